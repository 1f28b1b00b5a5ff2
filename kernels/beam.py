"""Beam search's wishes of a row of logits: its best ids that are not banned, and its softmax total.

Behind ``argmax_partial``, which finds the greatest logit of every part of a row:

1. ``beam_lanes``: the row's total as 256 chains, ids ascending, each added up by one thread;
2. ``beam_part``: the k best of each part, by logit − greatest, the lower id first. A part in which
   none of them can lie is left out: k others, and one more for each ban, have greater maxima;
3. ``beam_merge``: the k best of those, and the total, its chains from left to right.

Candidates are compared as int64 keys, (ordered bits of the difference, complement of the id), so
that their order is exact; weights and sums have the bits of ``atlas.ops.elementary``.
"""

from __future__ import annotations

import numpy as np
from atlas_kernels._cuda import device, f32, i32, i64
from atlas_kernels.argmax import LEAST, NOT_FINITE
from atlas_kernels.elementary import exp32
from atlas_kernels.ptx_async import launch_dependents, wait_prerequisites
from atlas_kernels.ptx_math import float_bits
from atlas_kernels.ptx_memory import (
    load_b32,
    load_b64,
    load_f32,
    load_shared_f32,
    shared_buffer,
    store_b32,
    store_b64,
    store_f32,
    store_shared_f32,
)
from atlas_kernels.ptx_warp import (
    block_max_i64,
    block_x,
    block_y,
    lane_id,
    num_blocks_x,
    shuffle_xor_b32,
    sync_threads,
    thread_x,
    warp_max_i64,
)
from atlas_kernels.registry import kernel
from atlas_kernels.sampling_parts import key_value
from atlas_kernels.sampling_rows import LANES

THREADS = 256
PART_LEN = 4096
"""Logits of a part, as ``argmax_partial`` is launched."""
LANE_THREADS = 512
LANE_BLOCKS = LANES // 32
_CHAIN = 4  # elements of a lane that a thread weighs at a time
_STAGE = _CHAIN * LANE_THREADS // 32
_LOW, _MAGNITUDE = 0xFFFFFFFF, 0x7FFFFFFF
_OUT = np.float32(np.nan)

_stages = shared_buffer("atlas_beam_stages", 2 * 4 * _STAGE * 32)
_part = shared_buffer("atlas_beam_values", 4 * PART_LEN)
_lanes = shared_buffer("atlas_beam_sums", 4 * LANES)


@device
def _candidate_key(difference, token):
    """The int64 key of a candidate; a NaN marks one that is out."""
    key = i64(LEAST)
    if difference == difference:
        bits = float_bits(difference + f32(0))  # −0 + 0 is +0
        order = bits ^ ((bits >> 31) & _MAGNITUDE)
        key = i64((i64(order) << 32) | (_LOW - i64(token)))
    return key


@device
def _greatest_key(keys, row, parts):
    """By each warp: the key of the row's greatest logit."""
    best = i64(LEAST)
    for part in range(lane_id(), parts, 32):
        best = max(best, load_b64(keys + (i64(row) * parts + part) * 8))
    return warp_max_i64(best)


@device
def _num_greater(keys, row, parts, greatest, own):
    """By each warp: the parts whose greatest difference is above ``own``."""
    count = i32(0)
    for part in range(lane_id(), parts, 32):
        difference = key_value(load_b64(keys + (i64(row) * parts + part) * 8)) - greatest
        count += i32(1) if difference > own else i32(0)
    for step in range(5):
        count = i32(count + shuffle_xor_b32(count, i32(16 >> step)))
    return count


@device
def _best_in_part(values, start, count):
    """The key of a thread's best at a shared address: places thread, thread + 256, …"""
    best = i64(LEAST)
    for at in range(thread_x(), count, THREADS):
        best = max(best, _candidate_key(load_shared_f32(values + at * 4), start + at))
    return best


@device
def _best_in_list(keys, count):
    """The greatest of a thread's keys in memory: places thread, thread + 256, …"""
    best = i64(LEAST)
    for at in range(thread_x(), count, THREADS):
        best = max(best, load_b64(keys + i64(at) * 8))
    return best


@kernel("beam_lanes", args="ptr ptr ptr i32 i32 i64", threads=LANE_THREADS)
def beam_lanes(logits, keys, lanes, size, parts, logits_stride):
    """lanes[row] = ``lane_sums`` of exp32(logit − greatest); grid (8, rows).

    A thread block has 32 neighbouring lanes: all warps weigh, one adds each lane's chain in order.
    Nothing is written for a row that is not finite. ``logits`` float32 [L, C], ``keys`` int64
    [L, parts], ``lanes`` float32 [L, 256].
    """
    launch_dependents()
    wait_prerequisites()
    row, lane, warp = block_y(), lane_id(), thread_x() >> 5
    best = _greatest_key(keys, row, parts)
    if best != NOT_FINITE:
        source, greatest = logits + i64(row) * logits_stride, key_value(best)
        total, turn = f32(0), i32(0)
        for first in range(0, size, _STAGE * LANES):
            stage = i32(_stages() + turn * (4 * 32 * _STAGE))
            for j in range(_CHAIN):
                chain = i32(warp * _CHAIN + j)
                at = i32(first + chain * LANES + block_x() * 32 + lane)
                weight = f32(0)
                if at < size:
                    weight = exp32(load_f32(source + i64(at) * 4) - greatest)
                store_shared_f32(stage + (chain * 32 + lane) * 4, weight)
            sync_threads()
            if warp == 0:
                for j in range(0, _STAGE, 4):
                    at = i32(stage + (j * 32 + lane) * 4)
                    a, b = load_shared_f32(at), load_shared_f32(at + 128)
                    c, d = load_shared_f32(at + 256), load_shared_f32(at + 384)
                    total = f32(f32(f32(total + a) + b) + c) + d
            turn = i32(1 - turn)  # warps go on while one adds; the next barrier comes in between
        if warp == 0:
            store_f32(lanes + (i64(row) * LANES + block_x() * 32 + lane) * 4, total)


