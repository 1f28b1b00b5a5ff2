"""What a device is told about the draws of a step: rows and edits, and which requests it serves.

The draws are those of ``atlas.ops.sampling.sample``, bit for bit. Where the last token of a
sequence is known to the device alone, it counts for the penalties there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from atlas.errors import InvalidArgumentError
from atlas.ops import penalties, sampling
from atlas.ops.elementary import F32
from atlas.ops.random import Purpose, uniform

if TYPE_CHECKING:
    from atlas.sampling import SamplingParams

ROW = np.dtype(
    [
        ("logits_row", np.int32),
        ("kind", np.int32),
        ("temperature", np.float32),
        ("top_k", np.int32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("seed_low", np.uint32),
        ("seed_high", np.uint32),
        ("sample_index", np.int32),
        ("position", np.int32),
        ("first_edit", np.int32),
        ("num_edits", np.int32),
        ("num_bans", np.int32),
        ("fed_row", np.int32),
        ("repetition", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("unused", np.int32, 3),
    ]
)
"""How one row's token is chosen: ``logits_row`` of the arena; ``fed_row`` of the step, if not −1,
holds a token that penalties count and edits do not; the first edits are ``num_bans`` banned ids,
ascending."""
EDIT = np.dtype(
    [("token_id", np.int32), ("bias", np.float32), ("count", np.int32), ("flags", np.int32)]
)
"""What happens to one id's logit; a row names an id once."""

NONE, GREEDY, DRAW = 0, 1, 2
IN_PROMPT, BANNED = 1, 2
MAX_VOCABULARY = 1 << 20
MAX_EDITS = 2048
"""Ids that bias, bans and penalties of one row may touch."""

Edits = NDArray[Any]
Ints = NDArray[np.int32]


def host_reason(params: SamplingParams, num_ids: int, vocab_size: int) -> str | None:
    """Why a device does not choose a request's tokens, or None where it does.

    Parameters
    ----------
    params : SamplingParams
    num_ids : int
        Different ids at most in prompt and output.
    vocab_size : int
    """
    on = {
        "logits_processor": params.logits_processor is not None,
        "logprobs": params.logprobs is not None,
        "bad_words of several tokens": any(len(word) > 1 for word in params.bad_words),
        "dry_multiplier": params.dry_multiplier > 0.0,
        "top_n_sigma": params.top_n_sigma > 0.0 and not params.greedy,
        "typical_p": params.typical_p < 1.0,
        "xtc_probability": params.xtc_probability > 0.0,
        # Rounded to float32 it would be off.
        "top_p just below 1": params.top_p < 1.0 and np.float32(params.top_p) == 1.0,
    }
    found = [name for name, is_on in on.items() if is_on]
    if vocab_size > MAX_VOCABULARY:
        return f"a vocabulary of more than {MAX_VOCABULARY} ids"
    if found:
        return ", ".join(found)
    num_edits = len(params.logit_bias) + len(params.bad_words) + len(params.stop_token_ids) + 16
    if penalizes(params):
        num_edits += num_ids
    if num_edits > min(MAX_EDITS, vocab_size):
        return f"bias and penalties over more than {MAX_EDITS} ids"
    return None


def penalizes(params: SamplingParams) -> bool:
    """Whether occurrences of ids matter."""
    off = (1.0, 0.0, 0.0)
    return (
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
    ) != off


class Counts(Protocol):
    """Occurrences of ids; `atlas.sampler.TokenCounts`."""

    def add(self, token_id: int, count: int) -> None:
        """Change an id's count in the output; 0 names an id that may occur."""
        ...

    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.float32]]:
        """Different ids, whether each is in the prompt, and how often in the output."""
        ...


class RowEdits:
    """What a request does to single ids: bias, bans, and penalties by the counts as they stand.

    Parameters
    ----------
    params : SamplingParams
        Without a ``host_reason``.
    ending_ids : iterable of int
        Banned below ``min_tokens``.
    counts : Counts, optional
        Where there are penalties; learns of the ids of bias and bans.
    """

    def __init__(
        self, params: SamplingParams, ending_ids: Iterable[int], counts: Counts | None = None
    ) -> None:
        words = {int(word[0]) for word in params.bad_words}
        ending = {*ending_ids} if params.min_tokens else set()
        named = sorted({*params.logit_bias, *words, *ending})
        self._counts, self._ids = counts, np.array(named, np.int64)
        if counts is not None:
            for token_id in named:
                counts.add(token_id, 0)
            self._ids = counts.arrays()[0].copy()
        place = {token_id: i for i, token_id in enumerate(self._ids.tolist())}
        self._bias = np.zeros(len(self._ids), np.float32)
        for token_id, bias in params.logit_bias.items():
            self._bias[place[token_id]] = bias
        self._bans = [
            np.array([place[token_id] for token_id in sorted(banned)], np.int64)
            for banned in (words, words | ending)
        ]

    def write(self, edits: Edits, *, below_min: bool) -> tuple[int, int]:
        """Fill the front of ``edits``, bans first; how many there are, and how many bans."""
        bans, ids, known = self._bans[below_min], self._ids, len(self._ids)
        if self._counts is not None:
            ids, in_prompt, counts = self._counts.arrays()
        if len(ids) > len(edits):
            raise InvalidArgumentError(f"{len(ids)} edits; allowed in this step: {len(edits)}")
        own = edits[: len(ids)]
        own["token_id"], own["bias"], own["bias"][:known] = ids, 0, self._bias
        own["count"], own["flags"] = (0, 0) if self._counts is None else (counts, in_prompt)
        if len(bans):
            others = np.ones(len(ids), np.bool_)
            others[bans] = False
            own[:] = np.concatenate([own[bans], own[others]])
            own["flags"][: len(bans)] = BANNED
        return len(ids), len(bans)


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """A token that the device shall choose.

    Attributes
    ----------
    params : SamplingParams
        Without a ``host_reason``; with a seed unless greedy.
    logits_row, position, sample_index : int
        As in ``atlas.ops.sampling.sample``; the row is one of the arena's.
    edits : RowEdits
    below_min : bool
        The output is shorter than ``min_tokens``.
    fed_row : int
        Row of the step whose input token the edits' counts do not know yet, or −1.
    """

    params: SamplingParams
    logits_row: int
    position: int
    sample_index: int
    edits: RowEdits
    below_min: bool = False
    fed_row: int = -1


