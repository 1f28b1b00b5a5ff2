"""Causal attention of prompt rows over paged keys and values, on Hopper's ``wgmma`` and TMA.

A thread block takes one query head and the rows at 128 i … 128 i + 127 of one sequence, absolute
positions, also where a chunk begins or ends inside. Two warp groups have 64 rows each, a warp of a
third brings tiles of 128 keys, from the diagonal down to key 0, so that only the first is masked.
Q · Kᵀ of a tile and P · V of the one before it are in flight together, and the two groups take
turns: one multiplies while the other exponentiates.

Order, which depends on a row's position alone: tiles descending from its own, with the running
maximum of the online softmax. P is rounded to bf16 before P · V; the sum of P is not.

In shared memory rows are 128 bytes with TMA's swizzle. Q: [group][half][64 rows]; K and V:
[16 pieces of 8 rows][half][8 rows], a block of the pool being two pieces and one TMA copy.

Source: Shah et al., "FlashAttention-3" (2024), arXiv 2407.08608.
"""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import device, f32, i32, i64
from atlas_kernels.attention_decode_body import LOG2_E
from atlas_kernels.ptx_async import (
    async_fence,
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
from atlas_kernels.ptx_math import quotient
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

DIM, ROWS, KEYS = 128, 128, 128
THREADS = 384
TILE_BYTES = KEYS * DIM * 2
PIECE_BYTES = 16 * DIM * 2  # one head of one block of the pool
PITCH = 2 * DIM + 16  # of the output's rows, which take the place of a group's queries
GROUP_BYTES = 64 * PITCH  # a multiple of 1,024
K_AT, V_AT = 2 * GROUP_BYTES, 2 * GROUP_BYTES + 2 * TILE_BYTES
FULL_K = 2 * GROUP_BYTES + 4 * TILE_BYTES
FREE_K, FULL_V, FREE_V = FULL_K + 16, FULL_K + 32, FULL_K + 48
SHARED_BYTES = FULL_K + 64
ADDRESS = 0x3FFFF

Q_DESCRIPTOR = descriptor(1024)
K_DESCRIPTOR = descriptor(2048)
V_DESCRIPTOR = descriptor(2048, 1024)


@kernel(
    "attention_prefill_wgmma",
    args="ptr ptr ptr ptr ptr ptr ptr i32 i32 i32 i64 i64 f32",
    threads=THREADS,
    shared=SHARED_BYTES,
    arch="sm_90a",
    lto=True,
    variants={"d128": (DIM,)},
)
def make_attention_prefill_wgmma(dim: int) -> Any:
    """q, out [T, H, 128] over the pools [B, HK, 16, 128], all bf16; chunks of any length.

    Grid (N · H, ⌈most rows / 128⌉ + 1). ``k_map`` and ``v_map`` are addresses of tensor maps of the
    pools (128 bytes in global memory): dimensions (64, 8, 2, 2, B · HK), strides in bytes
    (256, 128, 2048, 4096), box (64, 8, 2, 2, 1), 128-byte swizzle. The other arguments are those of
    ``attention_prefill``; without a window and a softcap.
    """
    q_steps = tuple(half * 8192 + 32 * step for half in range(2) for step in range(4))
    k_steps = tuple(half * 1024 + 32 * step for half in range(2) for step in range(4))
    scores_of = wgmma_stage(KEYS, q_steps, k_steps, accumulate=False)
    values_of = wgmma_stage_registers(
        dim, tuple(4096 * step for step in range(8)), b_transposed=True
    )
    settled, zero, pack = settle(KEYS), wgmma_zero(dim), pack_accumulators(KEYS)
    mask, maximum_of = tile_mask(KEYS, 1), tile_maximum(KEYS, 1)
    exponentials, decay_of = tile_exponentials(KEYS, 1), tile_decay(1)
    rows_fma, sum_lanes, scale_rows = tile_rows_fma(1), tile_sum_lanes(1), tile_scale(dim, 1)
    reciprocals, positions_of = tile_reciprocal(1), tile_positions(1)
    no_maxima = tile_fill(2, MASKED)
    store_rows = tile_store_bf16(dim, 1, PITCH)
    fewer, more = set_max_registers(40, more=False), set_max_registers(232, more=True)
    load_piece, copied = tile_load(5), copy_wait(0)

    @device
    def load_queries(target, source, stride, first, count):
        """A group's 64 rows; those before ``first`` and from ``first + count`` on become zeros."""
        for i in range(8):
            chunk = (thread_x() & 127) + 128 * i
            row, column = chunk >> 4, chunk & 15
            inside = row >= first and row < first + count
            at = source + (row - first if inside else 0) * stride + column * 16
            place = (column >> 3) * 8192 + row * 128 + ((column ^ row) & 7) * 16
            copy16_or_zero(target + place, at, i32(16) if inside else i32(0))
        copy_commit()
        copied()
        async_fence()

    @device
    def clear_values(tile, keys):
        """Zeros in the rows of V from ``keys`` on: 0 · what lies there must be 0."""
        for chunk in range(keys * 16 + (thread_x() & 127), KEYS * 16, 128):
            row, column = chunk >> 4, chunk & 15
            place = (row >> 3) * 2048 + (column >> 3) * 1024 + (row & 7) * 128
            store_shared_b32x4(tile + place + (column & 7) * 16, (0, 0, 0, 0))
        async_fence()

    def attention_prefill_wgmma(
        q, k_map, v_map, out, tables, cu_rows, positions,
        heads, kv_heads, table_stride, q_stride, out_stride, scale,
    ):  # fmt: skip
        launch_dependents()
        wait_prerequisites()
        sequence = quotient(block_x(), heads)
        head = i32(block_x() - sequence * heads)
        chunk_begin = load_b32(cu_rows + sequence * 4)
        chunk_len = load_b32(cu_rows + sequence * 4 + 4) - chunk_begin
        if chunk_len <= 0:
            return
        start = load_b32(positions + i64(chunk_begin) * 4)
        end = start + chunk_len
        top = i32((end - 1) // ROWS - block_y())  # the longest tiles come first
        if top < start // ROWS:
            return
        base, lane, warp = dynamic_shared(), lane_id(), shuffle_b32(thread_x() >> 5, 0)
        if thread_x() == 0:
            for stage in range(2):
                barrier_init(base + FULL_K + 8 * stage, 1)
                barrier_init(base + FULL_V + 8 * stage, 1)
                barrier_init(base + FREE_K + 8 * stage, 8)
                barrier_init(base + FREE_V + 8 * stage, 8)
            barrier_init_fence()
        sync_threads()
        if warp >= 8:
            fewer()
            if warp == 8:
                if lane < 8:
                    map_acquire(k_map)
                    map_acquire(v_map)
                table = tables + i64(sequence) * table_stride * 4
                kv_head = quotient(head, quotient(heads, kv_heads))
                last_block = (end - 1) >> 4
                tile = top
                turn = 0
                while tile >= 0:
                    stage, phase = (turn & 1) * 8, ((turn >> 1) & 1) ^ 1
                    block = min(tile * 8 + (lane & 7), last_block)
                    piece = load_b32(table + i64(block) * 4) * kv_heads + kv_head
                    place = base + (turn & 1) * TILE_BYTES + (lane & 7) * PIECE_BYTES
                    barrier_wait(base + FREE_K + stage, phase)
                    if lane == 0:
                        barrier_expect(base + FULL_K + stage, TILE_BYTES)
                    sync_warp()
                    if lane < 8:
                        load_piece(place + K_AT, k_map, base + FULL_K + stage, 0, 0, 0, 0, piece)
                    barrier_wait(base + FREE_V + stage, phase)
                    if lane == 0:
                        barrier_expect(base + FULL_V + stage, TILE_BYTES)
                    sync_warp()
                    if lane < 8:
                        load_piece(place + V_AT, v_map, base + FULL_V + stage, 0, 0, 0, 0, piece)
                    tile -= 1
                    turn += 1
                    sync_warp()  # no lane may fall two phases behind
        else:
            more()
            group, quarter = warp >> 2, warp & 3
            lead = 1 if lane == 0 else 0
            mine, other = i32(1 + group), i32(2 - group)
            queries = base + group * GROUP_BYTES
            first = i32(max(0, start - top * ROWS - group * 64))  # rows of the group in the chunk
            count = i32(min(64, end - top * ROWS - group * 64) - first)
            row = i64(chunk_begin) + max(0, top * ROWS + group * 64 - start)
            source = q + row * q_stride + i64(head) * (2 * DIM)
            load_queries(queries, source if count > 0 else q, q_stride, first, count)
            sync_named(3 + group, 128)
            q_words = i64(Q_DESCRIPTOR) | ((queries & ADDRESS) >> 4)
            k_words = i64(K_DESCRIPTOR) | (((base + K_AT) & ADDRESS) >> 4)
            v_words = i64(V_DESCRIPTOR) | (((base + V_AT) & ADDRESS) >> 4)
            last = positions_of(i32(group * 64 + quarter * 16 + (lane >> 2)))
            if group == 1:
                arrive_named(1, 256)  # group 0 begins
            factor = scale * f32(LOG2_E)
            # The diagonal tile.
            barrier_wait(base + FULL_K, 0)
            sync_named(mine, 256)
            scores = scores_of(q_words, k_words)
            arrive_named(other, 256)
            wgmma_wait0()
            scores = settled(scores)
            barrier_arrive_if(base + FREE_K, lead)
            scores = mask(scores, positions_of(i32(-KEYS)), last, i32(2 * (lane & 3)))
            maxima = maximum_of(scores, no_maxima())
            scores, totals = exponentials(scores, maxima, factor)
            weights = pack(scores)
            values = zero()
            keys = i32(min(KEYS, end - top * ROWS))
            if keys < KEYS:
                barrier_wait(base + FULL_V, 0)
                clear_values(base + V_AT, keys)
                sync_named(3 + group, 128)
            turn = 1
            while turn <= top:
                stage, before = turn & 1, (turn & 1) ^ 1
                barrier_wait(base + FULL_K + stage * 8, (turn >> 1) & 1)
                sync_named(mine, 256)
                scores = scores_of(q_words, k_words + stage * (TILE_BYTES >> 4))
                barrier_wait(base + FULL_V + before * 8, ((turn - 1) >> 1) & 1)
                values = values_of(values, weights, v_words + before * (TILE_BYTES >> 4))
                arrive_named(other, 256)
                wgmma_wait1()
                scores = settled(scores)
                barrier_arrive_if(base + FREE_K + stage * 8, lead)
                greatest = maximum_of(scores, maxima)
                decay = decay_of(maxima, greatest, factor)
                maxima = greatest
                scores, parts = exponentials(scores, maxima, factor)
                totals = rows_fma(totals, decay, parts)
                wgmma_wait0()
                values = settled(values)
                barrier_arrive_if(base + FREE_V + before * 8, lead)
                values = scale_rows(values, decay)
                weights = pack(scores)
                turn += 1
            if group == 0:
                sync_named(1, 256)  # takes the other group's last arrival
            before = (turn - 1) & 1
            barrier_wait(base + FULL_V + before * 8, ((turn - 1) >> 1) & 1)
            values = values_of(values, weights, v_words + before * (TILE_BYTES >> 4))
            shares = reciprocals(sum_lanes(totals))
            wgmma_wait0()
            values = scale_rows(settled(values), shares)
            sync_named(3 + group, 128)  # the whole group has read its queries
            rows = queries + quarter * (16 * PITCH)
            store_rows(values, i32(rows + (lane >> 2) * PITCH + (lane & 3) * 4))
            sync_warp()
            for chunk in range(lane, 16 * 16, 32):
                own = quarter * 16 + (chunk >> 4)
                if own >= first and own < first + count:
                    words = load_shared_b32x4(rows + (chunk >> 4) * PITCH + (chunk & 15) * 16)
                    target = out + (row + own - first) * out_stride + i64(head) * (2 * DIM)
                    store_b32x4(target + (chunk & 15) * 16, words)

    return attention_prefill_wgmma
