"""Sampling: filters and draw of a row by one thread block, over its candidates.

Their order makes the bits: sums run over candidates by id, prefix sums by probability. A list is
sorted once for each order that a row's filters need.
"""

from __future__ import annotations

from atlas_kernels._cuda import device, f32, i32, i64
from atlas_kernels.argmax import LEAST, NOT_FINITE
from atlas_kernels.elementary import exp32
from atlas_kernels.ptx_async import launch_dependents, wait_prerequisites
from atlas_kernels.ptx_memory import (
    atomic_add_b32,
    load_b32,
    load_b64,
    load_f32,
    load_shared_b32,
    load_shared_f32,
    load_shared_f32x4,
    shared_buffer,
    store_b32,
    store_b64,
    store_f32,
    store_shared_b32,
    store_shared_f32,
    store_shared_f32x4,
)
from atlas_kernels.ptx_warp import (
    block_max_i64,
    block_sum,
    block_x,
    num_blocks_x,
    sync_threads,
    thread_x,
)
from atlas_kernels.registry import kernel
from atlas_kernels.sampling_parts import (
    SENTINEL,
    bin_scale,
    exchanged,
    gather,
    key_value,
    last_bin,
    next_skipped,
    row_extent,
    uniform,
    wants,
    weight_of,
)
from atlas_kernels.sampling_rows import (
    BINS,
    DRAW,
    EDIT_BYTES,
    FIRST_EDIT,
    KIND,
    LANES,
    LOGITS_ROW,
    MIN_P,
    NONE,
    NUM_BANS,
    NUM_EDITS,
    POSITION,
    ROW_BYTES,
    SAMPLE_INDEX,
    SEED_HIGH,
    SEED_LOW,
    SHORT_LEN,
    TEMPERATURE,
    TOP_K,
    TOP_P,
)
from atlas_kernels.sampling_sort import THREADS, TILE, sort, tile_buffer

_lanes_buffer = shared_buffer("atlas_sampling_lane_sums", 4 * LANES)
_word = shared_buffer("atlas_sampling_word", 16)
_LOW = 0xFFFFFFFF
PART, WHOLE = 1, 2
"""A row that is left over: its list was too short, or too short by an unknown amount."""


@device
def _accumulate(at, count):
    """Inclusive sums in place, from left to right, of shared float32 [count, a multiple of 4]."""
    total = f32(0)
    for j in range(0, count, 4):
        a, b, c, d = load_shared_f32x4(at + j * 4)
        a = f32(total + a)
        b = f32(a + b)
        c = f32(b + c)
        total = f32(c + d)
        store_shared_f32x4(at + j * 4, (a, b, c, total))
    return total


@device
def _sum_lanes(tile, lanes, keys, count):
    """Lane sums of a list that is in order of ids, to the shared lanes."""
    thread = thread_x()
    total = f32(0)
    for first in range(0, count, TILE):
        own = i32(min(i32(TILE), i32(count - first)))
        for j in range(thread, own, THREADS):
            weight = weight_of(load_b64(keys + i64(first + j) * 8))
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
def _end_lanes(lanes):
    """The shared lanes become cumulative; the sum of all."""
    if thread_x() == 0:
        _accumulate(lanes, i32(LANES))
    sync_threads()
    return load_shared_f32(lanes + 4 * (LANES - 1))


@device
def _first(found, index):
    """The least index of those that threads found, in every thread; −1 where nobody did."""
    best = block_max_i64(i64(-i64(index)) if found else i64(LEAST), LEAST)
    return i32(-best) if best > LEAST else i32(-1)


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
            nearest = _first(found != 0, index)
            if nearest >= 0:
                reached = i32(first + nearest + 1)
            sync_threads()
    return reached


