"""Elementwise ops: activations, gated ones, addition, soft capping."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from atlas.ops.spec import op

Float = NDArray[np.float32]


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
    with np.errstate(over="ignore"):
        out[...] = gate / (np.float32(1) + np.exp(-gate)) * up


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
