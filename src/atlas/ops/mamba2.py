"""The Mamba-2 recurrence: a state per channel of a head, decayed by one number a head."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from atlas.ops.activation import softplus
from atlas.ops.spec import op

Float = NDArray[np.float32]
Int = NDArray[np.int32]


def _recur(
    x: Float,
    b: Float,
    c: Float,
    dt: Float,
    decay_log: Float,
    d: Float,
    dt_bias: Float,
    dt_min: float,
    dt_max: float,
    slots: Int,
    cu_rows: Int,
    states: Float,
    out: Float,
) -> None:
    heads, groups = x.shape[1], b.shape[1]
    reads = np.arange(heads) * groups // heads
    for n, slot in enumerate(slots):
        state = states[slot]
        for t in range(cu_rows[n], cu_rows[n + 1]):
            bounds = np.float32(dt_min), np.float32(dt_max)
            step = np.clip(softplus(dt[t] + dt_bias), *bounds)
            state *= np.exp(-np.exp(decay_log) * step)[:, None, None]
            state += (step[:, None] * x[t])[:, :, None] * b[t, reads, None, :]
            out[t] = np.einsum("hpn,hn->hp", state, c[t, reads]) + d[:, None] * x[t]


@op
def mamba2_step(
    x: Float,
    b: Float,
    c: Float,
    dt: Float,
    decay_log: Float,
    d: Float,
    dt_bias: Float,
    dt_min: float,
    dt_max: float,
    slots: Int,
    cu_rows: Int,
    positions: Int,
    *,
    states: Float,
    out: Float,
) -> None:
    """Advance each sequence's state by its rows, one after another, and read it after each.

    With Δ = clamp(softplus(dt + dt_bias), dt_min, dt_max)::

        h ← exp(−exp(decay_log) · Δ)·h + Δ·x ⊗ b,   out = h·c + d·x

    Parameters
    ----------
    x : float32 [T, H, P]
        After the convolution. Rows may be strided, a row's heads are contiguous; so for b and c.
    b, c : float32 [T, G, N]
        Head h reads group ⌊h · G / H⌋.
    dt : float32 [T, H]
        Raw projection; rows may be strided.
    decay_log, d, dt_bias : float32 [H]
        ``A_log``, the skip weight and the bias of ``dt``.
    dt_min, dt_max : float
        Bounds of Δ in both forms; 0 and infinity where a model has none.
    slots : int32 [N]
        Each sequence's place in ``states``; all different.
    cu_rows : int32 [N + 1]
        Rows cu_rows[n] … cu_rows[n + 1] − 1 belong to sequence n. The first need not be row 0;
        rows outside are left alone.
    positions : int32 [T]
        Of each row in its sequence, ascending by 1. A backend may compute a prompt in chunks, whose
        borders lie at multiples of a fixed number of positions.
    states : float32 [S, H, P, N]
        Updated; zeros at a sequence's start; contiguous.
    out : float32 [T, H, P]
        Written; rows may be strided.

    Source
    ------
    Dao and Gu, "Transformers are SSMs" (2024), arXiv 2405.21060, section 7.
    """
    _recur(x, b, c, dt, decay_log, d, dt_bias, dt_min, dt_max, slots, cu_rows, states, out)


@op
def mamba2_prefill(
    x: Float,
    b: Float,
    c: Float,
    dt: Float,
    decay_log: Float,
    d: Float,
    dt_bias: Float,
    dt_min: float,
    dt_max: float,
    slots: Int,
    cu_rows: Int,
    positions: Int,
    *,
    states: Float,
    out: Float,
) -> None:
    """:func:`mamba2_step` for prompt rows: the same parameters and the same recurrence.

    On the CPU also in the same order: bitwise the step form, for every split of a prompt.
    """
    _recur(x, b, c, dt, decay_log, d, dt_bias, dt_min, dt_max, slots, cu_rows, states, out)
