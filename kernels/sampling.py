"""Sampling: what comes before the choice, spread over the vocabulary.

In order: ``sampling_edit`` applies bias, bans and penalties in place, ``sampling_extent`` finds the
greatest and the least logit, ``sampling_count`` how many logits lie in each bin,
``sampling_lanes`` the lane sums of all weights, ``sampling_gather`` the candidates; then
``sampling_choose`` filters, draws and takes the edits back. A row that needs no part of this
leaves at once. The result has the bits of ``atlas.ops.sampling.sample``: x, weights and sums are
those of its definition, in its order.
"""

from __future__ import annotations

from atlas_kernels._cuda import device, f32, i32, i64
from atlas_kernels.argmax import LEAST, logit_key
from atlas_kernels.elementary import exp32
from atlas_kernels.ptx_async import launch_dependents, wait_prerequisites
from atlas_kernels.ptx_math import minimum
from atlas_kernels.ptx_memory import (
    atomic_add_b32,
    atomic_add_shared_b32,
    load_b32,
    load_f32,
    load_shared_b32,
    load_shared_f32,
    shared_buffer,
    store_b32,
    store_b64,
    store_f32,
    store_shared_b32,
    store_shared_f32,
)
from atlas_kernels.ptx_warp import (
    block_max_i64,
    block_x,
    block_y,
    lane_id,
    num_blocks_x,
    shuffle_xor_f32,
    sync_threads,
    thread_x,
)
from atlas_kernels.registry import kernel
from atlas_kernels.sampling_parts import (
    INFINITY,
    bin_of,
    bin_scale,
    gather,
    key_value,
    last_bin,
    next_skipped,
    row_extent,
    wants,
)
from atlas_kernels.sampling_rows import (
    BANNED,
    BINS,
    COUNT_LEN,
    DRAW,
    EDIT_BYTES,
    EXTENT_LEN,
    FED_ROW,
    FIRST_EDIT,
    FREQUENCY,
    IN_PROMPT,
    KIND,
    LANES,
    LOGITS_ROW,
    MIN_P,
    NONE,
    NUM_BANS,
    NUM_EDITS,
    PRESENCE,
    REPETITION,
    ROW_BYTES,
    SHORT_LEN,
    TEMPERATURE,
    TOP_K,
)

THREADS = 256
LANE_THREADS = 512
_CHAIN = 4  # elements of a lane that a thread weighs at a time
_STAGE = _CHAIN * LANE_THREADS // 32

