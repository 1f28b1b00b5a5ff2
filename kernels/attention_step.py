"""All of the step between the QKV product and the output product, in one kernel.

``attention_decode`` with the heads of q and k normalised and rotated on the way in, and the rows'
own keys and values, which are not in the pools yet, taken from k and v. Every thread block turns
the queries and the new keys that it needs, in shared memory; whichever has the split of a row's own
position writes that row's key and value into the pools. The pools are read before the first new
position alone, so it does not matter when. Two kernels less a layer, and the bits of
``norm_rope_kv_store`` or ``rope_kv_store`` followed by ``attention_decode``. With an output gate
three less, and those of ``sigmoid_gate`` after them.

The rows of a sequence stand at positions that follow each other, at most ``fresh_rows`` of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from atlas_kernels._cuda import device, i32, i64
from atlas_kernels.attention_decode import VARIANTS
from atlas_kernels.attention_decode_body import attention_body
from atlas_kernels.attention_decode_layout import (
    THREADS,
    key_pitch,
    queries_at,
    resident_blocks,
)
from atlas_kernels.attention_decode_layout import shared_bytes as decode_bytes
from atlas_kernels.attention_fresh import FreshRows, queries_copy, token_of
from atlas_kernels.attention_plan import HELD_DIMS, SPLIT, fresh_rows
from atlas_kernels.attention_turn import DIMS, turned_rows
from atlas_kernels.kv_store import BLOCK_LEN, pool_offset
from atlas_kernels.ptx_async import (
    copy4_or_zero,
    copy16_if,
    copy_commit,
    copy_wait,
    launch_dependents,
)
from atlas_kernels.ptx_math import pack_bf16, quotient, unpack_bf16
from atlas_kernels.ptx_memory import (
    load_b32,
    load_shared_b32,
    load_shared_b32x4,
    store_b32x4_if,
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
from atlas_kernels.rope import WIDTH, rotate_heads, rotate_normed_heads
from atlas_kernels.vector import access

_SINK_BYTES = 4 * THREADS


def _keys_at(dim: int, tiles: int) -> int:
    """Where the new keys lie in shared memory, before the new values."""
    return decode_bytes(dim, tiles)


def _values_at(dim: int, tiles: int) -> int:
    return _keys_at(dim, tiles) + fresh_rows(dim, 16 * tiles) * key_pitch(dim)


def _sink_at(dim: int, tiles: int) -> int:
    """Where what was only asked for lands, where heads are not turned in registers."""
    return _values_at(dim, tiles) + fresh_rows(dim, 16 * tiles) * 2 * dim


def shared_bytes(dim: int, tiles: int, holds: bool = False) -> int:
    """Dynamic shared memory: that of ``attention_decode``, and the new keys and values."""
    return _sink_at(dim, tiles) + (0 if dim in DIMS else _SINK_BYTES)


@device
def _store_pair(address, values):
    store_shared_b32(address, pack_bf16(values[0], values[1]))


_SHARED = replace(
    access("bf16", WIDTH),
    load=device(lambda address: unpack_bf16(load_shared_b32(address))),
    store=_store_pair,
)


def _copied_rows(dim: int, tiles: int) -> tuple[Any, Any]:
    """``ask`` and ``bring`` for any dimension: heads are copied to shared memory and turned there.

    The constants that this takes come into L1 before the wait, by the sector.
    """
    chunks, pitch = dim // 8, key_pitch(dim)
    q_at, keys_at, values_at = queries_at(dim), _keys_at(dim, tiles), _values_at(dim, tiles)
    sink_at = _sink_at(dim, tiles)
    copy_queries, copied = queries_copy(dim), copy_wait(0)
    rotate, rotate_normed = rotate_heads(_SHARED), rotate_normed_heads(_SHARED)

    @device
    def touch(base, source, num_bytes):
        at, end = i32(thread_x() * 32), i32(num_bytes)
        while at < end:
            copy4_or_zero(base + sink_at + thread_x() * 4, source + at, i32(4))
            at = i32(at + num_threads_x() * 32)

    @device
    def ask(base, q, q_stride, fresh, place):
        if fresh[2] != 0:
            touch(base, fresh[2], 4 * dim)
            touch(base, fresh[3], 4 * dim)
        touch(base, fresh[4] + i64(place[1]) * fresh[6] * 8, place[6] * fresh[6] * 8)
        return ()

    @device
    def copy(base, fresh, place, wanted):
        first_row, head = place[0], place[5]
        chunk, end = thread_x(), i32(place[6] * chunks)
        while chunk < end:
            row = quotient(chunk, chunks)
            column = i64(head) * (2 * dim) + (chunk - row * chunks) * 16
            k = fresh[0] + i64(first_row + row) * fresh[7] + column
            v = fresh[1] + i64(first_row + row) * fresh[8] + column
            copy16_if(base + keys_at + (chunk + row) * 16, k, wanted)
            copy16_if(base + values_at + chunk * 16, v, wanted)
            chunk = i32(chunk + num_threads_x())

    @device
    def bring(base, q, q_stride, fresh, place, asked, is_real):
        position, begin, rows, count = place[1], place[2], place[3], place[6]
        copy_queries(base, q, q_stride, place, is_real)
        copy(base, fresh, place, i32(1) if is_real else i32(0))
        copy_commit()
        if is_real:
            copied()
        sync_threads()
        half, item, end = fresh[6], i32(thread_x() >> 5), i32(rows + count)
        while item < end:
            at, token = i32(base + q_at + item * pitch), token_of(place, i32(begin + item))
            norm = fresh[2]
            if item >= rows:
                at, token = i32(base + keys_at + (item - rows) * pitch), i32(item - rows)
                norm = fresh[3]
            angles = fresh[4] + i64(position + token) * half * 8
            if norm != 0:
                rotate_normed((at,), (at,), norm, angles, half, dim, fresh[9])
            else:
                rotate((at,), (at,), angles, half, 2 * half)
            item = i32(item + (num_threads_x() >> 5))
        sync_threads()

    return ask, bring


def _fresh(dim: int, tiles: int) -> FreshRows:
    """``fresh`` is (k, v, q_weight, k_weight, table, slots, half, k_stride, v_stride, eps)."""
    chunks, pitch = dim // 8, key_pitch(dim)
    keys_at, values_at = _keys_at(dim, tiles), _values_at(dim, tiles)
    ask, bring = turned_rows(dim, keys_at, values_at) if dim in DIMS else _copied_rows(dim, tiles)

    @device
    def first(latest, first_row, positions):
        return load_b32(positions + i64(first_row) * 4)

    @device
    def store(base, fresh, kv_heads, place, split, pools, wanted):
        first_row, position, begin, rows, _, head = place[:6]
        if (split + 1) * SPLIT > position:
            chunk = i32(token_of(place, begin) * chunks + lane_id())
            end = i32((token_of(place, i32(begin + rows - 1)) + 1) * chunks)
            while chunk < end:
                row = quotient(chunk, chunks)
                if quotient(i32(position + row), SPLIT) == split:
                    slot = load_b32(fresh[5] + i64(first_row + row) * 4)
                    is_stored = wanted if slot >= 0 else i32(0)
                    offset = pool_offset(slot, head, kv_heads, dim) * 2
                    offset += (chunk - row * chunks) * 16
                    key = load_shared_b32x4(base + keys_at + (chunk + row) * 16)
                    value = load_shared_b32x4(base + values_at + chunk * 16)
                    store_b32x4_if(pools[0] + offset, key, is_stored)
                    store_b32x4_if(pools[1] + offset, value, is_stored)
                chunk = i32(chunk + lanes())

    @device
    def patch(base, at, block, place, which):
        position, count = place[1], place[6]
        if (block + 1) * BLOCK_LEN > position:
            source, source_pitch = base + keys_at, i32(pitch)
            if which:
                source, source_pitch = base + values_at, i32(2 * dim)
            chunk, end = lane_id(), i32(count * chunks)
            while chunk < end:
                own = quotient(chunk, chunks)
                column, row = (
                    i32(chunk - own * chunks) * 16,
                    i32(position + own - block * BLOCK_LEN),
                )
                if row >= 0 and row < BLOCK_LEN:
                    words = load_shared_b32x4(i32(source + own * source_pitch + column))
                    store_shared_b32x4(i32(at + row * pitch + column), words)
                chunk = i32(chunk + lanes())
            sync_warp()

    return FreshRows(True, first, ask, bring, store, patch)


_ARGS = (
    "ptr ptr ptr ptr ptr ptr ptr ptr ptr ptr ptr ptr ptr ptr ptr ptr ptr"
    " i32 i32 i32 i32 i32 i32 i32 i32 i64 i64 i64 i64 i64 f32 f32 f32"
)


@kernel(
    "attention_step",
    args=_ARGS,
    threads=THREADS,
    min_blocks=resident_blocks,
    shared=shared_bytes,
    variants=VARIANTS,
)
@kernel(
    "attention_step",
    args=_ARGS,
    threads=THREADS,
    min_blocks=resident_blocks,
    shared=shared_bytes,
    arch="sm_90a",
    variants={f"d{dim}_r16_held": (dim, 1, True) for dim in HELD_DIMS},
)
def make_attention_step(dim: int, tiles: int, holds: bool = False) -> Any:
    """q, out [T, H, K], k and v [T, HK, K] and the pools [B, HK, 16, K], all bf16.

    Grid and arguments as in ``attention_decode``, and

    - ``gate`` bf16 [T, H, K], or 0: what was attended, rounded, is multiplied by its sigmoid, with
      the bits of ``sigmoid_gate``;
    - ``q_weight``, ``k_weight`` float32 [K], or 0: norms of the heads, with ``eps``;
    - ``table`` float32 [P, 2, half]: cosines, then sines, of the first 2 · ``half`` dimensions;
    - ``slots`` int32 [T]: where keys and values go; a negative one is not written;
    - ``rehearsal``: how far few thread blocks go through their code while they wait (0, or as in
      ``attention_plan``): what the kernel before leaves time for;
    - ``max_rows``: at most ``fresh_rows`` of the variant. q, k and v are left as they were.

    ``_held`` is for few thread blocks, of which an SM holds two: at the start of a split a warp
    asks for one more block of keys and values, into registers. Same bits.
    """
    attend = attention_body(dim, tiles, _fresh(dim, tiles), holds=holds)

    def attention_step(
        q, k, v, gate, q_weight, k_weight, table, slots, k_pool, v_pool, out, tables, cu_rows,
        positions, partials, sums, counters, heads, kv_heads, half, max_rows, room, window,
        table_stride, rehearsal, q_stride, k_stride, v_stride, gate_stride, out_stride, scale,
        softcap, eps,
    ):  # fmt: skip
        launch_dependents()
        attend(
            q, k_pool, v_pool, out, tables, cu_rows, positions, partials, sums, counters,
            heads, kv_heads, max_rows, room, window, table_stride, q_stride, out_stride, scale,
            softcap, gate, gate_stride, rehearsal,
            (k, v, q_weight, k_weight, table, slots, half, k_stride, v_stride, eps),
        )  # fmt: skip

    return attention_step
