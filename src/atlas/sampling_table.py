"""What a device is told about the draws of a step: rows and edits, and which requests it serves.

The draws are those of ``atlas.ops.sampling.sample``, bit for bit. Where the last token of a
sequence is known to the device alone, it counts for the penalties there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from atlas.errors import InvalidArgumentError
from atlas.ops import penalties, sampling
from atlas.ops.elementary import F32, log32, tree_sum
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

NONE, GREEDY, DRAW, SCORE = 0, 1, 2, 3
IN_PROMPT, BANNED = 1, 2
MAX_SCORES = 20
SCORE_WORDS = 2 * MAX_SCORES + 2
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
        "logprobs_mode": params.logprobs is not None and params.logprobs_mode != "raw",
        f"logprobs above {MAX_SCORES}": (params.logprobs or 0) > MAX_SCORES,
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

    Attributes
    ----------
    touches_ids : bool
        Whether there may be any edits.
    """

    def __init__(
        self, params: SamplingParams, ending_ids: Iterable[int], counts: Counts | None = None
    ) -> None:
        self._params = params
        self._row = b"", -1
        words = {int(word[0]) for word in params.bad_words}
        ending = {*ending_ids} if params.min_tokens else set()
        named = sorted({*params.logit_bias, *words, *ending})
        self._counts, self._ids = counts, np.array(named, np.int64)
        if counts is not None:
            for token_id in named:
                counts.add(token_id, 0)
            self._ids = counts.arrays()[0].copy()
        self.touches_ids = counts is not None or bool(named)
        place = {token_id: i for i, token_id in enumerate(self._ids.tolist())}
        self._bias = np.zeros(len(self._ids), np.float32)
        for token_id, bias in params.logit_bias.items():
            self._bias[place[token_id]] = bias
        self._bans = [
            np.array([place[token_id] for token_id in sorted(banned)], np.int64)
            for banned in (words, words | ending)
        ]

    def row(self, sample_index: int) -> bytes:
        """A ``ROW`` of the request's parameters; what changes from step to step is left 0."""
        if self._row[1] != sample_index:
            params, row = self._params, np.zeros((), ROW)
            seed = params.seed or 0
            row["kind"] = GREEDY if params.greedy else DRAW
            row["seed_low"], row["seed_high"] = seed & 0xFFFFFFFF, seed >> 32
            row["sample_index"], row["fed_row"] = sample_index, -1
            for name in ("temperature", "top_k", "top_p", "min_p"):
                row[name] = getattr(params, name)
            for name in ("repetition", "presence", "frequency"):
                row[name] = getattr(params, f"{name}_penalty")
            self._row = row.tobytes(), sample_index
        return self._row[0]

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


