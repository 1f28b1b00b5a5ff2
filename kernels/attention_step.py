"""All of the step between the QKV product and the output product, in one kernel.

``attention_decode`` with the heads of q and k normalised and rotated on the way in, and the rows'
own keys and values, which are not in the pools yet, taken from k and v. Every thread block turns
the queries and the new keys that it needs, in shared memory; whichever has the split of a row's own
position writes that row's key and value into the pools. The pools are read before the first new
position alone, so it does not matter when. Two kernels less a layer, and the bits of
``norm_rope_kv_store`` or ``rope_kv_store`` followed by ``attention_decode``.

The rows of a sequence stand at positions that follow each other, at most ``fresh_rows`` of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from atlas_kernels._cuda import device, i32, i64
from atlas_kernels.attention_decode import VARIANTS
from atlas_kernels.attention_decode_body import (
    THREADS,
    WARPS,
    FreshRows,
    attention_body,
    key_pitch,
    queries_at,
    resident_blocks,
)
from atlas_kernels.attention_decode_body import shared_bytes as decode_bytes
from atlas_kernels.attention_plan import SPLIT, fresh_rows
from atlas_kernels.kv_store import BLOCK_LEN, pool_offset
from atlas_kernels.ptx_async import copy16_or_zero, launch_dependents, wait_prerequisites
from atlas_kernels.ptx_math import pack_bf16, quotient, unpack_bf16
from atlas_kernels.ptx_memory import (
    load_b32,
    load_shared_b32,
    load_shared_b32x4,
    store_b32x4,
    store_shared_b32,
    store_shared_b32x4,
)
from atlas_kernels.ptx_warp import lane_id, sync_threads, sync_warp, thread_x
from atlas_kernels.registry import kernel
from atlas_kernels.rope import WIDTH, rotate_head, rotate_normed_head
from atlas_kernels.vector import access


def shared_bytes(dim: int, tiles: int) -> int:
    """Dynamic shared memory: that of ``attention_decode``, and the new keys and values."""
    return decode_bytes(dim, tiles) + 2 * fresh_rows(dim, 16 * tiles) * key_pitch(dim)


@device
def _store_pair(address, values):
    store_shared_b32(address, pack_bf16(values[0], values[1]))


_SHARED = replace(
    access("bf16", WIDTH),
    load=device(lambda address: unpack_bf16(load_shared_b32(address))),
    store=_store_pair,
)


def _fresh(dim: int, tiles: int) -> FreshRows:
    """``fresh`` is (k, v, q_weight, k_weight, table, slots, half, k_stride, v_stride, eps)."""
    chunks, pitch = dim // 8, key_pitch(dim)
    q_at, keys_at = queries_at(dim), decode_bytes(dim, tiles)
    values_at = keys_at + fresh_rows(dim, 16 * tiles) * pitch
    rotate, rotate_normed = rotate_head(_SHARED), rotate_normed_head(_SHARED)

    @device
    def first(latest, first_row, positions):
        return load_b32(positions + i64(first_row) * 4)

    @device
    def copy(base, fresh, first_row, head, count):
        for chunk in range(thread_x(), count * chunks, THREADS):
            row = quotient(chunk, chunks)
            at = base + (chunk + row) * 16
            column = i64(head) * (2 * dim) + (chunk - row * chunks) * 16
            k = fresh[0] + i64(first_row + row) * fresh[7] + column
            v = fresh[1] + i64(first_row + row) * fresh[8] + column
            copy16_or_zero(at + keys_at, k, i32(16))
            copy16_or_zero(at + values_at, v, i32(16))

    @device
    def turn(base, fresh, warp, position, begin, rows, group, count):
        half = fresh[6]
        for item in range(warp, rows + count, WARPS):
            if item < rows:
                at, token, weight = base + q_at + item * pitch, quotient(begin + item, group), 2
            else:
                at, token, weight = base + keys_at + (item - rows) * pitch, item - rows, 3
            norm = fresh[2] if weight == 2 else fresh[3]
            angles = fresh[4] + i64(position + token) * half * 8
            if norm != 0:
                rotate_normed(at, at, norm, angles, half, dim, fresh[9])
            else:
                rotate(at, at, angles, half, 2 * half)
        sync_threads()

    @device
    def store(base, fresh, first_row, position, head, kv_heads, begin, end, split, pools):
        if (split + 1) * SPLIT > position:
            for chunk in range(begin * chunks + thread_x(), end * chunks, THREADS):
                row = quotient(chunk, chunks)
                if (position + row) // SPLIT == split:
                    slot = load_b32(fresh[5] + i64(first_row + row) * 4)
                    if slot >= 0:
                        offset = pool_offset(slot, head, kv_heads, dim) * 2
                        offset += (chunk - row * chunks) * 16
                        at = base + (chunk + row) * 16
                        store_b32x4(pools[0] + offset, load_shared_b32x4(at + keys_at))
                        store_b32x4(pools[1] + offset, load_shared_b32x4(at + values_at))

    @device
    def patch(base, at, block, position, count, which):
        if (block + 1) * BLOCK_LEN > position:
            source = base + (values_at if which else keys_at)
            for chunk in range(lane_id(), BLOCK_LEN * chunks, 32):
                row = quotient(chunk, chunks)
                own = block * BLOCK_LEN + row - position
                if own >= 0 and own < count:
                    words = load_shared_b32x4(source + own * pitch + (chunk - row * chunks) * 16)
                    store_shared_b32x4(at + (chunk + row) * 16, words)
            sync_warp()

    return FreshRows(first, copy, turn, store, patch)


@kernel(
    "attention_step",
    args="ptr ptr ptr ptr ptr ptr ptr ptr ptr ptr ptr ptr ptr ptr ptr ptr"
    " i32 i32 i32 i32 i32 i32 i32 i64 i64 i64 i64 f32 f32 f32",
    threads=THREADS,
    min_blocks=resident_blocks,
    shared=shared_bytes,
    variants=VARIANTS,
)
def make_attention_step(dim: int, tiles: int) -> Any:
    """q, out [T, H, K], k and v [T, HK, K] and the pools [B, HK, 16, K], all bf16.

    Grid and arguments as in ``attention_decode``, and

    - ``q_weight``, ``k_weight`` float32 [K], or 0: norms of the heads, with ``eps``;
    - ``table`` float32 [P, 2, half]: cosines, then sines, of the first 2 · ``half`` dimensions;
    - ``slots`` int32 [T]: where keys and values go; a negative one is not written;
    - ``max_rows``: at most ``fresh_rows`` of the variant. q, k and v are left as they were.
    """
    attend = attention_body(dim, tiles, _fresh(dim, tiles))

    def attention_step(
        q, k, v, q_weight, k_weight, table, slots, k_pool, v_pool, out, tables, cu_rows, positions,
        partials, sums, counters, heads, kv_heads, half, max_rows, room, window, table_stride,
        q_stride, k_stride, v_stride, out_stride, scale, softcap, eps,
    ):  # fmt: skip
        launch_dependents()
        wait_prerequisites()
        attend(
            q, k_pool, v_pool, out, tables, cu_rows, positions, partials, sums, counters,
            heads, kv_heads, max_rows, room, window, table_stride, q_stride, out_stride, scale,
            softcap, (k, v, q_weight, k_weight, table, slots, half, k_stride, v_stride, eps),
        )  # fmt: skip

    return attention_step
