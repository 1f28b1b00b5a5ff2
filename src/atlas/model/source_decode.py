"""Sequences that translate one source, and sweeps over many of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from atlas.interrupts import interrupts_deferred
from atlas.model.batch import Window, build

if TYPE_CHECKING:
    from atlas.model.encoded_source import EncodedSource
    from atlas.model.sequence import SequenceState
    from atlas.model.translator_core import TranslatorCore
    from atlas.sampling_table import Draw


class SourceDecode:
    """The sequences of one request and what each reads next.

    Parameters
    ----------
    core : TranslatorCore
    source : EncodedSource
        Released with the sequences.
    first_tokens : sequence of int
        What the first sequence reads first.
    """

    def __init__(
        self, core: TranslatorCore, source: EncodedSource, first_tokens: Sequence[int]
    ) -> None:
        self._core = core
        self._source = source
        self._seqs: list[SequenceState] = [core.new_sequence(source)]
        self._inputs = [np.array(first_tokens, np.int32)]

    @property
    def num_rows(self) -> int:
        """Rows of logits in the next sweep."""
        return len(self._seqs)

    def windows(self) -> list[Window]:
        """The rows of the next sweep, one row of logits a sequence."""
        return [
            Window(seq, ids, "step", 1) for seq, ids in zip(self._seqs, self._inputs, strict=True)
        ]

    @property
    def num_blocks(self) -> int:
        """Blocks held now, each counted once, the source's too."""
        held = {int(block) for seq in self._seqs for block in seq.native.block_table}
        return len(held) + len(self._source.blocks)

    def blocks_needed(self) -> int:
        """Blocks that the next sweep takes from the pool: for new positions, and for copies.

        Of n sequences that share the block they write, n − 1 copy it.
        """
        needed = 0
        writers: dict[int, int] = {}
        for seq, ids in zip(self._seqs, self._inputs, strict=True):
            native = seq.native
            end = native.seq_len + len(ids)
            needed += max(0, -(-end // native.block_size) - native.num_blocks)
            index = native.shared_block()
            if index >= 0:
                block = int(native.block_table[index])
                writers[block] = writers.get(block, 0) + 1
        references = self._core.blocks.references
        return needed + sum(
            count - (references(block) == count) for block, count in writers.items()
        )

    def release(self) -> None:
        """Give back every block, the source's too; once."""
        for seq in self._seqs:
            seq.native.release()
        self._seqs, self._inputs = [], []
        self._source.release()


def sweep(core: TranslatorCore, windows: Sequence[Window], draws: Sequence[Draw] = ()) -> None:
    """One sweep of the decoder over rows of any requests; logits go to the arena from row 0 on.

    Nothing advances before :func:`commit`. Blocks that were reserved when the pool ran out, or the
    sweep failed, stay with their sequences.
    """
    with interrupts_deferred(), core.pools.copies_together():
        for window in windows:
            core.reserve(window.seq, window.seq.seq_len + len(window.token_ids))
    core.run(build(windows), draws)


def commit(core: TranslatorCore, windows: Sequence[Window]) -> None:
    """Advance every sequence over the rows of a sweep."""
    for window in windows:
        core.commit(window.seq, window.token_ids, window.kind)