class Draw(NamedTuple):
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
    rows : int32 [S, 20], edits : int32 [E, 4], scores : int32 [S, 20]
        Where they are written, pinned memory perhaps. E ≥ S · MAX_EDITS; ``scores`` are rows too.

    Attributes
    ----------
    num_rows, num_edits, num_scores : int
    score_places : dict
        Logits row → number among the scores, and how many best ids are asked for.
    """

    def __init__(self, rows: Ints, edits: Ints, scores: Ints) -> None:
        self._rows, self._scores = (array.reshape(-1).view(ROW) for array in (rows, scores))
        self._edits = edits.reshape(-1).view(EDIT)
        self.fill(())

    def fill(self, draws: Sequence[Draw]) -> None:
        """Begin a step with these draws."""
        if len(draws) > len(self._rows):
            raise InvalidArgumentError(f"{len(draws)} rows; allowed: {len(self._rows)}")
        self.num_rows = self.num_edits = 0
        self.score_places: dict[int, tuple[int, int]] = {}
        if not draws:
            return
        rows = self._rows[: len(draws)]
        rows[:] = np.frombuffer(
            b"".join([draw.edits.row(draw.sample_index) for draw in draws]), ROW
        )
        rows["logits_row"] = [draw.logits_row for draw in draws]
        rows["position"] = [draw.position for draw in draws]
        for i, draw in enumerate(draws):
            if draw.edits.touches_ids:
                self._add_edits(draw, rows[i])
        self.num_rows = len(draws)
        scored = [draw for draw in draws if draw.params.logprobs is not None]
        if scored:
            self._fill_scores(scored)

    @property
    def num_scores(self) -> int:
        """Rows whose token is scored."""
        return len(self.score_places)

    def _fill_scores(self, draws: Sequence[Draw]) -> None:
        rows = self._scores[: len(draws)]
        rows[:] = np.zeros((), ROW)
        rows["kind"], rows["fed_row"] = SCORE, -1
        for name in ("temperature", "top_p", "repetition"):
            rows[name] = 1
        tops = [draw.params.logprobs or 0 for draw in draws]
        places = [draw.logits_row for draw in draws]
        rows["logits_row"], rows["top_k"] = places, tops
        self.score_places = dict(zip(places, enumerate(tops), strict=True))

    def _add_edits(self, draw: Draw, row: Any) -> None:
        first = self.num_edits
        count, num_bans = draw.edits.write(self._edits[first:], below_min=draw.below_min)
        row["first_edit"], row["num_edits"], row["num_bans"] = first, count, num_bans
        if penalizes(draw.params):
            row["fed_row"] = draw.fed_row
        self.num_edits += count

    def pad(self, num_rows: int, num_scores: int = 0) -> None:
        """Rows of nobody up to a number."""
        self._rows["kind"][self.num_rows : num_rows] = NONE
        self._scores["kind"][self.num_scores : num_scores] = NONE


class Scores:
    """Log-probabilities that a step on the device gives.

    Parameters
    ----------
    words : int32 [S, 42]
        As the device wrote them: log-probability (float32), 0, the best ids, theirs.
    places : mapping
        ``SamplingTable.score_places``.
    """

    def __init__(self, words: Ints, places: Mapping[int, tuple[int, int]]) -> None:
        self._words, self._places = words.reshape(-1, SCORE_WORDS)[: len(places)], dict(places)
        self._read: tuple[list[float], list[list[int]], list[list[float]]] | None = None

    def sampled(self, logits_row: int, token_id: int) -> sampling.Sampled:
        """A row's chosen token with its log-probability and the best ones."""
        number, num_top = self._places[logits_row]
        if self._read is None:  # all at once: the device is done with them
            words, floats = self._words, self._words.view(np.float32)
            ids, found = words[:, 2 : 2 + MAX_SCORES], floats[:, 2 + MAX_SCORES :]
            self._read = floats[:, 0].tolist(), ids.tolist(), found.tolist()
        own, best, scores = self._read
        top = zip(best[number][:num_top], scores[number][:num_top], strict=True)
        return sampling.Sampled(token_id, own[number], list(top))


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


def score_tokens(logits: F32, rows: Ints, chosen: Ints, *, scores: Ints) -> None:
    """The definition of what a device makes of a table's scores; none where no token was chosen.

    Parameters
    ----------
    logits : float32 [L, C]
    rows : int32 [S, 20]
    chosen : int32 [L]
    scores : int32 [S, 42]
    """
    for row, out in zip(np.ascontiguousarray(rows).reshape(-1).view(ROW), scores, strict=True):
        place, num_top = int(row["logits_row"]), int(row["top_k"])
        if row["kind"] != SCORE or chosen[place] < 0:
            continue
        left = sampling.candidates(logits[place])
        ranked = sampling.most_probable(left.x, num_top)
        log_total = log32(tree_sum(left.w))
        out[:1].view(np.float32)[0] = left.x[chosen[place]] - log_total
        out[2 : 2 + num_top] = ranked
        out[2 + MAX_SCORES :].view(np.float32)[:num_top] = left.x[ranked] - log_total