@device
def _drawn(
    tile, lanes, u, keys, count, is_list, logits, greatest, temperature, banned, bans
):  # fmt: skip
    """The id that ``draw`` finds, by the lane sums in shared memory.

    Among ``count`` candidates: those of a list in order of ids, or all ids that are not banned.
    """
    thread = thread_x()
    target = u * _end_lanes(lanes)
    end = f32(0)
    if thread < LANES:
        end = load_shared_f32(lanes + thread * 4)
    lane = _first(thread < LANES and end > target, thread)
    before, chosen = f32(0), i32(-1)
    if lane > 0:
        before = load_shared_f32(lanes + (lane - 1) * 4)
    elements, skipped = i32((count - lane + LANES - 1) >> 8), i32(0)
    for j in range(thread, TILE, THREADS):
        weight = f32(0)
        if j < elements:
            rank = i32(lane + j * LANES)
            if is_list:
                weight = weight_of(load_b64(keys + i64(rank) * 8))
            else:
                skipped = next_skipped(banned, bans, skipped, rank)
                value = load_f32(logits + i64(rank + skipped) * 4)
                weight = exp32((value - greatest) / temperature)
        store_shared_f32(tile + j * 4, weight)
    sync_threads()
    if thread == 0:
        _accumulate(tile, i32((elements + 3) & ~3))
    sync_threads()
    index, found = i32(0), i32(0)
    for j in range(thread, elements, THREADS):
        if found == 0 and f32(before + load_shared_f32(tile + j * 4)) > target:
            index, found = i32(j), i32(1)
    nearest = _first(found != 0, index)
    if nearest >= 0:
        rank = i32(lane + nearest * LANES)
        if is_list:
            chosen = i32(load_b64(keys + i64(rank) * 8) >> 32)
        else:
            chosen = i32(rank + next_skipped(banned, bans, i32(0), rank))
    return chosen


@device
def _refine(keys, count, floor):
    """Exchange halves, so that a list sorts by id, and mark what min-p drops; how many stay."""
    kept = f32(0)
    for j in range(thread_x(), count, THREADS):
        candidate = load_b64(keys + i64(j) * 8)
        if weight_of(candidate >> 32) >= floor:
            kept = kept + f32(1)
            candidate = exchanged(candidate)
        else:
            candidate = i64(SENTINEL)
        store_b64(keys + i64(j) * 8, candidate)
    return i32(block_sum(kept))


@device
def _exchange(keys, count):
    for j in range(thread_x(), count, THREADS):
        store_b64(keys + i64(j) * 8, exchanged(load_b64(keys + i64(j) * 8)))
    sync_threads()


