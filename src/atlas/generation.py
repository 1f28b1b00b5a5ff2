"""One sample of a request while it runs: choose, keep, detokenise, stop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from atlas.errors import AtlasError, CallbackError, InvalidArgumentError
from atlas.request import Delta, FinishReason, Sample, TokenLogprob
from atlas.sampler import Sampled, Sampler, needs_logits
from atlas.sampling_table import Draw, host_reason, penalizes
from atlas.stops import TextStream

if TYPE_CHECKING:
    from atlas.sampling import SamplingParams
    from atlas.tokenizer import Tokenizer

Weights = Callable[[NDArray[np.float32]], NDArray[np.float32]]


class Generation:
    """Turns rows of logits into a sample's tokens and text, until it is finished.

    Parameters
    ----------
    params : SamplingParams
        Texts resolved to ids, with a seed unless greedy.
    tokenizer : Tokenizer or None
        Without one there is no text, and stop strings were refused.
    prompt_ids : sequence of int
    vocab_size : int
    eos_token_ids : tuple of int
    max_seq_len : int
    sample_index : int
    weights : callable, optional
        The sampler's exponential (``Sampler``).
    device_samples : bool
        Whether the device chooses tokens where it can, or only takes the plain argmax.
    continues : bool
        The text goes on from the prompt's; a translation begins a text of its own.

    Attributes
    ----------
    needs_logits : bool
        The host chooses the tokens.
    draws_on_device : bool
        The device does, with these parameters.
    host_reason : str or None
        Why the host does although the device could for other parameters.
    end_ids : int32 array
        Ids that end it, ascending.
    is_predictable : bool
        Its device-chosen tokens need nothing of the host before one of ``end_ids``, or the token
        at ``last_position``.
    """

    def __init__(
        self,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        prompt_ids: Sequence[int],
        *,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        max_seq_len: int,
        sample_index: int = 0,
        weights: Weights | None = None,
        device_samples: bool = False,
        continues: bool = True,
    ) -> None:
        self.params = params
        self.index = sample_index
        self.num_prompt_tokens = len(prompt_ids)
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: AtlasError | None = None
        self.score: float | None = None  # of a beam search's hypothesis
        self.last_token = -1
        self.last_token_s = 0.0  # when it came, of the process's clock; 0 = none came yet
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids))
        self._end_ids = frozenset(ends)
        self.end_ids = np.array(sorted(ends), np.int32)
        extra = {} if weights is None else {"weights": weights}
        self._sampler = Sampler(
            params,
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
            prompt_ids=prompt_ids,
            sample_index=sample_index,
            **extra,
        )
        self._limit = max_seq_len - len(prompt_ids)  # of tokens
        if params.max_tokens is not None:
            self._limit = min(self._limit, params.max_tokens)
        self.host_reason: str | None = None
        self.needs_logits, self.draws_on_device = needs_logits(params), False
        if self.needs_logits and device_samples:
            num_ids = len(set(prompt_ids)) + self.max_tokens
            self.host_reason = host_reason(params, num_ids, vocab_size)
            self.draws_on_device = self.host_reason is None
            self.needs_logits = not self.draws_on_device
        self._text = None
        self._hold_stops = params.min_tokens  # stop strings count from here on
        if tokenizer is not None:
            self._text = TextStream(
                tokenizer,
                params.stop_strings if not params.min_tokens else (),
                include_stop=params.include_stop,
                skip_special=params.skip_special,
                continues=continues,
                vocab_size=vocab_size,
            )
        self.is_predictable = not (
            self.needs_logits or penalizes(params) or params.logprobs is not None
        ) and (tokenizer is None or not params.stop_strings)
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._pieces: list[str] = []
        self._num_given = 0  # ids that deltas have given out

    @property
    def num_tokens(self) -> int:
        """Tokens chosen so far, end tokens included."""
        return self._sampler.num_output_tokens

    @property
    def finished(self) -> bool:
        """Whether no further token is wanted."""
        return self.finish_reason is not None

    @property
    def max_tokens(self) -> int:
        """Tokens it may still have at most, end tokens included."""
        return self._limit - self.num_tokens

    @property
    def next_position(self) -> int:
        """Where its next token will stand, counted from the prompt's first."""
        return self.num_prompt_tokens + self.num_tokens

    @property
    def last_position(self) -> int:
        """Where its last token stands at the latest, counted from the prompt's first."""
        return self.num_prompt_tokens + self._limit - 1

    @property
    def chosen(self) -> list[Sampled]:
        """The tokens of a sample that still runs, with their log-probabilities where asked for."""
        if self.params.logprobs is None:
            return [Sampled(token) for token in self._tokens]
        return [Sampled(best.token_id, best.logprob, list(best.top)) for best in self._logprobs]

    def replay(self, chosen: Sequence[Sampled]) -> Delta:
        """Take tokens that were chosen before, into a sample that has none; what they gave out.

        Raises
        ------
        InvalidArgumentError
            They end the sample.
        """
        deltas = []
        for sampled in chosen:
            deltas.append(self.push(sampled))
            if self.finished:
                raise InvalidArgumentError(
                    f"these params end the request at its output token {self.num_tokens}; "
                    f"allowed: params under which its {len(chosen)} tokens so far go on"
                )
        return Delta(
            "".join(delta.text for delta in deltas),
            tuple(token for delta in deltas for token in delta.token_ids),
            tuple(best for delta in deltas for best in delta.logprobs),
        )

    def choose_from(self, row: NDArray[np.float32]) -> Sampled:
        """The next token from a row of logits, float32 [C]."""
        if self.params.logits_processor is not None:
            row = row.copy()  # the user's code may run this engine, which reuses the arena
        return self._sampler.sample(row, self.next_position)

    def choose_safely(self, row: NDArray[np.float32]) -> Sampled | AtlasError:
        """:meth:`choose_from`, or the error that ends the sample in the token's place."""
        try:
            return self.choose_from(row)
        except AtlasError as error:
            return error
        except Exception as error:
            fault = CallbackError(f"logits_processor raised {error!r}")
            fault.__cause__ = error
            return fault

    def draw(self, logits_row: int, position: int, fed_row: int = -1) -> Draw:
        """What the device needs to choose the token at a position (``Sampler.draw``)."""
        return self._sampler.draw(logits_row, position, fed_row)

    def push(self, sampled: Sampled) -> Delta:
        """Keep a chosen token; finishes the sample when it is an end, a stop or the last one."""
        token = sampled.token_id
        self._sampler.observe(token)
        self.last_token = token
        if sampled.logprob is not None:
            self._logprobs.append(TokenLogprob(token, sampled.logprob, tuple(sampled.top)))
        if token in self._end_ids:
            self.finish_reason, self.stop_reason = "stop", token
            if not self.params.include_stop:
                return self._delta("")
        self._tokens.append(token)
        text = "" if self._text is None else self._advance_text(self._text, token)
        if self.finish_reason is None and self.num_tokens >= self._limit:
            self.finish_reason = "length"
        return self._delta(text)

    def take(self, tokens: NDArray[np.int32]) -> None:
        """Keep chosen tokens, none of which ends a predictable sample; no delta will hold them."""
        if not len(tokens):
            return
        ids: list[int] = tokens.tolist()
        self._sampler.observe_all(tokens)
        self.last_token = ids[-1]
        self._tokens += ids
        if self._text is not None:
            self._pieces.append(self._text.extend(ids))
        self._num_given = max(self._num_given, self._num_final())

    def _advance_text(self, stream: TextStream, token: int) -> str:
        if self._hold_stops and self.num_tokens > self._hold_stops:  # min_tokens are out
            stream.watch(self.params.stop_strings)
            self._hold_stops = 0
        delta = stream.push(token)
        if delta.stop is not None and self.finish_reason is None:
            self.finish_reason, self.stop_reason = "stop", delta.stop
        return delta.text

    def _delta(self, text: str) -> Delta:
        """Everything that has become final since the last delta."""
        if self._text is not None and self.finished:
            rest = self._text.finish()
            text += rest.text
            if rest.stop is not None and self.finish_reason in ("length", "stop"):
                # The bytes that were held became the stop's last character.
                self.finish_reason, self.stop_reason = "stop", rest.stop
        self._pieces.append(text)
        first, final = self._num_given, self._num_final()
        ids = tuple(self._tokens[first:final])
        logprobs = tuple(self._logprobs[first:final]) if self._logprobs else ()
        self._num_given = max(first, final)
        return Delta(text, ids, logprobs, self.finish_reason, self.stop_reason)

    def _num_final(self) -> int:
        if self._text is None:
            return len(self._tokens)
        if self.finished and self._text.stop is None:
            return len(self._tokens)
        return self._text.num_tokens_final

    def fail(self, error: AtlasError) -> Delta:
        """End the sample with an error; what was given out stays."""
        self.finish_reason, self.error = "error", error
        return self._delta("")

    def cut(self) -> Delta:
        """End the sample because no token may follow."""
        self.finish_reason = "length"
        return self._delta("")

    def cancel(self) -> Delta:
        """End the sample because nobody wants the rest."""
        self.finish_reason = "cancelled"
        return self._delta("")

    def sample(self) -> Sample:
        """The finished sample."""
        assert self.finish_reason is not None
        final = self._num_final()
        logprobs = tuple(self._logprobs[:final]) if self.params.logprobs is not None else None
        return Sample(
            self.index,
            tuple(self._tokens[:final]),
            "".join(self._pieces),
            self.finish_reason,
            self.stop_reason,
            logprobs,
            self.error,
            self.score,
        )
