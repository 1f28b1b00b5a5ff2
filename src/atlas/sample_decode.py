"""A request's samples in an encoder-decoder's decoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from atlas.model.source_decode import SourceDecode

if TYPE_CHECKING:
    from atlas.generation import Generation
    from atlas.model.encoded_source import EncodedSource
    from atlas.model.translator_core import TranslatorCore


class SampleDecode(SourceDecode):
    """One sequence a sample, all on one source.

    The first sweep runs start token and language tag once for all of them. A sample that has tokens
    already (its request was preempted) runs these again, one a sweep, and chooses only after them.

    Parameters
    ----------
    core : TranslatorCore
    source : EncodedSource
        Released with the sequences.
    first_tokens : sequence of int
    generations : sequence of Generation
        Those that still run.
    """

    def __init__(
        self,
        core: TranslatorCore,
        source: EncodedSource,
        first_tokens: Sequence[int],
        generations: Sequence[Generation],
    ) -> None:
        super().__init__(core, source, first_tokens)
        self._num_first = len(first_tokens)
        self._samples = list(generations)  # one a sequence, but all on the first before it ran
        self._replayed = [[sampled.token_id for sampled in g.chosen] for g in generations]

    def choosers(self) -> list[tuple[Generation, int]]:
        """Samples that choose a token after this sweep, each with its window's place."""
        started = self._has_started
        return [
            (generation, i if started else 0)
            for i, generation in enumerate(self._samples)
            if not self._replayed[i]
        ]

    def advance(self) -> None:
        """Every sample that goes on gets its next input: a token to run again, or its last."""
        going = [i for i, generation in enumerate(self._samples) if not generation.finished]
        parents = going if self._has_started else [0] * len(going)
        tokens = [
            self._replayed[i].pop(0) if self._replayed[i] else self._samples[i].last_token
            for i in going
        ]
        self.rows.go_on(np.array(parents, np.int32), np.array(tokens, np.int32))
        self._samples = [self._samples[i] for i in going]
        self._replayed = [self._replayed[i] for i in going]

    @property
    def _has_started(self) -> bool:
        """Whether each sample has a sequence of its own."""
        return len(self.rows) == len(self._samples)