class SamplingTable:
    """The draws of one step, in arrays that a device copies.

    Parameters
    ----------
    rows : int32 [S, 20], edits : int32 [E, 4]
        Where they are written, pinned memory perhaps. E ≥ S · MAX_EDITS.
    """

    def __init__(self, rows: NDArray[np.int32], edits: NDArray[np.int32]) -> None:
        self._rows = rows.reshape(-1).view(ROW)
        self._edits = edits.reshape(-1).view(EDIT)
        self.num_rows = self.num_edits = 0

    def fill(self, draws: Sequence[Draw]) -> None:
        """Begin a step with these draws."""
        self.num_rows = self.num_edits = 0
        for draw in draws:
            self._add(draw)

    def _add(self, draw: Draw) -> None:
        params, first = draw.params, self.num_edits
        if self.num_rows == len(self._rows):
            raise InvalidArgumentError(f"{self.num_rows + 1} rows; allowed: {self.num_rows}")
        count, num_bans = draw.edits.write(self._edits[first:], below_min=draw.below_min)
        seed = params.seed or 0
        self._rows[self.num_rows] = (
            draw.logits_row,
            GREEDY if params.greedy else DRAW,
            params.temperature,
            params.top_k,
            params.top_p,
            params.min_p,
            seed & 0xFFFFFFFF,
            seed >> 32,
            draw.sample_index,
            draw.position,
            first,
            count,
            num_bans,
            draw.fed_row if penalizes(params) else -1,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
            0,
        )
        self.num_rows += 1
        self.num_edits += count

    def pad(self, num_rows: int) -> None:
        """Rows of nobody up to a number."""
        self._rows["kind"][self.num_rows : num_rows] = NONE


def choose_tokens(logits: F32, token_ids: Ints, rows: Ints, edits: Ints, *, chosen: Ints) -> None:
    """The definition of what a device makes of a table: chosen[logits row] = the token.

    Parameters
    ----------
    logits : float32 [L, C]
    token_ids : int32 [T]
        Input ids of the step.
    rows : int32 [S, 20], edits : int32 [E, 4]
    chosen : int32 [L]
        Greedy ids, −1 in rows that are not finite, which stays; −1 also where an adjusted logit
        overflows.
    """
    listed = np.ascontiguousarray(edits).reshape(-1).view(EDIT)
    for row in np.ascontiguousarray(rows).reshape(-1).view(ROW):
        place = int(row["logits_row"])
        if row["kind"] == NONE or chosen[place] < 0:
            continue
        first = int(row["first_edit"])
        own = listed[first : first + int(row["num_edits"])].copy()
        if row["fed_row"] >= 0:
            token = int(token_ids[row["fed_row"]])
            if token not in own["token_id"]:
                own = np.append(own, np.array([(token, 0, 0, 0)], EDIT))
            own["count"][own["token_id"] == token] += 1
        adjusted = logits[place].copy()
        ids, banned = own["token_id"], (own["flags"] & BANNED) != 0
        values: F32 = adjusted[ids] + own["bias"]
        penalties.penalize_repetition(
            values, (own["flags"] & IN_PROMPT > 0) | (own["count"] > 0), float(row["repetition"])
        )
        penalties.penalize_occurrence(
            values, own["count"].astype(np.float32), float(row["presence"]), float(row["frequency"])
        )
        is_sound = np.isfinite(values[~banned]).all()
        values[banned] = -np.inf
        adjusted[ids] = values
        chosen[place] = _token(adjusted, row) if is_sound else -1


def _token(adjusted: F32, row: Any) -> int:
    if row["kind"] == GREEDY:
        return int(adjusted.argmax())
    left = sampling.candidates(adjusted, float(row["temperature"]))
    if row["top_k"] > 0:
        left = left.keeping(sampling.top_k(left.x, int(row["top_k"])))
    if row["top_p"] < 1.0:
        left = left.keeping(sampling.top_p(left.x, left.w, float(row["top_p"])))
    if row["min_p"] > 0.0:
        left = left.keeping(sampling.min_p(left.w, float(row["min_p"])))
    seed = int(row["seed_low"]) | int(row["seed_high"]) << 32
    u = uniform(seed, int(row["sample_index"]), int(row["position"]), Purpose.DRAW)
    return int(left.ids[sampling.draw(left.w, u)])
