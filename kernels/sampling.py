"""Sampling: what comes before the choice, spread over the vocabulary.

In order: ``sampling_edit`` applies bias, bans and penalties in place, ``sampling_extent`` finds the
greatest and the least logit, ``sampling_count`` how many logits of each part lie in each bin,
``sampling_lanes`` the lane sums of all weights, ``sampling_gather`` the candidates; then
``sampling_choose`` filters, draws and takes the edits back. Each but the last reads a row once, 16
bytes at a time where the row lies so. A row that needs no part of this leaves at once. The result
has the bits of ``atlas.ops.sampling.sample``: x, weights and sums are those of its definition, in
its order.
"""

from __future__ import annotations

from atlas_kernels._cuda import device, f32, i32, i64
from atlas_kernels.argmax import LEAST, logit_key
from atlas_kernels.elementary import exp32_falling
from atlas_kernels.ptx_async import launch_dependents, wait_prerequisites
from atlas_kernels.ptx_math import minimum
from atlas_kernels.ptx_memory import (
    atomic_add_shared_b32,
    load_b32,
    load_f32,
    load_f32x4,
    load_shared_b32,
    load_shared_f32,
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
    block_x,
    block_y,
    lane_id,
    num_blocks_x,
    shuffle_xor_f32,
    sync_threads,
    thread_x,
)
from atlas_kernels.registry import kernel
from atlas_kernels.sampling_lists import collect, find_limit
from atlas_kernels.sampling_parts import (
    INFINITY,
    bin_in,
    first_quad,
    inverse_of,
    key_value,
    load_quad,
    next_skipped,
    row_extent,
    row_view,
    scaled,
    wants,
)
from atlas_kernels.sampling_rows import (
    BANNED,
    BINS,
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
    NONE,
    NUM_BANS,
    NUM_EDITS,
    PART_COUNT_BYTES,
    PART_LEN,
    PRESENCE,
    REPETITION,
    ROW_BYTES,
    SCORE,
    SHORT_LEN,
    TEMPERATURE,
    TOP_K,
)
from atlas_kernels.sampling_sort import THREADS as PART_THREADS

THREADS = 256
LANE_THREADS = 512
_CHAINS = LANE_THREADS // 8  # elements of its lanes that a thread block weighs at a time
_STAGE = 2 * _CHAINS

