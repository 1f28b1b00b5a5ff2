"""Causal attention of prompt rows over paged keys and values, on ``mma.sync``.

A thread block takes one query head and a tile of rows of one sequence's chunk; each of its four
warps has 16 · tiles rows and sees every key. Keys and values come in steps of a few blocks, at
absolute multiples of the step, by ``cp.async`` into two buffers: one step is copied while the one
before it is used.

Order, which depends on a row's position alone: steps ascending from the first that it sees, with
the running maximum of the online softmax. A step of keys that a row does not see leaves its bits as
they are, so a prompt may be cut anywhere. P is rounded to bf16 before P · V; the sum of P is not.

Source: Dao, "FlashAttention-2" (2023), arXiv 2307.08691.
"""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import device, f32, i32, i64
from atlas_kernels.attention_decode_body import LOG2_E
from atlas_kernels.attention_decode_layout import key_pitch
from atlas_kernels.attention_plan import PREFILL_SHAPES, prefill_variant
from atlas_kernels.kv_store import BLOCK_LEN
from atlas_kernels.ptx_async import (
    copy16_or_zero,
    copy_commit,
    copy_wait,
    launch_dependents,
    wait_prerequisites,
)
from atlas_kernels.ptx_math import fast_reciprocal, quotient
from atlas_kernels.ptx_memory import dynamic_shared, load_b32, load_shared_b32x4, store_b32x4
from atlas_kernels.ptx_tile import (
    MASKED,
    tile_decay,
    tile_fill,
    tile_mask,
    tile_maximum,
    tile_positions,
    tile_reciprocal,
    tile_rows_fma,
    tile_scale,
    tile_scores,
    tile_softcap,
    tile_store_bf16,
    tile_sum_lanes,
    tile_values,
    tile_weights,
)
from atlas_kernels.ptx_warp import (
    block_x,
    block_y,
    lane_id,
    shuffle_b32,
    sync_threads,
    sync_warp,
    thread_x,
)
from atlas_kernels.registry import kernel

THREADS = 128
WARPS = THREADS // 32
FOREVER = 1 << 30
"""Keys that a row without a window looks back."""

VARIANTS = {
    prefill_variant(dim): (dim, keys, tiles) for dim, (keys, tiles) in PREFILL_SHAPES.items()
}


def shared_bytes(dim: int, keys: int, tiles: int) -> int:
    """Dynamic shared memory: two steps of keys and values, and the queries."""
    return (4 * keys + WARPS * 16 * tiles) * key_pitch(dim)


