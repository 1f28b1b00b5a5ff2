"""What a thread block of decode attention does: its queries against the keys of its splits.

Shared by ``attention_decode``, whose page tells how and in which order, and by ``attention_step``,
which adds keys and values that are not in the pools yet (``FreshRows``).
"""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import device, f32, i32, i64
from atlas_kernels.attention_copy import block_copy, block_prefetch
from atlas_kernels.attention_decode_layout import (
    WARPS,
    key_pitch,
    limits_at,
    queries_at,
    result_pitch,
    stages,
    sums_at,
)
from atlas_kernels.attention_decode_parts import (
    add_part,
    combine_splits,
    empty_row,
    first_part,
    gated_words,
    merge_parts,
    output_words,
    row_words,
    store_rows,
)
from atlas_kernels.attention_fresh import FreshRows, queries_copy
from atlas_kernels.attention_held import NOT_HELD, held_blocks
from atlas_kernels.attention_plan import LOOP, SPLIT
from atlas_kernels.kv_store import BLOCK_LEN
from atlas_kernels.ptx_async import (
    copy_commit,
    copy_wait,
    wait_prerequisites,
)
from atlas_kernels.ptx_math import (
    fast_reciprocal,
    quotient,
    quotient_by,
    reciprocal_for,
    vector_scale,
)
from atlas_kernels.ptx_memory import (
    atomic_add_b32,
    dynamic_shared,
    fence_device,
    load_b32,
    load_f32x2,
    load_f32x4,
    load_shared_b32,
    load_shared_b32x2,
    store_b32,
    store_b32x2_if,
    store_f32x2_if,
    store_f32x4_if,
    store_shared_b32,
)
from atlas_kernels.ptx_tile import (
    MASKED,
    tile_decay,
    tile_fill,
    tile_mask,
    tile_maximum,
    tile_rows_fma,
    tile_scale,
    tile_scores,
    tile_softcap,
    tile_store_apart,
    tile_sum_lanes,
    tile_values,
    tile_weights,
)
from atlas_kernels.ptx_warp import (
    block_x,
    block_y,
    lane_id,
    num_blocks_x,
    num_blocks_y,
    num_threads_x,
    shuffle_b32,
    sync_threads,
    sync_warp,
    thread_x,
)

FEW_BLOCKS = 132
"""Thread blocks up to which a large GPU has one on each SM, with time before their turn. Two would
go through the same code, and the second start when the kernel before leaves."""
ALONE = 64
"""Thread blocks up to which what they read is little beside the product before."""
LOG2_E = 1.4426950408889634


@device
def own_position(positions, sequence, row):
    """The last key that a row sees: its own."""
    return load_b32(positions + i64(row) * 4)


