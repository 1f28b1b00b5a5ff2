"""Lists of candidates, by a thread block: how far down they reach, making them, shortening them.

A list is int64, in ascending order of ids. A part's candidates stand behind those of the parts
before it, which the counts of ``sampling_count`` tell; a warp's behind those of the warps before
it; so every candidate has one place, and no thread block waits for another.
"""

from __future__ import annotations

from atlas_kernels._cuda import device, f32, i32, i64
from atlas_kernels.ptx_math import fast_exp2, float_bits, maximum, popcount
from atlas_kernels.ptx_memory import (
    load_b32,
    load_b64,
    load_f32,
    load_shared_f32,
    store_b64,
    store_shared_f32,
)
from atlas_kernels.ptx_warp import ballot, block_sum, lane_id, sync_threads, thread_x, warp_sum
from atlas_kernels.sampling_parts import (
    INFINITY,
    bin_in,
    block_scan,
    first_of,
    load_quad,
    scaled,
    threshold,
    wants,
    weight_of,
)
from atlas_kernels.sampling_rows import BINS, PART_COUNT_BYTES, PART_LEN, TOP_K, TOP_P
from atlas_kernels.sampling_sort import THREADS

_LOW = 0xFFFFFFFF
_MAGNITUDE = 0x7FFFFFFF
_LOG2_E = 1.4426950408889634
_SLACK = 2
"""Bins more than the estimate of mass asks for: it has all logits of a bin in its middle."""
_WARP_LEN = PART_LEN // (THREADS // 32)
_QUADS = _WARP_LEN // 128
assert 2 * THREADS == BINS, "a thread has two bins, which are one word"
assert _QUADS == 8, "a bit of an int32 for each of a thread's logits"


@device
def _pair(word, is_used):
    """Two counts of 16 bits as two of 32."""
    pair = i64(i64(word & 0xFFFF) | (i64((word >> 16) & 0xFFFF) << 32))
    return pair if is_used else i64(0)


@device
def find_limit(row, counts, part, parts, scale, sums):
    """(limit, candidates before a part, all candidates): what bins up to the limit hold.

    The first bins that hold top-k logits, or by an estimate the mass of top-p and some more; bin 0
    where min-p alone filters. ``sums`` is shared float32 [warps].
    """
    thread = thread_x()
    whole, earlier = i64(0), i64(0)
    for q in range(0, parts, 4):
        place, last = counts + thread * 4, i32(parts - 1)
        a = load_b32(place + i64(q) * PART_COUNT_BYTES)
        b = load_b32(place + i64(min(i32(q + 1), last)) * PART_COUNT_BYTES)
        c = load_b32(place + i64(min(i32(q + 2), last)) * PART_COUNT_BYTES)
        d = load_b32(place + i64(min(i32(q + 3), last)) * PART_COUNT_BYTES)
        whole += _pair(a, True) + _pair(b, q + 1 < parts)
        whole += _pair(c, q + 2 < parts) + _pair(d, q + 3 < parts)
        earlier += _pair(a, q < part) + _pair(b, q + 1 < part)
        earlier += _pair(c, q + 2 < part) + _pair(d, q + 3 < part)
    first, second = f32(i32(whole & _LOW)), f32(i32(whole >> 32))
    at, limit = i32(2 * thread), i32(0)
    if wants(row) == 2:
        count = load_b32(row + 4 * TOP_K)
        by_mass = count == 0
        low, high = first, second
        if by_mass:
            rate = f32(-_LOG2_E) / scale if scale > f32(0) else f32(0)
            low = low * fast_exp2((f32(at) + f32(0.5)) * rate)
            high = high * fast_exp2((f32(at) + f32(1.5)) * rate)
        end, total = block_scan(low + high, sums)
        aim = f32(count)
        if by_mass:
            p = load_f32(row + 4 * TOP_P)
            aim = total * (p + (f32(1) - p) * f32(0.25))
        reaches_low = end - high >= aim
        limit = first_of(end >= aim, at if reaches_low else i32(at + 1))
        if limit < 0:
            limit = i32(BINS - 1)
        if by_mass:
            limit = i32(min(limit + _SLACK, BINS - 1))
    before = f32(i32(earlier & _LOW)) if at <= limit else f32(0)
    before = before + (f32(i32(earlier >> 32)) if at < limit else f32(0))
    kept = first if at <= limit else f32(0)
    kept = kept + (second if at < limit else f32(0))
    return limit, i32(block_sum(before)), i32(block_sum(kept))


