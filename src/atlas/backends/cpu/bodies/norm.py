"""RMS and layer normalisation of strided rows."""

# mypy: ignore-errors
from __future__ import annotations

import numpy as np

from atlas.backends.cpu.bodies import body
from atlas.backends.cpu.bodies.simd import (
    add,
    bits_f32,
    fma,
    lanes_between,
    load,
    load_first,
    mul,
    select,
    splat,
    sqrt_f32,
    store,
    store_first,
    sub,
    sum_lanes,
    zeros,
)

ONE = np.float32(1.0)


@body("norm.rmsnorm")
def rmsnorm(thread, num_threads, args):
    x, outer_stride, inner_stride, num_outer, num_inner = (
        args[0],
        args[1],
        args[2],
        args[3],
        args[4],
    )
    size, weight, eps = args[5], args[6], bits_f32(args[7])
    out, out_outer, out_inner = args[8], args[9], args[10]
    whole, rest = size // 16, size % 16
    for item in range(thread, num_outer * num_inner, num_threads):
        i, j = item // num_inner, item % num_inner
        source = x + i * outer_stride + j * inner_stride
        target = out + i * out_outer + j * out_inner
        squares = zeros()
        for n in range(whole):
            value = load(source + n * 64)
            squares = fma(value, value, squares)
        if rest:
            value = load_first(source + whole * 64, rest)
            squares = fma(value, value, squares)
        mean = sum_lanes(squares) / np.float32(size)
        scale = splat(ONE / sqrt_f32(mean + eps))
        for n in range(whole):
            value = mul(mul(load(source + n * 64), scale), load(weight + n * 64))
            store(target + n * 64, value)
        if rest:
            value = mul(load_first(source + whole * 64, rest), scale)
            value = mul(value, load_first(weight + whole * 64, rest))
            store_first(target + whole * 64, value, rest)


@body("norm.layernorm")
def layernorm(thread, num_threads, args):
    x, x_stride, num_rows, size = args[0], args[1], args[2], args[3]
    weight, bias, eps, out, out_stride = args[4], args[5], bits_f32(args[6]), args[7], args[8]
    for row in range(thread, num_rows, num_threads):
        source, target = x + row * x_stride, out + row * out_stride
        total = zeros()
        for start in range(0, size, 16):
            total = add(load_first(source + start * 4, min(16, size - start)), total)
        mean = splat(sum_lanes(total) / np.float32(size))
        squares = zeros()
        for start in range(0, size, 16):
            count = min(16, size - start)
            centred = sub(load_first(source + start * 4, count), mean)
            centred = select(lanes_between(0, count), centred, zeros())
            squares = fma(centred, centred, squares)
        variance = sum_lanes(squares) / np.float32(size)
        scale = splat(ONE / sqrt_f32(variance + eps))
        for start in range(0, size, 16):
            count = min(16, size - start)
            value = mul(sub(load_first(source + start * 4, count), mean), scale)
            value = fma(
                value, load_first(weight + start * 4, count), load_first(bias + start * 4, count)
            )
            store_first(target + start * 4, value, count)
