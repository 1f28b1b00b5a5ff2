"""Paged attention: four query rows against 16 keys at a time, in segments of 256 positions.

A *query* is one (row, head) pair; the queries of one key head in one tile of rows are taken four
at a time, so that every key and value loaded serves four. A segment's result (maximum, Σ p,
Σ p·v) is computed on its own and merged into the row's total in ascending order: the same
operations whether one thread walks all segments (``attention.fused``) or segments are shared out
and merged afterwards (``attention.segments`` then ``attention.merge``).
"""

# mypy: ignore-errors
from __future__ import annotations

import numpy as np

from atlas.backends.cpu.bodies import body
from atlas.backends.cpu.bodies.elementary import exp, exp_scalar, tanh
from atlas.backends.cpu.bodies.simd import (
    add,
    bits_f32,
    div,
    fma,
    lanes_between,
    load,
    load_f16,
    load_f32,
    load_first,
    load_i32,
    max_lane,
    maximum,
    mul,
    prefetch,
    select,
    splat,
    store,
    store_f16_scalar,
    store_f32,
    store_first,
    sub,
    sum_lanes,
    zeros,
)
from atlas.backends.cpu.bodies.vectors import device
from atlas.ops.attention import SEGMENT

_f = np.float32
LOWEST, ZERO = _f(-np.inf), _f(0.0)
TILE_ROWS = 16
QUERIES = 4
# Positions whose keys are asked for before their turn: a block of a sequence lies anywhere in the
# pool, so the hardware's prefetcher has to begin anew with each (benchmarks/NOTES.md).
AHEAD = 48
SCORE_BYTES = QUERIES * SEGMENT * 4


@device
def load_f32_lanes(address):
    return load(address)


@device
def f16_first(address, count):
    """Up to 16 float16 values; lanes past ``count`` hold whatever is there and are not stored."""
    return load_f16(address)


