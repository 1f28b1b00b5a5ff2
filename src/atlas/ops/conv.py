"""Causal depthwise convolution over time, with the inputs that a sequence carries along."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from atlas.ops.activation import silu
from atlas.ops.spec import op

Float = NDArray[np.float32]
Int = NDArray[np.int32]


def _convolve(
    x: Float, weight: Float, bias: Float | None, slots: Int, cu_rows: Int, tails: Float, out: Float
) -> None:
    width = len(weight)
    for n, slot in enumerate(slots):
        start, stop = cu_rows[n], cu_rows[n + 1]
        inputs = np.concatenate([tails[slot], x[start:stop]])
        for t in range(start, stop):
            taps = (inputs[t - start : t - start + width] * weight).sum(axis=0, dtype=np.float32)
            out[t] = silu(taps if bias is None else taps + bias)
        tails[slot] = inputs[len(inputs) - (width - 1) :]


@op
def causal_conv_step(
    x: Float,
    weight: Float,
    bias: Float | None,
    slots: Int,
    cu_rows: Int,
    positions: Int,
    *,
    tails: Float,
    out: Float,
) -> None:
    """out[t] = silu(bias + Σⱼ weight[j] · input[t − W + 1 + j]), each channel on its own.

    Rows before a sequence's first one in this call come from its tail.

    Parameters
    ----------
    x : float32 [T, C]
        Rows may be strided.
    weight : float32 [W, C]
        W ≥ 2 taps, the oldest input's first; contiguous.
    bias : float32 [C], optional
    slots : int32 [N]
        Each sequence's place in ``tails``; all different.
    cu_rows : int32 [N + 1]
        Rows cu_rows[n] … cu_rows[n + 1] − 1 belong to sequence n. The first need not be row 0;
        rows outside are left alone.
    positions : int32 [T]
        Of each row in its sequence, ascending by 1.
    tails : float32 [S, W − 1, C]
        Updated: the last W − 1 inputs of each sequence, the oldest first; zeros at its start.
        Contiguous.
    out : float32 [T, C]
        Written; not ``x``; rows may be strided.

    Notes
    -----
    Order: bias, then taps ascending in one accumulator. Any split of a sequence over calls gives
    the same bits.

    Source
    ------
    Gu and Dao, "Mamba" (2023), arXiv 2312.00752, section 3.4.
    """
    _convolve(x, weight, bias, slots, cu_rows, tails, out)


@op
def causal_conv_prefill(
    x: Float,
    weight: Float,
    bias: Float | None,
    slots: Int,
    cu_rows: Int,
    positions: Int,
    *,
    tails: Float,
    out: Float,
) -> None:
    """:func:`causal_conv_step` for prompt rows: the same parameters and the same result."""
    _convolve(x, weight, bias, slots, cu_rows, tails, out)
