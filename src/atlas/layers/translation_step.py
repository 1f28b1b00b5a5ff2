"""The buffers of an encoder-decoder's sweeps; ``layers.step`` says how they are used.

The encoder's sweep and the decoder's share them: a source's keys and values leave the encoder
through the paged pools, not through a buffer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from atlas import pages
from atlas.config import ModelConfig
from atlas.layers.step import Array


@dataclass(frozen=True, slots=True)
class EncodeShape:
    """An encoder's sweep: T rows of G sources."""

    rows: int
    sources: int


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """A decoder's sweep: T rows of N sequences over G sources, L of them with logits.

    Sequences of one source (its beams) lie side by side. No sequence has more than ``max_rows``
    rows, and no source more than ``max_source_rows``. Where no sequence has more than one row, all
    rows have logits.
    Logits go to the arena from row ``first_logits`` on.
    """

    rows: int
    seqs: int
    sources: int
    logits: int
    first_logits: int = 0
    max_rows: int = 1
    max_source_rows: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class TranslationBuffers:
    """Views for one sweep, or the whole buffers.

    Attributes
    ----------
    token_ids, positions, slots : int32 [T]
    cu_rows : int32 [N + 1]
    block_tables : int32 [N, M]
    source_cu_rows : int32 [G + 1]
        The encoder's rows of each source, or the decoder's rows that look at it.
    source_tables : int32 [G, MS]
    source_lens : int32 [G]
    logits_rows : int32 [L]
        0, 1, 2, … where ``max_rows`` is 1.
    hidden, normed : float32 [T, D]
    qkv : float32 [T, 3D]
    attended : float32 [T, D]
    inner : float32 [T, F]
    last_hidden : float32 [L, D]
    logits : float32 [L, C]
    max_rows, max_source_rows : int
        As in ``DecodeShape``; 0 in the whole buffers.
    """

    token_ids: Array
    positions: Array
    slots: Array
    cu_rows: Array
    block_tables: Array
    source_cu_rows: Array
    source_tables: Array
    source_lens: Array
    logits_rows: Array
    hidden: Array
    normed: Array
    qkv: Array
    attended: Array
    inner: Array
    last_hidden: Array
    logits: Array
    max_rows: int = 0
    max_source_rows: int = 0

    def view(self, shape: EncodeShape | DecodeShape) -> TranslationBuffers:
        """The front of every buffer for a sweep of this shape."""
        rows, sources = slice(0, shape.rows), slice(0, shape.sources)
        by_name = {
            "source_cu_rows": slice(0, shape.sources + 1),
            "source_tables": sources,
            "source_lens": sources,
        }
        if isinstance(shape, DecodeShape):
            arena = slice(shape.first_logits, shape.first_logits + shape.logits)
            by_name |= {
                "cu_rows": slice(0, shape.seqs + 1),
                "block_tables": slice(0, shape.seqs),
                "logits_rows": slice(0, shape.logits),
                "last_hidden": arena,
                "logits": arena,
            }
        arrays: dict[str, Any] = {
            name: getattr(self, name)[by_name.get(name, rows)]
            for name in self.__slots__
            if name not in _NUMBERS
        }
        numbers: dict[str, Any] = {name: getattr(shape, name, 0) for name in _NUMBERS}
        return replace(self, **arrays, **numbers)


_NUMBERS = ("max_rows", "max_source_rows")
TRANSLATION_INPUTS = (
    "token_ids",
    "positions",
    "slots",
    "cu_rows",
    "source_cu_rows",
    "source_lens",
    "logits_rows",
    "source_tables",
    "block_tables",
)
"""Integers that the host writes for every sweep; a device has a copy of them."""


def translation_buffer_shapes(
    config: ModelConfig, max_rows: int, max_seqs: int, max_blocks: int, logits_rows: int
) -> dict[str, tuple[int, ...]]:
    """The shape of each buffer for sweeps of up to ``max_rows`` rows; every element is 4 bytes."""
    assert config.encoder is not None
    hidden = config.hidden_size
    return {
        "token_ids": (max_rows,),
        "positions": (max_rows,),
        "slots": (max_rows,),
        "cu_rows": (max_seqs + 1,),
        "block_tables": (max_seqs, max_blocks),
        "source_cu_rows": (max_seqs + 1,),
        "source_tables": (max_seqs, max_blocks),
        "source_lens": (max_seqs,),
        "logits_rows": (logits_rows,),
        "hidden": (max_rows, hidden),
        "normed": (max_rows, hidden),
        "qkv": (max_rows, 3 * hidden),
        "attended": (max_rows, hidden),
        "inner": (max_rows, max(config.intermediate_size, config.encoder.intermediate_size)),
        "last_hidden": (logits_rows, hidden),
        "logits": (logits_rows, config.vocab_size),
    }


def allocate_translation(shapes: Mapping[str, tuple[int, ...]]) -> TranslationBuffers:
    """Zeroed buffers of these shapes; untouched pages cost no memory."""
    arrays: dict[str, Any] = {
        name: pages.zeros(shape, np.int32 if name in TRANSLATION_INPUTS else np.float32)
        for name, shape in shapes.items()
    }
    return TranslationBuffers(**arrays)
