"""RMS and layer normalisation."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from atlas.ops.activation import silu
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


@op
def gated_rmsnorm(
    x: Float,
    gate: Float,
    weight: Float,
    eps: float,
    group_size: int,
    norm_first: bool,
    *,
    out: Float,
) -> None:
    """RMS norm of each group of a row, gated by silu before or after.

    ``norm_first``: out = rmsnorm(x) · weight · silu(gate); else out = rmsnorm(x · silu(gate)) ·
    weight.

    Parameters
    ----------
    x, gate : float32 [T, D] or [T, H, group_size]
        Rows, and the groups of a row, may be strided.
    weight : float32 [D] or [group_size]
        The latter serves every group.
    eps : float
        Added to the mean of squares.
    group_size : int
        Divides D; elements that are normalised together, such as those of a head.
    norm_first : bool
        True in gated delta networks, False in Mamba-2.
    out : float32, shape of x
        Written; may be ``x``; rows and groups may be strided.

    Notes
    -----
    Order: Σ x² as in :func:`rmsnorm`; (x · rsqrt) · weight, then · silu(gate).

    Source
    ------
    Dao and Gu, "Transformers are SSMs" (2024), arXiv 2405.21060, section 7.1.
    """
    shape = (len(x), -1, group_size)
    values, gates = x.reshape(shape), silu(gate).reshape(shape)
    if not norm_first:
        values = values * gates
    mean = np.mean(values * values, axis=-1, keepdims=True, dtype=np.float32)
    normed = values * (np.float32(1) / np.sqrt(mean + np.float32(eps)))
    normed = normed * weight.reshape(-1, group_size)
    out[...] = (normed * gates if norm_first else normed).reshape(x.shape)


@op
def layernorm(x: Float, weight: Float, bias: Float, eps: float, *, out: Float) -> None:
    """out = (x − mean) / sqrt(var + eps) · weight + bias over the last axis.

    Parameters
    ----------
    x : float32 [T, D]
        Rows may be strided; the last axis is contiguous.
    weight, bias : float32 [D]
    eps : float
        Added to the variance, which is the mean of squared deviations.
    out : float32 [T, D]
        Written; may be ``x``.

    Notes
    -----
    Order: Σ x, then Σ (x − mean)², each in 16 lanes with element index ascending, then the lane
    tree of ``simd.sum_lanes``; ((x − mean) · rsqrt) · weight + bias, the last two fused.

    Source
    ------
    Ba, Kiros and Hinton, "Layer Normalization" (2016), arXiv 1607.06450.
    """
    mean = np.mean(x, axis=-1, keepdims=True, dtype=np.float32)
    centred = x - mean
    variance = np.mean(centred * centred, axis=-1, keepdims=True, dtype=np.float32)
    out[...] = centred * (np.float32(1) / np.sqrt(variance + np.float32(eps))) * weight + bias
