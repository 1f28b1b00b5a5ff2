"""Shapes of an encoder-decoder's sweeps that launch lists are recorded for, and their padding.

Padding changes nothing: a row's result depends on its own sequence and source only.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from atlas.backends.cuda.buckets import next_power, padded_rows
from atlas.backends.cuda.inputs import PADDING_SLOT, PADDING_TOKEN
from atlas.layers.translation_step import DecodeShape, EncodeShape
from atlas.model.records import PADDED_BATCH_SIZES, padded_batch

TranslationShape = EncodeShape | DecodeShape
_NARROW = 16  # rows of a source that cross attention takes in one tile


@lru_cache(1024)
def translation_bucket(
    shape: TranslationShape, max_rows: int, max_seqs: int, max_logits: int
) -> TranslationShape:
    """The shape under which a sweep runs; one that does not fit the buffers padded, as it is."""
    if isinstance(shape, EncodeShape):
        encoded = EncodeShape(padded_rows(shape.rows), next_power(shape.sources))
        fits = encoded.rows <= max_rows and encoded.sources <= max_seqs
        return encoded if fits else shape
    seqs, logits = _rung(shape.seqs), shape.logits
    if shape.first_logits == 0 and logits:
        logits = _rung(logits)
    padded = replace(
        shape,
        rows=seqs if shape.max_rows == 1 else _rung(shape.rows),
        seqs=seqs,
        sources=min(seqs, next_power(shape.sources)),
        logits=logits,
        max_source_rows=max(_NARROW, next_power(shape.max_source_rows)),
    )
    fits = padded.rows <= max_rows and padded.seqs <= max_seqs
    return padded if fits and padded.first_logits + padded.logits <= max_logits else shape


def _rung(count: int) -> int:
    if count == 1:
        return 1
    return padded_batch(count) if count <= PADDED_BATCH_SIZES[-1] else padded_rows(count)


def pad_translation(arrays: Any, shape: TranslationShape, padded: TranslationShape) -> int:
    """Fill what the padded shape has more: rows of nobody, empty sequences and sources.

    Parameters
    ----------
    arrays : object
        The integers of a sweep under the names of ``TranslationBuffers``.

    Returns
    -------
    int
        Sequences whose block tables the sweep reads.
    """
    arrays.token_ids[shape.rows : padded.rows] = PADDING_TOKEN
    arrays.positions[shape.rows : padded.rows] = 0
    arrays.slots[shape.rows : padded.rows] = PADDING_SLOT
    arrays.source_cu_rows[shape.sources + 1 : padded.sources + 1] = shape.rows
    if isinstance(shape, EncodeShape) or isinstance(padded, EncodeShape):
        return 0
    arrays.cu_rows[shape.seqs + 1 : padded.seqs + 1] = shape.rows
    arrays.logits_rows[shape.logits : padded.logits] = 0
    return padded.seqs
