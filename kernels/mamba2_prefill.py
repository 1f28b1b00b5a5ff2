"""The Mamba-2 recurrence from chunk to chunk of a prompt, after ``mamba2_chunk``.

A thread block takes 16 or 32 channels of one head's state, transposed to [N, P], through all chunks
of a sequence, as ``chunk_pass`` says. A prompt cut at a multiple of ``CHUNK`` gives the bits of one
pass. Rounded to bf16: b, c, P, and Δ x and the state as factors. Sums are float32.

Source: Dao and Gu, "Transformers are SSMs" (2024), arXiv 2405.21060, section 6.
"""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import device, f32, i32, i64
from atlas_kernels.chunk_pass import (
    PASSES,
    ChunkPass,
    load_columns,
    load_rows,
    scale_rows,
    store_columns,
    store_rows,
)
from atlas_kernels.mamba2_chunk import SIZES
from atlas_kernels.ptx_async import copy_commit, copy_wait, launch_dependents, wait_prerequisites
from atlas_kernels.ptx_chunk import CHUNK, add_rows, read_state, weigh_rows
from atlas_kernels.ptx_math import (
    fast_exp2,
    quotient,
    vector_add,
    vector_scale,
)
from atlas_kernels.ptx_memory import dynamic_shared, load_b32, load_constant_f32, load_shared_f32
from atlas_kernels.ptx_tile import tile_fill
from atlas_kernels.ptx_warp import block_x, lane_id, shuffle_b32, sync_threads, thread_x
from atlas_kernels.registry import kernel

HEAD_DIM = 64
VARIANTS = {f"{name}_{form}": (SIZES[name], *PASSES[form]) for name in SIZES for form in PASSES}


def layout(size: int, columns: int, stages: int) -> ChunkPass:
    """A stage holds c and b."""
    return ChunkPass(size, HEAD_DIM, columns, stages, 2)


