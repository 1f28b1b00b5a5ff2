"""Rotary position embedding."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from atlas.ops.spec import op

Float = NDArray[np.float32]


@op
def rope(x: Float, positions: NDArray[np.int32], table: Float) -> None:
    """Rotate pairs (i, i + R/2) of each head's first R dimensions, in place.

    Parameters
    ----------
    x : float32 [T, H, K]
        Updated in place; rows may be strided.
    positions : int32 [T]
        Below P, checked by the caller.
    table : float32 [P, 2, R/2]
        Cosines, then sines, of every position.

    Source
    ------
    Su et al., "RoFormer" (2021), arXiv 2104.09864, eq. 34, with rotate-half pairing.
    """
    half = table.shape[2]
    cos, sin = table[positions, 0][:, None, :], table[positions, 1][:, None, :]
    first, second = x[..., :half].copy(), x[..., half : 2 * half].copy()
    x[..., :half] = first * cos - second * sin
    x[..., half : 2 * half] = second * cos + first * sin
