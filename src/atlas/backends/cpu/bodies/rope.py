"""Rotary position embedding, in place."""

# mypy: ignore-errors
from __future__ import annotations

from atlas.backends.cpu.bodies import body
from atlas.backends.cpu.bodies.simd import fma, load_first, load_i32, mul, store_first, sub, zeros


@body("rope.rope")
def rope(thread, num_threads, args):
    x, row_stride, head_stride, num_rows, num_heads = args[0], args[1], args[2], args[3], args[4]
    positions, table, half = args[5], args[6], args[7]
    for item in range(thread, num_rows * num_heads, num_threads):
        row, head = item // num_heads, item % num_heads
        cosines = table + load_i32(positions + row * 4) * half * 8
        low = x + row * row_stride + head * head_stride
        for start in range(0, half, 16):
            count = min(16, half - start)
            at = start * 4
            cos, sin = load_first(cosines + at, count), load_first(cosines + half * 4 + at, count)
            first, second = load_first(low + at, count), load_first(low + half * 4 + at, count)
            minus = sub(zeros(), second)
            store_first(low + at, fma(minus, sin, mul(first, cos)), count)
            store_first(low + half * 4 + at, fma(first, sin, mul(second, cos)), count)