@kernel("beam_part", args="ptr ptr ptr ptr ptr i32 i32 i64", threads=THREADS)
def beam_part(logits, keys, banned, cu_banned, found, size, k, logits_stride):
    """found[row, part] = the keys of a part's k best, greatest first; grid (parts, rows).

    ``banned`` int32 and ``cu_banned`` int32 [L + 1] as in the op; ``found`` int64 [L, parts, k],
    filled up with the least key. Nothing is written for a row that is not finite.
    """
    launch_dependents()
    wait_prerequisites()
    part, row, parts, thread = block_x(), block_y(), num_blocks_x(), thread_x()
    best = _greatest_key(keys, row, parts)
    if best != NOT_FINITE:
        greatest = key_value(best)
        first_ban = load_b32(cu_banned + i64(row) * 4)
        num_bans = i32(load_b32(cu_banned + i64(row) * 4 + 4) - first_ban)
        own = key_value(load_b64(keys + (i64(row) * parts + part) * 8)) - greatest
        left = i32(k)
        if _num_greater(keys, row, parts, greatest, own) >= k + num_bans:
            left = i32(0)
        out = found + (i64(row) * parts + part) * k * 8
        if left > 0:
            start, values = i32(part * PART_LEN), _part()
            count = i32(min(i32(size - start), i32(PART_LEN)))
            source = logits + i64(row) * logits_stride + i64(start) * 4
            for at in range(thread, count, THREADS):
                store_shared_f32(values + at * 4, load_f32(source + i64(at) * 4) - greatest)
            sync_threads()
            for i in range(thread, num_bans, THREADS):
                at = i32(load_b32(banned + i64(first_ban + i) * 4) - start)
                if at >= 0 and at < count:
                    store_shared_f32(values + at * 4, _OUT)
            sync_threads()
            mine = _best_in_part(values, start, count)
            for j in range(k):
                chosen = block_max_i64(mine, LEAST)
                if thread == 0:
                    store_b64(out + i64(j) * 8, chosen)
                if chosen == mine and mine != LEAST:
                    at = i32(_LOW - (mine & _LOW)) - start
                    store_shared_f32(values + at * 4, _OUT)
                    mine = _best_in_part(values, start, count)
        else:
            for j in range(thread, k, THREADS):
                store_b64(out + i64(j) * 8, i64(LEAST))


@kernel("beam_merge", args="ptr ptr ptr ptr ptr ptr i32 i32", threads=THREADS)
def beam_merge(keys, lanes, found, ids, values, totals, parts, k):
    """The row's k best of its parts', and its total; grid (rows, 2): each has thread blocks.

    ``ids`` int32 and ``values`` float32 [L, k], ``totals`` float32 [L] as in the op; ``found`` is
    used up.
    """
    launch_dependents()
    wait_prerequisites()
    row, thread = block_x(), thread_x()
    best = _greatest_key(keys, row, parts)
    if block_y() == 1:
        store_shared_f32(_lanes() + thread * 4, load_f32(lanes + (i64(row) * LANES + thread) * 4))
        sync_threads()
        if thread == 0:
            total = f32(0)
            for i in range(LANES):
                total = f32(total + load_shared_f32(_lanes() + i * 4))
            if best == NOT_FINITE:
                total = f32(_OUT)
            store_f32(totals + i64(row) * 4, total)
        return
    count = i32(parts * k)
    if best == NOT_FINITE:
        count = i32(0)
    own = found + i64(row) * parts * k * 8
    mine = _best_in_list(own, count)
    for j in range(k):
        chosen = block_max_i64(mine, LEAST)
        if thread == 0:
            token, value = i32(-1), f32(float("-inf"))
            if chosen != LEAST:
                token, value = i32(_LOW - (chosen & _LOW)), key_value(chosen)
            store_b32(ids + (i64(row) * k + j) * 4, token)
            store_f32(values + (i64(row) * k + j) * 4, value)
        if chosen == mine and mine != LEAST:
            for at in range(thread, count, THREADS):
                if load_b64(own + i64(at) * 8) == mine:
                    store_b64(own + i64(at) * 8, i64(LEAST))
            mine = _best_in_list(own, count)