@device
def _is_wanted(view, value, limit):
    wanted = value > f32(-INFINITY) and bin_in(view, value) <= limit
    return i32(1) if wanted else i32(0)


@device
def _wanted(view, quad, limit, low):
    """A bit for each of four logits; most quads lie below the threshold whole."""
    bits = i32(0)
    if maximum(maximum(quad[0], quad[1]), maximum(quad[2], quad[3])) >= low:
        bits = _is_wanted(view, quad[0], limit) | (_is_wanted(view, quad[1], limit) << 1)
        bits |= _is_wanted(view, quad[2], limit) << 2
        bits |= _is_wanted(view, quad[3], limit) << 3
    return i32(bits)


@device
def collect(view, source, start, size, limit, out, base, room, sums):
    """Write the candidates among a part's logits to a list, from place ``base`` on; how many.

    Those without room are counted only. Each warp has 1,024 neighbouring logits; it finds its
    candidates, waits for the number that the others have, and writes. ``sums`` is shared float32
    [warps].
    """
    lane, warp, low = lane_id(), thread_x() >> 5, threshold(view, limit)
    first = i32(start + warp * _WARP_LEN + lane * 4)
    found = i32(0)
    for half in range(2):
        at = i32(first + half * 512)
        a, b = load_quad(source, at, size), load_quad(source, i32(at + 128), size)
        c, d = load_quad(source, i32(at + 256), size), load_quad(source, i32(at + 384), size)
        bits = _wanted(view, a, limit, low) | (_wanted(view, b, limit, low) << 4)
        bits |= (_wanted(view, c, limit, low) << 8) | (_wanted(view, d, limit, low) << 12)
        found |= bits << (16 * half)
    own = warp_sum(f32(popcount(i32(found))))
    if lane == 0:
        store_shared_f32(sums + warp * 4, own)
    sync_threads()
    before, total = f32(0), f32(0)
    for w in range(THREADS // 32):
        other = load_shared_f32(sums + w * 4)
        before = before + (other if w < warp else f32(0))
        total = total + other
    sync_threads()
    if own > f32(0):
        place, lower = i32(base + i32(before)), i32((i64(1) << lane) - 1)
        for i in range(_QUADS):
            bits = i32(found >> (4 * i)) & 15
            v0, v1 = ballot(i32(bits & 1)), ballot(i32(bits & 2))
            v2, v3 = ballot(i32(bits & 4)), ballot(i32(bits & 8))
            target = i32(place + popcount(i32(v0 & lower)) + popcount(i32(v1 & lower)))
            target = i32(target + popcount(i32(v2 & lower)) + popcount(i32(v3 & lower)))
            place = i32(place + popcount(v0) + popcount(v1) + popcount(v2) + popcount(v3))
            for k in range(4):
                if (bits >> k) & 1 != 0:
                    token_id = i32(first + i * 128 + k)
                    value = load_f32(source + i64(token_id) * 4)
                    x = scaled(value, view[0], view[1], view[2])
                    magnitude = i64(float_bits(x) & _MAGNITUDE)
                    if target < room:
                        store_b64(out + i64(target) * 8, i64((magnitude << 32) | i64(token_id)))
                    target = i32(target + 1)
    return i32(total)


@device
def keep(listed, count, last, floor, sums):
    """Drop what lies behind ``last`` by probability, or has less weight than ``floor``; in place.

    How many stay. ``sums`` is shared float32 [warps].
    """
    base = i32(0)
    for first in range(0, count, THREADS):
        at, wanted, candidate = i32(first + thread_x()), i32(0), i64(0)
        if at < count:
            candidate = load_b64(listed + i64(at) * 8)
            if candidate <= last and weight_of(candidate >> 32) >= floor:
                wanted = i32(1)
        end, total = block_scan(f32(wanted), sums)  # all have read before one writes
        if wanted != 0:
            store_b64(listed + i64(base + i32(end) - 1) * 8, candidate)
        base = i32(base + i32(total))
    sync_threads()
    return base
