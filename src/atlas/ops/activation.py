"""Elementwise ops: activations and gates, addition, soft capping."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from atlas.ops.spec import op

Float = NDArray[np.float32]


def sigmoid(x: Float) -> Float:
    """1 / (1 + exp(−x))."""
    with np.errstate(over="ignore"):
        sigma: Float = np.float32(1) / (np.float32(1) + np.exp(-x))
    return sigma


def silu(x: Float) -> Float:
    """x / (1 + exp(−x))."""
    with np.errstate(over="ignore"):
        activated: Float = np.divide(x, np.float32(1) + np.exp(-x))
    return activated


def softplus(x: Float) -> Float:
    """log(1 + exp(x)), as max(x, 0) + log(1 + exp(−|x|)), which does not overflow."""
    positive: Float = np.maximum(x, np.float32(0)) + np.log1p(np.exp(-np.abs(x)))
    return positive


@op
def silu_and_mul(gate_up: Float, *, out: Float) -> None:
    """out = silu(gate) · up, silu(g) = g / (1 + exp(−g)).

    Parameters
    ----------
    gate_up : float32 [T, 2F]
        The gate in the first F columns, ``up`` in the last.
    out : float32 [T, F]
        Written.

    Source
    ------
    Shazeer, "GLU Variants Improve Transformer" (2020), arXiv 2002.05202.
    """
    gate, up = np.split(gate_up, 2, axis=-1)
    out[...] = silu(gate) * up


@op
def gelu_tanh_and_mul(gate_up: Float, *, out: Float) -> None:
    """out = gelu(gate) · up with gelu's tanh form.

    Parameters
    ----------
    gate_up : float32 [T, 2F]
        The gate in the first F columns, ``up`` in the last.
    out : float32 [T, F]
        Written. gelu(g) = g/2 · (1 + tanh(√(2/π) · (g + 0.044715 g³))).

    Source
    ------
    Hendrycks and Gimpel, "Gaussian Error Linear Units" (2016), arXiv 1606.08415.
    """
    gate, up = np.split(gate_up, 2, axis=-1)
    inner = np.float32(np.sqrt(2 / np.pi)) * (gate + np.float32(0.044715) * gate**3)
    out[...] = np.float32(0.5) * gate * (np.float32(1) + np.tanh(inner)) * up


@op
def relu_squared(x: Float, *, out: Float) -> None:
    """out = max(x, 0)², float32 [T, F]; ``out`` may be ``x``.

    Source
    ------
    So et al., "Primer" (2021), arXiv 2109.08668.
    """
    out[...] = np.square(np.maximum(x, np.float32(0)))


@op
def sigmoid_gate(x: Float, gate: Float, *, out: Float) -> None:
    """out = x · σ(gate).

    Parameters
    ----------
    x : float32 [T, D]
        Rows may be strided; so for ``gate`` and ``out``.
    gate : float32 [T, D] or [T, 1]
        One for each element (the output gate of attention), or one a row (a shared expert's).
    out : float32 [T, D]
        Written; may be ``x``.

    Source
    ------
    Qiu et al., "Gated Attention for Large Language Models" (2025), arXiv 2505.06708.
    """
    out[...] = x * sigmoid(gate)


@op
def zero(*, out: Float) -> None:
    """out = 0, float32 [T, D]; rows may be strided."""
    out[...] = 0


@op
def relu(x: Float, *, out: Float) -> None:
    """out = max(x, 0), float32 [T, F]; ``out`` may be ``x``. A NaN stays one."""
    out[...] = np.maximum(x, np.float32(0))


@op
def add(x: Float, y: Float, *, out: Float) -> None:
    """out = x + y, float32 [T, D] each; ``out`` may be either."""
    out[...] = x + y


@op
def softcap(x: Float, cap: float, *, out: Float) -> None:
    """out = cap · tanh(x / cap), float32 [T, C]; ``out`` may be ``x``.

    Source
    ------
    Gemma Team, "Gemma 2" (2024), arXiv 2408.00118, section 2.
    """
    out[...] = np.float32(cap) * np.tanh(x / np.float32(cap))
