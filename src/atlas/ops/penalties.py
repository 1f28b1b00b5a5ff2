"""The stages that change or forbid logits, in their order: the NumPy definitions.

Each works in place on one float32 row; -inf marks a forbidden token. Parameters are rounded to
float32 first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from atlas.errors import InvalidArgumentError, NonFiniteLogitsError, ShapeError
from atlas.ops.elementary import F32
from atlas.sampling import SamplingParams

Flags = NDArray[np.bool_]

MAX_DRY_PENALTY = 1e30
"""A repeat's penalty grows no further: it already exceeds any logit, and float32 stays finite."""


def check_finite(logits: F32) -> None:
    """Refuse a row that holds NaN or an infinity, naming the first such id."""
    finite = np.isfinite(logits)
    if not finite.all():
        token_id = int(np.argmin(finite))
        raise NonFiniteLogitsError(f"the logit of token {token_id} is {logits[token_id]}")


def add_logit_bias(logits: F32, bias: Mapping[int, float]) -> None:
    """logit[id] += bias[id]."""
    for token_id, value in bias.items():
        logits[token_id] += np.float32(value)


def forbid_bad_words(logits: F32, words: Iterable[Sequence[int]], history: Sequence[int]) -> None:
    """Forbid the last id of every word whose other ids end the history (prompt, then output)."""
    for word in words:
        head = list(word[:-1])
        if len(head) <= len(history) and list(history[len(history) - len(head) :]) == head:
            logits[word[-1]] = -np.inf


def forbid_ids(logits: F32, token_ids: Iterable[int]) -> None:
    """Forbid ids, here those that would end a request below ``min_tokens``."""
    for token_id in token_ids:
        logits[token_id] = -np.inf


