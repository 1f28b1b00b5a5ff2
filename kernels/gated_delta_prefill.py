"""The gated delta rule from chunk to chunk of a prompt, after ``gated_delta_chunk``.

A thread block takes 16 or 32 columns of one value head's state through all chunks of a sequence:
four warps for every 16 columns, each with 16 rows of a chunk and K / 4 rows of the state. The state
is float32 in registers, with a copy in bf16 for the products; what a chunk needs comes by
``cp.async``, ``STAGES`` chunks deep. Columns are independent and chunks come one after another, so
a prompt cut at a multiple of ``CHUNK`` gives the bits of one pass.

Rounded to bf16: q, k, W, U, P, and V' and the state as factors. Sums are float32.

Source: Yang, Kautz and Hatamizadeh, "Gated Delta Networks" (2024), arXiv 2412.06464, section 3.3.
"""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import device, f32, i32, i64
from atlas_kernels.gated_delta_chunk import DIMS, row_pitch
from atlas_kernels.ptx_async import (
    copy16_or_zero,
    copy_commit,
    copy_wait,
    launch_dependents,
    wait_prerequisites,
)
from atlas_kernels.ptx_chunk import CHUNK, add_rows, read_state, weigh_rows
from atlas_kernels.ptx_math import fast_exp2, pack_bf16, quotient, unpack_bf16, vector_scale
from atlas_kernels.ptx_memory import (
    dynamic_shared,
    load_b32,
    load_f32x2,
    load_shared_b32,
    load_shared_f32,
    store_f32x2,
    store_shared_b32,
)
from atlas_kernels.ptx_mma import mma_scale_rows
from atlas_kernels.ptx_tile import tile_fill
from atlas_kernels.ptx_warp import block_x, lane_id, shuffle_b32, sync_threads, thread_x
from atlas_kernels.registry import kernel

STAGES = 3
VARIANTS = {
    f"{size}_c{columns}": (dim, columns) for size, dim in DIMS.items() for columns in (16, 32)
}


def num_threads(dim: int, columns: int) -> int:
    """Four warps for every 16 columns."""
    return 8 * columns


def stage_bytes(dim: int, columns: int) -> int:
    """W, q, k, P, U and G of a chunk."""
    return CHUNK * (3 * row_pitch(dim) + row_pitch(CHUNK) + row_pitch(columns) + 4)


def shared_bytes(dim: int, columns: int) -> int:
    """The stages, the state in bf16, and V' twice."""
    return STAGES * stage_bytes(dim, columns) + (dim + 2 * CHUNK) * row_pitch(columns)


