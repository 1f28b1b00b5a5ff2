"""One request's sampler: what it remembers between tokens, and its choice of the next one.

`atlas.ops.penalties` and `atlas.ops.sampling` define the result. Here penalties touch only the ids
that occurred, and the filters are the CPU backend's; the tokens and log-probabilities are bitwise
those of the definition.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from atlas.backends.cpu.sampling import Weights, candidates, filtered, most_probable
from atlas.errors import InvalidArgumentError, ShapeError
from atlas.ops import penalties
from atlas.ops.elementary import F32, exp32, tree_sum
from atlas.ops.random import Purpose, uniform
from atlas.ops.sampling import Candidates, Sampled, draw, logprobs
from atlas.sampling import SamplingParams
from atlas.sampling_table import Draw, RowEdits, penalizes

__all__ = ["Sampled", "Sampler", "needs_logits", "score_token"]


def needs_logits(params: SamplingParams) -> bool:
    """Whether the host needs the rows: False when every token is a plain argmax (no row mask)."""
    return not params.greedy or params.logprobs is not None or _adjusts(params)


def _adjusts(params: SamplingParams) -> bool:
    """Whether any stage before the temperature is on."""
    return (
        params.logits_processor is not None
        or bool(params.logit_bias or params.bad_words or params.min_tokens)
        or params.dry_multiplier > 0.0
        or penalizes(params)
    )


def score_token(logits: F32, token_id: int, num_top: int, weights: Weights = exp32) -> Sampled:
    """A given token's log-probability under the model's logits, and the ``num_top`` highest.

    Parameters
    ----------
    logits : float32 [C]
        The row that predicts the token.

    Raises
    ------
    NonFiniteLogitsError
        NaN or an infinity in the row.
    """
    penalties.check_finite(logits)
    return _scored(candidates(logits, 1.0, weights), token_id, num_top)


def _scored(left: Candidates, chosen: int, num_top: int) -> Sampled:
    """The chosen index's token with log-probabilities over the candidates."""
    ranked = most_probable(left.x, num_top)
    scores = logprobs(left.ids, left.x, tree_sum(left.w), chosen, ranked.tolist())
    return Sampled(int(left.ids[chosen]), *scores)


class TokenCounts:
    """Occurrences of the ids that a request has seen, kept as compact arrays.

    Parameters
    ----------
    prompt_ids : int64 [T]
    """

    def __init__(self, prompt_ids: NDArray[np.int64]) -> None:
        unique = np.unique(prompt_ids)
        self._size = unique.size
        self._ids = np.concatenate([unique, np.zeros(64, np.int64)])
        self._in_prompt = np.arange(self._ids.size) < unique.size
        self._counts = np.zeros(self._ids.size, np.float32)  # in the output
        self._slots = {token_id: slot for slot, token_id in enumerate(unique.tolist())}

    def add(self, token_id: int, count: int) -> None:
        """Change an id's count in the output; a count may return to 0."""
        slot = self._slots.setdefault(token_id, self._size)
        if slot == self._size:
            if slot == self._ids.size:
                for name in ("_ids", "_in_prompt", "_counts"):
                    array = getattr(self, name)
                    setattr(self, name, np.concatenate([array, np.zeros_like(array)]))
            self._ids[slot] = token_id
            self._size += 1
        self._counts[slot] += count

    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.bool_], F32]:
        """Different ids, whether each is in the prompt, and how often in the output: views."""
        size = self._size
        return self._ids[:size], self._in_prompt[:size], self._counts[:size]

    def penalize(self, row: F32, params: SamplingParams) -> None:
        """Apply the repetition, presence and frequency penalties to the ids that occurred."""
        ids, counts = self._ids[: self._size], self._counts[: self._size]
        values = row[ids]
        if params.repetition_penalty != 1.0:
            seen = self._in_prompt[: self._size] | (counts > 0)
            penalties.penalize_repetition(values, seen, params.repetition_penalty)
        penalties.penalize_occurrence(
            values, counts, params.presence_penalty, params.frequency_penalty
        )
        row[ids] = values