def unpack_mask(mask: NDArray[np.int32], vocab_size: int) -> Flags:
    """bool [C] from int32 [⌈C/32⌉]: id i is allowed if bit i % 32 of word i // 32 is set."""
    if mask.dtype not in (np.int32, np.uint32) or mask.shape != (-(-vocab_size // 32),):
        raise ShapeError(
            f"the row mask is {mask.dtype} {list(mask.shape)}; allowed: int32 "
            f"[{-(-vocab_size // 32)}] for {vocab_size} tokens"
        )
    octets = np.ascontiguousarray(mask).view(np.uint8)
    return np.unpackbits(octets, count=vocab_size, bitorder="little").view(np.bool_)


def penalize_repetition(logits: F32, seen: Flags, penalty: float) -> None:
    """logit / penalty where positive, logit · penalty elsewhere, for ids in prompt or output.

    Source: Keskar et al., "CTRL" (2019), arXiv 1909.05858, section 4.1; for negative logits the
    penalty multiplies, as is usual since, so that it never rewards.
    """
    theta = np.float32(penalty)
    with np.errstate(over="ignore"):  # `check_maximum` refuses what overflows
        scaled = np.where(logits > 0, logits / theta, logits * theta)
    logits[...] = np.where(seen, scaled, logits)


def penalize_occurrence(logits: F32, counts: F32, presence: float, frequency: float) -> None:
    """(logit − frequency · count) − presence · [count > 0]; count: occurrences in the output."""
    logits -= np.float32(frequency) * counts
    logits -= np.float32(presence) * (counts > 0)


def dry_penalties(history: Sequence[int], params: SamplingParams) -> dict[int, np.float32]:
    """Penalties on the ids that would continue a repetition of the history's end.

    If the last L tokens also end at an earlier place and id t follows there, t is penalised by
    multiplier · base^(L − allowed_length) when L ≥ allowed_length, for the greatest such L. A
    repetition does not extend over a breaker, and breakers are not penalised. The power is taken by
    repeated multiplication in float64, at most `MAX_DRY_PENALTY`, then rounded to float32.

    Source: P. E. Weidmann, "DRY" (2024), text-generation-webui pull request 5677.
    """
    breakers = frozenset(params.dry_sequence_breakers)
    tail = list(history if params.dry_range is None else history[-params.dry_range :])
    last = len(tail) - 1
    longest: dict[int, int] = {}
    for end in range(last):
        length = 0
        while length <= end and tail[end - length] == tail[last - length] not in breakers:
            length += 1
        following = tail[end + 1]
        if length >= params.dry_allowed_length and following not in breakers:
            longest[following] = max(longest.get(following, 0), length)
    return {token_id: dry_penalty(length, params) for token_id, length in longest.items()}


def dry_penalty(length: int, params: SamplingParams) -> np.float32:
    """The penalty of continuing a repetition of ``length`` tokens; see `dry_penalties`."""
    penalty = params.dry_multiplier
    for _ in range(length - params.dry_allowed_length):
        if penalty >= MAX_DRY_PENALTY or params.dry_base == 1.0:
            break
        penalty *= params.dry_base
    return np.float32(min(penalty, MAX_DRY_PENALTY))


def adjust(
    logits: F32,
    params: SamplingParams,
    *,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    eos_token_ids: Iterable[int] = (),
    mask: NDArray[np.int32] | None = None,
) -> F32:
    """A copy of the row after logits processor, bias, bad words, min tokens, mask, penalties, DRY.

    Raises
    ------
    NonFiniteLogitsError
        NaN or an infinity in the row; NaN or +inf from the processor or after the penalties.
    InvalidArgumentError
        A stage forbade the last allowed token; the message names the stage.
    """
    check_finite(logits)
    history = [*prompt_ids, *output_ids]
    row = logits.copy()
    if params.logits_processor is not None:
        row = processed(params, prompt_ids, output_ids, row)
    check_choice(row, "logits_processor")
    add_logit_bias(row, params.logit_bias)
    forbid_bad_words(row, cast(Sequence[Sequence[int]], params.bad_words), history)
    check_choice(row, "bad_words")
    if len(output_ids) < params.min_tokens:
        forbid_ids(row, ending_ids(params, eos_token_ids))
    check_choice(row, "min_tokens")
    if mask is not None:
        row[~unpack_mask(mask, row.size)] = -np.inf
    check_choice(row, "the row mask")
    seen = np.zeros(row.size, np.bool_)
    seen[history] = True
    if params.repetition_penalty != 1.0:
        penalize_repetition(row, seen, params.repetition_penalty)
    counts = np.bincount(np.array(output_ids, np.int64), minlength=row.size).astype(np.float32)
    penalize_occurrence(row, counts, params.presence_penalty, params.frequency_penalty)
    if params.dry_multiplier > 0.0:
        for token_id, penalty in dry_penalties(history, params).items():
            row[token_id] -= penalty
    check_maximum(row)
    return row


def ending_ids(params: SamplingParams, eos_token_ids: Iterable[int]) -> set[int]:
    """The ids that end the request: its stop ids, and the model's end tokens unless ignored."""
    return {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}


def processed(
    params: SamplingParams, prompt_ids: Sequence[int], output_ids: Sequence[int], row: F32
) -> F32:
    """The logits processor's row, checked; ``row`` may be changed by it."""
    assert params.logits_processor is not None
    result = params.logits_processor(prompt_ids, output_ids, row)
    result = row if result is None else result
    if not isinstance(result, np.ndarray) or (result.dtype, result.shape) != (row.dtype, row.shape):
        raise ShapeError(
            f"the logits processor returned {type(result).__name__} "
            f"{getattr(result, 'dtype', '')} {getattr(result, 'shape', '')}; "
            f"allowed: float32 ({row.size},) or None"
        )
    if np.isnan(result).any() or np.isposinf(result).any():
        raise NonFiniteLogitsError("the logits processor returned NaN or +inf; allowed: -inf")
    return result.copy()


def check_maximum(row: F32) -> None:
    """Refuse an adjusted row whose greatest logit is not finite."""
    greatest = row.max()
    if not np.isfinite(greatest):
        raise NonFiniteLogitsError(f"the greatest logit after bias and penalties is {greatest}")


def check_choice(row: F32, stage: str) -> None:
    """Refuse a row in which ``stage`` forbade the last allowed token."""
    if row.max() == -np.inf:
        raise InvalidArgumentError(f"{stage} leaves no token to choose from")
