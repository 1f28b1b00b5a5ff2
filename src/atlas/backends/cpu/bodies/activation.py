"""Elementwise bodies: each thread takes whole rows, 16 columns at a time."""

# mypy: ignore-errors
from __future__ import annotations

import numpy as np

from atlas.backends.cpu.bodies import body
from atlas.backends.cpu.bodies.elementary import exp, sigmoid, tanh
from atlas.backends.cpu.bodies.simd import add as add_lanes
from atlas.backends.cpu.bodies.simd import (
    bits_f32,
    div,
    fma,
    load_f32,
    load_first,
    maximum,
    mul,
    splat,
    store_first,
    sub,
    zeros,
)
from atlas.backends.cpu.bodies.vectors import device

_f = np.float32
ONE, HALF = _f(1.0), _f(0.5)
CUBIC, ROOT = _f(0.044715), _f(0.7978845608028654)


@device
def silu(gate):
    return div(gate, add_lanes(splat(ONE), exp(sub(zeros(), gate))))


@device
def gelu_tanh(gate):
    cube = mul(mul(gate, gate), gate)
    inner = mul(splat(ROOT), fma(splat(CUBIC), cube, gate))
    return mul(mul(splat(HALF), gate), add_lanes(splat(ONE), tanh(inner)))


def _gated(activation):
    def gated(thread, num_threads, args):
        gate_up, in_stride, num_rows, size = args[0], args[1], args[2], args[3]
        out, out_stride = args[4], args[5]
        # Columns are shared out too: with one row there is one row's work for every thread.
        pieces = (size + 15) // 16
        for item in range(
            num_rows * pieces * thread // num_threads,
            num_rows * pieces * (thread + 1) // num_threads,
        ):
            row, piece = item // pieces, item % pieces
            count = min(16, size - piece * 16)
            source = gate_up + row * in_stride + piece * 64
            gate, up = load_first(source, count), load_first(source + size * 4, count)
            store_first(out + row * out_stride + piece * 64, mul(activation(gate), up), count)

    return gated


body("activation.silu_and_mul")(_gated(silu))
body("activation.gelu_tanh_and_mul")(_gated(gelu_tanh))


@body("activation.relu")
def relu(thread, num_threads, args):
    x, x_stride, num_rows, size = args[0], args[1], args[2], args[3]
    out, out_stride = args[4], args[5]
    pieces = (size + 15) // 16
    for item in range(
        num_rows * pieces * thread // num_threads, num_rows * pieces * (thread + 1) // num_threads
    ):
        row, piece = item // pieces, item % pieces
        count = min(16, size - piece * 16)
        value = load_first(x + row * x_stride + piece * 64, count)
        value = maximum(zeros(), value)  # in this order NaN stays NaN
        store_first(out + row * out_stride + piece * 64, value, count)


@body("activation.relu_squared")
def relu_squared(thread, num_threads, args):
    x, x_stride, num_rows, size = args[0], args[1], args[2], args[3]
    out, out_stride = args[4], args[5]
    pieces = (size + 15) // 16
    for item in range(
        num_rows * pieces * thread // num_threads, num_rows * pieces * (thread + 1) // num_threads
    ):
        row, piece = item // pieces, item % pieces
        count = min(16, size - piece * 16)
        value = load_first(x + row * x_stride + piece * 64, count)
        value = maximum(zeros(), value)  # in this order NaN stays NaN
        store_first(out + row * out_stride + piece * 64, mul(value, value), count)


@body("activation.sigmoid_gate")
def sigmoid_gate(thread, num_threads, args):
    x, x_stride, num_rows, size = args[0], args[1], args[2], args[3]
    gate, gate_stride, one_a_row, out, out_stride = args[4], args[5], args[6], args[7], args[8]
    pieces = (size + 15) // 16
    for item in range(
        num_rows * pieces * thread // num_threads, num_rows * pieces * (thread + 1) // num_threads
    ):
        row, piece = item // pieces, item % pieces
        count = min(16, size - piece * 16)
        gates = gate + row * gate_stride
        if one_a_row != 0:
            factor = sigmoid(splat(load_f32(gates)))
        else:
            factor = sigmoid(load_first(gates + piece * 64, count))
        value = load_first(x + row * x_stride + piece * 64, count)
        store_first(out + row * out_stride + piece * 64, mul(value, factor), count)


@body("activation.zero")
def zero(thread, num_threads, args):
    out, out_stride, num_rows, size = args[0], args[1], args[2], args[3]
    for row in range(thread, num_rows, num_threads):
        for start in range(0, size, 16):
            store_first(out + row * out_stride + start * 4, zeros(), min(16, size - start))


@body("activation.add")
def add(thread, num_threads, args):
    x, x_stride, y, y_stride, num_rows, size = args[0], args[1], args[2], args[3], args[4], args[5]
    out, out_stride = args[6], args[7]
    for row in range(thread, num_rows, num_threads):
        for start in range(0, size, 16):
            count = min(16, size - start)
            total = add_lanes(
                load_first(x + row * x_stride + start * 4, count),
                load_first(y + row * y_stride + start * 4, count),
            )
            store_first(out + row * out_stride + start * 4, total, count)


@body("activation.softcap")
def softcap(thread, num_threads, args):
    x, x_stride, num_rows, size = args[0], args[1], args[2], args[3]
    cap, out, out_stride = splat(bits_f32(args[4])), args[5], args[6]
    pieces = (size + 15) // 16
    for item in range(
        num_rows * pieces * thread // num_threads, num_rows * pieces * (thread + 1) // num_threads
    ):
        row, piece = item // pieces, item % pieces
        count = min(16, size - piece * 16)
        value = load_first(x + row * x_stride + piece * 64, count)
        capped = mul(cap, tanh(div(value, cap)))
        store_first(out + row * out_stride + piece * 64, capped, count)
