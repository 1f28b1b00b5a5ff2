"""Rotary position embedding, in place."""

# mypy: ignore-errors
from __future__ import annotations

from atlas.backends.cpu.bodies import body
from atlas.backends.cpu.bodies.simd import (
    fma,
    load_f32,
    load_first,
    load_i32,
    mul,
    store_f32,
    store_first,
    sub,
    zeros,
)
from atlas.backends.cpu.bodies.vectors import device


@device
def rotate(low, cosines, half):
    """Turn one head's pairs by ``half`` cosines, then as many sines."""
    for start in range(0, half, 16):
        count = min(16, half - start)
        at = start * 4
        cos, sin = load_first(cosines + at, count), load_first(cosines + half * 4 + at, count)
        first, second = load_first(low + at, count), load_first(low + half * 4 + at, count)
        minus = sub(zeros(), second)
        store_first(low + at, fma(minus, sin, mul(first, cos)), count)
        store_first(low + half * 4 + at, fma(first, sin, mul(second, cos)), count)


@body("rope.rope")
def rope(thread, num_threads, args):
    x, row_stride, head_stride, num_rows, num_heads = args[0], args[1], args[2], args[3], args[4]
    positions, table, half = args[5], args[6], args[7]
    for item in range(thread, num_rows * num_heads, num_threads):
        row, head = item // num_heads, item % num_heads
        cosines = table + load_i32(positions + row * 4) * half * 8
        rotate(x + row * row_stride + head * head_stride, cosines, half)


@body("rope.axes")
def rope_axes(thread, num_threads, args):
    """Positions int32 [3, T]; ``axes`` int32 [half] says which of a row's three turns a pair."""
    x, row_stride, head_stride, num_rows, num_heads = args[0], args[1], args[2], args[3], args[4]
    positions, axis_stride, table, half, axes = args[5], args[6], args[7], args[8], args[9]
    mixed = args[10] + thread * half * 8
    for row in range(thread, num_rows, num_threads):
        for i in range(half):
            axis = load_i32(axes + i * 4)
            position = load_i32(positions + axis * axis_stride + row * 4)
            source = table + position * half * 8 + i * 4
            store_f32(mixed + i * 4, load_f32(source))
            store_f32(mixed + (half + i) * 4, load_f32(source + half * 4))
        for head in range(num_heads):
            rotate(x + row * row_stride + head * head_stride, mixed, half)
