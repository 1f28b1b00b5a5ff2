"""Token embedding, absolute positions and row selection."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from atlas.ops.blocks import HostMatrix, dequantize
from atlas.ops.spec import op

Float = NDArray[np.float32]


@op
def embedding(ids: NDArray[np.int32], table: HostMatrix, scale: float, *, out: Float) -> None:
    """out[t] = table[ids[t]] · scale.

    Parameters
    ----------
    ids : int32 [T]
        0 ≤ id < C, checked by the caller.
    table : matrix [C, D]
        Any weight format; dequantised to float32.
    scale : float
        1.0, or √D for the Gemma family.
    out : float32 [T, D]
        Written.
    """
    out[...] = dequantize(table.take_rows(ids.astype(np.int64))) * np.float32(scale)


@op
def add_positions(
    x: Float,
    ids: NDArray[np.int32],
    positions: NDArray[np.int32],
    table: Float,
    padding_id: int,
    *,
    out: Float,
) -> None:
    """out[t] = x[t] + table[positions[t]]; a row of the padding token gets no position.

    Parameters
    ----------
    x : float32 [T, D]
    ids, positions : int32 [T]
        0 ≤ position < P, checked by the caller.
    table : float32 [P, D]
        One row a position (``layers.positions``).
    padding_id : int
        −1: every row gets its position.
    out : float32 [T, D]
        Written; may be ``x``.

    Source
    ------
    Vaswani et al., "Attention Is All You Need" (2017), arXiv 1706.03762, section 3.5.
    """
    out[...] = np.where((ids == padding_id)[:, None], x, x + table[positions])


@op
def gather_rows(x: Float, rows: NDArray[np.int32], *, out: Float) -> None:
    """out[i] = x[rows[i]]; float32 [T, D] → [L, D]."""
    out[...] = x[rows]


@op
def scatter_rows(x: Float, rows: NDArray[np.int32], *, out: Float) -> None:
    """out[rows[i]] = x[i], except where rows[i] is −1; float32 [L, D] → [T, D].

    Rows of ``out`` that are not named are left alone; none is named twice.
    """
    named = rows >= 0
    out[rows[named]] = x[named]
