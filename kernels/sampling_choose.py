"""Sampling: filters and draw of a row by one thread block, over its candidates.

Their order makes the bits: sums run over candidates by id, prefix sums by probability. Candidates
come by id; they are sorted once, and what a filter keeps is a first part of the sorted list, which
ends at one candidate: it tells which candidates stay in the list by id.
"""

from __future__ import annotations

from atlas_kernels._cuda import device, f32, i32, i64
from atlas_kernels.argmax import LEAST, NOT_FINITE
from atlas_kernels.elementary import exp32_falling
from atlas_kernels.ptx_async import launch_dependents, wait_prerequisites
from atlas_kernels.ptx_memory import (
    load_b32,
    load_b64,
    load_f32,
    load_shared_f32,
    load_shared_f32x4,
    shared_buffer,
    store_b32,
    store_f32,
    store_shared_f32,
    store_shared_f32x4,
)
from atlas_kernels.ptx_warp import block_x, num_blocks_x, sync_threads, thread_x
from atlas_kernels.registry import kernel
from atlas_kernels.sampling_lists import collect, keep
from atlas_kernels.sampling_parts import (
    first_of,
    first_quad,
    next_skipped,
    row_extent,
    scaled,
    uniform,
    view_of,
    wants,
    weight_of,
)
from atlas_kernels.sampling_rows import (
    BINS,
    DRAW,
    EDIT_BYTES,
    FIRST_EDIT,
    GREEDY,
    KIND,
    LANES,
    LOGITS_ROW,
    MIN_P,
    NONE,
    NUM_BANS,
    NUM_EDITS,
    PART_LEN,
    POSITION,
    ROW_BYTES,
    SAMPLE_INDEX,
    SEED_HIGH,
    SEED_LOW,
    SHORT_LEN,
    TOP_K,
    TOP_P,
)
from atlas_kernels.sampling_sort import THREADS, TILE, rank, tile_buffer

