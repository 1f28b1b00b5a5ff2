"""Mixture of experts for many rows: pairs sorted by expert, and the sum of the experts' outputs."""

from __future__ import annotations

from atlas_kernels._cuda import device, f32, i32, i64
from atlas_kernels.ptx_async import launch_dependents, wait_prerequisites
from atlas_kernels.ptx_math import fma, pack_bf16, popcount, quotient, unpack_bf16
from atlas_kernels.ptx_memory import (
    load_b32,
    load_b32x4,
    load_f32,
    load_shared_b32,
    shared_buffer,
    store_b32,
    store_b32x4,
    store_shared_b32,
)
from atlas_kernels.ptx_warp import (
    ballot,
    block_sum,
    block_x,
    block_y,
    lane_id,
    sync_threads,
    thread_x,
    warp_sum,
)
from atlas_kernels.registry import kernel

SORT_THREADS = 1024
_WARPS = SORT_THREADS // 32
COMBINE_THREADS = 128
_NONE = -2  # past the last pair; −1 is a pair without a choice

_counts = shared_buffer("atlas_sort_counts", 4 * _WARPS)


@device
def _four(ids, p, end):
    """Ids of pairs p … p + 3."""
    if p + 4 <= end:
        return load_b32x4(ids + i64(p) * 4)
    a = load_b32(ids + i64(p) * 4) if p < end else i32(_NONE)
    b = load_b32(ids + i64(p + 1) * 4) if p + 1 < end else i32(_NONE)
    c = load_b32(ids + i64(p + 2) * 4) if p + 2 < end else i32(_NONE)
    return a, b, c, i32(_NONE)


@device
def _is_below(value, expert):
    return i32(1) if value >= 0 and value < expert else i32(0)


@device
def _is(value, expert):
    return i32(1) if value == expert else i32(0)


@kernel("moe_sort", args="ptr ptr ptr i32 i32 i32 i32", threads=SORT_THREADS)
def moe_sort(ids, order, tiles, pairs, experts, tile_rows, num_tiles):
    """order[…] = pairs by expert, then by number; tiles[t] = (expert, first, rows, 0); grid (E).

    A counting sort without atomics: a thread block counts the pairs of its expert and of those
    below it, and places its own. ``ids`` int32 [pairs], 16-byte aligned; ``order`` int32 [pairs];
    ``tiles`` int32 [num_tiles, 4]: up to ``tile_rows`` neighbours in ``order`` that share an
    expert, at ⌊first / tile_rows⌋ + expert, and 0 rows in entries that are left over;
    ``num_tiles`` = ⌊pairs / tile_rows⌋ + E. The sums are exact up to 2**24 pairs.
    """
    launch_dependents()
    wait_prerequisites()
    lane, warp, expert = lane_id(), i32(thread_x() >> 5), i32(block_x())
    # A warp has neighbouring pairs, 128 at a time.
    per_warp = i32(quotient(i32(pairs + (128 * _WARPS - 1)), 128 * _WARPS) * 128)
    begin = i32(warp * per_warp)
    end = i32(min(i32(begin + per_warp), pairs))
    below, equal = i32(0), i32(0)
    for p in range(begin + lane * 4, end, 128):
        a, b, c, d = _four(ids, i32(p), end)
        below = i32(below + _is_below(a, expert) + _is_below(b, expert))
        below = i32(below + _is_below(c, expert) + _is_below(d, expert))
        equal = i32(equal + _is(a, expert) + _is(b, expert) + _is(c, expert) + _is(d, expert))
    start = i32(block_sum(f32(below)))
    lanes_before = i32((i64(1) << lane) - 1)
    own = i32(warp_sum(f32(equal)))
    if lane == 0:
        store_shared_b32(_counts() + warp * 4, own)
    sync_threads()
    at, count = start, i32(0)
    for w in range(_WARPS):
        value = load_shared_b32(_counts() + w * 4)
        if w < warp:
            at = i32(at + value)
        count = i32(count + value)
    if count > 0:
        rounds = quotient(i32(max(i32(0), i32(end - begin)) + 127), 128)
        for i in range(rounds):
            p = i32(begin + i * 128 + lane * 4)
            a, b, c, d = _four(ids, p, end)
            e, f, g, h = _is(a, expert), _is(b, expert), _is(c, expert), _is(d, expert)
            m, n, o, q = ballot(e), ballot(f), ballot(g), ballot(h)
            place = i32(at + popcount(i32(m & lanes_before)) + popcount(i32(n & lanes_before)))
            place = i32(place + popcount(i32(o & lanes_before)) + popcount(i32(q & lanes_before)))
            if e != 0:
                store_b32(order + i64(place) * 4, p)
                place = i32(place + 1)
            if f != 0:
                store_b32(order + i64(place) * 4, i32(p + 1))
                place = i32(place + 1)
            if g != 0:
                store_b32(order + i64(place) * 4, i32(p + 2))
                place = i32(place + 1)
            if h != 0:
                store_b32(order + i64(place) * 4, i32(p + 3))
            at = i32(at + popcount(m) + popcount(n) + popcount(o) + popcount(q))
    stop = i32(start + count)
    first_tile = i32(quotient(start, tile_rows) + expert)
    last_tile = num_tiles
    if expert + 1 < experts:
        last_tile = i32(quotient(stop, tile_rows) + expert + 1)
    for t in range(first_tile + thread_x(), last_tile, SORT_THREADS):
        first = i32(start + (t - first_tile) * tile_rows)
        rows = i32(max(i32(0), min(tile_rows, i32(stop - first))))
        store_b32x4(tiles + i64(t) * 16, (expert, first, rows, i32(0)))


@device
def _add_word(word, weight, a, b):
    low, high = unpack_bf16(word)
    return fma(weight, low, a), fma(weight, high, b)


@kernel("moe_combine", args="ptr ptr ptr ptr ptr i32 i32 i64 i64", threads=COMBINE_THREADS)
def moe_combine(y, ids, weights, residual, out, slots, dim, residual_stride, out_stride):
    """out[row] = Σ over slots, ascending, of weight · y[pair] + residual; grid (T, ⌈D / 1024⌉).

    y bf16 [T · slots, D], ids int32 and weights float32 [T, slots], residual (or 0) and out bf16
    [T, D], which may be the same; D a multiple of 8; strides in bytes. Pairs without a choice are
    left out.
    """
    launch_dependents()
    wait_prerequisites()
    row, column = i64(block_x()), i64(block_y() * COMBINE_THREADS + thread_x()) * 8
    if column < dim:
        a = b = c = d = e = f = g = h = f32(0)
        for s in range(slots):
            pair = row * slots + s
            if load_b32(ids + pair * 4) >= 0:
                weight = load_f32(weights + pair * 4)
                words = load_b32x4(y + (pair * dim + column) * 2)
                a, b = _add_word(words[0], weight, a, b)
                c, d = _add_word(words[1], weight, c, d)
                e, f = _add_word(words[2], weight, e, f)
                g, h = _add_word(words[3], weight, g, h)
        if residual != 0:
            words = load_b32x4(residual + row * residual_stride + column * 2)
            r, s = unpack_bf16(words[0])
            t, u = unpack_bf16(words[1])
            v, w = unpack_bf16(words[2])
            x, z = unpack_bf16(words[3])
            a, b, c, d, e, f, g, h = a + r, b + s, c + t, d + u, e + v, f + w, g + x, h + z
        low, high = (pack_bf16(a, b), pack_bf16(c, d)), (pack_bf16(e, f), pack_bf16(g, h))
        target = out + row * out_stride + column * 2
        store_b32x4(target, (low[0], low[1], high[0], high[1]))
