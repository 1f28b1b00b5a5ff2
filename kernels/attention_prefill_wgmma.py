"""Causal attention of prompt rows over paged keys and values, on Hopper's ``wgmma`` and TMA.

A thread block takes one query head and the rows at 128 i … 128 i + 127 of one sequence, absolute
positions, also where a chunk begins or ends inside. Two warp groups have 64 rows each, a warp of a
third brings tiles of 128 keys (80 for a head of 256 dimensions), at absolute multiples of their
size, from the diagonal down to the first key that the rows' window lets them see. Only tiles that
the diagonal or the window's edge crosses are masked. Q · Kᵀ of a tile and P · V of the one before
it are in flight together. Up to 128 dimensions the two groups take turns: one multiplies while the
other exponentiates. With 256 they need not: two thirds of the time go into products.

Order, which depends on a row's position alone: tiles descending from its own, with the running
maximum of the online softmax. A tile that a row does not see leaves its bits as they are. P is
rounded to bf16 before P · V; the sum of P is not.

In shared memory a row is ``row_bytes`` long, 128 or 64, with TMA's swizzle of that width, and a
head lies in as many parts. Q: [group][part][64 rows]; K and V: [pieces of 8 rows][part][8 rows], a
block of the pool being two pieces and one TMA copy.

Source: Shah et al., "FlashAttention-3" (2024), arXiv 2407.08608.
"""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import device, f32, i32, i64
from atlas_kernels.attention_decode_body import LOG2_E
from atlas_kernels.attention_plan import WGMMA_KEYS, WGMMA_ROWS, part_columns, wgmma_variant
from atlas_kernels.attention_prefill import FOREVER
from atlas_kernels.attention_tiles import find_tile
from atlas_kernels.kv_store import BLOCK_LEN
from atlas_kernels.ptx_async import (
    async_fence,
    barrier_arrive_after,
    barrier_arrive_if,
    barrier_expect,
    barrier_init,
    barrier_init_fence,
    barrier_wait,
    copy16_or_zero,
    copy_commit,
    copy_wait,
    launch_dependents,
    map_acquire,
    tile_load,
    wait_prerequisites,
)
from atlas_kernels.ptx_math import fast_reciprocal, quotient
from atlas_kernels.ptx_memory import (
    dynamic_shared,
    load_b32,
    load_shared_b32x4,
    store_b32x4,
    store_shared_b32x4,
)
from atlas_kernels.ptx_tile import (
    MASKED,
    tile_decay,
    tile_exponentials,
    tile_fill,
    tile_mask,
    tile_maximum,
    tile_positions,
    tile_reciprocal,
    tile_rows_fma,
    tile_scale,
    tile_softcap,
    tile_store_bf16,
    tile_sum_lanes,
)
from atlas_kernels.ptx_warp import (
    arrive_named,
    block_x,
    block_y,
    lane_id,
    shuffle_b32,
    sync_named,
    sync_threads,
    sync_warp,
    thread_x,
)
from atlas_kernels.ptx_wgmma import (
    descriptor,
    pack_accumulators,
    set_max_registers,
    settle,
    wgmma_stage,
    wgmma_stage_registers,
    wgmma_wait0,
    wgmma_wait1,
    wgmma_zero,
)
from atlas_kernels.registry import kernel

ROWS = WGMMA_ROWS
THREADS = 384
ADDRESS = 0x3FFFF
FULL_K, FREE_K, FULL_V, FREE_V = 0, 16, 32, 48
"""Where the barriers of the tiles stand, two each."""

VARIANTS = {
    wgmma_variant(dim, capped=capped): (dim, keys, capped)
    for dim, keys in WGMMA_KEYS.items()
    for capped in (False, True)
}


def group_bytes(dim: int) -> int:
    """Of a group's queries, whose place its output takes: rows 16 bytes apart; a whole KB."""
    return 64 * (2 * dim + 16)


def shared_bytes(dim: int, keys: int, capped: bool = False) -> int:
    """Queries, two tiles each of keys and values, and eight barriers."""
    return 2 * group_bytes(dim) + 8 * keys * dim + 64


