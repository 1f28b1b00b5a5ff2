"""The gated delta rule from chunk to chunk of a prompt, after ``gated_delta_chunk``.

A thread block takes 16 or 32 columns of one value head's state through all chunks of a sequence, as
``chunk_pass`` says. Columns are independent and chunks come one after another, so a prompt cut at a
multiple of ``CHUNK`` gives the bits of one pass.

Rounded to bf16: q, k, W, U, P, and V' and the state as factors. Sums are float32.

Source: Yang, Kautz and Hatamizadeh, "Gated Delta Networks" (2024), arXiv 2412.06464, section 3.3.
"""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import device, f32, i32, i64
from atlas_kernels.chunk_pass import PASSES, ChunkPass, load_rows, scale_rows, store_rows
from atlas_kernels.gated_delta_step import DIMS
from atlas_kernels.ptx_async import copy_commit, copy_wait, launch_dependents, wait_prerequisites
from atlas_kernels.ptx_chunk import CHUNK, add_rows, read_state, weigh_rows
from atlas_kernels.ptx_math import fast_exp2, quotient, vector_scale
from atlas_kernels.ptx_memory import dynamic_shared, load_b32, load_shared_f32
from atlas_kernels.ptx_tile import tile_fill
from atlas_kernels.ptx_warp import block_x, lane_id, shuffle_b32, sync_threads, thread_x
from atlas_kernels.registry import kernel

VARIANTS = {f"{name}_{form}": (DIMS[name], *PASSES[form]) for name in DIMS for form in PASSES}


def layout(dim: int, columns: int, stages: int) -> ChunkPass:
    """A stage holds q, k and W."""
    return ChunkPass(dim, dim, columns, stages, 3)


@kernel(
    "gated_delta_prefill",
    args="ptr " * 11 + "i32 i32 i64",
    threads=lambda *sizes: layout(*sizes).threads,
    shared=lambda *sizes: layout(*sizes).shared_bytes,
    variants=VARIANTS,
)
def make_gated_delta_prefill(dim: int, columns: int, stages: int) -> Any:
    """Grid (N · HV · V / columns), K = V = ``dim``.

    ``q`` … ``logs`` as ``gated_delta_chunk`` wrote them, ``chunk_rows`` int32 [chunks];
    ``cu_chunks`` int32 [N + 1]: sequence n has the chunks ``cu_chunks[n]`` … ``cu_chunks[n + 1]``
    − 1; its state is at ``slots[n]`` of ``states`` float32 [S, HV, K, V], updated. ``out`` [T, HV,
    V] float32, ``out_stride`` in bytes.
    """
    at, lookahead = layout(dim, columns, stages), stages - 1
    pitch, narrow, stage, tiles = at.pitch, at.narrow, at.stage, at.tiles
    q_at, k_at, w_at, p_at, u_at, logs_at = at.q, at.k, at.w, at.p, at.u, at.logs
    state_at, rows_at, last_at, p_pitch = at.state, at.rows, at.last, at.p_pitch
    copy_wide, copy_rest, get, put = at.copy_wide(), at.copy_rest(), at.get(), at.put()
    first_tile, last_tile, joined = at.tile(0), at.tile(1), at.join()
    read = read_state(dim, pitch, narrow, 2)
    add, weigh = add_rows(tiles, pitch, narrow), weigh_rows(p_pitch, narrow)
    nothing, scale_state = tile_fill(8, 0.0), vector_scale(8 * tiles)
    arrived = copy_wait(max(0, lookahead - 1))
    next_tile = (tiles - 1) * 16  # rows from a warp's first tile to its last

    @device
    def fetch(target, q, k, w, u, p, logs, key_place, place):
        """Ask for a chunk; places are counted in rows."""
        copy_wide(target + w_at, w + place * (2 * dim))
        copy_wide(target + q_at, q + key_place * (2 * dim))
        copy_wide(target + k_at, k + key_place * (2 * dim))
        copy_rest(target, p, u, logs, place)

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
        for ahead in range(lookahead):
            if chunk + ahead < end:
                place = (i64(chunk + ahead) * value_heads + head) * CHUNK
                key_place = (i64(chunk + ahead) * key_heads + key_head) * CHUNK
                fetch(base + ahead * stage, q, k, w, u, p, logs, key_place, place)
            copy_commit()

        line = dim * 4
        state_row = (warp & 3) * (16 * tiles) + (lane >> 2)
        slot = load_b32(slots + sequence * 4)
        state_place = states + (i64(slot) * value_heads + head) * (dim * dim * 4)
        state_place += (state_row * dim + column + group + (lane & 3) * 2) * 4
        last_place = state_place + next_tile * line
        state = joined(load_rows(state_place, line), load_rows(last_place, line))
        kept = base + state_at + state_row * narrow + (group + (lane & 3) * 2) * 2
        put(kept, first_tile(state), f32(1), f32(1))
        put(kept + next_tile * narrow, last_tile(state), f32(1), f32(1))

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
            if lookahead > 0:
                arrived()
            sync_threads()  # nobody reads the chunk before this one any more
            ahead = chunk + lookahead
            if ahead < end:
                free = number - 1 if number > 0 else lookahead
                place = (i64(ahead) * value_heads + head) * CHUNK
                key_place = (i64(ahead) * key_heads + key_head) * CHUNK
                fetch(base + free * stage, q, k, w, u, p, logs, key_place, place)
            copy_commit()
            if lookahead == 0:
                arrived()
                sync_threads()
            here = base + number * stage
            first_row = i64(load_b32(chunk_rows + i64(chunk) * 4) + row + (lane >> 2))
            upper, lower = load_shared_f32(here + log_at), load_shared_f32(here + log_at + 32)
            total = load_shared_f32(here + logs_at + (CHUNK - 1) * 4)
            new, read_out = read(
                get(here + u_at + fragment), nothing(), here + w_at + a_row, here + a_row,
                base + state_at + own,
            )  # fmt: skip
            put(base + rows_at + fragment, new, f32(1), f32(1))
            put(base + last_at + fragment, new, fast_exp2(total - upper), fast_exp2(total - lower))
            sync_threads()
            state = add(scale_state(state, fast_exp2(total)), here + k_row, base + last_at + own)
            put(kept, first_tile(state), f32(1), f32(1))
            put(kept + next_tile * narrow, last_tile(state), f32(1), f32(1))
            read_out = scale_rows(read_out, fast_exp2(upper), fast_exp2(lower))
            read_out = weigh(read_out, here + p_row, base + rows_at + own)
            store_rows(target + first_row * out_stride, out_stride, read_out)
            chunk = i32(chunk + 1)
            number = i32(number + 1 if number < lookahead else 0)
        store_rows(state_place, line, first_tile(state))
        store_rows(last_place, line, last_tile(state))

    return gated_delta_prefill