@kernel(
    "mamba2_prefill",
    args="ptr " * 12 + "i32 i32 i64 i64",
    threads=lambda *sizes: layout(*sizes).threads,
    shared=lambda *sizes: layout(*sizes).shared_bytes,
    variants=VARIANTS,
)
def make_mamba2_prefill(size: int, columns: int, stages: int) -> Any:
    """Grid (N · H · P / columns), P = ``HEAD_DIM``, a state of N = ``size``.

    ``q`` … ``logs`` as ``mamba2_chunk`` wrote them, ``x`` [T, H, P] float32 and ``d`` float32 [H];
    ``chunk_rows`` int32 [chunks]; ``cu_chunks`` int32 [N + 1]: sequence n has the chunks
    ``cu_chunks[n]`` … ``cu_chunks[n + 1]`` − 1; its state is at ``slots[n]`` of ``states`` float32
    [S, H, P, N], updated. ``out`` [T, H, P] float32. Strides in bytes.
    """
    at, lookahead = layout(size, columns, stages), stages - 1
    pitch, narrow, stage, tiles = at.pitch, at.narrow, at.stage, at.tiles
    k_at, p_at, u_at, logs_at = at.k, at.p, at.u, at.logs
    state_at, last_at, p_pitch = at.state, at.last, at.p_pitch
    copy_wide, copy_rest, get, put = at.copy_wide(), at.copy_rest(), at.get(), at.put()
    first_tile, last_tile, joined = at.tile(0), at.tile(1), at.join()
    read = read_state(size, pitch, narrow, 1)
    add, weigh = add_rows(tiles, pitch, narrow), weigh_rows(p_pitch, narrow)
    nothing, scale_state = tile_fill(8, 0.0), vector_scale(8 * tiles)
    plus, times, arrived = vector_add(8), vector_scale(8), copy_wait(max(0, lookahead - 1))
    next_tile = (tiles - 1) * 16
    line = size * 4

    @device
    def fetch(target, q, k, u, p, logs, key_place, place):
        """Ask for a chunk; places are counted in rows."""
        copy_wide(target, q + key_place * (2 * size))
        copy_wide(target + k_at, k + key_place * (2 * size))
        copy_rest(target, p, u, logs, place)

    def mamba2_prefill(
        q, k, u, p, logs, x, d, chunk_rows, cu_chunks, slots, states, out,
        heads, groups, x_stride, out_stride,
    ):  # fmt: skip
        launch_dependents()
        wait_prerequisites()
        parts = HEAD_DIM // columns
        pair = quotient(block_x(), parts)
        column = i32((block_x() - pair * parts) * columns)
        sequence = quotient(pair, heads)
        head = i32(pair - sequence * heads)
        group = quotient(head, quotient(heads, groups))
        chunk, end = load_b32(cu_chunks + sequence * 4), load_b32(cu_chunks + sequence * 4 + 4)
        if chunk >= end:
            return
        base, lane, warp = dynamic_shared(), lane_id(), shuffle_b32(thread_x() >> 5, 0)
        strip, row = (warp >> 2) * 16, (warp & 3) * 16
        u += column * 2
        for ahead in range(lookahead):
            if chunk + ahead < end:
                place = (i64(chunk + ahead) * heads + head) * CHUNK
                key_place = (i64(chunk + ahead) * groups + group) * CHUNK
                fetch(base + ahead * stage, q, k, u, p, logs, key_place, place)
            copy_commit()

        skip = load_constant_f32(d + head * 4)
        state_row = (warp & 3) * (16 * tiles) + (lane >> 2)
        slot = load_b32(slots + sequence * 4)
        channel = head * HEAD_DIM + column + strip + (lane & 3) * 2
        state_place = (
            states + i64(slot) * heads * (HEAD_DIM * line) + channel * line + state_row * 4
        )
        last_place = state_place + next_tile * 4
        state = joined(load_columns(state_place, line), load_columns(last_place, line))
        kept = base + state_at + state_row * narrow + (strip + (lane & 3) * 2) * 2
        put(kept, first_tile(state), f32(1), f32(1))
        put(kept + next_tile * narrow, last_tile(state), f32(1), f32(1))

        a_row = (row + (lane & 15)) * pitch + (lane >> 4) * 16
        p_row = p_at + (row + (lane & 15)) * p_pitch + (lane >> 4) * 16
        k_row = k_at + ((lane & 7) + (lane >> 4) * 8) * pitch
        k_row += (warp & 3) * (32 * tiles) + (lane & 8) * 2
        own = (lane & 15) * narrow + (lane >> 4) * 16 + strip * 2
        fragment = (row + (lane >> 2)) * narrow + (strip + (lane & 3) * 2) * 2
        log_at = logs_at + (row + (lane >> 2)) * 4
        number = i32(0)
        while chunk < end:
            if lookahead > 0:
                arrived()
            sync_threads()  # nobody reads the chunk before this one any more
            ahead = chunk + lookahead
            if ahead < end:
                free = number - 1 if number > 0 else lookahead
                place = (i64(ahead) * heads + head) * CHUNK
                key_place = (i64(ahead) * groups + group) * CHUNK
                fetch(base + free * stage, q, k, u, p, logs, key_place, place)
            copy_commit()
            if lookahead == 0:
                arrived()
                sync_threads()
            here = base + number * stage
            first_row = i64(load_b32(chunk_rows + i64(chunk) * 4) + row + (lane >> 2))
            values = load_rows(x + first_row * x_stride + channel * 4, x_stride)
            upper, lower = load_shared_f32(here + log_at), load_shared_f32(here + log_at + 32)
            total = load_shared_f32(here + logs_at + (CHUNK - 1) * 4)
            pushed = get(here + u_at + fragment)
            put(
                base + last_at + fragment,
                pushed,
                fast_exp2(total - upper),
                fast_exp2(total - lower),
            )
            read_out = read(nothing(), here + a_row, base + state_at + own)
            read_out = scale_rows(read_out, fast_exp2(upper), fast_exp2(lower))
            read_out = weigh(read_out, here + p_row, here + u_at + own)
            target = out + first_row * out_stride + channel * 4
            store_rows(target, out_stride, plus(read_out, times(values, skip)))
            sync_threads()
            state = add(scale_state(state, fast_exp2(total)), here + k_row, base + last_at + own)
            put(kept, first_tile(state), f32(1), f32(1))
            put(kept + next_tile * narrow, last_tile(state), f32(1), f32(1))
            chunk = i32(chunk + 1)
            number = i32(number + 1 if number < lookahead else 0)
        store_columns(state_place, line, first_tile(state))
        store_columns(last_place, line, last_tile(state))

    return mamba2_prefill