@kernel(
    "attention_prefill_wgmma",
    args="ptr ptr ptr ptr ptr ptr ptr ptr i32 i32 i32 i32 i32 i64 i64 f32 f32",
    threads=THREADS,
    shared=shared_bytes,
    arch="sm_90a",
    lto=True,
    variants=VARIANTS,
)
def make_attention_prefill_wgmma(dim: int, keys: int, capped: bool) -> Any:
    """q, out [T, H, K] over the pools [B, HK, 16, K], all bf16; chunks of any length.

    Grid (H, ``attention_plan.wgmma_tiles``) for N = ``sequences`` chunks. ``k_map`` and ``v_map``
    are addresses of tensor maps of the pools, see ``attention_plan.pool_view``. The other arguments
    are those of ``attention_prefill``; ``softcap`` is read by the ``_cap`` variants alone, in which
    it must not be 0.
    """
    columns, pitch = part_columns(dim), 2 * dim + 16
    row_bytes, parts, chunks = 2 * columns, dim // columns, dim // 8
    part_chunks = columns // 8
    own_bytes, tile_bytes, piece_bytes = group_bytes(dim), 2 * keys * dim, 2 * BLOCK_LEN * dim
    k_at, v_at = 2 * own_bytes, 2 * own_bytes + 2 * tile_bytes
    barriers_at = v_at + 2 * tile_bytes
    blocks, tile_words = keys // BLOCK_LEN, tile_bytes >> 4
    takes_turns = keys == ROWS  # then, too, both groups begin at the same tile

    q_constant = descriptor(8 * row_bytes, swizzle=row_bytes)
    k_constant = descriptor(16 * dim, swizzle=row_bytes)
    v_constant = descriptor(16 * dim, 8 * row_bytes, swizzle=row_bytes)
    steps = [(part, 32 * step) for part in range(parts) for step in range(columns // 16)]
    q_steps = tuple(part * 64 * row_bytes + step for part, step in steps)
    k_steps = tuple(part * 8 * row_bytes + step for part, step in steps)
    scores_of = wgmma_stage(keys, q_steps, k_steps, accumulate=False)
    values_of = wgmma_stage_registers(
        dim, tuple(32 * dim * step for step in range(blocks)), b_transposed=True
    )
    scores_settled, values_settled = settle(keys), settle(dim)
    zero, pack = wgmma_zero(dim), pack_accumulators(keys)
    cap, mask, maximum_of = tile_softcap(keys, 1), tile_mask(keys, 1), tile_maximum(keys, 1, 4)
    exponentials, decay_of = tile_exponentials(keys, 1), tile_decay(1)
    rows_fma, sum_lanes, scale_rows = tile_rows_fma(1), tile_sum_lanes(1), tile_scale(dim, 1)
    reciprocals, positions_of = tile_reciprocal(1), tile_positions(1)
    no_maxima = tile_fill(2, MASKED)
    store_rows = tile_store_bf16(dim, 1, pitch)
    fewer, more = set_max_registers(40, more=False), set_max_registers(232, more=True)
    load_piece, copied = tile_load(5), copy_wait(0)

    @device
    def load_queries(target, source, stride, first, count):
        """A group's 64 rows; those before ``first`` and from ``first + count`` on become zeros."""
        for i in range(chunks // 2):
            chunk = i32((thread_x() & 127) + 128 * i)
            row = quotient(chunk, chunks)
            column = chunk - row * chunks
            inside = row >= first and row < first + count
            at = source + (row - first if inside else 0) * stride + column * 16
            part = quotient(column, part_chunks)
            bits = (column ^ (row * row_bytes >> 7)) & (part_chunks - 1)
            place = part * (64 * row_bytes) + row * row_bytes + bits * 16
            copy16_or_zero(target + place, at, i32(16) if inside else i32(0))
        copy_commit()
        copied()
        async_fence()

    @device
    def clear_values(tile, count):
        """Zeros in the rows of V from ``count`` on: 0 · what lies there must be 0."""
        for chunk in range(count * chunks + (thread_x() & 127), keys * chunks, 128):
            row = quotient(i32(chunk), chunks)
            column = chunk - row * chunks
            part = quotient(i32(column), part_chunks)
            place = (row >> 3) * (16 * dim) + part * (8 * row_bytes) + (row & 7) * row_bytes
            store_shared_b32x4(tile + place + (column & (part_chunks - 1)) * 16, (0, 0, 0, 0))
        async_fence()

    def advance_over(masked: bool) -> Any:
        """A tile after the first: its scores and weights, and the values of the one before it."""

        @device
        def advance(
            values, weights, maxima, totals, turn, q_words, k_words, v_words, barriers,
            mine, other, lead, factor, inner, softcap, first, last, key,
        ):  # fmt: skip
            stage, before = turn & 1, (turn & 1) ^ 1
            barrier_wait(barriers + FULL_K + stage * 8, (turn >> 1) & 1)
            if takes_turns:
                sync_named(mine, 256)
            scores = scores_of(q_words, k_words + stage * tile_words)
            barrier_wait(barriers + FULL_V + before * 8, ((turn - 1) >> 1) & 1)
            values = values_of(values, weights, v_words + before * tile_words)
            if takes_turns:
                arrive_named(other, 256)
            wgmma_wait1()
            scores = scores_settled(scores)
            if capped:
                scores = cap(scores, inner, softcap)
            if masked:
                scores = mask(scores, first, last, key)
            greatest = maximum_of(scores, maxima)
            decay = decay_of(maxima, greatest, factor)
            scores, parts, half = exponentials(scores, greatest, factor)
            totals = rows_fma(totals, decay, parts)
            # So about half of the exponentials stand before the wait for P · V.
            barrier_arrive_after(barriers + FREE_K + stage * 8, lead, half)
            wgmma_wait0()
            values = values_settled(values)
            barrier_arrive_if(barriers + FREE_V + before * 8, lead)
            return scale_rows(values, decay), pack(scores), greatest, totals

        return advance

    advance, advance_masked = advance_over(False), advance_over(True)

    def attention_prefill_wgmma(
        q, k_map, v_map, out, tables, first_rows, cu_rows, positions,
        heads, kv_heads, sequences, window, table_stride, q_stride, out_stride, scale, softcap,
    ):  # fmt: skip
        launch_dependents()
        wait_prerequisites()
        sequence, tile = find_tile(block_y(), sequences, first_rows, cu_rows, positions)
        if sequence < 0:
            return
        head = block_x()
        chunk_begin = load_b32(first_rows + sequence * 4)
        chunk_len = load_b32(cu_rows + sequence * 4 + 4) - chunk_begin
        if chunk_len <= 0:
            return
        start = load_b32(positions + i64(chunk_begin) * 4)
        end = start + chunk_len
        begin = i32(((end - 1) // ROWS - tile) * ROWS)
        reach = i32(window if window > 0 else FOREVER) - 1  # keys before a row's own
        top = quotient(i32(min(begin + ROWS, end) - 1), keys)
        bottom = quotient(i32(max(0, begin - reach)), keys)
        base, lane, warp = dynamic_shared(), lane_id(), shuffle_b32(thread_x() >> 5, 0)
        barriers = i32(base + barriers_at)
        if thread_x() == 0:
            for stage in range(2):
                barrier_init(barriers + FULL_K + 8 * stage, 1)
                barrier_init(barriers + FULL_V + 8 * stage, 1)
                barrier_init(barriers + FREE_K + 8 * stage, 8)
                barrier_init(barriers + FREE_V + 8 * stage, 8)
            barrier_init_fence()
        sync_threads()
        if warp >= 8:
            fewer()
            if warp == 8:
                if lane < blocks:
                    map_acquire(k_map)
                    map_acquire(v_map)
                table = tables + i64(sequence) * table_stride * 4
                kv_head = quotient(head, quotient(heads, kv_heads))
                last_block, own = (end - 1) >> 4, min(lane, blocks - 1)
                tile = top
                turn = 0
                while tile >= bottom:
                    stage, phase = (turn & 1) * 8, ((turn >> 1) & 1) ^ 1
                    block = min(tile * blocks + own, last_block)
                    piece = load_b32(table + i64(block) * 4) * kv_heads + kv_head
                    place = base + (turn & 1) * tile_bytes + own * piece_bytes
                    barrier_wait(barriers + FREE_K + stage, phase)
                    if lane == 0:
                        barrier_expect(barriers + FULL_K + stage, tile_bytes)
                    sync_warp()
                    if lane < blocks:
                        load_piece(
                            place + k_at, k_map, barriers + FULL_K + stage, 0, 0, 0, 0, piece
                        )
                    barrier_wait(barriers + FREE_V + stage, phase)
                    if lane == 0:
                        barrier_expect(barriers + FULL_V + stage, tile_bytes)
                    sync_warp()
                    if lane < blocks:
                        load_piece(
                            place + v_at, v_map, barriers + FULL_V + stage, 0, 0, 0, 0, piece
                        )
                    tile -= 1
                    turn += 1
                    sync_warp()  # no lane may fall two phases behind
        else:
            more()
            group, quarter = warp >> 2, warp & 3
            lead = 1 if lane == 0 else 0
            mine, other = i32(1 + group), i32(2 - group)
            queries = base + group * own_bytes
            at = i32(begin + group * 64)  # position of the group's first row
            first = i32(max(0, start - at))  # rows of the group in the chunk
            count = i32(min(64, end - at) - first)
            row = i64(chunk_begin) + max(0, at - start)
            source = q + row * q_stride + i64(head) * (2 * dim)
            load_queries(queries, source if count > 0 else q, q_stride, first, count)
            sync_named(3 + group, 128)
            q_words = i64(q_constant) | ((queries & ADDRESS) >> 4)
            k_words = i64(k_constant) | (((base + k_at) & ADDRESS) >> 4)
            v_words = i64(v_constant) | (((base + v_at) & ADDRESS) >> 4)
            position = i32(at + quarter * 16 + (lane >> 2))
            latest, earliest = positions_of(position), positions_of(i32(position - reach))
            lane_key = 2 * (lane & 3)
            factor = f32(LOG2_E) if capped else scale * f32(LOG2_E)
            inner = scale * fast_reciprocal(softcap) if capped else f32(0)
            tile = quotient(i32(min(at + 64, end) - 1), keys)
            turn = i32(top - tile)
            if turn > 0:  # one tile that none of the group's rows sees
                barrier_arrive_if(barriers + FREE_K, lead)
                barrier_arrive_if(barriers + FREE_V, lead)
            if takes_turns and group == 1:
                arrive_named(1, 256)  # group 0 begins
            # The first tile.
            barrier_wait(barriers + FULL_K + turn * 8, 0)
            if takes_turns:
                sync_named(mine, 256)
            scores = scores_of(q_words, k_words + turn * tile_words)
            if takes_turns:
                arrive_named(other, 256)
            wgmma_wait0()
            scores = scores_settled(scores)
            barrier_arrive_if(barriers + FREE_K + turn * 8, lead)
            if capped:
                scores = cap(scores, inner, softcap)
            scores = mask(scores, earliest, latest, i32(tile * keys + lane_key))
            maxima = maximum_of(scores, no_maxima())
            scores, totals, _ = exponentials(scores, maxima, factor)
            weights = pack(scores)
            values = zero()
            present = i32(end - tile * keys)
            if present < keys:
                barrier_wait(barriers + FULL_V + turn * 8, 0)
                clear_values(base + v_at + turn * tile_bytes, present)
                sync_named(3 + group, 128)
            # Tiles that every row sees whole: below the diagonal, above the edge of the window.
            below = max(quotient(i32(at + 1), keys), bottom)
            inside = max(quotient(i32(max(0, at + 63 - reach + keys - 1)), keys), bottom)
            tile -= 1
            turn += 1
            while tile >= bottom:
                while tile >= below:
                    values, weights, maxima, totals = advance_masked(
                        values, weights, maxima, totals, turn, q_words, k_words, v_words, barriers,
                        mine, other, lead, factor, inner, softcap,
                        earliest, latest, i32(tile * keys + lane_key),
                    )  # fmt: skip
                    tile -= 1
                    turn += 1
                while tile >= inside:
                    values, weights, maxima, totals = advance(
                        values, weights, maxima, totals, turn, q_words, k_words, v_words, barriers,
                        mine, other, lead, factor, inner, softcap, earliest, latest, i32(0),
                    )  # fmt: skip
                    tile -= 1
                    turn += 1
                below = bottom
            if takes_turns and group == 0:
                sync_named(1, 256)  # takes the other group's last arrival
            before = (turn - 1) & 1
            barrier_wait(barriers + FULL_V + before * 8, ((turn - 1) >> 1) & 1)
            values = values_of(values, weights, v_words + before * tile_words)
            shares = reciprocals(sum_lanes(totals))
            wgmma_wait0()
            values = scale_rows(values_settled(values), shares)
            sync_named(3 + group, 128)  # the whole group has read its queries
            rows = queries + quarter * (16 * pitch)
            store_rows(values, i32(rows + (lane >> 2) * pitch + (lane & 3) * 4))
            sync_warp()
            for chunk in range(lane, 16 * chunks, 32):
                line = quotient(i32(chunk), chunks)
                own, column = quarter * 16 + line, chunk - line * chunks
                if own >= first and own < first + count:
                    words = load_shared_b32x4(rows + line * pitch + column * 16)
                    target = out + (row + own - first) * out_stride + i64(head) * (2 * dim)
                    store_b32x4(target + column * 16, words)

    return attention_prefill_wgmma
