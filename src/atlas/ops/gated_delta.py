"""The gated delta rule: a matrix of state per value head, decayed, corrected and read."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from atlas.ops.activation import sigmoid, softplus
from atlas.ops.conv import causal_conv_step
from atlas.ops.norm import gated_rmsnorm
from atlas.ops.spec import op

Float = NDArray[np.float32]
Int = NDArray[np.int32]

NORM_EPS = 1e-6
"""Added to a head's sum of squares before q and k are divided by its root."""


def _unit(heads: Float) -> Float:
    squares = (heads * heads).sum(axis=-1, keepdims=True, dtype=np.float32)
    unit: Float = heads / np.sqrt(squares + np.float32(NORM_EPS))
    return unit


def _recur(
    qkv: Float,
    a: Float,
    b: Float,
    decay_log: Float,
    dt_bias: Float,
    slots: Int,
    cu_rows: Int,
    states: Float,
    out: Float,
) -> None:
    value_heads, key_dim, value_dim = states.shape[1:]
    keys = (qkv.shape[1] - value_heads * value_dim) // 2
    key_heads = keys // key_dim
    reads = np.arange(value_heads) * key_heads // value_heads
    for n, slot in enumerate(slots):
        state = states[slot]
        for t in range(cu_rows[n], cu_rows[n + 1]):
            q = _unit(qkv[t, :keys].reshape(key_heads, key_dim))[reads]
            k = _unit(qkv[t, keys : 2 * keys].reshape(key_heads, key_dim))[reads]
            v = qkv[t, 2 * keys :].reshape(value_heads, value_dim)
            decay = np.exp(-np.exp(decay_log) * softplus(a[t] + dt_bias))
            state *= decay[:, None, None]
            held = np.einsum("hkv,hk->hv", state, k)
            delta = sigmoid(b[t])[:, None] * (v - held)
            state += k[:, :, None] * delta[:, None, :]
            out[t] = np.einsum("hkv,hk->hv", state, q) / np.float32(np.sqrt(key_dim))


@op
def gated_delta_step(
    qkv: Float,
    a: Float,
    b: Float,
    decay_log: Float,
    dt_bias: Float,
    slots: Int,
    cu_rows: Int,
    positions: Int,
    *,
    states: Float,
    out: Float,
) -> None:
    """Advance each sequence's state by its rows, one after another, and read it after each.

    With q, k of unit length, g = exp(−exp(decay_log) · softplus(a + dt_bias)) and β = σ(b)::

        H ← g·H + k ⊗ β(v − g·Hᵀk),   out = Hᵀq / √K

    Parameters
    ----------
    qkv : float32 [T, 2·HK·K + HV·V]
        q, k and v of all heads, after the convolution. Value head h reads key head ⌊h · HK / HV⌋.
        Rows may be strided.
    a, b : float32 [T, HV]
        Raw projections of decay and write strength; rows may be strided.
    decay_log, dt_bias : float32 [HV]
        ``A_log`` (natural logarithm of the decay rate) and the bias of ``a``.
    slots : int32 [N]
        Each sequence's place in ``states``; all different.
    cu_rows : int32 [N + 1]
        Rows cu_rows[n] … cu_rows[n + 1] − 1 belong to sequence n. The first need not be row 0;
        rows outside are left alone.
    positions : int32 [T]
        Of each row in its sequence, ascending by 1. A backend may compute a prompt in chunks, whose
        borders lie at multiples of a fixed number of positions.
    states : float32 [S, HV, K, V]
        Updated; zeros at a sequence's start; contiguous.
    out : float32 [T, HV, V]
        Written; rows may be strided.

    Notes
    -----
    Traffic is twice the states; work is 7·HV·K·V per row. This form's K rows of a sequence are
    K sequential updates: bitwise those of K calls with one row each.

    Source
    ------
    Yang, Kautz and Hatamizadeh, "Gated Delta Networks" (2024), arXiv 2412.06464, eq. 10.
    """
    _recur(qkv, a, b, decay_log, dt_bias, slots, cu_rows, states, out)


@op
def gated_delta_prefill(
    qkv: Float,
    a: Float,
    b: Float,
    decay_log: Float,
    dt_bias: Float,
    slots: Int,
    cu_rows: Int,
    positions: Int,
    *,
    states: Float,
    out: Float,
) -> None:
    """:func:`gated_delta_step` for prompt rows: the same parameters and the same recurrence.

    On the CPU also in the same order: bitwise the step form, for every split of a prompt.
    """
    _recur(qkv, a, b, decay_log, dt_bias, slots, cu_rows, states, out)


@op
def gated_delta_mixer_step(
    qkv: Float,
    gate: Float,
    a: Float,
    b: Float,
    conv_weight: Float,
    norm_weight: Float,
    norm_eps: float,
    decay_log: Float,
    dt_bias: Float,
    slots: Int,
    cu_rows: Int,
    positions: Int,
    *,
    states: Float,
    tails: Float,
    convolved: Float,
    recurred: Float,
    out: Float,
) -> None:
    """All that lies between a layer's input and output products, for step rows.

    :func:`~atlas.ops.conv.causal_conv_step` without a bias, :func:`gated_delta_step`, and
    :func:`~atlas.ops.norm.gated_rmsnorm` of each head, the norm first.

    Parameters
    ----------
    qkv : float32 [T, C]
        Before the convolution, C = 2·HK·K + HV·V. Rows may be strided; so for ``gate``, a and b.
    gate : float32 [T, HV·V]
    conv_weight : float32 [W, C]
    norm_weight : float32 [V]
    norm_eps : float
    tails : float32 [S, W − 1, C]
        Updated.
    convolved, recurred : float32 [T, C], [T, HV·V]
        Scratch for backends that do not fuse; rows may be strided.
    out : float32 [T, HV·V]
        Written; rows may be strided.

    The others are those of :func:`gated_delta_step`.
    """
    causal_conv_step(qkv, conv_weight, None, slots, cu_rows, positions, tails=tails, out=convolved)
    heads = (len(recurred), states.shape[1], states.shape[3])
    gated_delta_step(
        convolved, a, b, decay_log, dt_bias, slots, cu_rows, positions,
        states=states, out=recurred.reshape(heads, copy=False),
    )  # fmt: skip
    gated_rmsnorm(recurred, gate, norm_weight, norm_eps, states.shape[3], True, out=out)
