"""Sequences of an encoder-decoder: their own KV, and a source that several may share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atlas.model.capability import Unavailable
from atlas.model.lifecycle import DenseLifecycle

if TYPE_CHECKING:
    from atlas.model.sequence import SequenceState


class TranslatorLifecycle(DenseLifecycle):
    """Sequences hold their source's blocks until they are freed; forks hold the same ones.

    There is no prefix cache: a source's keys depend on all of it. Saving is not offered.
    """

    save_sequence_state = Unavailable("lifecycle")
    restore_sequence_state = Unavailable("lifecycle")

    def free_sequence(self, seq: SequenceState) -> None:
        super().free_sequence(seq)
        self._release_source(seq)

    def rewind(self, seq: SequenceState, new_len: int) -> None:
        super().rewind(seq, new_len)
        if seq.seq_len == 0:
            self._release_source(seq)

    def fork(self, seq: SequenceState) -> SequenceState:
        forked = super().fork(seq)
        if forked.encoder is not None:
            forked.encoder.retain()
        return forked

    def _release_source(self, seq: SequenceState) -> None:
        if seq.encoder is not None:
            seq.encoder.release()
            seq.encoder = None