def _kv_store(narrow):
    def kv_store(thread, num_threads, args):
        k, k_stride, v, v_stride, num_rows, num_heads = (
            args[0],
            args[1],
            args[2],
            args[3],
            args[4],
            args[5],
        )
        dim, block_size, slots, k_pool, v_pool = args[6], args[7], args[8], args[9], args[10]
        width = 2 if narrow else 4
        for item in range(thread, num_rows * num_heads, num_threads):
            row, head = item // num_heads, item % num_heads
            slot = load_i32(slots + row * 4)
            plane = ((slot // block_size) * num_heads + head) * dim * block_size
            offset = slot % block_size
            key_at = k_pool + (plane + offset) * width
            value_at = v_pool + (plane + offset * dim) * width
            for i in range(dim):
                key = load_f32(k + row * k_stride + (head * dim + i) * 4)
                value = load_f32(v + row * v_stride + (head * dim + i) * 4)
                if narrow:
                    store_f16_scalar(key_at + i * block_size * 2, key)
                    store_f16_scalar(value_at + i * 2, value)
                else:
                    store_f32(key_at + i * block_size * 4, key)
                    store_f32(value_at + i * 4, value)

    return kv_store


body("attention.kv_store_f32")(_kv_store(False))
body("attention.kv_store_f16")(_kv_store(True))


@device
def merge(total_max, total_sum, part_max, part_sum, total, part, dim):
    """Fold one segment's result into the row's total; returns the new maximum and Σ p."""
    if part_sum == ZERO:  # no key of this segment is visible
        return total_max, total_sum
    if total_sum == ZERO:
        for i in range(0, dim, 16):
            store(total + i * 4, load(part + i * 4))
        return part_max, part_sum
    top = max(total_max, part_max)
    old, new = exp_scalar(total_max - top), exp_scalar(part_max - top)
    old_scale, new_scale = splat(old), splat(new)
    for i in range(0, dim, 16):
        scaled = mul(load(total + i * 4), old_scale)
        store(total + i * 4, fma(load(part + i * 4), new_scale, scaled))
    return top, total_sum * old + part_sum * new


def _segment(load_keys, load_values, width):
    """Build ``segment``: the partial softmax of four queries over one segment."""

    @device
    def scores_of(keys, q0, q1, q2, q3, dim, block_size):
        a0, a1, a2, a3 = zeros(), zeros(), zeros(), zeros()
        for i in range(dim):
            key = load_keys(keys + i * block_size * width)
            a0 = fma(key, splat(load_f32(q0 + i * 4)), a0)
            a1 = fma(key, splat(load_f32(q1 + i * 4)), a1)
            a2 = fma(key, splat(load_f32(q2 + i * 4)), a2)
            a3 = fma(key, splat(load_f32(q3 + i * 4)), a3)
        return a0, a1, a2, a3

    @device
    def place(scores, raw, scale, cap, position, start, end, greatest):
        """Scale, cap and mask 16 scores; keep them and the running maximum."""
        value = mul(raw, scale)
        if cap != ZERO:
            value = mul(splat(cap), tanh(div(value, splat(cap))))
        visible = lanes_between(start - position, end - position)
        value = select(visible, value, splat(LOWEST))
        store(scores, value)
        return maximum(value, greatest)

    @device
    def weigh(scores, low, high, greatest):
        """scores → exp(score − maximum); returns the maximum and the sum."""
        top = max_lane(greatest)
        total = zeros()
        if top == LOWEST:
            for at in range(low, high, 16):
                store(scores + at * 4, total)
            return top, ZERO
        shift = splat(top)
        for at in range(low, high, 16):
            weight = exp(sub(load(scores + at * 4), shift))
            store(scores + at * 4, weight)
            total = add(total, weight)
        return top, sum_lanes(total)

    @device
    def add_seen(total, value, weight, position, start, end):
        """total + weight · value where the query sees the position."""
        if start <= position and position < end:
            return fma(value, splat(load_f32(weight)), total)
        return total

    @device
    def fetch_keys(k_head, table, position, end, plane, dim, block_size):
        """Ask for the keys of 16 positions, if they are before ``end``."""
        if position < end:
            block = load_i32(table + position // block_size * 4)
            keys = k_head + (block * plane + position % block_size) * width
            stride = block_size * width
            for i in range(0, dim, max(1, 64 // stride)):
                prefetch(keys + i * stride)

    @device
    def segment(
        q, starts, ends, base, k_head, v_head, plane, table, dims, scale, cap, scores, out, fetch
    ):
        """Partial softmax of queries q[0 … 3] over positions base … base + 255.

        Writes Σ p·v of query i to ``out[i]``; returns the four maxima and the four sums. With
        ``fetch``, asks for keys and values ahead of their use.
        """
        dim, block_size = dims
        q0, q1, q2, q3 = q
        first = max(base, min(min(starts[0], starts[1]), min(starts[2], starts[3])))
        last = min(base + SEGMENT, max(max(ends[0], ends[1]), max(ends[2], ends[3])))
        low, high = (first - base) // 16 * 16, last - base
        g0, g1, g2, g3 = splat(LOWEST), splat(LOWEST), splat(LOWEST), splat(LOWEST)
        row = SEGMENT * 4
        if fetch:
            for at in range(low, low + AHEAD, 16):
                fetch_keys(k_head, table, base + at, base + high, plane, dim, block_size)
        for at in range(low, high, 16):
            position = base + at
            block = load_i32(table + position // block_size * 4)
            keys = k_head + (block * plane + position % block_size) * width
            if fetch:
                fetch_keys(k_head, table, position + AHEAD, base + high, plane, dim, block_size)
                values = v_head + (block * plane + position % block_size * dim) * width
                for line in range(0, 16 * dim * width, 64):
                    prefetch(values + line)
            a = scores_of(keys, q0, q1, q2, q3, dim, block_size)
            here = scores + at * 4
            g0 = place(here, a[0], scale, cap, position, starts[0], ends[0], g0)
            g1 = place(here + row, a[1], scale, cap, position, starts[1], ends[1], g1)
            g2 = place(here + 2 * row, a[2], scale, cap, position, starts[2], ends[2], g2)
            g3 = place(here + 3 * row, a[3], scale, cap, position, starts[3], ends[3], g3)
        m0, l0 = weigh(scores, low, high, g0)
        m1, l1 = weigh(scores + row, low, high, g1)
        m2, l2 = weigh(scores + 2 * row, low, high, g2)
        m3, l3 = weigh(scores + 3 * row, low, high, g3)
        # Keys that all four queries see, and the few at either end that only some see: a key's
        # value may be infinite, so it is not even multiplied by a weight of 0.
        seen_from = max(low, max(max(starts[0], starts[1]), max(starts[2], starts[3])) - base)
        seen_to = min(high, min(min(ends[0], ends[1]), min(ends[2], ends[3])) - base)
        if seen_from > seen_to:
            seen_from, seen_to = high, high
        for i in range(0, dim, 16):
            count = min(16, dim - i)
            a0, a1, a2, a3 = zeros(), zeros(), zeros(), zeros()
            at = low
            while at < high:
                position = base + at
                block = load_i32(table + position // block_size * 4)
                values = v_head + (block * plane + position % block_size * dim + i) * width
                stop = min(16, high - at)
                inner = min(max(seen_from - at, 0), stop)
                outer = min(max(seen_to - at, inner), stop)
                for j in range(stop):
                    value = load_values(values + j * dim * width, count)
                    here = scores + (at + j) * 4
                    if inner <= j and j < outer:
                        a0 = fma(value, splat(load_f32(here)), a0)
                        a1 = fma(value, splat(load_f32(here + row)), a1)
                        a2 = fma(value, splat(load_f32(here + 2 * row)), a2)
                        a3 = fma(value, splat(load_f32(here + 3 * row)), a3)
                    else:
                        a0 = add_seen(a0, value, here, position + j, starts[0], ends[0])
                        a1 = add_seen(a1, value, here + row, position + j, starts[1], ends[1])
                        a2 = add_seen(a2, value, here + 2 * row, position + j, starts[2], ends[2])
                        a3 = add_seen(a3, value, here + 3 * row, position + j, starts[3], ends[3])
                at += 16
            store(out[0] + i * 4, a0)
            store(out[1] + i * 4, a1)
            store(out[2] + i * 4, a2)
            store(out[3] + i * 4, a3)
        return (m0, m1, m2, m3), (l0, l1, l2, l3)

    return segment


SEGMENTS = {
    "f32": _segment(load_f32_lanes, load_first, 4),
    "f16": _segment(load_f16, f16_first, 2),
}


@device
def visible_from(position, window):
    return max(0, position + 1 - window) if window > 0 else 0


@device
def finish(out, total, total_sum, dim):
    scale = splat(total_sum)
    for i in range(0, dim, 16):
        store_first(out + i * 4, div(load(total + i * 4), scale), min(16, dim - i))


def _bodies(segment, width):
    """The fused and the shared-out body over one kind of pool."""

    @device
    def quad(args, n, first_row, num_rows, kv_head, e):
        """Addresses and visible ranges of queries e … e + 3 of a tile; past the end, the last."""
        q, q_stride, positions = args[0], args[1], args[7]
        group = args[9] // args[10]
        dim, window = args[11], args[14]
        last = num_rows * group - 1
        e0, e1, e2, e3 = e, min(e + 1, last), min(e + 2, last), min(e + 3, last)
        heads = q + kv_head * group * dim * 4
        p0 = load_i32(positions + (first_row + e0 // group) * 4)
        p1 = load_i32(positions + (first_row + e1 // group) * 4)
        p2 = load_i32(positions + (first_row + e2 // group) * 4)
        p3 = load_i32(positions + (first_row + e3 // group) * 4)
        queries = (
            heads + (first_row + e0 // group) * q_stride + e0 % group * dim * 4,
            heads + (first_row + e1 // group) * q_stride + e1 % group * dim * 4,
            heads + (first_row + e2 // group) * q_stride + e2 % group * dim * 4,
            heads + (first_row + e3 // group) * q_stride + e3 % group * dim * 4,
        )
        starts = (
            visible_from(p0, window),
            visible_from(p1, window),
            visible_from(p2, window),
            visible_from(p3, window),
        )
        return queries, starts, (p0 + 1, p1 + 1, p2 + 1, p3 + 1)

    @device
    def run_segment(args, n, base, kv_head, queries, starts, ends, scores, out, fetch):
        dim, block_size = args[11], args[12]
        plane = args[10] * dim * block_size
        return segment(
            queries,
            starts,
            ends,
            base,
            args[2] + kv_head * dim * block_size * width,
            args[3] + kv_head * dim * block_size * width,
            plane,
            args[4] + n * args[5],
            (dim, block_size),
            splat(bits_f32(args[13])),
            bits_f32(args[15]),
            scores,
            out,
            fetch,
        )

    def fused(thread, num_threads, args):
        cu_rows, num_seqs = args[6], args[8]
        num_heads, num_kv_heads, dim = args[9], args[10], args[11]
        out, scratch, scratch_bytes, first_rows = args[16], args[17], args[18], args[19]
        group = num_heads // num_kv_heads
        wide = (dim + 15) // 16 * 64
        scores = scratch + thread * scratch_bytes
        parts = scores + SCORE_BYTES
        totals = parts + QUERIES * wide
        part = (parts, parts + wide, parts + 2 * wide, parts + 3 * wide)
        item = 0
        for n in range(num_seqs):
            row_end = load_i32(cu_rows + (n + 1) * 4)
            for first_row in range(load_i32(first_rows + n * 4), row_end, TILE_ROWS):
                num_rows = min(TILE_ROWS, row_end - first_row)
                for kv_head in range(num_kv_heads):
                    item += 1
                    if item % num_threads != thread:
                        continue
                    for e in range(0, num_rows * group, QUERIES):
                        queries, starts, ends = quad(args, n, first_row, num_rows, kv_head, e)
                        m0, m1, m2, m3 = LOWEST, LOWEST, LOWEST, LOWEST
                        l0, l1, l2, l3 = ZERO, ZERO, ZERO, ZERO
                        for base in range(starts[0] // SEGMENT * SEGMENT, ends[3], SEGMENT):
                            m, s = run_segment(
                                args, n, base, kv_head, queries, starts, ends, scores, part, e == 0
                            )
                            m0, l0 = merge(m0, l0, m[0], s[0], totals, part[0], dim)
                            m1, l1 = merge(m1, l1, m[1], s[1], totals + wide, part[1], dim)
                            m2, l2 = merge(m2, l2, m[2], s[2], totals + 2 * wide, part[2], dim)
                            m3, l3 = merge(m3, l3, m[3], s[3], totals + 3 * wide, part[3], dim)
                        sums = (l0, l1, l2, l3)
                        for i in range(min(QUERIES, num_rows * group - e)):
                            row, head = first_row + (e + i) // group, (e + i) % group
                            target = out + (row * num_heads + kv_head * group + head) * dim * 4
                            finish(target, totals + i * wide, sums[i], dim)

    def segments(thread, num_threads, args):
        """Every (row, key head, segment) on its own; results to the partial buffer."""
        cu_rows, num_seqs = args[6], args[8]
        num_heads, num_kv_heads, dim = args[9], args[10], args[11]
        scratch, scratch_bytes, first_rows = args[17], args[18], args[19]
        partials, max_segments, row_bytes = args[20], args[21], args[22]
        group = num_heads // num_kv_heads
        wide = (dim + 15) // 16 * 64
        scores = scratch + thread * scratch_bytes
        spare = scores + SCORE_BYTES
        item = 0
        for n in range(num_seqs):
            for row in range(load_i32(first_rows + n * 4), load_i32(cu_rows + (n + 1) * 4)):
                for kv_head in range(num_kv_heads):
                    for e in range(0, group, QUERIES):
                        queries, starts, ends = quad(args, n, row, 1, kv_head, e)
                        count = min(QUERIES, group - e)
                        for base in range(starts[0] // SEGMENT * SEGMENT, ends[0], SEGMENT):
                            item += 1
                            if item % num_threads != thread:
                                continue
                            query = row * num_heads + kv_head * group + e
                            at = partials + (query * max_segments + base // SEGMENT) * row_bytes
                            step = max_segments * row_bytes
                            o1 = at + step + 64 if count > 1 else spare
                            o2 = at + 2 * step + 64 if count > 2 else spare + wide
                            o3 = at + 3 * step + 64 if count > 3 else spare + 2 * wide
                            m, s = run_segment(
                                args,
                                n,
                                base,
                                kv_head,
                                queries,
                                starts,
                                ends,
                                scores,
                                (at + 64, o1, o2, o3),
                                e == 0,
                            )
                            for i in range(count):
                                store_f32(at + i * step, m[i])
                                store_f32(at + i * step + 4, s[i])

    return fused, segments


for _name, _width in (("f32", 4), ("f16", 2)):
    _fused, _segments = _bodies(SEGMENTS[_name], _width)
    body(f"attention.fused_{_name}")(_fused)
    body(f"attention.segments_{_name}")(_segments)


@body("attention.merge")
def merge_segments(thread, num_threads, args):
    """Fold the partial buffer's segments of each (row, head), ascending."""
    positions, num_rows, num_heads, dim, window = args[0], args[1], args[2], args[3], args[4]
    out, partials, max_segments, row_bytes = args[5], args[6], args[7], args[8]
    scratch, scratch_bytes = args[9], args[10]
    total = scratch + thread * scratch_bytes
    for query in range(thread, num_rows * num_heads, num_threads):
        position = load_i32(positions + query // num_heads * 4)
        top, weight = LOWEST, ZERO
        for s in range(visible_from(position, window) // SEGMENT, position // SEGMENT + 1):
            at = partials + (query * max_segments + s) * row_bytes
            top, weight = merge(top, weight, load_f32(at), load_f32(at + 4), total, at + 64, dim)
        finish(out + query * dim * 4, total, weight, dim)
