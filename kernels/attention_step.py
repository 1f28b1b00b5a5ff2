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
    attention_body,
    key_pitch,
    queries_at,
    resident_blocks,
    sums_offset,
)
from atlas_kernels.attention_decode_body import shared_bytes as decode_bytes
from atlas_kernels.attention_fresh import FreshRows
from atlas_kernels.attention_plan import SPLIT, fresh_rows
from atlas_kernels.kv_store import BLOCK_LEN, pool_offset
from atlas_kernels.ptx_async import copy4_or_zero, copy16_or_zero, launch_dependents
from atlas_kernels.ptx_math import pack_bf16, quotient, unpack_bf16
from atlas_kernels.ptx_memory import (
    load_b32,
    load_shared_b32,
    load_shared_b32x4,
    store_b32x4,
    store_shared_b32,
    store_shared_b32x4,
)
from atlas_kernels.ptx_warp import (
    lane_id,
    lanes,
    num_threads_x,
    sync_threads,
    sync_warp,
    thread_x,
)
from atlas_kernels.registry import kernel
from atlas_kernels.rope import WIDTH, rotate_head, rotate_normed_head
from atlas_kernels.vector import access


def shared_bytes(dim: int, tiles: int) -> int:
    """Dynamic shared memory: that of ``attention_decode``, and the new keys and values."""
    return decode_bytes(dim, tiles) + fresh_rows(dim, 16 * tiles) * (key_pitch(dim) + 2 * dim)


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
    sink_at = sums_offset(dim, tiles)
    rotate, rotate_normed = rotate_head(_SHARED), rotate_normed_head(_SHARED)

    @device
    def first(latest, first_row, positions):
        return load_b32(positions + i64(first_row) * 4)

    @device
    def touch(base, source, num_bytes):
        """Into L1, by the sector; the copies that this takes land where sums will, and are lost."""
        at, end = i32(thread_x() * 32), i32(num_bytes)
        while at < end:
            copy4_or_zero(base + sink_at + thread_x() * 4, source + at, i32(4))
            at = i32(at + num_threads_x() * 32)

    @device
    def warm(base, fresh, first_row, position, count):
        if fresh[2] != 0:
            touch(base, fresh[2], 4 * dim)
            touch(base, fresh[3], 4 * dim)
        touch(base, fresh[4] + i64(position) * fresh[6] * 8, count * fresh[6] * 8)
        touch(base, fresh[5] + i64(first_row) * 4, count * 4)

    @device
    def copy(base, fresh, first_row, head, count):
        chunk, end = thread_x(), i32(count * chunks)
        while chunk < end:
            row = quotient(chunk, chunks)
            column = i64(head) * (2 * dim) + (chunk - row * chunks) * 16
            k = fresh[0] + i64(first_row + row) * fresh[7] + column
            v = fresh[1] + i64(first_row + row) * fresh[8] + column
            copy16_or_zero(base + keys_at + (chunk + row) * 16, k, i32(16))
            copy16_or_zero(base + values_at + chunk * 16, v, i32(16))
            chunk = i32(chunk + num_threads_x())

    @device
    def turn(base, fresh, warp, position, begin, rows, group, count):
        half, item, end = fresh[6], i32(warp), i32(rows + count)
        while item < end:
            at, token = i32(base + q_at + item * pitch), quotient(i32(begin + item), group)
            norm = fresh[2]
            if item >= rows:
                at, token = i32(base + keys_at + (item - rows) * pitch), i32(item - rows)
                norm = fresh[3]
            angles = fresh[4] + i64(position + token) * half * 8
            if norm != 0:
                rotate_normed(at, at, norm, angles, half, dim, fresh[9])
            else:
                rotate(at, at, angles, half, 2 * half)
            item = i32(item + (num_threads_x() >> 5))
        sync_threads()

    @device
    def store(base, fresh, first_row, position, head, kv_heads, begin, end, split, pools):
        if (split + 1) * SPLIT > position:
            chunk, stop = i32(begin * chunks + thread_x()), i32(end * chunks)
            while chunk < stop:
                row = quotient(chunk, chunks)
                if (position + row) // SPLIT == split:
                    slot = load_b32(fresh[5] + i64(first_row + row) * 4)
                    if slot >= 0:
                        offset = pool_offset(slot, head, kv_heads, dim) * 2
                        offset += (chunk - row * chunks) * 16
                        key = load_shared_b32x4(base + keys_at + (chunk + row) * 16)
                        value = load_shared_b32x4(base + values_at + chunk * 16)
                        store_b32x4(pools[0] + offset, key)
                        store_b32x4(pools[1] + offset, value)
                chunk = i32(chunk + num_threads_x())

    @device
    def patch(base, at, block, position, count, which):
        if (block + 1) * BLOCK_LEN > position:
            source, source_pitch = base + keys_at, i32(pitch)
            if which:
                source, source_pitch = base + values_at, i32(2 * dim)
            chunk = lane_id()
            while chunk < BLOCK_LEN * chunks:
                row = quotient(chunk, chunks)
                own = i32(block * BLOCK_LEN + row - position)
                if own >= 0 and own < count:
                    words = load_shared_b32x4(
                        i32(source + own * source_pitch + (chunk - row * chunks) * 16)
                    )
                    store_shared_b32x4(i32(at + (chunk + row) * 16), words)
                chunk = i32(chunk + lanes())
            sync_warp()

    return FreshRows(first, warm, copy, turn, store, patch)


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
        attend(
            q, k_pool, v_pool, out, tables, cu_rows, positions, partials, sums, counters,
            heads, kv_heads, max_rows, room, window, table_stride, q_stride, out_stride, scale,
            softcap, (k, v, q_weight, k_weight, table, slots, half, k_stride, v_stride, eps),
        )  # fmt: skip

    return attention_step
