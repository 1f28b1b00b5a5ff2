"""Greedy choice over a row of logits."""

# mypy: ignore-errors
from __future__ import annotations

import numpy as np

from atlas.backends.cpu.bodies import body
from atlas.backends.cpu.bodies.simd import (
    add,
    lanes_between,
    load_f32,
    load_first,
    max_lane,
    maximum,
    select,
    splat,
    store_i32,
    sub,
    sum_lanes,
    zeros,
)

LOWEST = np.float32(-np.inf)
ZERO = np.float32(0.0)


@body("argmax.argmax")
def argmax(thread, num_threads, args):
    logits, row_stride, num_rows, size, out = args[0], args[1], args[2], args[3], args[4]
    for row in range(thread, num_rows, num_threads):
        source = logits + row * row_stride
        greatest, not_finite = splat(LOWEST), zeros()
        for start in range(0, size, 16):
            count = min(16, size - start)
            value = load_first(source + start * 4, count)
            not_finite = add(not_finite, sub(value, value))
            greatest = maximum(select(lanes_between(0, count), value, splat(LOWEST)), greatest)
        top = max_lane(greatest)
        found = -1
        if sum_lanes(not_finite) == ZERO:
            found = 0
            while load_f32(source + found * 4) != top:
                found += 1
        store_i32(out + row * 4, found)