class Sampler:
    """Chooses one sample's tokens and remembers them.

    Parameters
    ----------
    params : SamplingParams
        Texts resolved (`SamplingParams.with_token_ids`); with a seed unless greedy.
    vocab_size : int
        C. Ids in parameters and prompt must be below.
    eos_token_ids : iterable of int
        The model's end tokens.
    prompt_ids : sequence of int
    sample_index : int
        Which of the request's ``n`` samples this is.
    weights : callable
        exp32 of x ≤ 0; `atlas.backends.cpu.sampling.CompiledWeights` is a quicker one with the
        same bits.

    Raises
    ------
    InvalidArgumentError
        An id is outside the vocabulary, a text is unresolved, or the seed is missing.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        vocab_size: int,
        eos_token_ids: Iterable[int] = (),
        prompt_ids: Sequence[int],
        sample_index: int = 0,
        weights: Weights = exp32,
    ) -> None:
        self.params = params
        self.vocab_size = vocab_size
        self.sample_index = sample_index
        self._weights = weights
        self._ending_ids = sorted(penalties.ending_ids(params, eos_token_ids))
        self._check_params()
        history = np.array(prompt_ids, np.int64)
        if history.size and not 0 <= history.min() <= history.max() < vocab_size:
            outside = history[(history < 0) | (history >= vocab_size)][0]
            raise InvalidArgumentError(f"prompt id is {outside}; allowed: 0 … {vocab_size - 1}")
        self._history = np.concatenate([history, np.zeros(64, np.int64)])
        self._prompt_len = self._len = int(history.size)
        self._counts = TokenCounts(history) if penalizes(params) else None
        self._edits: RowEdits | None = None
        self._adjusts = _adjusts(params)
        self._is_breaker = np.zeros(vocab_size if params.dry_multiplier else 0, np.bool_)
        if params.dry_multiplier:
            self._is_breaker[list(cast(Sequence[int], params.dry_sequence_breakers))] = True

    def _check_params(self) -> None:
        params, size = self.params, self.vocab_size
        if params.has_unresolved_text:
            raise InvalidArgumentError(
                "bad_words or dry_sequence_breakers hold texts; allowed here: token ids "
                "(a model without a tokenizer cannot resolve texts)"
            )
        if not params.greedy and params.seed is None:
            raise InvalidArgumentError("seed is None; a drawing sampler needs one (with_seed)")
        breakers = params.dry_sequence_breakers if params.dry_multiplier else ()
        named: list[tuple[str, Iterable[object]]] = [
            ("logit_bias key", params.logit_bias),
            ("bad_words id", (token_id for word in params.bad_words for token_id in word)),
            ("stop_token_ids", params.stop_token_ids),
            ("eos_token_ids", self._ending_ids),
            ("dry_sequence_breakers", breakers),
        ]
        for name, ids in named:
            for token_id in cast(Iterable[int], ids):
                if not 0 <= token_id < size:
                    raise InvalidArgumentError(f"{name} is {token_id}; allowed: 0 … {size - 1}")
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > size:
                raise InvalidArgumentError(
                    f"{name} is {getattr(params, name)}; allowed: 0 … {size}"
                )

    @property
    def output_ids(self) -> list[int]:
        """The tokens observed so far."""
        return cast(list[int], self._history[self._prompt_len : self._len].tolist())

    @property
    def num_output_tokens(self) -> int:
        return self._len - self._prompt_len

    def observe(self, token_id: int) -> None:
        """Append a token to the output: the sampled one, or one that the caller forces."""
        if not 0 <= token_id < self.vocab_size:
            raise InvalidArgumentError(
                f"token id is {token_id}; allowed: 0 … {self.vocab_size - 1}"
            )
        if self._len == self._history.size:
            self._history = np.concatenate([self._history, np.zeros_like(self._history)])
        self._history[self._len] = token_id
        self._len += 1
        if self._counts is not None:
            self._counts.add(token_id, 1)

    def observe_all(self, token_ids: NDArray[np.int32]) -> None:
        """`observe` each of one or more tokens."""
        low, high = int(token_ids.min()), int(token_ids.max())
        if low < 0 or high >= self.vocab_size:
            raise InvalidArgumentError(
                f"token id is {low if low < 0 else high}; allowed: 0 … {self.vocab_size - 1}"
            )
        end = self._len + len(token_ids)
        if end > self._history.size:
            more = np.zeros(max(len(token_ids), self._history.size), np.int64)
            self._history = np.concatenate([self._history, more])
        self._history[self._len : end] = token_ids
        self._len = end
        if self._counts is not None:
            for token_id in token_ids.tolist():
                self._counts.add(token_id, 1)

    def rewind(self, num_output_tokens: int) -> None:
        """Forget the output's tokens after the first ``num_output_tokens``."""
        if not 0 <= num_output_tokens <= self.num_output_tokens:
            raise InvalidArgumentError(
                f"num_output_tokens is {num_output_tokens}; allowed: 0 … {self.num_output_tokens}"
            )
        new_len = self._prompt_len + num_output_tokens
        if self._counts is not None:
            for token_id in self._history[new_len : self._len].tolist():
                self._counts.add(token_id, -1)
        self._len = new_len

    def draw(self, logits_row: int, position: int, fed_row: int = -1) -> Draw:
        """What a device must know to choose a token.

        Parameters
        ----------
        logits_row : int
        position : int
            Index in the sequence of the token that is chosen. With penalties it follows those
            that were observed, or the one at ``fed_row``.
        fed_row : int
            Where the device reads a token that comes before and was not observed; −1: none does.
        """
        if self._edits is None:
            self._edits = RowEdits(self.params, self._ending_ids, self._counts)
        below_min = position - self._prompt_len < self.params.min_tokens
        return Draw(
            self.params, logits_row, position, self.sample_index, self._edits, below_min, fed_row
        )

    def sample(self, logits: F32, position: int, mask: NDArray[np.int32] | None = None) -> Sampled:
        """Choose the next token; the caller passes it to `observe` if it keeps it.

        Parameters
        ----------
        logits : float32 [C]
            The model's row; not changed.
        position : int
            Index in the sequence of the token that is chosen.
        mask : int32 [⌈C/32⌉] or None
            Row mask: bit i % 32 of word i // 32 allows id i.

        Raises
        ------
        NonFiniteLogitsError
            NaN or an infinity in the row, or after the penalties.
        InvalidArgumentError
            Nothing is left to choose from; the stage is named.
        """
        if logits.dtype != np.float32 or logits.shape != (self.vocab_size,):
            raise ShapeError(
                f"logits are {logits.dtype} {list(logits.shape)}; "
                f"allowed: float32 [{self.vocab_size}]"
            )
        # NaN passes through min and max, so that two reductions see every non-finite value.
        if not (np.isfinite(logits.min()) and np.isfinite(logits.max())):
            penalties.check_finite(logits)
        row = logits
        if self._adjusts or mask is not None:
            row = self._adjusted(logits, mask)
        params = self.params
        raw = params.logprobs_mode == "raw"
        if params.greedy:
            token_id = int(row.argmax())
            if params.logprobs is not None and not raw:
                left = candidates(row, 1.0, self._weights)
                chosen = int(left.x.argmax())
        else:
            xtc_u = self._uniform(position, Purpose.XTC) if params.xtc_probability > 0.0 else None
            left = filtered(row, params, xtc_u, self._weights)
            chosen = draw(left.w, self._uniform(position, Purpose.DRAW))
            token_id = int(left.ids[chosen])
        if params.logprobs is None:
            return Sampled(token_id)
        if raw:
            left, chosen = candidates(logits, 1.0, self._weights), token_id
        return _scored(left, chosen, params.logprobs)

    def _uniform(self, position: int, purpose: Purpose) -> np.float32:
        return uniform(cast(int, self.params.seed), self.sample_index, position, purpose)

    def _adjusted(self, logits: F32, mask: NDArray[np.int32] | None) -> F32:
        """`atlas.ops.penalties.adjust` with the remembered counts; an idle stage costs nothing."""
        params = self.params
        history = self._history[: self._len]
        row = logits.copy()
        if params.logits_processor is not None:
            prompt_ids = history[: self._prompt_len].tolist()
            row = penalties.processed(params, prompt_ids, self.output_ids, row)
            penalties.check_choice(row, "logits_processor")
        penalties.add_logit_bias(row, params.logit_bias)
        if params.bad_words:
            words = cast(Sequence[Sequence[int]], params.bad_words)
            penalties.forbid_bad_words(row, words, cast(Sequence[int], history))
            penalties.check_choice(row, "bad_words")
        if self.num_output_tokens < params.min_tokens:
            penalties.forbid_ids(row, self._ending_ids)
            penalties.check_choice(row, "min_tokens")
        if mask is not None:
            # ±inf where allowed or not, and the lesser: no branch a token.
            limit = penalties.unpack_mask(mask, row.size).astype(np.float32)
            limit -= np.float32(0.5)
            limit *= np.float32(np.inf)
            np.minimum(row, limit, out=row)
            penalties.check_choice(row, "the row mask")
        if self._counts is not None:
            self._counts.penalize(row, params)
        if params.dry_multiplier > 0.0:
            for token_id, penalty in repeat_penalties(history, params, self._is_breaker).items():
                row[token_id] -= penalty
        penalties.check_maximum(row)
        return row


def repeat_penalties(
    history: NDArray[np.int64], params: SamplingParams, is_breaker: NDArray[np.bool_]
) -> dict[int, np.float32]:
    """`atlas.ops.penalties.dry_penalties` with all earlier places extended backwards together.

    One token a pass, until no place is left or the penalty grows no further.
    """
    tail = history if params.dry_range is None else history[-params.dry_range :]
    breaks = is_breaker[tail]
    last = tail.size - 1
    ends = np.flatnonzero(~breaks[1:])  # places that a token follows which may be penalised
    amounts: dict[int, np.float32] = {}
    penalty, length = params.dry_multiplier, 0
    while length <= last and not breaks[last - length]:
        ends = ends[ends >= length]
        ends = ends[tail[ends - length] == tail[last - length]]
        length += 1
        if not ends.size:
            break
        if length < params.dry_allowed_length:
            continue
        if length > params.dry_allowed_length:
            penalty = min(penalty * params.dry_base, penalties.MAX_DRY_PENALTY)
        amounts.update(dict.fromkeys(tail[ends + 1].tolist(), np.float32(penalty)))
        if penalty == penalties.MAX_DRY_PENALTY or params.dry_base == 1.0:
            break
    return amounts
