"""RMS normalisation."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from atlas.ops.spec import op

Float = NDArray[np.float32]


@op
def rmsnorm(x: Float, weight: Float, eps: float, *, out: Float) -> None:
    """out = x / sqrt(mean(x²) + eps) · weight over the last axis.

    Parameters
    ----------
    x : float32 [T, D] or [T, H, D]
        Rows may be strided; the last axis is contiguous.
    weight : float32 [D]
    eps : float
        Added to the mean of squares.
    out : float32, shape of x
        Written; may be ``x``.

    Notes
    -----
    Order: Σ x² in 16 lanes with element index ascending, then the lane tree of
    ``simd.sum_lanes``; (x · rsqrt) · weight.

    Source
    ------
    Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), arXiv 1910.07467.
    """
    mean = np.mean(x * x, axis=-1, keepdims=True, dtype=np.float32)
    out[...] = x * (np.float32(1) / np.sqrt(mean + np.float32(eps))) * weight
