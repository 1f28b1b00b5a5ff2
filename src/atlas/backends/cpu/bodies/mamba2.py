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

CHANNELS = 32  # a thread takes at a time: 16 KiB of state of 128, which stay cached between rows


@device
def advance(state, decay, push, b, total, c):
    """h ← decay·h + push·b of 16 elements; returns total + h·c."""
    after = fma(push, b, mul(decay, load(state)))
    store(state, after)
    return fma(after, c, total)


@device
def advance_first(state, decay, push, b, total, c, count):
    after = fma(push, b, mul(decay, load_first(state, count)))
    store_first(state, after, count)
    return fma(after, c, total)


@device
def channels_4(state, size, decay, push, b, c):
    """Four channels; each sums h·c with elements ascending in 16 lanes, then by the lane tree."""
    g, line, whole = splat(decay), size * 4, size // 16 * 16
    w0, w1, w2, w3 = splat(push[0]), splat(push[1]), splat(push[2]), splat(push[3])
    t0, t1, t2, t3 = zeros(), zeros(), zeros(), zeros()
    for i in range(0, whole, 16):
        at, key, read = state + i * 4, load(b + i * 4), load(c + i * 4)
        t0 = advance(at, g, w0, key, t0, read)
        t1 = advance(at + line, g, w1, key, t1, read)
        t2 = advance(at + 2 * line, g, w2, key, t2, read)
        t3 = advance(at + 3 * line, g, w3, key, t3, read)
    rest = size - whole
    if rest > 0:
        at = state + whole * 4
        key, read = load_first(b + whole * 4, rest), load_first(c + whole * 4, rest)
        t0 = advance_first(at, g, w0, key, t0, read, rest)
        t1 = advance_first(at + line, g, w1, key, t1, read, rest)
        t2 = advance_first(at + 2 * line, g, w2, key, t2, read, rest)
        t3 = advance_first(at + 3 * line, g, w3, key, t3, read, rest)
    return sum_lanes(t0), sum_lanes(t1), sum_lanes(t2), sum_lanes(t3)


@device
def channel(state, size, decay, push, b, c):
    """One channel, in the same order."""
    g, weight, total = splat(decay), splat(push), zeros()
    whole = size // 16 * 16
    for i in range(0, whole, 16):
        total = advance(state + i * 4, g, weight, load(b + i * 4), total, load(c + i * 4))
    rest = size - whole
    if rest > 0:
        key, read = load_first(b + whole * 4, rest), load_first(c + whole * 4, rest)
        total = advance_first(state + whole * 4, g, weight, key, total, read, rest)
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
            source, target = source + head * dim * 4, target + head * dim * 4
            for p in range(first, last, 4):
                values, outputs, at = source + p * 4, target + p * 4, state + p * size * 4
                if last - p < 4:
                    for i in range(last - p):
                        value = load_f32(values + i * 4)
                        y = channel(at + i * size * 4, size, decay, time * value, keys, reads)
                        store_f32(outputs + i * 4, fma_f32(skip, value, y))
                    continue
                v0, v1 = load_f32(values), load_f32(values + 4)
                v2, v3 = load_f32(values + 8), load_f32(values + 12)
                push = (time * v0, time * v1, time * v2, time * v3)
                y = channels_4(at, size, decay, push, keys, reads)
                store_f32(outputs, fma_f32(skip, v0, y[0]))
                store_f32(outputs + 4, fma_f32(skip, v1, y[1]))
                store_f32(outputs + 8, fma_f32(skip, v2, y[2]))
                store_f32(outputs + 12, fma_f32(skip, v3, y[3]))