_flag = shared_buffer("atlas_sampling_flag", 16)
_histogram = shared_buffer("atlas_sampling_histogram", 4 * BINS)
_sums = shared_buffer("atlas_sampling_sums", 4 * (PART_THREADS // 32))
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


@kernel("sampling_edit", args="ptr ptr ptr ptr ptr ptr i64", threads=THREADS)
def sampling_edit(rows, edits, token_ids, logits, saved, extra, logits_stride):
    """Adjust the logits of each row in place; grid (rows).

    ``saved`` float32 gets what stood there, at (first edit + row + number); ``extra`` int32 [rows]
    the id of the token that only the device knows where no edit names it, else −1.
    """
    launch_dependents()
    wait_prerequisites()
    i, thread = block_x(), thread_x()
    row = rows + i64(i) * ROW_BYTES
    if thread == 0:
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


@device
def _extend(best, low, quad, at):
    for k in range(4):
        value = quad[k]
        if value != f32(-INFINITY):
            best = max(best, logit_key(value, i32(at + k)))
            low = minimum(low, value)
    return best, low


@kernel("sampling_extent", args="ptr ptr ptr ptr i32 i64", threads=THREADS)
def sampling_extent(rows, logits, keys, lows, size, logits_stride):
    """keys[row, part], lows[row, part] = greatest key and least logit; grid (extent parts, rows).

    Banned logits (−inf) count for neither.
    """
    launch_dependents()
    wait_prerequisites()
    i, thread = block_y(), thread_x()
    row = rows + i64(i) * ROW_BYTES
    if load_b32(row + 4 * KIND) != NONE:
        source = logits + i64(load_b32(row + 4 * LOGITS_ROW)) * logits_stride
        at = i32(first_quad(source) + block_x() * EXTENT_LEN + thread * 4)
        a = load_quad(source, at, size)
        b = load_quad(source, i32(at + 4 * THREADS), size)
        c = load_quad(source, i32(at + 8 * THREADS), size)
        d = load_quad(source, i32(at + 12 * THREADS), size)
        best, low = _extend(i64(LEAST), f32(INFINITY), a, at)
        best, low = _extend(best, low, b, i32(at + 4 * THREADS))
        best, low = _extend(best, low, c, i32(at + 8 * THREADS))
        best, low = _extend(best, low, d, i32(at + 12 * THREADS))
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


@device
def _count_quad(histogram, view, quad):
    for k in range(4):
        if quad[k] > f32(-INFINITY):
            place = i32(histogram + bin_in(view, quad[k]) * 4)
            atomic_add_shared_b32(place, i32(1))


@kernel(
    "sampling_count", args="ptr ptr ptr ptr ptr i32 i32 i64", threads=PART_THREADS, min_blocks=2
)
def sampling_count(rows, logits, keys, lows, counts, size, extents, logits_stride):
    """counts[row, part, bin] = the logits of a part that lie in a bin; grid (parts, rows).

    ``counts`` is uint16. Where min-p alone filters, bin 0 has what stays.
    """
    launch_dependents()
    wait_prerequisites()
    i, thread, histogram = block_y(), thread_x(), _histogram()
    row = rows + i64(i) * ROW_BYTES
    if load_b32(row + 4 * KIND) >= DRAW and wants(row) != 0:
        store_shared_b32(histogram + thread * 8, i32(0))
        store_shared_b32(histogram + thread * 8 + 4, i32(0))
        source = logits + i64(load_b32(row + 4 * LOGITS_ROW)) * logits_stride
        view = row_view(row, keys, lows, i, extents)
        start = i32(first_quad(source) + block_x() * PART_LEN)
        sync_threads()
        for first in range(0, PART_LEN, 16 * PART_THREADS):
            at = i32(start + first + thread * 4)
            a, b = load_quad(source, at, size), load_quad(source, i32(at + 4 * PART_THREADS), size)
            c = load_quad(source, i32(at + 8 * PART_THREADS), size)
            d = load_quad(source, i32(at + 12 * PART_THREADS), size)
            _count_quad(histogram, view, a)
            _count_quad(histogram, view, b)
            _count_quad(histogram, view, c)
            _count_quad(histogram, view, d)
        sync_threads()
        low = load_shared_b32(histogram + thread * 8)
        high = load_shared_b32(histogram + thread * 8 + 4)
        out = counts + (i64(i) * num_blocks_x() + block_x()) * PART_COUNT_BYTES
        store_b32(out + thread * 4, i32(low | (high << 16)))


@device
def _allowed_quad(source, rank, count, banned, bans, skipped):
    """Four logits by their rank among the ids that are not banned, and how many of those precede.

    Behind the last rank something finite.
    """
    if bans == 0 and rank + 4 <= count and (source & 15) == 0:
        return load_f32x4(source + i64(rank) * 4), skipped
    last = i32(count - 1)
    skipped = next_skipped(banned, bans, skipped, min(rank, last))
    a = load_f32(source + i64(min(rank, last) + skipped) * 4)
    skipped = next_skipped(banned, bans, skipped, min(i32(rank + 1), last))
    b = load_f32(source + i64(min(i32(rank + 1), last) + skipped) * 4)
    skipped = next_skipped(banned, bans, skipped, min(i32(rank + 2), last))
    c = load_f32(source + i64(min(i32(rank + 2), last) + skipped) * 4)
    skipped = next_skipped(banned, bans, skipped, min(i32(rank + 3), last))
    d = load_f32(source + i64(min(i32(rank + 3), last) + skipped) * 4)
    return (a, b, c, d), skipped


@device
def _weigh(value, is_there, greatest, temperature, inverse):
    weight = exp32_falling(scaled(value, greatest, temperature, inverse))
    return weight if is_there else f32(0)


@device
def _stage_quad(place, quad, left, greatest, temperature, inverse):
    """Weights of four logits, 0 where fewer are left, to the stage."""
    a = _weigh(quad[0], left > 0, greatest, temperature, inverse)
    b = _weigh(quad[1], left > 1, greatest, temperature, inverse)
    c = _weigh(quad[2], left > 2, greatest, temperature, inverse)
    d = _weigh(quad[3], left > 3, greatest, temperature, inverse)
    store_shared_f32x4(place, (a, b, c, d))


@device
def _add_eight(total, at):
    """The total and eight weights of a lane, 128 bytes apart, one after the other."""
    a, b = load_shared_f32(at), load_shared_f32(at + 128)
    c, d = load_shared_f32(at + 256), load_shared_f32(at + 384)
    e, f = load_shared_f32(at + 512), load_shared_f32(at + 640)
    g, h = load_shared_f32(at + 768), load_shared_f32(at + 896)
    total = f32(f32(f32(total + a) + b) + c) + d
    return f32(f32(f32(total + e) + f) + g) + h


@kernel(
    "sampling_lanes", args="ptr ptr ptr ptr ptr ptr i32 i32 i64", threads=LANE_THREADS, min_blocks=2
)
def sampling_lanes(rows, edits, logits, keys, lows, lanes, size, extents, logits_stride):
    """lanes[row] = ``lane_sums`` of the weights of all allowed ids; grid (8, rows).

    A thread block has 32 neighbouring lanes, and 8 threads one element of each. All warps weigh;
    one adds each lane's chain in order.
    """
    launch_dependents()
    wait_prerequisites()
    i, lane, warp = block_y(), lane_id(), thread_x() >> 5
    row = rows + i64(i) * ROW_BYTES
    mode, kind = wants(row), load_b32(row + 4 * KIND)
    needed = mode == 0 or (mode == 2 and load_b32(row + 4 * TOP_K) == 0)
    if (kind == DRAW and needed) or kind == SCORE:
        source = logits + i64(load_b32(row + 4 * LOGITS_ROW)) * logits_stride
        temperature = load_f32(row + 4 * TEMPERATURE)
        key, low = row_extent(keys, lows, i, extents)
        greatest = key_value(key)
        inverse = inverse_of(temperature, greatest, low)
        bans = load_b32(row + 4 * NUM_BANS)
        banned = edits + i64(load_b32(row + 4 * FIRST_EDIT)) * EDIT_BYTES
        count = i32(size - bans)
        total, skipped, turn = f32(0), i32(0), i32(0)
        own = i32((thread_x() >> 3) * LANES + block_x() * 32 + (thread_x() & 7) * 4)
        for first in range(0, count, _STAGE * LANES):
            stage = i32(_stages() + turn * (4 * 32 * _STAGE))
            rank, place = i32(first + own), i32(stage + thread_x() * 16)
            a, skipped = _allowed_quad(source, rank, count, banned, bans, skipped)
            later = i32(rank + _CHAINS * LANES)
            b, skipped = _allowed_quad(source, later, count, banned, bans, skipped)
            _stage_quad(place, a, i32(count - rank), greatest, temperature, inverse)
            place = i32(place + 16 * LANE_THREADS)
            _stage_quad(place, b, i32(count - later), greatest, temperature, inverse)
            sync_threads()
            if warp == 0:
                for j in range(0, _STAGE, 8):
                    total = _add_eight(total, i32(stage + (j * 32 + lane) * 4))
            turn = i32(1 - turn)  # warps go on while one adds; the next barrier comes in between
        if warp == 0:
            store_f32(lanes + (i64(i) * LANES + block_x() * 32 + lane) * 4, total)


@kernel(
    "sampling_gather",
    args="ptr ptr ptr ptr ptr ptr ptr i32 i32 i64",
    threads=PART_THREADS,
)
def sampling_gather(rows, logits, keys, lows, counts, taken, lists, size, extents, logits_stride):
    """The candidates of each row, in ascending order of ids; grid (parts, rows).

    ``lists`` is int64 [rows, 2, SHORT_LEN], of which the first half is written where it has room;
    ``taken`` int32 [rows, 2] the number of candidates and the bin that they reach down to.
    """
    launch_dependents()
    wait_prerequisites()
    i, part, parts = block_y(), block_x(), num_blocks_x()
    row = rows + i64(i) * ROW_BYTES
    if load_b32(row + 4 * KIND) >= DRAW and wants(row) != 0:
        source = logits + i64(load_b32(row + 4 * LOGITS_ROW)) * logits_stride
        view, sums = row_view(row, keys, lows, i, extents), _sums()
        own = counts + i64(i) * parts * PART_COUNT_BYTES
        limit, before, total = find_limit(row, own, part, parts, view[3], sums)
        if part == 0 and thread_x() == 0:
            store_b32(taken + i64(i) * 8, total)
            store_b32(taken + i64(i) * 8 + 4, limit)
        if total <= SHORT_LEN:
            start = i32(first_quad(source) + part * PART_LEN)
            out = lists + i64(i) * (16 * SHORT_LEN)
            collect(view, source, start, size, limit, out, before, SHORT_LEN, sums)