_flag = shared_buffer("atlas_sampling_flag", 16)
_histogram = shared_buffer("atlas_sampling_histogram", 4 * BINS)
_stages = shared_buffer("atlas_sampling_stages", 2 * 4 * _STAGE * 32)
_minima = shared_buffer("atlas_sampling_minima", 4 * (THREADS // 32))


@device
def _adjusted(value, row, bias, count, flags):
    """A logit after bias, ban and penalties, in this order; NaN where it overflows downwards."""
    if (flags & BANNED) != 0:
        return f32(-INFINITY)
    value = value + bias
    theta = load_f32(row + 4 * REPETITION)
    if count > 0 or (flags & IN_PROMPT) != 0:
        value = value / theta if value > f32(0) else value * theta
        if count > 0:
            value = value - load_f32(row + 4 * FREQUENCY) * f32(count)
            value = value - load_f32(row + 4 * PRESENCE)
    return value if value > f32(-INFINITY) else f32(float("nan"))


@kernel("sampling_edit", args="ptr ptr ptr ptr ptr ptr ptr ptr ptr i64", threads=THREADS)
def sampling_edit(
    rows, edits, token_ids, logits, saved, extra, counts, taken, lanes, logits_stride
):
    """Adjust the logits of each row in place and clear its work areas; grid (rows).

    ``saved`` float32 gets what stood there, at (first edit + row + number); ``extra`` int32 [rows]
    the id of the token that only the device knows where no edit names it, else −1. ``counts`` int32
    [rows, BINS], ``taken`` int32 [rows] and ``lanes`` float32 [rows, LANES] become 0.
    """
    launch_dependents()
    wait_prerequisites()
    i, thread = block_x(), thread_x()
    row = rows + i64(i) * ROW_BYTES
    for j in range(thread, BINS, THREADS):
        store_b32(counts + (i64(i) * BINS + j) * 4, i32(0))
    for j in range(thread, LANES, THREADS):
        store_f32(lanes + (i64(i) * LANES + j) * 4, f32(0))
    if thread == 0:
        store_b32(taken + i64(i) * 4, i32(0))
        store_shared_b32(_flag(), i32(0))
    if load_b32(row + 4 * KIND) != NONE:
        source = logits + i64(load_b32(row + 4 * LOGITS_ROW)) * logits_stride
        first, count = load_b32(row + 4 * FIRST_EDIT), load_b32(row + 4 * NUM_EDITS)
        fed, token = load_b32(row + 4 * FED_ROW), i32(-1)
        if fed >= 0:
            token = load_b32(token_ids + i64(fed) * 4)
        sync_threads()
        kept = saved + (i64(first) + i) * 4
        for e in range(thread, count, THREADS):
            edit = edits + (i64(first) + e) * EDIT_BYTES
            token_id, seen = load_b32(edit), load_b32(edit + 8)
            if token_id == token:
                store_shared_b32(_flag(), i32(1))
                seen = i32(seen + 1)
            place = source + i64(token_id) * 4
            value = load_f32(place)
            store_f32(kept + i64(e) * 4, value)
            flags = load_b32(edit + 12)
            store_f32(place, _adjusted(value, row, load_f32(edit + 4), seen, flags))
        sync_threads()
        if thread == 0:
            if load_shared_b32(_flag()) != 0:
                token = i32(-1)
            store_b32(extra + i64(i) * 4, token)
            if token >= 0:
                place = source + i64(token) * 4
                value = load_f32(place)
                store_f32(kept + i64(count) * 4, value)
                store_f32(place, _adjusted(value, row, f32(0), i32(1), i32(0)))


@kernel("sampling_extent", args="ptr ptr ptr ptr i32 i64", threads=THREADS)
def sampling_extent(rows, logits, keys, lows, size, logits_stride):
    """keys[row, part], lows[row, part] = greatest key and least logit; grid (⌈C / 4096⌉, rows).

    Banned logits (−inf) count for neither.
    """
    launch_dependents()
    wait_prerequisites()
    i, thread = block_y(), thread_x()
    row = rows + i64(i) * ROW_BYTES
    if load_b32(row + 4 * KIND) != NONE:
        source = logits + i64(load_b32(row + 4 * LOGITS_ROW)) * logits_stride
        start = block_x() * EXTENT_LEN
        end = min(i64(size), start + EXTENT_LEN)
        best, low = i64(LEAST), f32(INFINITY)
        for at in range(start + thread, end, 4 * THREADS):
            for j in range(4):
                place = min(at + j * THREADS, end - 1)  # the last again changes nothing
                value = load_f32(source + place * 4)
                if value != f32(-INFINITY):
                    best = max(best, logit_key(value, place))
                    low = minimum(low, value)
        for step in range(5):
            low = minimum(low, shuffle_xor_f32(low, i32(16 >> step)))
        if lane_id() == 0:
            store_shared_f32(_minima() + (thread >> 5) * 4, low)
        best = block_max_i64(best, LEAST)
        if thread == 0:
            for w in range(THREADS // 32):
                low = minimum(low, load_shared_f32(_minima() + w * 4))
            out = i64(i) * num_blocks_x() + block_x()
            store_b64(keys + out * 8, best)
            store_f32(lows + out * 4, low)


@kernel("sampling_count", args="ptr ptr ptr ptr ptr i32 i32 i64", threads=THREADS)
def sampling_count(rows, logits, keys, lows, counts, size, parts, logits_stride):
    """counts[row, bin] += the logits of a part that lie in it; grid (⌈C / 8192⌉, rows)."""
    launch_dependents()
    wait_prerequisites()
    i, thread = block_y(), thread_x()
    row = rows + i64(i) * ROW_BYTES
    if load_b32(row + 4 * KIND) == DRAW and wants(row) == 2:
        for j in range(thread, BINS, THREADS):
            store_shared_b32(_histogram() + j * 4, i32(0))
        source = logits + i64(load_b32(row + 4 * LOGITS_ROW)) * logits_stride
        temperature = load_f32(row + 4 * TEMPERATURE)
        key, low = row_extent(keys, lows, i, parts)
        greatest = key_value(key)
        scale = bin_scale(greatest, low, temperature)
        sync_threads()
        start = block_x() * COUNT_LEN
        end = min(i64(size), start + COUNT_LEN)
        for at in range(start + thread, end, THREADS):
            value = load_f32(source + at * 4)
            if value > f32(-INFINITY):
                found = bin_of((value - greatest) / temperature, scale)
                atomic_add_shared_b32(i32(_histogram() + found * 4), i32(1))
        sync_threads()
        for j in range(thread, BINS, THREADS):
            count = load_shared_b32(_histogram() + j * 4)
            if count != 0:
                atomic_add_b32(counts + (i64(i) * BINS + j) * 4, count)


@kernel("sampling_lanes", args="ptr ptr ptr ptr ptr ptr i32 i32 i64", threads=LANE_THREADS)
def sampling_lanes(rows, edits, logits, keys, lows, lanes, size, parts, logits_stride):
    """lanes[row] = ``lane_sums`` of the weights of all allowed ids; grid (8, rows).

    A thread block has 32 neighbouring lanes: all warps weigh, one adds each lane's chain in order.
    """
    launch_dependents()
    wait_prerequisites()
    i, lane, warp = block_y(), lane_id(), thread_x() >> 5
    row = rows + i64(i) * ROW_BYTES
    mode = wants(row)
    needed = mode == 0 or (mode == 2 and load_b32(row + 4 * TOP_K) == 0)
    if load_b32(row + 4 * KIND) == DRAW and needed:
        source = logits + i64(load_b32(row + 4 * LOGITS_ROW)) * logits_stride
        temperature = load_f32(row + 4 * TEMPERATURE)
        greatest = key_value(row_extent(keys, lows, i, parts)[0])
        bans = load_b32(row + 4 * NUM_BANS)
        banned = edits + i64(load_b32(row + 4 * FIRST_EDIT)) * EDIT_BYTES
        count = i32(size - bans)
        total, skipped, turn = f32(0), i32(0), i32(0)
        for first in range(0, count, _STAGE * LANES):
            stage = i32(_stages() + turn * (4 * 32 * _STAGE))
            for j in range(_CHAIN):
                chain = i32(warp * _CHAIN + j)
                rank = i32(first + chain * LANES + block_x() * 32 + lane)
                weight = f32(0)
                if rank < count:
                    skipped = next_skipped(banned, bans, skipped, rank)
                    value = load_f32(source + i64(rank + skipped) * 4)
                    weight = exp32((value - greatest) / temperature)
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
            store_f32(lanes + (i64(i) * LANES + block_x() * 32 + lane) * 4, total)


@kernel("sampling_gather", args="ptr ptr ptr ptr ptr ptr ptr i32 i32 i64", threads=THREADS)
def sampling_gather(rows, logits, keys, lows, counts, taken, lists, size, parts, logits_stride):
    """Append a part's candidates to the row's list; grid (⌈C / 4096⌉, rows).

    ``lists`` is int64 [rows, SHORT_LEN]; ``taken`` counts candidates, also those without room.
    """
    launch_dependents()
    wait_prerequisites()
    i = block_y()
    row = rows + i64(i) * ROW_BYTES
    mode = wants(row)
    if load_b32(row + 4 * KIND) == DRAW and mode != 0:
        source = logits + i64(load_b32(row + 4 * LOGITS_ROW)) * logits_stride
        temperature = load_f32(row + 4 * TEMPERATURE)
        key, low = row_extent(keys, lows, i, parts)
        greatest = key_value(key)
        scale, limit = bin_scale(greatest, low, temperature), i32(-1)
        if mode == 2:
            limit = last_bin(row, counts + i64(i) * (4 * BINS), scale)
        start = i32(block_x() * EXTENT_LEN)
        end = i32(min(i32(size), i32(start + EXTENT_LEN)))
        gather(
            source, start, end, THREADS, thread_x(), greatest, temperature, scale, limit,
            load_f32(row + 4 * MIN_P), lists + i64(i) * (8 * SHORT_LEN), SHORT_LEN,
            taken + i64(i) * 4,
        )  # fmt: skip