@device
def _all_threads(value):
    """A device counter's value; past L1."""
    if thread_x() == 0:
        store_shared_b32(_word(), atomic_add_b32(value, 0))
    sync_threads()
    count = load_shared_b32(_word())
    sync_threads()
    return count


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
    args="ptr ptr ptr ptr ptr ptr ptr ptr ptr ptr ptr ptr ptr ptr i32 i32 i32 i64",
    threads=THREADS,
)
def sampling_choose(
    rows, edits, logits, keys, lows, counts, taken, lanes, lists, long_lists, saved, extra,
    left_over, chosen, num_rows, size, parts, logits_stride,
):  # fmt: skip
    """chosen[logits row] = the token, or −1 where a logit is not finite; grid (rows).

    ``chosen`` holds −1 already where the model's own logits are not finite. Rows that need more
    candidates than a list of ``lists`` holds are left over: a second launch, with int64 [grid, C]
    as ``long_lists`` instead of 0, takes them in turn.
    """
    launch_dependents()
    wait_prerequisites()
    thread, tile, sums = thread_x(), tile_buffer(), _lanes_buffer()
    for i in range(block_x(), num_rows, num_blocks_x()):
        row = rows + i64(i) * ROW_BYTES
        kind, left = load_b32(row + 4 * KIND), i32(0)
        is_second = long_lists != 0
        if is_second:
            left = load_b32(left_over + i64(i) * 4)
        if kind != NONE and (left != 0 or not is_second):
            logits_row = i64(load_b32(row + 4 * LOGITS_ROW))
            source, result = logits + logits_row * logits_stride, i32(-1)
            key, low = row_extent(keys, lows, i, parts)
            is_sound = load_b32(chosen + logits_row * 4) >= 0
            is_sound = is_sound and key != NOT_FINITE and key != LEAST
            if is_sound and kind != DRAW:
                result = i32(_LOW - (key & _LOW))
            if is_sound and kind == DRAW:
                temperature, greatest = load_f32(row + 4 * TEMPERATURE), key_value(key)
                bans = load_b32(row + 4 * NUM_BANS)
                banned = edits + i64(load_b32(row + 4 * FIRST_EDIT)) * EDIT_BYTES
                top_k, top_p = load_b32(row + 4 * TOP_K), load_f32(row + 4 * TOP_P)
                floor, mode = load_f32(row + 4 * MIN_P), wants(row)
                listed, counter = lists + i64(i) * (8 * SHORT_LEN), taken + i64(i) * 4
                scale = bin_scale(greatest, low, temperature)
                allowed, count = i32(size - bans), i32(size - bans)
                if thread < LANES:
                    own = load_f32(lanes + (i64(i) * LANES + thread) * 4)
                    store_shared_f32(sums + thread * 4, own)
                sync_threads()
                total, is_whole = f32(0), left == WHOLE
                if mode == 2 and top_k == 0:
                    total = _end_lanes(sums)
                if mode != 0:
                    count = load_b32(counter)
                # 0: gather again where the list is too short; 1: by probability, top-k; 2: by id,
                # for the mass of the top k; 3: by probability, top-p; 4: by id, min-p.
                phase = i32(0)
                if not is_second:
                    left = i32(PART if mode != 0 and count > SHORT_LEN else 0)
                    phase = i32(5 if mode == 0 or left != 0 else 1)
                while phase <= 4:
                    step, phase = phase, i32(phase + 1)
                    if step == 0:
                        limit = i32(-1)
                        if mode == 2:
                            limit = i32(BINS - 1)
                            if not is_whole:
                                limit = last_bin(row, counts + i64(i) * (4 * BINS), scale)
                        listed = long_lists + i64(block_x()) * i64(size) * 8
                        if thread == 0:
                            store_b32(counter, i32(0))
                        sync_threads()
                        gather(
                            source, i32(0), size, THREADS, thread, greatest, temperature, scale,
                            limit, floor, listed, size, counter,
                        )  # fmt: skip
                        sync_threads()
                        count = _all_threads(counter)
                    by_mass = top_k > 0 and top_p < f32(1)
                    active = step == 4 or (step == 1 and mode == 2) or (step == 3 and by_mass)
                    active = active or (step == 2 and by_mass)
                    if active:
                        before = count
                        if step == 4:
                            count = _refine(listed, count, floor)
                        if step == 2 or step == 3:
                            _exchange(listed, count)
                        sort(tile, listed, before)
                    if step == 1 and mode == 2 and top_k > 0:
                        count = i32(min(count, top_k))
                    if step == 2 and by_mass:
                        _sum_lanes(tile, sums, listed, count)
                        total = _end_lanes(sums)
                    if top_p < f32(1) and ((step == 1 and top_k == 0) or (step == 3 and by_mass)):
                        reached = _count_to_mass(tile, sums, listed, count, top_p * total)
                        if reached >= 0:
                            count = reached
                        elif top_k == 0 and count < allowed:
                            left, is_whole = i32(WHOLE), True
                            phase = i32(0 if is_second else 5)
                    if step == 4:
                        _sum_lanes(tile, sums, listed, count)
                if left == 0 or is_second:
                    u = uniform(
                        load_b32(row + 4 * SEED_LOW), load_b32(row + 4 * SEED_HIGH),
                        load_b32(row + 4 * SAMPLE_INDEX), load_b32(row + 4 * POSITION),
                    )  # fmt: skip
                    result = _drawn(
                        tile, sums, u, listed, count, mode != 0, source, greatest, temperature,
                        banned, bans,
                    )  # fmt: skip
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
