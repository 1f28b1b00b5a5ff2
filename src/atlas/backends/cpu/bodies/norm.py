"""RMS and layer normalisation of strided rows."""

# mypy: ignore-errors
from __future__ import annotations

import numpy as np

from atlas.backends.cpu.bodies import body
from atlas.backends.cpu.bodies.activation import silu
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
from atlas.backends.cpu.bodies.vectors import device

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


@device
def gated_load(x, gate, at, count, gated):
    """16 elements of a row, times silu of their gates where ``gated``."""
    value = load_first(x + at, count)
    return mul(value, silu(load_first(gate + at, count))) if gated else value


@body("norm.gated_rmsnorm")
def gated_rmsnorm(thread, num_threads, args):
    x, x_stride, x_step = args[0], args[1], args[2]
    gate, gate_stride, gate_step = args[3], args[4], args[5]
    num_rows, groups, size, weight, weight_stride = args[6], args[7], args[8], args[9], args[10]
    eps, norm_first = bits_f32(args[11]), args[12] != 0
    out, out_stride, out_step = args[13], args[14], args[15]
    items = num_rows * groups
    for item in range(items * thread // num_threads, items * (thread + 1) // num_threads):
        row, group = item // groups, item % groups
        source = x + row * x_stride + group * x_step
        gates = gate + row * gate_stride + group * gate_step
        target = out + row * out_stride + group * out_step
        scales = weight + group * weight_stride
        squares = zeros()
        for i in range(0, size, 16):
            value = gated_load(source, gates, i * 4, min(16, size - i), not norm_first)
            squares = fma(value, value, squares)
        mean = sum_lanes(squares) / np.float32(size)
        scale = splat(ONE / sqrt_f32(mean + eps))
        for i in range(0, size, 16):
            count = min(16, size - i)
            value = gated_load(source, gates, i * 4, count, not norm_first)
            value = mul(mul(value, scale), load_first(scales + i * 4, count))
            if norm_first:
                value = mul(value, silu(load_first(gates + i * 4, count)))
            store_first(target + i * 4, value, count)


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
