"""A translation request between submit and its last event."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from atlas.live_request import LiveRequest
from atlas.model.records import BeamHypothesis
from atlas.request import Completion, Delta
from atlas.sampler import Sampled
from atlas.translation import BeamParams, Hypothesis, Language, Translation


@dataclass(slots=True, eq=False)
class TranslationRequest(LiveRequest):
    """A source, and the hypotheses or samples it is to have.

    ``prompt_ids`` are what the encoder reads: language tag, subwords, end token. A beam search has
    one generation for each hypothesis it returns, which it fills at its end; with one beam the only
    generation grows token by token.

    Attributes
    ----------
    source, target : str or int
        Languages as given.
    first_tokens : tuple of int
        What the decoder begins with: start token and the target's tag.
    beam : BeamParams, optional
        None: sampled as ``params`` says.
    """

    source: Language = field(default=0, kw_only=True)
    target: Language = field(default=0, kw_only=True)
    first_tokens: tuple[int, ...] = field(default=(), kw_only=True)
    beam: BeamParams | None = field(default=None, kw_only=True)

    @property
    def max_new(self) -> int:
        """Tokens that each hypothesis or sample may have in all."""
        first = self.generations[0]
        return first.num_tokens + first.max_tokens

    @property
    def num_rows(self) -> int:
        """Rows of a sweep that it may take: its beams or samples."""
        return self.params.n if self.beam is None else self.beam.num_beams

    def take(self, index: int, hypothesis: BeamHypothesis) -> Delta:
        """Keep a whole hypothesis as a generation; what the generation gives out."""
        generation = self.generations[index]
        assert generation.is_predictable
        generation.score = hypothesis.score
        *before, last = hypothesis.token_ids or (None,)
        if last is not None:  # which alone can end it
            generation.take(np.array(before, np.int32))
            generation.push(Sampled(last))
        if not generation.finished:  # it ended because nothing may follow
            generation.cut()
        whole = generation.sample()
        return Delta(whole.text, whole.token_ids, (), whole.finish_reason, whole.stop_reason)


def joined(deltas: Sequence[Delta]) -> Delta:
    """What several deltas of one sample gave out, one after the other."""
    last = deltas[-1]
    return Delta(
        "".join(delta.text for delta in deltas),
        tuple(token for delta in deltas for token in delta.token_ids),
        tuple(best for delta in deltas for best in delta.logprobs),
        last.finish_reason,
        last.stop_reason,
    )


def translation_of(request: TranslationRequest, completion: Completion) -> Translation:
    """The result of a request that has ended."""
    return Translation(
        tuple(
            Hypothesis(sample.text, sample.token_ids, sample.score, sample.finish_reason)
            for sample in completion.samples
        ),
        completion.prompt_token_ids,
        request.source,
        request.target,
        completion.usage,
        completion.timings,
        completion.error,
    )
