"""Sequences that translate one source, and sweeps over many of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from atlas._native import source_rows
from atlas._native.source_rows import SourceRows

if TYPE_CHECKING:
    from atlas.model.encoded_source import EncodedSource
    from atlas.model.translator_core import TranslatorCore
    from atlas.sampling_table import Draw


class SourceDecode:
    """One request's part of the sweeps: its source, and sequences that translate it.

    Parameters
    ----------
    core : TranslatorCore
    source : EncodedSource
        Released with the sequences.
    first_tokens : sequence of int
        What the first sequence reads first.

    Attributes
    ----------
    rows : SourceRows
        The sequences, and what each reads next; one row of logits a sequence.
    """

    def __init__(
        self, core: TranslatorCore, source: EncodedSource, first_tokens: Sequence[int]
    ) -> None:
        self._source = source
        self.rows = SourceRows(
            core.blocks,
            core.pools.block_size,
            source.blocks,
            len(source),
            np.array(first_tokens, np.int32),
        )

    @property
    def num_rows(self) -> int:
        """Rows of logits in the next sweep."""
        return len(self.rows)

    @property
    def num_blocks(self) -> int:
        """Blocks held now, each counted once, the source's too."""
        return self.rows.num_blocks + len(self._source.blocks)

    def release(self) -> None:
        """Give back every block, the source's too; once."""
        self.rows.release()
        self._source.release()


def blocks_needed(decodes: Sequence[SourceDecode]) -> int:
    """Blocks that the next sweep takes from the pool: for new positions, and for copies."""
    return source_rows.blocks_needed([decode.rows for decode in decodes])


def reserve(core: TranslatorCore, decodes: Sequence[SourceDecode]) -> None:
    """Take the blocks of the next sweep: all of them, or KvExhausted and no change.

    To be called where interrupts wait: a block is copied before it is written.
    """
    rows = [decode.rows for decode in decodes]
    core.require_length(source_rows.longest(rows))
    core.pools.copy_blocks(source_rows.reserve(rows))


def sweep(
    core: TranslatorCore, decodes: Sequence[SourceDecode], draws: Sequence[Draw] = ()
) -> None:
    """One sweep of the decoder over any requests; logits go to the arena from row 0 on.

    Their blocks are reserved. Nothing advances before :func:`commit`, and with a sweep that fails
    the blocks stay with their sequences.
    """
    core.run_rows([decode.rows for decode in decodes], draws)


def commit(decodes: Sequence[SourceDecode]) -> None:
    """Advance every sequence over the rows of a sweep."""
    source_rows.advance([decode.rows for decode in decodes])