def attention_body(
    dim: int,
    tiles: int,
    rows_apart: FreshRows,
    last_key: Any = own_position,
    *,
    holds: bool = False,
) -> Any:
    """A device function of the kernel's arguments, and of a tuple that ``rows_apart`` takes.

    - ``last_key``: (positions, sequence, row) → the last key that a row sees;
    - ``holds``: the block after those in a warp's buffers waits in registers.

    Unless ``gate`` is 0, whoever writes a row's output multiplies it by its gates' sigmoid.

    It waits for the kernels before. What the host copied for the step (``tables``, ``cu_rows``,
    ``positions``) is read before that; so are the pools where the step's own keys and values are
    apart, since all that is then read of them is older than the step.
    """
    is_apart = rows_apart.are_apart
    pitch, depth, rows = key_pitch(dim), stages(dim), 16 * tiles
    block_bytes = BLOCK_LEN * pitch
    warp_bytes = depth * 2 * block_bytes
    q_at = queries_at(dim)
    row_limits, row_sums, part_pitch = limits_at(dim, tiles), sums_at(dim, tiles), result_pitch(dim)
    vectors = dim // 4

    scores_of, values_of = tile_scores(dim, 16, tiles, pitch), tile_values(dim, 16, tiles, pitch)
    cap, mask = tile_softcap(16, tiles), tile_mask(16, tiles)
    maximum_of, weights_of = tile_maximum(16, tiles), tile_weights(16, tiles)
    decay_of, scale_rows = tile_decay(tiles), tile_scale(dim, tiles)
    rows_fma, sum_lanes = tile_rows_fma(tiles), tile_sum_lanes(tiles)
    no_values, no_sums = tile_fill(rows * dim // 32, 0.0), tile_fill(2 * tiles, 0.0)
    no_maxima, scale_maxima = tile_fill(2 * tiles, MASKED), vector_scale(2 * tiles)
    store_values = tile_store_apart(dim, tiles)
    load_rows, put_rows = row_words(tiles), store_rows(tiles)
    copied, all_copied = copy_wait(2 * depth - 1), copy_wait(0)
    copy_block, prefetch_block, copy_gates = block_copy(dim), block_prefetch(dim), queries_copy(dim)
    merge_warps = merge_parts(part_pitch, row_sums, rows)
    combine = combine_splits(dim)
    first_fresh, ask, bring = rows_apart.first, rows_apart.ask, rows_apart.bring
    store_fresh, patch = rows_apart.store, rows_apart.patch
    hold, put_held = held_blocks(dim) if holds else NOT_HELD
    asked_for = depth + holds  # blocks of a warp before the wait

    @device
    def attend(
        q, k_pool, v_pool, out, tables, cu_rows, positions, partials, sums, counters,
        heads, kv_heads, max_rows, room, window, table_stride, q_stride, out_stride, scale, softcap,
        gate, gate_stride, rehearsal, fresh,
    ):  # fmt: skip
        group = quotient(heads, kv_heads)
        per_group = reciprocal_for(group)
        row_groups = quotient(max_rows * group + (rows - 1), rows)
        pair = quotient(block_x(), row_groups)
        begin = i32((block_x() - pair * row_groups) * rows)
        sequence = quotient(pair, kv_heads)
        head = i32(pair - sequence * kv_heads)
        table = tables + i64(sequence) * table_stride * 4
        # Without a window, the first split's entries: asked for before the row's place is known.
        likely = i32(block_y() * (SPLIT // 16) + (lane_id() & (SPLIT // 16 - 1)))
        entry = load_b32(table + i64(min(likely, i32(table_stride - 1))) * 4)
        first_row = load_b32(cu_rows + i64(sequence) * 4)
        count = (load_b32(cu_rows + i64(sequence) * 4 + 4) - first_row) * group - begin
        count = i32(min(count, rows))
        earliest = latest = i32(0)
        if count > 0:
            initial = quotient_by(begin, per_group)
            final = quotient_by(begin + count - 1, per_group)
            earliest = i32(last_key(positions, sequence, first_row + initial))
            latest = i32(last_key(positions, sequence, first_row + final))
        start = i32(max(0, earliest - window + 1)) if window > 0 else i32(0)
        first_split = quotient(start, SPLIT)
        num_splits = i32(quotient(latest, SPLIT) - first_split + 1) if count > 0 else i32(0)
        workers = i32(min(num_blocks_y(), num_splits))
        if block_y() >= workers:
            if block_x() + block_y() == 0:
                wait_prerequisites()  # one thread block must: the kernels after rely on it
            return

        base, lane, warp = dynamic_shared(), lane_id(), shuffle_b32(thread_x() >> 5, 0)
        known = first_fresh(latest, first_row, positions)  # keys that the pools hold
        fresh_count = i32(latest + 1 - known)
        fresh_at = first_row, known, begin, count, group, head, fresh_count, per_group
        asked = ask(base, q, q_stride, fresh, fresh_at)
        if thread_x() < rows:
            index = begin + min(thread_x(), count - 1)
            position = last_key(positions, sequence, first_row + quotient_by(index, per_group))
            at = base + row_limits + thread_x() * 8
            store_shared_b32(at, max(0, position - window + 1) if window > 0 else 0)
            store_shared_b32(at + 4, position)
        if not is_apart:
            wait_prerequisites()  # the kernel before stored keys

        factor = f32(LOG2_E) if softcap > f32(0) else scale * f32(LOG2_E)
        inner = scale * fast_reciprocal(softcap) if softcap > f32(0) else f32(0)
        buffers = i32(base + warp * warp_bytes)
        q_row = i32(base + q_at + (lane & 15) * pitch + (lane >> 4) * 16)
        sink = i32(base + q_at)  # of a rehearsal: the queries are not there yet
        k_row = i32((lane & 7) * pitch + (lane >> 4) * (8 * pitch) + (lane & 8) * 2)
        v_row = i32((lane & 15) * pitch + (lane >> 4) * 16)
        head_bytes = BLOCK_LEN * dim * 2
        pools = k_pool, v_pool
        split = i32(first_split + block_y())
        while split < i32(first_split + num_splits):
            low = i32(max(split * (SPLIT // 16), start >> 4))
            high = i32(min((split + 1) * (SPLIT // 16) - 1, latest >> 4))
            if split != block_y():
                place_of = min(split * (SPLIT // 16) + (lane & (SPLIT // 16 - 1)), high)
                entry = load_b32(table + i64(place_of) * 4)
            first_block = i32(low + ((warp - low) & (WARPS - 1)))
            for stage in range(depth):
                ahead = i32(first_block + stage * WARPS)
                if ahead <= high:
                    number = shuffle_b32(entry, ahead & (SPLIT // 16 - 1))
                    source = (i64(number) * kv_heads + head) * head_bytes
                    target = buffers + stage * (2 * block_bytes)
                    seen = i32(known - ahead * 16)
                    copy_block(target, k_pool + source, seen, 1)
                    copy_commit()
                    copy_block(target + block_bytes, v_pool + source, seen, 1)
                    copy_commit()
                else:
                    copy_commit()
                    copy_commit()
            next_block = i32(first_block + depth * WARPS)
            held = hold(pools, entry, next_block, high, head, kv_heads, known)
            is_first = split == first_split + block_y()
            # Few thread blocks, one after the other the step's path, find none of this code in
            # their SM's instruction cache. So while they wait anyway, they go through it once, as
            # far as ``rehearsal`` says, with what their buffers hold. Nothing is waited for then,
            # be it memory that is on its way, and nothing is stored.
            is_early = is_apart and is_first and num_blocks_x() <= FEW_BLOCKS
            later = i32(first_block + asked_for * WARPS)
            # What no buffer has room for comes as far as L2, unless memory has enough to do.
            while is_early and num_blocks_x() <= ALONE and later <= high:
                number = shuffle_b32(entry, later & (SPLIT // 16 - 1))
                source = (i64(number) * kv_heads + head) * head_bytes
                seen = i32(known - later * 16)
                prefetch_block(k_pool + source, seen)
                prefetch_block(v_pool + source, seen)
                later = i32(later + WARPS)
            attempt = i32(0) if is_early and rehearsal > 0 else i32(1)
            while attempt < 2:
                if is_first:
                    if is_apart and attempt == 1:
                        wait_prerequisites()
                    bring(base, q, q_stride, fresh, fresh_at, asked, attempt == 1)
                first = load_rows(base + row_limits + (lane >> 2) * 8)
                last = load_rows(base + row_limits + (lane >> 2) * 8 + 4)
                values, maxima, totals = no_values(), no_maxima(), no_sums()
                slot, block = i32(0), first_block
                end = high if attempt == 1 else i32(min(high, first_block))
                while block <= end:
                    at = i32(buffers + slot * (2 * block_bytes))
                    ahead = i32(block + depth * WARPS)
                    number = shuffle_b32(entry, ahead & (SPLIT // 16 - 1))
                    source = (i64(number) * kv_heads + head) * head_bytes
                    seen = i32(known - ahead * 16)
                    target = at if attempt == 1 else sink
                    patched = block if attempt == 1 else i32(known >> 4)
                    if attempt == 1:
                        copied()
                    sync_warp()
                    patch(base, target, patched, fresh_at, 0)
                    scores = scores_of(q_row, at + k_row)
                    sync_warp()
                    if ahead <= high:
                        if holds and ahead == next_block:
                            if attempt == 1:  # else it would wait for them
                                put_held(at, held[0])
                        else:
                            copy_block(at, k_pool + source, seen, attempt)
                    copy_commit()
                    if softcap > f32(0):
                        scores = cap(scores, inner, softcap)
                    scores = mask(scores, first, last, block * 16 + 2 * (lane & 3))
                    greatest = maximum_of(scores, maxima)
                    decay = decay_of(maxima, greatest, factor)
                    maxima = greatest
                    weights, parts = weights_of(scores, maxima, factor)
                    totals = rows_fma(totals, decay, parts)
                    values = scale_rows(values, decay)
                    target = i32(at + block_bytes) if attempt == 1 else sink
                    if attempt == 1:
                        copied()
                    sync_warp()
                    patch(base, target, patched, fresh_at, 1)
                    values = values_of(values, weights, at + block_bytes + v_row)
                    sync_warp()
                    if ahead <= high:
                        if holds and ahead == next_block:
                            if attempt == 1:
                                put_held(at + block_bytes, held[1])
                        else:
                            copy_block(at + block_bytes, v_pool + source, seen, attempt)
                    copy_commit()
                    block = i32(block + WARPS)
                    slot = i32(0) if slot == depth - 1 else i32(slot + 1)
                if attempt == 0 and rehearsal == LOOP:
                    sync_threads()  # what it wrote to is the queries' next
                    attempt = i32(1)
                    continue
                if warp == i32((latest >> 4) + 1) & (WARPS - 1):  # the next block's: it is ahead
                    store_fresh(base, fresh, kv_heads, fresh_at, split, pools, attempt)
                totals = sum_lanes(totals)
                sync_threads()  # the buffers are free, and the place of the queries
                done = i32(split - first_split)
                is_output = workers == 1 and done == num_splits - 1
                if gate != 0 and is_output:
                    copy_gates(base, gate, gate_stride, fresh_at, attempt == 1)
                    copy_commit()
                own, step_to = i32(warp * rows + (lane >> 2)), i32(8 * part_pitch)
                at, sums_to = own * part_pitch, own * 8 + row_sums
                at, sums_to = i32(base + at), i32(base + sums_to)
                if attempt == 0:  # over each other
                    at, sums_to, step_to = sink, sink, i32(0)
                store_values(values, at + (lane & 3) * 8, step_to)
                put_rows(sums_to, scale_maxima(maxima, factor))
                put_rows(sums_to + 4, totals)
                if attempt == 1:
                    all_copied()
                sync_threads()
                item, end = thread_x(), i32(count * vectors)
                end = end if attempt == 1 else i32(min(end, num_threads_x()))
                while item < end:
                    row = quotient(item, vectors)
                    column = (item - row * vectors) * 4
                    maximum, total, columns = merge_warps(base, row, column)
                    step = kv_heads * max_rows * group  # from a split's results to the next one's
                    if workers == 1:
                        state = empty_row()
                        if done > 0:
                            at = first_part(sequence, head, begin, max_rows * group, kv_heads, room)
                            at += row + i64(i32(done - 1) & 1) * step
                            before = load_f32x4(partials + (at * dim + column) * 4)
                            pair = load_f32x2(sums + at * 8)
                            state = pair[0], pair[1], before
                        maximum, total, columns = add_part(state, (maximum, total), columns)
                    if is_output:
                        token = quotient_by(begin + row, per_group)
                        target = out + i64(first_row + token) * out_stride + column * 2
                        target += i64(head * group + begin + row - token * group) * (2 * dim)
                        words = output_words(columns, total)
                        if gate != 0:
                            gates = load_shared_b32x2(base + q_at + row * pitch + column * 2)
                            words = gated_words(words, gates)
                        store_b32x2_if(target, words, attempt)
                    else:
                        at = first_part(sequence, head, begin, max_rows * group, kv_heads, room)
                        at += row + i64(done & 1 if workers == 1 else done) * step
                        store_f32x4_if(partials + (at * dim + column) * 4, columns, attempt)
                        if column == 0:
                            store_f32x2_if(sums + at * 8, (maximum, total), attempt)
                    item = i32(item + num_threads_x())
                sync_threads()
                attempt = i32(attempt + 1)
            split = i32(split + workers)

        if workers > 1:
            place = first_part(sequence, head, begin, max_rows * group, kv_heads, room)
            step = i64(kv_heads) * max_rows * group
            fence_device()
            sync_threads()
            if thread_x() == 0:
                finished = atomic_add_b32(counters + i64(block_x()) * 4, 1)
                store_shared_b32(base, finished)
            sync_threads()
            if load_shared_b32(base) == workers - 1:
                fence_device()
                if thread_x() == 0:
                    store_b32(counters + i64(block_x()) * 4, 0)
                for row in range(warp, count, WARPS):
                    token = quotient_by(begin + row, per_group)
                    of_head = i64(head * group + begin + row - token * group) * (2 * dim)
                    target = out + i64(first_row + token) * out_stride + of_head
                    gates_at = i64(0)
                    if gate != 0:
                        gates_at = gate + i64(first_row + token) * gate_stride + of_head
                    combine(partials, sums, place + row, step, num_splits, target, gates_at)

    return attend
