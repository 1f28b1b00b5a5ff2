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

    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.float32]]:
        """Different ids, whether each is in the prompt, and how often in the output."""
        ...


def row_edits(
    params: SamplingParams, counts: Counts | None, banned_ids: Iterable[int]
) -> tuple[Edits, int]:
    """One row's edits, bans first, and the number of bans."""
    banned = np.array(sorted({*banned_ids, *(word[0] for word in params.bad_words)}), np.int64)
    ids, in_prompt, seen = np.empty(0, np.int64), np.empty(0, np.bool_), np.empty(0, np.float32)
    if counts is not None:
        ids, in_prompt, seen = counts.arrays()
        matters = (seen > 0) | (in_prompt if params.repetition_penalty != 1.0 else False)
        ids, in_prompt, seen = ids[matters], in_prompt[matters], seen[matters]
    biased = np.fromiter(params.logit_bias, np.int64, len(params.logit_bias))
    others = ids
    if biased.size or banned.size:
        others = np.setdiff1d(np.union1d(ids, biased), banned)
    edits = np.zeros(banned.size + others.size, EDIT)
    edits["token_id"][: banned.size], edits["flags"][: banned.size] = banned, BANNED
    rest = edits[banned.size :]
    rest["token_id"] = others
    if others is ids:
        rest["count"], rest["flags"] = seen, np.where(in_prompt, IN_PROMPT, 0)
        return edits, banned.size
    for values, of, name in (
        (seen, ids, "count"),
        (np.where(in_prompt, IN_PROMPT, 0), ids, "flags"),
        (np.fromiter(params.logit_bias.values(), np.float64, biased.size), biased, "bias"),
    ):
        kept = ~np.isin(of, banned)
        rest[name][np.searchsorted(others, of[kept])] = values[kept]
    return edits, banned.size


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """A token that the device shall choose.

    Attributes
    ----------
    params : SamplingParams
        Without a ``host_reason``; with a seed unless greedy.
    logits_row, position, sample_index : int
        As in ``atlas.ops.sampling.sample``; the row is one of the arena's.
    counts : Counts, optional
        Of prompt and output, where there are penalties.
    banned_ids : iterable of int
        Ids that would end the request below ``min_tokens``.
    fed_row : int
        Row of the step whose input token ``counts`` do not know yet, or −1.
    """

    params: SamplingParams
    logits_row: int
    position: int
    sample_index: int = 0
    counts: Counts | None = None
    banned_ids: Iterable[int] = ()
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
        params = draw.params
        edits, num_bans = row_edits(params, draw.counts, draw.banned_ids)
        first, seed = self.num_edits, params.seed or 0
        if self.num_rows == len(self._rows) or first + len(edits) > len(self._edits):
            raise InvalidArgumentError(
                f"{self.num_rows + 1} rows and {first + len(edits)} edits in a step; "
                f"allowed: {len(self._rows)} and {len(self._edits)}"
            )
        self._edits[first : first + len(edits)] = edits
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
            len(edits),
            num_bans,
            draw.fed_row if penalizes(params) else -1,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
            0,
        )
        self.num_rows += 1
        self.num_edits += len(edits)

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
