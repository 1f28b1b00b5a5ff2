"""Shapes that launch lists are recorded for: few, and with room for what is asked.

Padding rows change nothing: a row's result depends on its own sequence only.
"""

from __future__ import annotations

from dataclasses import replace

from atlas.layers.step import StepShape
from atlas.model.records import padded_batch

_SMALL = (8, 16, 32, 64, 128)  # rows of the step GEMM's tiles
PROMPT_SIZES = (*_SMALL, 256, 512)
"""Rows of prompts that are worth recording ahead: the small rungs, and some between."""
_MIDDLE, _MIDDLE_STEP = 1024, 64
_LARGE_STEP = 128


def bucket(shape: StepShape, max_rows: int, max_seqs: int, max_logits: int) -> StepShape:
    """The shape under which a step runs.

    Steps that only decode get a batch rung and the most rows that a sequence has; their logits rows
    are padded too. Where prompts run as well, step rows and step sequences are padded between those
    and the prompts', and rows and sequences behind the prompts'.

    Parameters
    ----------
    shape : StepShape
    max_rows, max_seqs, max_logits : int
        Room in the buffers; a shape that does not fit padded runs as it is.
    """
    padded = _decode_bucket(shape) if shape.rows == shape.step_rows else _mixed_bucket(shape)
    fits = padded.rows <= max_rows and padded.seqs <= max_seqs
    return padded if fits and padded.first_logits + padded.logits <= max_logits else shape


def _decode_bucket(shape: StepShape) -> StepShape:
    seqs = shape.seqs if shape.seqs == 1 else padded_batch(shape.seqs)
    rows = seqs * shape.max_step_rows
    logits = shape.logits
    if shape.first_logits == 0 and logits:
        logits = rows if logits > seqs else max(logits, min(rows, seqs))
    return replace(shape, rows=rows, seqs=seqs, logits=logits, step_rows=rows, step_seqs=seqs)


def _mixed_bucket(shape: StepShape) -> StepShape:
    step_seqs = next_power(shape.step_seqs) if shape.step_seqs else 0
    step_rows = step_seqs * shape.max_step_rows
    rows, logits = padded_rows(step_rows + shape.rows - shape.step_rows), shape.logits
    if shape.first_logits == 0 and logits and step_seqs:
        logits = min(next_power(logits), rows)  # buffers of feed-forwards have this many rows
    return replace(
        shape,
        rows=rows,
        seqs=step_seqs + next_power(shape.seqs - shape.step_seqs),
        logits=logits,
        step_rows=step_rows,
        step_seqs=step_seqs,
    )


def padded_rows(rows: int) -> int:
    """Rows that a step with prompts runs."""
    for size in _SMALL:
        if rows <= size:
            return size
    step = _MIDDLE_STEP if rows <= _MIDDLE else _LARGE_STEP
    return -(-rows // step) * step


def next_power(number: int) -> int:
    """The least power of two that is not below a number."""
    return 1 << (number - 1).bit_length()
