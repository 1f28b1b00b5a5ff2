"""Mixture of experts: routing, and the experts' products with their weighted sum."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from atlas.ops.activation import gelu_tanh_and_mul, silu_and_mul
from atlas.ops.blocks import HostMatrix
from atlas.ops.linear import product
from atlas.ops.spec import op

Float = NDArray[np.float32]
Int = NDArray[np.int32]


@op
def moe_route(scores: Float, normalize: bool, *, ids: Int, weights: Float) -> None:
    """Choose each row's experts by softmax.

    Parameters
    ----------
    scores : float32 [T, E]
        Router logits.
    normalize : bool
        Divide the chosen probabilities by their sum.
    ids : int32 [T, X]
        Written: the X most probable experts, greatest first, lower id first on ties.
    weights : float32 [T, X]
        Written.

    Source
    ------
    Shazeer et al., "Outrageously Large Neural Networks" (2017), arXiv 1701.06538.
    """
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    probabilities = exponentials / exponentials.sum(axis=-1, keepdims=True)
    ids[...] = np.argsort(-probabilities, axis=-1, kind="stable")[:, : ids.shape[1]]
    chosen = np.take_along_axis(probabilities, ids.astype(np.int64), axis=-1)
    weights[...] = chosen / chosen.sum(axis=-1, keepdims=True) if normalize else chosen


@op
def moe_experts(
    x: Float,
    gate_up: HostMatrix,
    down: HostMatrix,
    ids: Int,
    weights: Float,
    activation: str,
    *,
    expert_gate_up: Float,
    expert_activated: Float,
    expert_out: Float,
    out: Float,
) -> None:
    """out[t] += Σⱼ weights[t, j] · down_e(act(gate_e(x[t])) · up_e(x[t])) with e = ids[t, j].

    Parameters
    ----------
    x : float32 [T, D]
    gate_up : matrix [E · 2F, D]
        The gate's rows of expert 0, then its ``up``'s, then those of expert 1, …
    down : matrix [E · D, F]
        The experts' matrices, one under the other.
    ids, weights : int32 and float32 [T, X]
        As :func:`moe_route` leaves them.
    activation : {"silu", "gelu_tanh"}
    expert_gate_up, expert_activated, expert_out : float32 [T, X, 2F], [T, X, F], [T, X, D]
        Scratch.
    out : float32 [T, D]
        The residual stream, updated: experts are added in the order of j, then into it.

    Notes
    -----
    Each (row, expert) product is summed in the order of ``linear``.
    """
    (rows, top_k, inner), gate = expert_activated.shape, gelu_tanh_and_mul
    if activation == "silu":
        gate = silu_and_mul
    moe_linear(x[:, None], gate_up, ids, out=expert_gate_up)
    pairs = rows * top_k
    gate(expert_gate_up.reshape(pairs, -1), out=expert_activated.reshape(pairs, inner))
    moe_linear(expert_activated, down, ids, out=expert_out)
    moe_combine(expert_out, weights, out=out)


def moe_linear(x: Float, weight: HostMatrix, ids: Int, *, out: Float) -> None:
    """out[t, j] = x[t, j] · W[ids[t, j]]ᵀ.

    Parameters
    ----------
    x : float32 [T, 1, K] or [T, X, K]
        One input for all of a row's experts, or one for each.
    weight : matrix [E · N, K]
        The experts' matrices, one under the other.
    ids : int32 [T, X]
    out : float32 [T, X, N]
        Written. Each (row, expert) product is summed in the order of ``linear``.
    """
    rows = out.shape[2]
    for t in range(ids.shape[0]):
        for j in range(ids.shape[1]):
            expert = weight.row_slice(ids[t, j] * rows, (ids[t, j] + 1) * rows)
            out[t, j] = product(x[t, min(j, x.shape[1] - 1)][None], expert)[0]


def moe_combine(y: Float, weights: Float, *, out: Float) -> None:
    """out[t] += Σⱼ weights[t, j] · y[t, j], j ascending from 0, then into the residual.

    y float32 [T, X, D], weights float32 [T, X], out float32 [T, D] (updated).
    """
    total = np.zeros_like(out)
    for j in range(y.shape[1]):
        total += weights[:, j, None] * y[:, j]
    out += total