@kernel(
    "gated_delta_prefill",
    args="ptr " * 11 + "i32 i32 i64",
    threads=num_threads,
    shared=shared_bytes,
    variants=VARIANTS,
)
def make_gated_delta_prefill(dim: int, columns: int) -> Any:
    """Grid (N · HV · V / columns), K = V = ``dim``.

    ``q`` … ``logs`` as ``gated_delta_chunk`` wrote them, ``chunk_rows`` int32 [chunks];
    ``cu_chunks`` int32 [N + 1]: sequence n has the chunks ``cu_chunks[n]`` … ``cu_chunks[n + 1]``
    − 1; its state is at ``slots[n]`` of ``states`` float32 [S, HV, K, V], updated. ``out`` [T, HV,
    V] float32, ``out_stride`` in bytes.
    """
    threads, pitch, narrow = num_threads(dim, columns), row_pitch(dim), row_pitch(columns)
    p_pitch, stage = row_pitch(CHUNK), stage_bytes(dim, columns)
    q_at, k_at, p_at = CHUNK * pitch, 2 * CHUNK * pitch, 3 * CHUNK * pitch
    u_at = p_at + CHUNK * p_pitch
    logs_at = u_at + CHUNK * narrow
    state_at = STAGES * stage
    rows_at = state_at + dim * narrow
    last_at = rows_at + CHUNK * narrow
    tiles = dim // 64  # of 16 rows of the state, for each warp

    read = read_state(dim, pitch, narrow)
    add, weigh = add_rows(tiles, pitch, narrow), weigh_rows(p_pitch, narrow)
    nothing, scale_state = tile_fill(8, 0.0), vector_scale(8 * tiles)
    arrived = copy_wait(STAGES - 2)

    def copy(row_bytes, target_pitch, source_pitch):
        """A device function: the thread block's copy of CHUNK rows."""
        per_row = row_bytes // 16

        @device
        def rows(target, source):
            for i in range(thread_x(), CHUNK * per_row, threads):
                row = quotient(i, per_row)
                column = (i - row * per_row) * 16
                place = source + row * source_pitch + column
                copy16_or_zero(target + row * target_pitch + column, place, 16)

        return rows

    copy_wide, copy_p = copy(2 * dim, pitch, 2 * dim), copy(2 * CHUNK, p_pitch, 2 * CHUNK)
    copy_u = copy(2 * columns, narrow, 2 * dim)

    @device
    def fetch(target, q, k, w, u, p, logs, key_place, place):
        """Ask for a chunk; places are counted in rows."""
        copy_wide(target, w + place * (2 * dim))
        copy_wide(target + q_at, q + key_place * (2 * dim))
        copy_wide(target + k_at, k + key_place * (2 * dim))
        copy_p(target + p_at, p + place * (2 * CHUNK))
        copy_u(target + u_at, u + place * (2 * dim))
        if thread_x() < CHUNK // 4:
            at = thread_x() * 16
            copy16_or_zero(target + logs_at + at, logs + place * 4 + at, 16)

    @device
    def load_u(at):
        """A C fragment of 16 columns from bf16 rows."""
        a, b = unpack_bf16(load_shared_b32(at))
        c, d = unpack_bf16(load_shared_b32(at + 8 * narrow))
        e, f = unpack_bf16(load_shared_b32(at + 16))
        g, h = unpack_bf16(load_shared_b32(at + 8 * narrow + 16))
        return a, b, c, d, e, f, g, h

    @device
    def put(at, v, upper, lower):
        """A C fragment of 16 columns, its rows times their factors, as bf16."""
        store_shared_b32(at, pack_bf16(v[0] * upper, v[1] * upper))
        store_shared_b32(at + 8 * narrow, pack_bf16(v[2] * lower, v[3] * lower))
        store_shared_b32(at + 16, pack_bf16(v[4] * upper, v[5] * upper))
        store_shared_b32(at + 8 * narrow + 16, pack_bf16(v[6] * lower, v[7] * lower))

    @device
    def put_rows(at, stride, v):
        """A C fragment of 16 columns to float32 rows ``stride`` bytes apart."""
        store_f32x2(at, (v[0], v[1]))
        store_f32x2(at + 8 * stride, (v[2], v[3]))
        store_f32x2(at + 32, (v[4], v[5]))
        store_f32x2(at + 8 * stride + 32, (v[6], v[7]))

    @device
    def load_rows(at):
        """The same the other way, rows V · 4 bytes apart."""
        a, b = load_f32x2(at)
        c, d = load_f32x2(at + 32 * dim)
        e, f = load_f32x2(at + 32)
        g, h = load_f32x2(at + 32 * dim + 32)
        return a, b, c, d, e, f, g, h

    @device
    def scale_rows(v, upper, lower):
        low = mma_scale_rows((v[0], v[1], v[2], v[3]), upper, lower)
        high = mma_scale_rows((v[4], v[5], v[6], v[7]), upper, lower)
        return low[0], low[1], low[2], low[3], high[0], high[1], high[2], high[3]

    first_tile, second_tile = _tiles(tiles)
    joined = _join(tiles)

    def gated_delta_prefill(
        q, k, w, u, p, logs, chunk_rows, cu_chunks, slots, states, out,
        key_heads, value_heads, out_stride,
    ):  # fmt: skip
        launch_dependents()
        wait_prerequisites()
        parts = dim // columns
        pair = quotient(block_x(), parts)
        column = i32((block_x() - pair * parts) * columns)
        sequence = quotient(pair, value_heads)
        head = i32(pair - sequence * value_heads)
        key_head = quotient(head, quotient(value_heads, key_heads))
        chunk, end = load_b32(cu_chunks + sequence * 4), load_b32(cu_chunks + sequence * 4 + 4)
        if chunk >= end:
            return
        base, lane, warp = dynamic_shared(), lane_id(), shuffle_b32(thread_x() >> 5, 0)
        group, row = (warp >> 2) * 16, (warp & 3) * 16
        u += column * 2
        for ahead in range(STAGES - 1):
            if chunk + ahead < end:
                place = (i64(chunk + ahead) * value_heads + head) * CHUNK
                key_place = (i64(chunk + ahead) * key_heads + key_head) * CHUNK
                fetch(base + ahead * stage, q, k, w, u, p, logs, key_place, place)
            copy_commit()

        state_row = (warp & 3) * (16 * tiles) + (lane >> 2)
        slot = load_b32(slots + sequence * 4)
        state_place = states + (i64(slot) * value_heads + head) * (dim * dim * 4)
        state_place += (state_row * dim + column + group + (lane & 3) * 2) * 4
        state = joined(load_rows(state_place), load_rows(state_place + (tiles - 1) * 64 * dim))
        kept = base + state_at + state_row * narrow + (group + (lane & 3) * 2) * 2
        put(kept, first_tile(state), f32(1), f32(1))
        put(kept + (tiles - 1) * 16 * narrow, second_tile(state), f32(1), f32(1))

        a_row = (row + (lane & 15)) * pitch + (lane >> 4) * 16
        p_row = p_at + (row + (lane & 15)) * p_pitch + (lane >> 4) * 16
        k_row = k_at + ((lane & 7) + (lane >> 4) * 8) * pitch
        k_row += (warp & 3) * (32 * tiles) + (lane & 8) * 2
        own = (lane & 15) * narrow + (lane >> 4) * 16 + group * 2
        fragment = (row + (lane >> 2)) * narrow + (group + (lane & 3) * 2) * 2
        log_at = logs_at + (row + (lane >> 2)) * 4
        target = out + (head * dim + column + group + (lane & 3) * 2) * 4
        number = i32(0)
        while chunk < end:
            arrived()
            sync_threads()  # the chunk is there, and nobody reads the one before it any more
            ahead = chunk + (STAGES - 1)
            if ahead < end:
                free = number - 1 if number > 0 else STAGES - 1
                place = (i64(ahead) * value_heads + head) * CHUNK
                key_place = (i64(ahead) * key_heads + key_head) * CHUNK
                fetch(base + free * stage, q, k, w, u, p, logs, key_place, place)
            copy_commit()
            here = base + number * stage
            first_row = i64(load_b32(chunk_rows + i64(chunk) * 4) + row + (lane >> 2))
            upper, lower = load_shared_f32(here + log_at), load_shared_f32(here + log_at + 32)
            total = load_shared_f32(here + logs_at + (CHUNK - 1) * 4)
            new, read_out = read(
                load_u(here + u_at + fragment), nothing(), here + a_row, here + q_at + a_row,
                base + state_at + own,
            )  # fmt: skip
            put(base + rows_at + fragment, new, f32(1), f32(1))
            put(base + last_at + fragment, new, fast_exp2(total - upper), fast_exp2(total - lower))
            sync_threads()
            state = add(scale_state(state, fast_exp2(total)), here + k_row, base + last_at + own)
            put(kept, first_tile(state), f32(1), f32(1))
            put(kept + (tiles - 1) * 16 * narrow, second_tile(state), f32(1), f32(1))
            read_out = scale_rows(read_out, fast_exp2(upper), fast_exp2(lower))
            read_out = weigh(read_out, here + p_row, base + rows_at + own)
            put_rows(target + first_row * out_stride, out_stride, read_out)
            chunk = i32(chunk + 1)
            number = i32(number + 1 if number < STAGES - 1 else 0)
        put_rows(state_place, dim * 4, first_tile(state))
        put_rows(state_place + (tiles - 1) * 64 * dim, dim * 4, second_tile(state))

    return gated_delta_prefill


def _tiles(tiles: int) -> tuple[Any, Any]:
    """The state's first and last fragment of 16 columns; with one tile they are the same."""

    @device
    def first(v):
        return v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7]

    if tiles == 1:
        return first, first

    @device
    def second(v):
        return v[8], v[9], v[10], v[11], v[12], v[13], v[14], v[15]

    return first, second


def _join(tiles: int) -> Any:
    """(first, last) → the state."""
    if tiles == 1:
        return device(lambda first, last: first)

    @device
    def both(a, b):
        return (
            a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7],
            b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7],
        )  # fmt: skip

    return both
