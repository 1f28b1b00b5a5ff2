"""Attention of an encoder: every row of a sequence sees all its rows, on ``mma.sync``.

Queries, keys and values are rows of a ragged batch, side by side and without blocks. A thread block
takes one head and a tile of rows of one sequence; each of its four warps has 16 · tiles rows and
sees every key. Keys and values come in steps, by ``cp.async`` into two buffers: one step is copied
while the one before it is used.

Order, which depends on the sequence alone: steps of ``keys`` keys ascending from its first, with
the running maximum of the online softmax. P is rounded to bf16 before P · V; the sum of P is not.

Sources: Vaswani et al., "Attention Is All You Need" (2017), arXiv 1706.03762; Dao,
"FlashAttention-2" (2023), arXiv 2307.08691.
"""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import device, f32, i32, i64
from atlas_kernels.attention_decode_body import LOG2_E
from atlas_kernels.attention_decode_layout import key_pitch
from atlas_kernels.attention_prefill import THREADS, VARIANTS, WARPS, shared_bytes
from atlas_kernels.ptx_async import (
    copy16_or_zero,
    copy_commit,
    copy_wait,
    launch_dependents,
    wait_prerequisites,
)
from atlas_kernels.ptx_math import quotient
from atlas_kernels.ptx_memory import dynamic_shared, load_b32, load_shared_b32x4, store_b32x4
from atlas_kernels.ptx_tile import (
    MASKED,
    tile_decay,
    tile_fill,
    tile_mask,
    tile_maximum,
    tile_reciprocal,
    tile_rows_fma,
    tile_same,
    tile_scale,
    tile_scores,
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


@kernel(
    "encoder_attention",
    args="ptr ptr ptr ptr ptr i32 i64 i64 i64 i64 f32",
    threads=THREADS,
    min_blocks=2,
    shared=shared_bytes,
    variants=VARIANTS,
)
def make_encoder_attention(dim: int, keys: int, tiles: int) -> Any:
    """q, k, v, out [T, H, K], all bf16; the sequences' rows one after the other.

    Grid (N · H, ⌈most rows / (64 · tiles)⌉). ``cu_rows`` int32 [N + 1]; a sequence may be empty.
    Strides in bytes, multiples of 16.
    """
    chunks, pitch = dim // 8, key_pitch(dim)
    own_rows = 16 * tiles  # of a warp
    rows = WARPS * own_rows
    step_bytes = keys * pitch
    q_at = 4 * step_bytes

    scores_of = tile_scores(dim, keys, tiles, pitch)
    values_of = tile_values(dim, keys, tiles, pitch)
    mask, same = tile_mask(keys, tiles), tile_same(tiles)
    maximum_of, weights_of = tile_maximum(keys, tiles), tile_weights(keys, tiles)
    decay_of, scale_rows = tile_decay(tiles), tile_scale(dim, tiles)
    rows_fma, sum_lanes = tile_rows_fma(tiles), tile_sum_lanes(tiles)
    no_values, no_sums = tile_fill(own_rows * dim // 32, 0.0), tile_fill(2 * tiles, 0.0)
    no_maxima = tile_fill(2 * tiles, MASKED)
    reciprocals, store_rows = tile_reciprocal(tiles), tile_store_bf16(dim, tiles, pitch)
    all_copied = copy_wait(0)

    @device
    def copy_rows(target, source, stride, count, most):
        """The thread block's copy of ``most`` rows; those past ``count`` become zeros."""
        for chunk in range(thread_x(), most * chunks, THREADS):
            row = quotient(chunk, chunks)
            place = source + i64(min(row, count - 1)) * stride + (chunk - row * chunks) * 16
            num_bytes = i32(16) if row < count else i32(0)
            copy16_or_zero(target + (chunk + row) * 16, place, num_bytes)

    def encoder_attention(
        q, k, v, out, cu_rows, heads, q_stride, k_stride, v_stride, out_stride, scale
    ):
        launch_dependents()
        wait_prerequisites()
        sequence = quotient(block_x(), heads)
        head = i32(block_x() - sequence * heads)
        first_row = load_b32(cu_rows + sequence * 4)
        length = i32(load_b32(cu_rows + sequence * 4 + 4) - first_row)
        begin = i32(block_y() * rows)
        if begin >= length:
            return
        count = i32(min(length - begin, rows))
        num_steps = quotient(length + (keys - 1), keys)
        first_query = i64(first_row + begin)
        column = i64(head) * (2 * dim)
        queries = q + first_query * q_stride + column
        key_rows, value_rows = (
            k + i64(first_row) * k_stride + column,
            v + i64(first_row) * v_stride + column,
        )

        base, lane, warp = dynamic_shared(), lane_id(), shuffle_b32(thread_x() >> 5, 0)
        copy_rows(i32(base + q_at), queries, q_stride, count, rows)
        copy_rows(i32(base), key_rows, k_stride, length, keys)
        copy_rows(i32(base + step_bytes), value_rows, v_stride, length, keys)
        copy_commit()

        factor = scale * f32(LOG2_E)
        own_q = base + q_at + warp * (own_rows * pitch)
        q_row = own_q + (lane & 15) * pitch + (lane >> 4) * 16
        k_row = (lane & 7) * pitch + (lane >> 4) * (8 * pitch) + (lane & 8) * 2
        v_row = step_bytes + (lane & 15) * pitch + (lane >> 4) * 16
        first, last = same(i32(0)), same(i32(length - 1))
        values, maxima, totals = no_values(), no_maxima(), no_sums()
        at, other, step = i32(base), i32(base + 2 * step_bytes), i32(0)
        while step < num_steps:
            all_copied()
            sync_threads()  # this step is there, and nobody reads the one before it any more
            after = i32((step + 1) * keys)
            if after < length:
                left = i32(length - after)
                copy_rows(other, key_rows + i64(after) * k_stride, k_stride, left, keys)
                copy_rows(
                    i32(other + step_bytes), value_rows + i64(after) * v_stride, v_stride, left,
                    keys,
                )  # fmt: skip
            copy_commit()
            scores = scores_of(q_row, i32(at + k_row))
            if after > length:
                scores = mask(scores, first, last, i32(step * keys + 2 * (lane & 3)))
            greatest = maximum_of(scores, maxima)
            decay = decay_of(maxima, greatest, factor)
            maxima = greatest
            weights, parts = weights_of(scores, maxima, factor)
            totals = rows_fma(totals, decay, parts)
            values = scale_rows(values, decay)
            values = values_of(values, weights, i32(at + v_row))
            at, other = other, at
            step = i32(step + 1)

        values = scale_rows(values, reciprocals(sum_lanes(totals)))
        sync_warp()
        store_rows(values, i32(own_q + (lane >> 2) * pitch + (lane & 3) * 4))
        sync_warp()
        own_count = i32(min(count - warp * own_rows, own_rows))
        target = out + (first_query + warp * own_rows) * out_stride + column
        for chunk in range(lane, own_count * chunks, 32):
            row = quotient(chunk, chunks)
            words = load_shared_b32x4(own_q + (chunk + row) * 16)
            store_b32x4(target + row * out_stride + (chunk - row * chunks) * 16, words)

    return encoder_attention