_lanes_buffer = shared_buffer("atlas_sampling_lane_sums", 4 * LANES)
_bins = shared_buffer("atlas_sampling_bins", 4 * BINS)
_scans = shared_buffer("atlas_sampling_scans", 4 * (THREADS // 32))
_LOW = 0xFFFFFFFF
_GREATEST = (1 << 63) - 1
PART, WHOLE = 1, 2
"""A row that is left over: its list was too short, or too short by an unknown amount."""


@device
def _accumulate_quad(at, total, quad):
    a = f32(total + quad[0])
    b = f32(a + quad[1])
    c = f32(b + quad[2])
    d = f32(c + quad[3])
    store_shared_f32x4(at, (a, b, c, d))
    return d


@device
def _accumulate(at, count):
    """Inclusive sums in place, from left to right, of shared float32 [count, a multiple of 16]."""
    total = f32(0)
    for j in range(0, count, 16):
        place = i32(at + j * 4)
        a, b = load_shared_f32x4(place), load_shared_f32x4(place + 16)
        c, d = load_shared_f32x4(place + 32), load_shared_f32x4(place + 48)
        total = _accumulate_quad(place, total, a)
        total = _accumulate_quad(i32(place + 16), total, b)
        total = _accumulate_quad(i32(place + 32), total, c)
        total = _accumulate_quad(i32(place + 48), total, d)
    return total


@device
def _sum_lanes(tile, lanes, keys, count):
    """Lane sums of a list that is in order of ids, to the shared lanes."""
    thread = thread_x()
    total = f32(0)
    for first in range(0, count, TILE):
        own = i32(min(i32(TILE), i32(count - first)))
        for j in range(thread, own, THREADS):
            weight = weight_of(load_b64(keys + i64(first + j) * 8) >> 32)
            store_shared_f32(tile + j * 4, weight)
        sync_threads()
        if thread < LANES:
            for j in range(thread, own, LANES):
                total = f32(total + load_shared_f32(tile + j * 4))
        sync_threads()
    if thread < LANES:
        store_shared_f32(lanes + thread * 4, total)
    sync_threads()


@device
def end_lanes(lanes):
    """The shared lanes become cumulative; the sum of all."""
    if thread_x() == 0:
        _accumulate(lanes, i32(LANES))
    sync_threads()
    return load_shared_f32(lanes + 4 * (LANES - 1))


@device
def _count_to_mass(tile, lanes, keys, count, target):
    """How many of a list in order of probability reach the target, or −1: ``count_to_mass``."""
    thread = thread_x()
    before, reached = f32(0), i32(-1)
    for first in range(0, count, TILE):
        if reached < 0:
            own = i32(min(i32(TILE), i32(count - first)))
            for j in range(thread, TILE, THREADS):
                weight = f32(0)
                if j < own:
                    weight = weight_of(load_b64(keys + i64(first + j) * 8) >> 32)
                store_shared_f32(tile + j * 4, weight)
            sync_threads()
            if thread < TILE // LANES:
                _accumulate(i32(tile + thread * (4 * LANES)), i32(LANES))
            sync_threads()
            if thread == 0:
                for j in range(TILE // LANES):
                    store_shared_f32(lanes + j * 4, before)
                    block = load_shared_f32(tile + (j + 1) * (4 * LANES) - 4)
                    before = f32(before + block)
            sync_threads()
            index, found = i32(0), i32(0)
            for j in range(thread, own, THREADS):
                if found == 0:
                    start = load_shared_f32(lanes + (j >> 8) * 4)
                    if f32(start + load_shared_f32(tile + j * 4)) >= target:
                        index, found = i32(j), i32(1)
            nearest = first_of(found != 0, index)
            if nearest >= 0:
                reached = i32(first + nearest + 1)
            sync_threads()
    return reached


@device
def _drawn(
    tile, lanes, u, keys, count, is_list, logits, view, banned, bans
):  # fmt: skip
    """The id that ``draw`` finds, by the lane sums in shared memory.

    Among ``count`` candidates: those of a list in order of ids, or all ids that are not banned.
    """
    thread = thread_x()
    target = u * end_lanes(lanes)
    end = f32(0)
    if thread < LANES:
        end = load_shared_f32(lanes + thread * 4)
    lane = first_of(thread < LANES and end > target, thread)
    before, chosen = f32(0), i32(-1)
    if lane > 0:
        before = load_shared_f32(lanes + (lane - 1) * 4)
    elements, skipped = i32((count - lane + LANES - 1) >> 8), i32(0)
    for j in range(thread, TILE, THREADS):
        weight = f32(0)
        if j < elements:
            rank = i32(lane + j * LANES)
            if is_list:
                weight = weight_of(load_b64(keys + i64(rank) * 8) >> 32)
            else:
                skipped = next_skipped(banned, bans, skipped, rank)
                value = load_f32(logits + i64(rank + skipped) * 4)
                weight = exp32_falling(scaled(value, view[0], view[1], view[2]))
        store_shared_f32(tile + j * 4, weight)
    sync_threads()
    if thread == 0:
        _accumulate(tile, i32((elements + 15) & ~15))
    sync_threads()
    index, found = i32(0), i32(0)
    for j in range(thread, elements, THREADS):
        if found == 0 and f32(before + load_shared_f32(tile + j * 4)) > target:
            index, found = i32(j), i32(1)
    nearest = first_of(found != 0, index)
    if nearest >= 0:
        rank = i32(lane + nearest * LANES)
        if is_list:
            chosen = i32(load_b64(keys + i64(rank) * 8) & _LOW)
        else:
            chosen = i32(rank + next_skipped(banned, bans, i32(0), rank))
    return chosen


@device
def _take_back(row, i, logits, edits, saved, extra):
    """Put the row's logits back."""
    first, count = load_b32(row + 4 * FIRST_EDIT), load_b32(row + 4 * NUM_EDITS)
    kept = saved + (i64(first) + i) * 4
    for e in range(thread_x(), count, THREADS):
        token_id = load_b32(edits + (i64(first) + e) * EDIT_BYTES)
        store_f32(logits + i64(token_id) * 4, load_f32(kept + i64(e) * 4))
    token = load_b32(extra + i64(i) * 4)
    if token >= 0 and thread_x() == 0:
        store_f32(logits + i64(token) * 4, load_f32(kept + i64(count) * 4))


@kernel(
    "sampling_choose",
    args="ptr ptr ptr ptr ptr ptr ptr ptr ptr ptr ptr ptr ptr i32 i32 i32 i64",
    threads=THREADS,
)
def sampling_choose(
    rows, edits, logits, keys, lows, taken, lanes, lists, long_lists, saved, extra, left_over,
    chosen, num_rows, size, extents, logits_stride,
):  # fmt: skip
    """chosen[logits row] = the token, or −1 where a logit is not finite; grid (rows).

    ``chosen`` holds −1 already where the model's own logits are not finite. Rows that need more
    candidates than a list of ``lists`` holds are left over: a second launch, with int64 [grid, 2,
    C] as ``long_lists`` instead of 0, takes them in turn. A row's two lists are its candidates by
    id and by probability.
    """
    launch_dependents()
    wait_prerequisites()
    thread, tile, sums, bins, scans = thread_x(), tile_buffer(), _lanes_buffer(), _bins(), _scans()
    for i in range(block_x(), num_rows, num_blocks_x()):
        row = rows + i64(i) * ROW_BYTES
        kind, left = load_b32(row + 4 * KIND), i32(0)
        is_second = long_lists != 0
        if is_second:
            left = load_b32(left_over + i64(i) * 4)
        if kind != NONE and (left != 0 or not is_second):
            logits_row = i64(load_b32(row + 4 * LOGITS_ROW))
            source, result = logits + logits_row * logits_stride, i32(-1)
            key, low = row_extent(keys, lows, i, extents)
            is_sound = load_b32(chosen + logits_row * 4) >= 0
            is_sound = is_sound and key != NOT_FINITE and key != LEAST
            if is_sound and kind == GREEDY:
                result = i32(_LOW - (key & _LOW))
            if is_sound and kind == DRAW:
                view, bans = view_of(row, key, low), load_b32(row + 4 * NUM_BANS)
                banned = edits + i64(load_b32(row + 4 * FIRST_EDIT)) * EDIT_BYTES
                top_k, top_p = load_b32(row + 4 * TOP_K), load_f32(row + 4 * TOP_P)
                floor, mode = load_f32(row + 4 * MIN_P), wants(row)
                by_mass = top_k > 0 and top_p < f32(1)
                listed, ranked = lists + i64(i) * (16 * SHORT_LEN), i64(8 * SHORT_LEN)
                if is_second:
                    listed, ranked = long_lists + i64(block_x()) * i64(size) * 16, i64(size) * 8
                ranked = listed + ranked
                allowed, count, limit = i32(size - bans), i32(size - bans), i32(0)
                total, num_ranked, last = f32(0), i32(0), i64(_GREATEST)
                if mode == 0 or (mode == 2 and top_k == 0):
                    if thread < LANES:
                        own = load_f32(lanes + (i64(i) * LANES + thread) * 4)
                        store_shared_f32(sums + thread * 4, own)
                    sync_threads()
                    if mode == 2:
                        total = end_lanes(sums)
                if mode != 0:
                    count = load_b32(taken + i64(i) * 8)
                    limit = load_b32(taken + i64(i) * 8 + 4)
                if left == WHOLE:
                    limit = i32(BINS - 1)
                # 0: a list anew where the short one has no room; 1: by probability, top-k; 2: the
                # mass of those; 3: top-p; 4: what is left by id, min-p, and its lane sums.
                phase = i32(0)
                if not is_second:
                    left = i32(PART if mode != 0 and count > SHORT_LEN else 0)
                    phase = i32(5 if mode == 0 or left != 0 else 1)
                while phase <= 4:
                    step, phase = phase, i32(phase + 1)
                    if step == 0:
                        count = i32(0)
                        for start in range(first_quad(source), size, PART_LEN):
                            part = i32(start)
                            count = i32(count + collect(
                                view, source, part, size, limit, listed, count, size, scans
                            ))  # fmt: skip
                        sync_threads()
                    if step == 1 and mode == 2:
                        rank(tile, bins, listed, ranked, count, view[3], scans)
                        num_ranked = i32(min(count, top_k)) if top_k > 0 else count
                    if step == 3 and top_p < f32(1):
                        reached = _count_to_mass(tile, sums, ranked, num_ranked, top_p * total)
                        if reached >= 0:
                            num_ranked = reached
                        elif top_k == 0 and count < allowed:
                            left, limit = i32(WHOLE), i32(BINS - 1)
                            phase = i32(0 if is_second else 5)
                    if (step == 2 and by_mass) or (step == 4):
                        if mode == 2:
                            last = load_b64(ranked + i64(num_ranked - 1) * 8)
                        least = floor if step == 4 else f32(0)
                        count = keep(listed, count, last, least, scans)
                        _sum_lanes(tile, sums, listed, count)
                        if step == 2:
                            total = end_lanes(sums)
                if left == 0 or is_second:
                    u = uniform(
                        load_b32(row + 4 * SEED_LOW), load_b32(row + 4 * SEED_HIGH),
                        load_b32(row + 4 * SAMPLE_INDEX), load_b32(row + 4 * POSITION),
                    )  # fmt: skip
                    result = _drawn(
                        tile, sums, u, listed, count, mode != 0, source, view, banned, bans
                    )
            sync_threads()
            is_left = left != 0 and not is_second
            if not is_left:
                _take_back(row, i, source, edits, saved, extra)
            if thread == 0:
                if not is_second:
                    store_b32(left_over + i64(i) * 4, left)
                if not is_left:
                    store_b32(chosen + logits_row * 4, result)
            sync_threads()
