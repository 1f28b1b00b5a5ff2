"""Elementwise bodies: each thread takes whole rows, 16 columns at a time."""

# mypy: ignore-errors
from __future__ import annotations

import numpy as np

from atlas.backends.cpu.bodies import body
from atlas.backends.cpu.bodies.elementary import exp, tanh
from atlas.backends.cpu.bodies.simd import add as add_lanes
from atlas.backends.cpu.bodies.simd import (
    bits_f32,
    div,
    fma,
    less,
    load_first,
    mul,
    select,
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
    x, x_stride, num_rows, size, out, out_stride = (
        args[0],
        args[1],
        args[2],
        args[3],
        args[4],
        args[5],
    )
    pieces = (size + 15) // 16
    for item in range(
        num_rows * pieces * thread // num_threads, num_rows * pieces * (thread + 1) // num_threads
    ):
        row, piece = item // pieces, item % pieces
        count = min(16, size - piece * 16)
        value = load_first(x + row * x_stride + piece * 64, count)
        # The comparison is false for a NaN, which is the operand that then stays.
        store_first(
            out + row * out_stride + piece * 64,
            select(less(value, zeros()), zeros(), value),
            count,
        )


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
