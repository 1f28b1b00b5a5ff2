"""The gated delta rule: a thread takes a tile of columns of one head's state through all rows.

A column of a state depends on no other, so tiles of 64 columns (then of 16) are independent and
stay in the first-level cache from row to row; for a prompt they are copied there, as rows a power
of two apart would share few of its sets. Within a column: k ascending in one accumulator.
"""

# mypy: ignore-errors
from __future__ import annotations

import numpy as np

from atlas.backends.cpu.bodies import body
from atlas.backends.cpu.bodies.elementary import exp_scalar, sigmoid_scalar, softplus_scalar
from atlas.backends.cpu.bodies.simd import (
    bits_f32,
    fma,
    load,
    load_f32,
    load_first,
    load_i32,
    mul,
    splat,
    sqrt_f32,
    store,
    store_first,
    sub,
    sum_lanes,
    zeros,
)
from atlas.backends.cpu.bodies.vectors import device

_f = np.float32
ONE = _f(1.0)
TILE = 256  # bytes of 64 columns
COPIED_ROWS = 8  # from so many rows on, a copy of the tile pays


@device
def unit(source, size, eps, scale, out):
    """out = source / √(Σ source² + eps) · scale."""
    squares = zeros()
    for i in range(0, size, 16):
        value = load_first(source + i * 4, min(16, size - i))
        squares = fma(value, value, squares)
    factor = splat(scale / sqrt_f32(sum_lanes(squares) + eps))
    for i in range(0, size, 16):
        store(out + i * 4, mul(load_first(source + i * 4, min(16, size - i)), factor))


@device
def update_64(state, stride, key_dim, k, q, decay, beta, value, out):
    """One row of 64 columns: correct the state by what it held for k, then read it by q."""
    g = splat(decay)
    h0, h1, h2, h3 = zeros(), zeros(), zeros(), zeros()
    for i in range(key_dim):
        at, key = state + i * stride, splat(load_f32(k + i * 4))
        h0 = fma(load(at), key, h0)
        h1 = fma(load(at + 64), key, h1)
        h2 = fma(load(at + 128), key, h2)
        h3 = fma(load(at + 192), key, h3)
    strength = splat(beta)
    d0 = mul(strength, sub(load(value), mul(g, h0)))
    d1 = mul(strength, sub(load(value + 64), mul(g, h1)))
    d2 = mul(strength, sub(load(value + 128), mul(g, h2)))
    d3 = mul(strength, sub(load(value + 192), mul(g, h3)))
    o0, o1, o2, o3 = zeros(), zeros(), zeros(), zeros()
    for i in range(key_dim):
        at = state + i * stride
        key, query = splat(load_f32(k + i * 4)), splat(load_f32(q + i * 4))
        s0 = fma(key, d0, mul(g, load(at)))
        s1 = fma(key, d1, mul(g, load(at + 64)))
        s2 = fma(key, d2, mul(g, load(at + 128)))
        s3 = fma(key, d3, mul(g, load(at + 192)))
        store(at, s0)
        store(at + 64, s1)
        store(at + 128, s2)
        store(at + 192, s3)
        o0 = fma(s0, query, o0)
        o1 = fma(s1, query, o1)
        o2 = fma(s2, query, o2)
        o3 = fma(s3, query, o3)
    store(out, o0)
    store(out + 64, o1)
    store(out + 128, o2)
    store(out + 192, o3)


@device
def update_16(state, stride, key_dim, k, q, decay, beta, value, out, count):
    """The same for up to 16 columns."""
    g, held = splat(decay), zeros()
    for i in range(key_dim):
        held = fma(load_first(state + i * stride, count), splat(load_f32(k + i * 4)), held)
    delta = mul(splat(beta), sub(load_first(value, count), mul(g, held)))
    total = zeros()
    for i in range(key_dim):
        at = state + i * stride
        after = fma(splat(load_f32(k + i * 4)), delta, mul(g, load_first(at, count)))
        store_first(at, after, count)
        total = fma(after, splat(load_f32(q + i * 4)), total)
    store_first(out, total, count)


@device
def copy_tile(source, source_stride, target, target_stride, key_dim):
    for i in range(key_dim):
        for line in range(0, TILE, 64):
            value = load(source + i * source_stride + line)
            store(target + i * target_stride + line, value)


@body("gated_delta.recur")
def recur(thread, num_threads, args):
    qkv, qkv_stride, a, a_stride, b, b_stride = (
        args[0],
        args[1],
        args[2],
        args[3],
        args[4],
        args[5],
    )
    decay_log, dt_bias, slots, cu_rows, num_seqs = args[6], args[7], args[8], args[9], args[10]
    key_heads, value_heads, key_dim, value_dim = args[11], args[12], args[13], args[14]
    states, out, out_stride, eps = args[15], args[16], args[17], bits_f32(args[18])
    root, scratch = bits_f32(args[19]), args[20] + thread * args[21]
    k = scratch + key_dim * TILE
    q, stride = k + (key_dim + 15) // 16 * 64, value_dim * 4
    wide = value_dim // 64
    tiles = wide + (value_dim % 64 + 15) // 16
    items = num_seqs * value_heads * tiles
    for item in range(items * thread // num_threads, items * (thread + 1) // num_threads):
        n, head, tile = item // tiles // value_heads, item // tiles % value_heads, item % tiles
        column = tile * 64 if tile < wide else wide * 64 + (tile - wide) * 16
        state = states + load_i32(slots + n * 4) * value_heads * key_dim * value_dim * 4
        state += (head * key_dim * value_dim + column) * 4
        query_at = head * key_heads // value_heads * key_dim * 4
        key_at = query_at + key_heads * key_dim * 4
        value_at = (2 * key_heads * key_dim + head * value_dim + column) * 4
        rate = exp_scalar(load_f32(decay_log + head * 4))
        bias = load_f32(dt_bias + head * 4)
        start, stop = load_i32(cu_rows + n * 4), load_i32(cu_rows + (n + 1) * 4)
        copied = tile < wide and wide > 1 and stop - start >= COPIED_ROWS
        tile_state, tile_stride = (scratch, TILE) if copied else (state, stride)
        if copied:
            copy_tile(state, stride, scratch, TILE, key_dim)
        for row in range(start, stop):
            source = qkv + row * qkv_stride
            unit(source + query_at, key_dim, eps, ONE / root, q)
            unit(source + key_at, key_dim, eps, ONE, k)
            time = softplus_scalar(load_f32(a + row * a_stride + head * 4) + bias)
            decay = exp_scalar(-(rate * time))
            beta = sigmoid_scalar(load_f32(b + row * b_stride + head * 4))
            value = source + value_at
            target = out + row * out_stride + (head * value_dim + column) * 4
            if tile < wide:
                update_64(tile_state, tile_stride, key_dim, k, q, decay, beta, value, target)
            else:
                count = min(16, value_dim - column)
                update_16(state, stride, key_dim, k, q, decay, beta, value, target, count)
        if copied:
            copy_tile(scratch, TILE, state, stride, key_dim)
