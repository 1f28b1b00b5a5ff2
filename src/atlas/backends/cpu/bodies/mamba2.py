"""The Mamba-2 recurrence: a thread takes some channels of one head's state through all rows."""

# mypy: ignore-errors
from __future__ import annotations

from atlas.backends.cpu.bodies import body
from atlas.backends.cpu.bodies.elementary import exp_scalar, softplus_scalar
from atlas.backends.cpu.bodies.simd import (
    bits_f32,
    fma,
    fma_f32,
    load,
    load_f32,
    load_first,
    load_i32,
    mul,
    splat,
    store,
    store_f32,
    store_first,
    sum_lanes,
    zeros,
)
from atlas.backends.cpu.bodies.vectors import device

CHANNELS = 16  # a thread takes at a time: 8 KiB of state of 128, which stay cached between rows


@device
def channel(state, size, decay, push, b, c):
    """h ← decay·h + push·b; returns h·c: elements ascending in 16 lanes, then the lane tree."""
    g, weight, total = splat(decay), splat(push), zeros()
    whole = size // 16 * 16
    for i in range(0, whole, 16):
        after = fma(weight, load(b + i * 4), mul(g, load(state + i * 4)))
        store(state + i * 4, after)
        total = fma(after, load(c + i * 4), total)
    if whole < size:
        at, rest = whole * 4, size - whole
        after = fma(weight, load_first(b + at, rest), mul(g, load_first(state + at, rest)))
        store_first(state + at, after, rest)
        total = fma(after, load_first(c + at, rest), total)
    return sum_lanes(total)


@body("mamba2.recur")
def recur(thread, num_threads, args):
    x, x_stride, b, b_stride, c, c_stride = args[0], args[1], args[2], args[3], args[4], args[5]
    dt, dt_stride, decay_log, d, dt_bias = args[6], args[7], args[8], args[9], args[10]
    lowest, highest = bits_f32(args[11]), bits_f32(args[12])
    slots, cu_rows, num_seqs = args[13], args[14], args[15]
    heads, groups, dim, size = args[16], args[17], args[18], args[19]
    states, out, out_stride = args[20], args[21], args[22]
    pieces = (dim + CHANNELS - 1) // CHANNELS
    items = num_seqs * heads * pieces
    for item in range(items * thread // num_threads, items * (thread + 1) // num_threads):
        n, head, piece = item // pieces // heads, item // pieces % heads, item % pieces
        first, last = piece * CHANNELS, min(dim, (piece + 1) * CHANNELS)
        state = states + (load_i32(slots + n * 4) * heads + head) * dim * size * 4
        group_at = head * groups // heads * size * 4
        rate, skip = exp_scalar(load_f32(decay_log + head * 4)), load_f32(d + head * 4)
        bias = load_f32(dt_bias + head * 4)
        for row in range(load_i32(cu_rows + n * 4), load_i32(cu_rows + (n + 1) * 4)):
            time = softplus_scalar(load_f32(dt + row * dt_stride + head * 4) + bias)
            time = min(max(time, lowest), highest)
            decay = exp_scalar(-(rate * time))
            source, target = x + row * x_stride, out + row * out_stride
            keys, reads = b + row * b_stride + group_at, c + row * c_stride + group_at
            for p in range(first, last):
                value = load_f32(source + (head * dim + p) * 4)
                y = channel(state + p * size * 4, size, decay, time * value, keys, reads)
                store_f32(target + (head * dim + p) * 4, fma_f32(skip, value, y))
