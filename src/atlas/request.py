"""Requests and what they give back: deltas while they run, completions at the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from atlas.errors import AtlasError

FinishReason = Literal["stop", "length", "error", "cancelled"]
"""``stop``: an end token or stop string; ``length``: max_tokens or max_seq_len."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log-probability (natural log) and the most probable alternatives.

    ``logprob`` is None for the first token of a prompt, which nothing predicts.
    """

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts: of the prompt, of it from a cache, and generated (end tokens included).

    ``restored_tokens``, of prompt and output, came with a saved session and were not run again.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    restored_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of wall time."""

    first_token_s: float
    total_s: float

    def decode_tokens_per_s(self, completion_tokens: int) -> float:
        """Tokens after the first, by the time after the first."""
        rest = self.total_s - self.first_token_s
        return (completion_tokens - 1) / rest if completion_tokens > 1 and rest > 0 else 0.0


class Delta(NamedTuple):
    """What one step added to a streamed request; joined texts equal the completion's text."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """One of a request's samples.

    ``stop_reason`` is the end token's id or the stop string. The stop itself is in neither
    ``token_ids`` nor ``text`` unless ``include_stop`` was set. ``score`` is that of a beam search's
    hypothesis.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    error: AtlasError | None = None
    score: float | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """The result of a request.

    Attributes
    ----------
    token_ids, text, finish_reason, stop_reason, logprobs, error
        Those of the first sample; ``samples`` holds all ``n``.
    prompt_token_ids : tuple of int
        After truncation, special tokens included.
    prompt_logprobs : tuple of TokenLogprob, optional
    seed : int, optional
        The seed that was used, given or made; None for greedy requests.
    """

    samples: tuple[Sample, ...]
    prompt_token_ids: tuple[int, ...]
    usage: Usage
    timings: Timings
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    seed: int | None = None
    request_id: str = field(default="", kw_only=True)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.samples[0].token_ids

    @property
    def text(self) -> str:
        return self.samples[0].text

    @property
    def finish_reason(self) -> FinishReason:
        return self.samples[0].finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        return self.samples[0].stop_reason

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        return self.samples[0].logprobs

    @property
    def error(self) -> AtlasError | None:
        """The first sample's error, else that of the first sample that has one."""
        return next((sample.error for sample in self.samples if sample.error is not None), None)

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= 80 else self.text[:77] + "…"
        more = f", {len(self.samples)} samples" if len(self.samples) > 1 else ""
        return (
            f"Completion({text!r}, finish_reason={self.finish_reason!r}, "
            f"{self.usage.completion_tokens} tokens{more})"
        )