@kernel(
    "attention_prefill",
    args="ptr ptr ptr ptr ptr ptr ptr ptr i32 i32 i32 i32 i64 i64 f32 f32",
    threads=THREADS,
    min_blocks=2,
    shared=shared_bytes,
    variants=VARIANTS,
)
def make_attention_prefill(dim: int, keys: int, tiles: int) -> Any:
    """q, out [T, H, K] over the pools [B, HK, 16, K], all bf16; chunks of any length.

    Grid (N · H, ⌈most rows / (64 · tiles)⌉). ``tables`` int32 [N, ``table_stride``],
    ``first_rows`` int32 [N] (or ``cu_rows``: every row), ``cu_rows`` int32 [N + 1] and
    ``positions`` int32 [T] as in the op ``attention_prefill``, the rows of a sequence at positions
    that follow each other. ``window`` 0 and ``softcap`` 0 mean none; ``q_stride``,
    ``out_stride`` in bytes.
    """
    chunks, pitch = dim // 8, key_pitch(dim)
    own_rows = 16 * tiles  # of a warp
    rows = WARPS * own_rows
    step_bytes = keys * pitch
    q_at = 4 * step_bytes
    blocks = keys // BLOCK_LEN
    step_chunks = keys * chunks
    block_chunks = BLOCK_LEN * chunks
    # Then a thread copies the same columns of every row it meets, and a pass lies in one block.
    regular = THREADS % chunks == 0 and block_chunks % THREADS == 0

    scores_of = tile_scores(dim, keys, tiles, pitch)
    values_of = tile_values(dim, keys, tiles, pitch)
    cap, mask = tile_softcap(keys, tiles), tile_mask(keys, tiles)
    maximum_of, weights_of = tile_maximum(keys, tiles), tile_weights(keys, tiles)
    decay_of, scale_rows = tile_decay(tiles), tile_scale(dim, tiles)
    rows_fma, sum_lanes = tile_rows_fma(tiles), tile_sum_lanes(tiles)
    no_values, no_sums = tile_fill(own_rows * dim // 32, 0.0), tile_fill(2 * tiles, 0.0)
    no_maxima, positions_of = tile_fill(2 * tiles, MASKED), tile_positions(tiles)
    reciprocals, store_rows = tile_reciprocal(tiles), tile_store_bf16(dim, tiles, pitch)
    all_copied = copy_wait(0)

    @device
    def copy_step(target, pool, entry, kv_heads, head, seen):
        """The thread block's copy of a step; rows past the last key become zeros."""
        if regular:
            row = quotient(thread_x(), chunks)
            target += (thread_x() + row) * 16
            for i in range(0, step_chunks, THREADS):
                number = shuffle_b32(entry, i // block_chunks)
                source = pool + (i64(number) * kv_heads + head) * (block_chunks * 16)
                num_bytes = i32(16) if row + i // chunks < seen else i32(0)
                place = source + (thread_x() + i % block_chunks) * 16
                copy16_or_zero(target + (i + i // chunks) * 16, place, num_bytes)
        else:
            for i in range(0, step_chunks, THREADS):
                chunk = i + thread_x()
                block, row = quotient(chunk, block_chunks), quotient(chunk, chunks)
                number = shuffle_b32(entry, block)
                source = pool + (i64(number) * kv_heads + head) * (block_chunks * 16)
                num_bytes = i32(16) if row < seen else i32(0)
                place = source + (chunk - block * block_chunks) * 16
                copy16_or_zero(target + (chunk + row) * 16, place, num_bytes)

    def attention_prefill(
        q, k_pool, v_pool, out, tables, first_rows, cu_rows, positions,
        heads, kv_heads, window, table_stride, q_stride, out_stride, scale, softcap,
    ):  # fmt: skip
        launch_dependents()
        wait_prerequisites()
        sequence = quotient(block_x(), heads)
        head = i32(block_x() - sequence * heads)
        kv_head = quotient(head, quotient(heads, kv_heads))
        chunk_begin = load_b32(first_rows + sequence * 4)
        chunk_len = load_b32(cu_rows + sequence * 4 + 4) - chunk_begin
        # The longest tiles come first.
        begin = i32((quotient(chunk_len + (rows - 1), rows) - 1 - block_y()) * rows)
        if begin < 0:
            return
        count = i32(min(chunk_len - begin, rows))
        first_row = i64(chunk_begin + begin)
        earliest = load_b32(positions + first_row * 4)
        latest = earliest + count - 1
        reach = i32(window if window > 0 else FOREVER) - 1  # keys before a row's own
        step = i32(max(0, earliest - reach) // keys)
        last_step = latest // keys

        base, lane, warp = dynamic_shared(), lane_id(), shuffle_b32(thread_x() >> 5, 0)
        table = tables + i64(sequence) * table_stride * 4
        last_block = latest >> 4
        at_block = lane & (blocks - 1)
        entry = load_b32(table + i64(min(step * blocks + at_block, last_block)) * 4)
        ahead = load_b32(table + i64(min((step + 1) * blocks + at_block, last_block)) * 4)
        for i in range(0, rows * chunks, THREADS):
            chunk = i + thread_x()
            row = quotient(chunk, chunks)
            source = q + (first_row + min(row, count - 1)) * q_stride
            source += i64(head) * (2 * dim) + (chunk - row * chunks) * 16
            num_bytes = i32(16) if row < count else i32(0)
            copy16_or_zero(base + q_at + (chunk + row) * 16, source, num_bytes)
        copy_step(base, k_pool, entry, kv_heads, kv_head, latest + 1 - step * keys)
        copy_step(base + step_bytes, v_pool, entry, kv_heads, kv_head, latest + 1 - step * keys)
        copy_commit()

        factor = f32(LOG2_E) if softcap > f32(0) else scale * f32(LOG2_E)
        inner = scale * fast_reciprocal(softcap) if softcap > f32(0) else f32(0)
        own_q = base + q_at + warp * (own_rows * pitch)
        q_row = own_q + (lane & 15) * pitch + (lane >> 4) * 16
        k_row = (lane & 7) * pitch + (lane >> 4) * (8 * pitch) + (lane & 8) * 2
        v_row = step_bytes + (lane & 15) * pitch + (lane >> 4) * 16
        position = i32(earliest + warp * own_rows + (lane >> 2))
        last, first = positions_of(position), positions_of(i32(position - reach))
        values, maxima, totals = no_values(), no_maxima(), no_sums()
        at, other = i32(base), i32(base + 2 * step_bytes)
        while step <= last_step:
            all_copied()
            sync_threads()  # this step is there, and nobody reads the one before it any more
            if step < last_step:
                seen = latest + 1 - (step + 1) * keys
                copy_step(other, k_pool, ahead, kv_heads, kv_head, seen)
                copy_step(other + step_bytes, v_pool, ahead, kv_heads, kv_head, seen)
                block = min((step + 2) * blocks + at_block, last_block)
                ahead = load_b32(table + i64(block) * 4)
            copy_commit()
            scores = scores_of(q_row, i32(at + k_row))
            if softcap > f32(0):
                scores = cap(scores, inner, softcap)
            # Alike for all warps: every row sees every key of a step in the middle.
            if (step + 1) * keys > earliest + 1 or step * keys < latest - reach:
                scores = mask(scores, first, last, i32(step * keys + 2 * (lane & 3)))
            greatest = maximum_of(scores, maxima)
            decay = decay_of(maxima, greatest, factor)
            maxima = greatest
            weights, parts = weights_of(scores, maxima, factor)
            totals = rows_fma(totals, decay, parts)
            values = scale_rows(values, decay)
            values = values_of(values, weights, i32(at + v_row))
            at, other = other, at
            step += 1

        values = scale_rows(values, reciprocals(sum_lanes(totals)))
        sync_warp()
        store_rows(values, i32(own_q + (lane >> 2) * pitch + (lane & 3) * 4))
        sync_warp()
        own_count = i32(min(count - warp * own_rows, own_rows))
        target = out + (first_row + warp * own_rows) * out_stride + i64(head) * (2 * dim)
        for chunk in range(lane, own_count * chunks, 32):
            row = quotient(chunk, chunks)
            words = load_shared_b32x4(own_q + (chunk + row) * 16)
            store_b32x4(target + row * out_stride + (chunk - row * chunks) * 16, words)

    return attention_prefill
