"""The weights of a row of scaled logits, with the bits of ``atlas.ops.elementary.exp32``."""

# mypy: ignore-errors
from __future__ import annotations

import numpy as np

from atlas.backends.cpu.bodies import body
from atlas.backends.cpu.bodies.simd import (
    add,
    less,
    load,
    load_first,
    maximum,
    mul,
    power_of_two,
    select,
    splat,
    store,
    store_first,
    sub,
    to_i32,
    zeros,
)
from atlas.backends.cpu.bodies.vectors import device

# The numbers of atlas.ops.elementary; a test compares the results bit by bit.
EXP_LOW = np.float32(-87.33)
LOG2_E = np.float32(1.4426950408889634)
LN2_HIGH = np.float32(0.693359375)
LN2_LOW = np.float32(-2.1219444005469057e-4)
ROUND = np.float32(12582912.0)
ONE, Q4 = np.float32(1.0), np.float32(0.5)
Q0, Q1 = np.float32(0.0013814173871651292), np.float32(0.008368921466171741)
Q2, Q3 = np.float32(0.04166840761899948), np.float32(0.1666651964187622)


@device
def exp32(x):
    """e^x by lane for x ≤ 0: products and sums rounded one by one, never fused."""
    clamped = maximum(x, splat(EXP_LOW))
    n = sub(add(mul(clamped, splat(LOG2_E)), splat(ROUND)), splat(ROUND))
    r = sub(sub(clamped, mul(n, splat(LN2_HIGH))), mul(n, splat(LN2_LOW)))
    q = add(mul(splat(Q0), r), splat(Q1))
    q = add(mul(q, r), splat(Q2))
    q = add(mul(q, r), splat(Q3))
    q = add(mul(q, r), splat(Q4))
    value = add(add(mul(q, mul(r, r)), r), splat(ONE))
    return select(less(x, splat(EXP_LOW)), zeros(), mul(value, power_of_two(to_i32(n))))


@body("sampling.weights")
def weights(thread, num_threads, args):
    """out[i] = exp32(x[i]); threads take every num_threads-th vector."""
    x, size, out = args[0], args[1], args[2]
    whole = size // 16
    for i in range(thread, whole, num_threads):
        store(out + i * 64, exp32(load(x + i * 64)))
    rest = size - whole * 16
    if rest > 0 and thread == 0:
        store_first(out + whole * 64, exp32(load_first(x + whole * 64, rest)), rest)
