"""Elementwise: activations and gates, addition, soft capping.

Everything in float32, each operation as in the op's NumPy definition, rounded once at the end.
Rows are addressed by strides in bytes; a thread takes a vector, the grid is
(rows, ⌈columns / (threads · width)⌉).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from atlas_kernels._cuda import device, f32
from atlas_kernels.gates import sigmoid, sigmoid_gated
from atlas_kernels.ptx_async import launch_dependents, wait_prerequisites
from atlas_kernels.ptx_math import divide, minimum
from atlas_kernels.ptx_warp import block_x, block_y, thread_x
from atlas_kernels.registry import kernel
from atlas_kernels.vector import Access, access, row_variants

THREADS = 256

_ONE, _HALF, _LARGE = np.float32(1), np.float32(0.5), np.float32(2.0**126)
_SQRT_2_PI = np.float32(math.sqrt(2 / math.pi))
_CUBIC = np.float32(0.044715)


@device
def silu_mul(gate, up):
    """gate / (1 + exp(−gate)) · up, the divisor at most 2**126."""
    return divide(gate, minimum(_ONE + math.exp(-gate), _LARGE)) * up


@device
def gelu_tanh_mul(gate, up):
    """gate/2 · (1 + tanh(√(2/π) · (gate + 0.044715 gate³))) · up."""
    inner = _SQRT_2_PI * (gate + _CUBIC * (gate * gate * gate))
    return _HALF * gate * (_ONE + math.tanh(inner)) * up


@device
def _relu_squared(x, same):
    positive = x if x > f32(0) or x != x else f32(0)  # NaN stays NaN
    return positive * same


@device
def _relu(x, same):
    return x if x > f32(0) or x != x else f32(0)


def over_pairs(function: Any, width: int) -> Any:
    """A device function of two tuples, from one of two numbers."""
    if width == 1:
        return device(lambda a, b: (function(a[0], b[0]),))

    @device
    def apply(a, b):
        return (
            function(a[0], b[0]),
            function(a[1], b[1]),
            function(a[2], b[2]),
            function(a[3], b[3]),
            function(a[4], b[4]),
            function(a[5], b[5]),
            function(a[6], b[6]),
            function(a[7], b[7]),
        )

    return apply


def _gated(rows: Access, function: Any) -> Any:
    load, store, item, width = rows.load, rows.store, rows.item_bytes, rows.width
    apply = over_pairs(function, width)

    def gated(gate_up, out, size, gate_up_stride, out_stride):
        launch_dependents()
        wait_prerequisites()
        at = (block_y() * THREADS + thread_x()) * width
        if at < size:
            source = gate_up + block_x() * gate_up_stride
            values = apply(load(source + at * item), load(source + (size + at) * item))
            store(out + block_x() * out_stride + at * item, values)

    return gated


def _alone(rows: Access, function: Any) -> Any:
    """A kernel over one input, which ``function`` gets twice."""
    load, store, item, width = rows.load, rows.store, rows.item_bytes, rows.width
    apply = over_pairs(function, width)

    def alone(x, out, dim, x_stride, out_stride):
        launch_dependents()
        wait_prerequisites()
        at = (block_y() * THREADS + thread_x()) * width
        if at < dim:
            value = load(x + block_x() * x_stride + at * item)
            store(out + block_x() * out_stride + at * item, apply(value, value))

    return alone


@kernel("silu_and_mul", args="ptr ptr i32 i64 i64", threads=THREADS, variants=row_variants())
def make_silu_and_mul(rows: Access) -> Any:
    """out [T, F] = silu(gate) · up of gate_up [T, 2F].

    Source: Shazeer, "GLU Variants Improve Transformer" (2020), arXiv 2002.05202.
    """
    return _gated(rows, silu_mul)


@kernel("gelu_tanh_and_mul", args="ptr ptr i32 i64 i64", threads=THREADS, variants=row_variants())
def make_gelu_tanh_and_mul(rows: Access) -> Any:
    """out [T, F] = gelu(gate) · up of gate_up [T, 2F], with gelu's tanh form.

    Source: Hendrycks and Gimpel, "Gaussian Error Linear Units" (2016), arXiv 1606.08415.
    """
    return _gated(rows, gelu_tanh_mul)


@kernel(
    "sigmoid_gate", args="ptr ptr ptr i32 i64 i64 i64", threads=THREADS, variants=row_variants()
)
def make_sigmoid_gate(rows: Access) -> Any:
    """out = x · σ(gate), [T, D] each; ``out`` may be ``x``.

    Source: Qiu et al., "Gated Attention for Large Language Models" (2025), arXiv 2505.06708.
    """
    load, store, item, width = rows.load, rows.store, rows.item_bytes, rows.width
    apply = over_pairs(sigmoid_gated, width)

    def sigmoid_gate(x, gate, out, dim, x_stride, gate_stride, out_stride):
        launch_dependents()
        wait_prerequisites()
        at = (block_y() * THREADS + thread_x()) * width
        if at < dim:
            value = load(x + block_x() * x_stride + at * item)
            gates = load(gate + block_x() * gate_stride + at * item)
            store(out + block_x() * out_stride + at * item, apply(value, gates))

    return sigmoid_gate


@kernel("row_gate", args="ptr ptr ptr i32 i64 i64 i64", threads=THREADS, variants=row_variants())
def make_row_gate(rows: Access) -> Any:
    """The op ``sigmoid_gate`` with one gate a row: out [T, D] = x · σ(gate [T, 1])."""
    load, store, item, width = rows.load, rows.store, rows.item_bytes, rows.width
    load_gate, scale = access(rows.type, 1).load, rows.scale

    def row_gate(x, gate, out, dim, x_stride, gate_stride, out_stride):
        launch_dependents()
        wait_prerequisites()
        at = (block_y() * THREADS + thread_x()) * width
        if at < dim:
            factor = sigmoid(load_gate(gate + block_x() * gate_stride)[0])
            value = load(x + block_x() * x_stride + at * item)
            store(out + block_x() * out_stride + at * item, scale(value, factor))

    return row_gate


@kernel("relu_squared", args="ptr ptr i32 i64 i64", threads=THREADS, variants=row_variants())
def make_relu_squared(rows: Access) -> Any:
    """out = max(x, 0)², [T, F]; ``out`` may be ``x``.

    Source: So et al., "Primer" (2021), arXiv 2109.08668.
    """
    return _alone(rows, _relu_squared)


@kernel("relu", args="ptr ptr i32 i64 i64", threads=THREADS, variants=row_variants())
def make_relu(rows: Access) -> Any:
    """out = max(x, 0), [T, F]; NaN stays NaN; ``out`` may be ``x``."""
    return _alone(rows, _relu)


@kernel("zero", args="ptr i32 i64", threads=THREADS, variants=row_variants())
def make_zero(rows: Access) -> Any:
    """out = 0, [T, D]."""
    store, item, width, zero_of = rows.store, rows.item_bytes, rows.width, rows.zero

    def zero(out, dim, out_stride):
        launch_dependents()
        wait_prerequisites()
        at = (block_y() * THREADS + thread_x()) * width
        if at < dim:
            store(out + block_x() * out_stride + at * item, zero_of())

    return zero


@kernel("add", args="ptr ptr ptr i32 i64 i64 i64", threads=THREADS, variants=row_variants())
def make_add(rows: Access) -> Any:
    """out = x + y, [T, D] each; ``out`` may be either."""
    load, store, item = rows.load, rows.store, rows.item_bytes
    add, width = rows.add, rows.width

    def add_rows(x, y, out, dim, x_stride, y_stride, out_stride):
        launch_dependents()
        wait_prerequisites()
        at = (block_y() * THREADS + thread_x()) * width
        if at < dim:
            left = load(x + block_x() * x_stride + at * item)
            right = load(y + block_x() * y_stride + at * item)
            store(out + block_x() * out_stride + at * item, add(left, right))

    return add_rows


@kernel(
    "softcap",
    args="ptr ptr i32 i64 i64 f32",
    threads=THREADS,
    variants={"f32": (access("f32", 1),)},
)
def make_softcap(rows: Access) -> Any:
    """out = cap · tanh(x / cap), float32 [T, C]; ``out`` may be ``x``.

    Source: Gemma Team, "Gemma 2" (2024), arXiv 2408.00118, section 2.
    """
    load, store = rows.load, rows.store

    def softcap(x, out, size, x_stride, out_stride, cap):
        launch_dependents()
        wait_prerequisites()
        at = block_y() * THREADS + thread_x()
        if at < size:
            value = load(x + block_x() * x_stride + at * 4)[0]
            capped = f32(cap * math.tanh(value / cap))
            store(out + block_x() * out_stride + at * 4, (capped,))

    return softcap
