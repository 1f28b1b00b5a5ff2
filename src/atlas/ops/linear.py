"""Matrix products with float or quantised weights."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from atlas.ops.activation import gelu_tanh_and_mul, relu, silu_and_mul
from atlas.ops.blocks import HostMatrix, dequantize, integers
from atlas.ops.spec import op

Float = NDArray[np.float32]

ACTIVATION_BLOCK = 32
FLOAT_FORMATS = ("f32", "f16", "bf16")


def quantize_rows(x: Float) -> tuple[NDArray[np.int8], Float]:
    """Quantise activations to int8 in blocks of 32 along each row.

    Parameters
    ----------
    x : float32 [T, K]
        K is a multiple of 32.

    Returns
    -------
    q : int8 [T, K]
        rint(x · (127 / amax)), halves to even; |q| ≤ 127.
    scale : float32 [T, K / 32]
        amax / 127; 0 for a block of zeros.
    """
    blocks = x.reshape(x.shape[0], -1, ACTIVATION_BLOCK)
    amax = np.abs(blocks).max(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        inverse = np.where(amax > 0, np.float32(127) / amax, np.float32(0))
    q = np.rint(blocks * inverse.astype(np.float32)).astype(np.int8)
    return q.reshape(x.shape), (amax[..., 0] / np.float32(127)).astype(np.float32)


def product(x: Float, weight: HostMatrix) -> Float:
    """x · weightᵀ as :func:`linear` defines it, float32 [T, N]."""
    if weight.format in FLOAT_FORMATS:
        floats: Float = np.matmul(x, dequantize(weight).T, dtype=np.float32)
        return floats
    blocks = integers(weight)
    q, scale = quantize_rows(x)
    count = weight.cols // blocks.block_len
    weight_q = blocks.q.reshape(weight.rows, count, blocks.block_len).astype(np.float64)
    row_q = q.reshape(x.shape[0], count, blocks.block_len).astype(np.float64)
    row_scale = np.repeat(scale, ACTIVATION_BLOCK // blocks.block_len, axis=1)
    # The integer sums are exact; float64 keeps the rest of the definition free of an order.
    dot = np.einsum("nbk,tbk->tnb", weight_q, row_q)
    total = np.einsum("tnb,nb,tb->tn", dot, blocks.scale.astype(np.float64), row_scale)
    total += np.einsum("tb,nb,tb->tn", row_q.sum(-1), blocks.minimum.astype(np.float64), row_scale)
    rounded: Float = total.astype(np.float32)
    return rounded


@op
def linear(x: Float, weight: HostMatrix, bias: Float | None = None, *, out: Float) -> None:
    """out = x · weightᵀ + bias.

    Parameters
    ----------
    x : float32 [T, K]
        Rows may be strided.
    weight : matrix [N, K]
        Float formats multiply in float32. Quantised ones meet activations quantised per row and
        block of 32 (:func:`quantize_rows`): integer sums within a block are exact, and block b
        adds (w_scale · x_scale) · Σ q·q + w_minimum · (x_scale · Σ q).
    bias : float32 [N], optional
    out : float32 [T, N]
        Written; rows may be strided.

    Notes
    -----
    Order: k (or block) ascending in one float32 accumulator for each output, fused multiply-add
    where the CPU has it, bias last. A GPU sums 16 products at a time, and small matrices as four
    parts of K (``kernels/gemm_step_plan.py``). No order depends on T: a row's result is bitwise
    the same in any batch.
    """
    out[...] = product(x, weight) if bias is None else product(x, weight) + bias


@op
def linear_add(x: Float, weight: HostMatrix, bias: Float | None = None, *, out: Float) -> None:
    """out += x · weightᵀ + bias: :func:`linear` into a residual stream.

    Where the stream has fewer bits than float32, the product is rounded to them before it is added.
    """
    out[...] = out + (product(x, weight) if bias is None else product(x, weight) + bias)


@op
def linear_relu(x: Float, weight: HostMatrix, bias: Float | None = None, *, out: Float) -> None:
    """out = max(x · weightᵀ + bias, 0): the bits of :func:`linear` followed by ``relu``."""
    linear(x, weight, bias, out=out)
    relu(out, out=out)


@op
def linear_gated(
    x: Float,
    weight: HostMatrix,
    bias: Float | None,
    activation: str,
    *,
    gate_up: Float,
    out: Float,
) -> None:
    """out = act(gate) · up, where [gate; up] = x · weightᵀ + bias: a gated MLP's first half.

    Parameters
    ----------
    x : float32 [T, K]
        Rows may be strided.
    weight : matrix [2F, K]
        The gate's rows, then ``up``'s.
    bias : float32 [2F], optional
    activation : {"silu", "gelu_tanh"}
    gate_up : float32 [T, 2F]
        Scratch: a backend that does not fuse the two halves leaves the product there.
    out : float32 [T, F]
        Written: the bits of :func:`linear` followed by the activation's op.
    """
    linear(x, weight, bias, out=gate_up)
    gates = {"silu": silu_and_mul, "gelu_tanh": gelu_tanh_and_mul}
    gates[activation](gate_up, out=out)
