"""The Mamba-2 recurrence from chunk to chunk of a prompt, after ``mamba2_chunk``.

A thread block takes 16 or 32 channels of one head's state, transposed to [N, P], through all chunks
of a sequence, as ``chunk_pass`` says. A prompt cut at a multiple of ``CHUNK`` gives the bits of one
pass. Order: 2^G c S, then P Δ x, then d x; 2^G₆₃ S, then Σ bᵢ ⊗ Δᵢ xᵢ; each k16 steps ascending
in one accumulator. Rounded to bf16: b, c, P, and Δ x and the state as factors. Sums are float32.

Source: Dao and Gu, "Transformers are SSMs" (2024), arXiv 2405.21060, section 6.
"""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import i32, i64
from atlas_kernels.chunk_pass import (
    BULK_PASSES,
    CARRY,
    PASSES,
    READ,
    STRIP,
    STRIP_BYTES,
    THREADS,
    ChunkPass,
)
from atlas_kernels.mamba2_chunk import SIZES
from atlas_kernels.ptx_async import launch_dependents, wait_prerequisites
from atlas_kernels.ptx_math import fast_exp2, quotient, vector_add, vector_scale
from atlas_kernels.ptx_memory import (
    dynamic_shared,
    load_b32,
    load_constant_f32,
    load_shared_f32,
    load_shared_f32x2,
)
from atlas_kernels.ptx_pass import (
    WORD_BYTES,
    add_rows,
    get_rows,
    load_piece,
    put_words,
    read_rows,
    scale_rows,
    store_piece,
)
from atlas_kernels.ptx_tile import tile_fill
from atlas_kernels.ptx_warp import block_x, lane_id, shuffle_b32, sync_threads, thread_x
from atlas_kernels.recurrence_shapes import CHUNK, row_pitch
from atlas_kernels.registry import kernel

HEAD_DIM = 64


def layout(size: int, columns: int, stages: int, bulk: bool) -> ChunkPass:
    """A stage holds c and b."""
    return ChunkPass(size, columns, stages, 2, bulk)


def _variants(passes: dict[str, tuple[int, int]], bulk: bool) -> dict[str, tuple[int, ...]]:
    return {
        f"{name}_{form}": (SIZES[name], *passes[form], bulk) for name in SIZES for form in passes
    }


_SETTINGS: dict[str, Any] = {
    "args": "ptr " * 12 + "i32 i32 i64 i64",
    "threads": THREADS,
    "shared": lambda *sizes: layout(*sizes).shared_bytes,
}


@kernel("mamba2_prefill", **_SETTINGS, arch="sm_90", variants=_variants(BULK_PASSES, True))
@kernel("mamba2_prefill", **_SETTINGS, variants=_variants(PASSES, False))
def make_mamba2_prefill(size: int, columns: int, stages: int, bulk: bool) -> Any:
    """Grid (N · H · P / columns), P = ``HEAD_DIM``, a state of N = ``size``.

    ``q`` … ``logs`` as ``mamba2_chunk`` wrote them, ``x`` [T, H, P] float32 and ``d`` float32 [H];
    ``chunk_rows`` int32 [chunks]; ``cu_chunks`` int32 [N + 1]: sequence n has the chunks
    ``cu_chunks[n]`` … ``cu_chunks[n + 1]`` − 1; its state is at ``slots[n]`` of ``states`` float32
    [S, H, P, N], updated. ``out`` [T, H, P] float32. Strides in bytes.
    """
    at, lookahead = layout(size, columns, stages, bulk), stages - 1
    stage, tiles, pairs = at.stage, at.tiles, at.pairs
    k_at, p_at, u_at, logs_at = at.k, at.p, at.u, at.logs
    state_at, new_at, last_at = at.state, at.new, at.last
    prepare, fetch, arrived = at.prepare(), at.fetch(), at.arrived()
    pitch, p_pitch = row_pitch(size), row_pitch(CHUNK)
    state_words, new_words = size // 16, CHUNK // 16
    read, weigh = read_rows(state_words, tiles), read_rows(new_words, tiles)
    put_state, put_new = put_words(pairs, tiles, state_words), put_words(1, tiles, new_words)
    get_new, nothing = get_rows(tiles, STRIP_BYTES), tile_fill(8 * tiles, 0.0)
    add, scaled, plus = add_rows(pairs, tiles, pitch), scale_rows(tiles), vector_add(8 * tiles)
    scale_state, times = vector_scale(8 * pairs * tiles), vector_scale(8 * tiles)
    line, strips = size * 4, HEAD_DIM // STRIP
    load_state, store_state = load_piece(pairs, tiles, line), store_piece(pairs, tiles, line)
    load_x, store_out = load_piece(1, tiles, 4), store_piece(1, tiles, 4)

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
        role, warp = warp >> 2, warp & 3
        sources, strip = (q, k, p, u, logs), quotient(column, STRIP)
        prepare(base)
        for ahead in range(lookahead):
            place = i64(chunk + ahead) * heads + head
            key_place = i64(chunk + ahead) * groups + group
            present = chunk + ahead < end
            fetch(base, ahead, present, sources, key_place, place, place * strips + strip)

        slot = load_b32(slots + sequence * 4)
        key = warp * (16 * pairs) + (lane & 3) * 2
        skip = load_constant_f32(d + head * 4)
        channel = head * HEAD_DIM + column + (lane >> 2)
        state_place = states + (i64(slot) * heads * HEAD_DIM + channel) * line + key * 4
        own = base + lane * 16
        kept = own + state_at + warp * (pairs * WORD_BYTES)
        state = load_state(state_place, 4)
        if role == CARRY:
            put_state(kept, state)
        sums = values = nothing()

        b_row = warp * 16 + (lane & 7) + (lane >> 4) * 8
        a_row, p_row = b_row * pitch + (lane & 8) * 2, p_at + b_row * p_pitch + (lane & 8) * 2
        u_row = u_at + b_row * (2 * STRIP) + (lane & 8) * 2
        k_row = k_at + (lane & 15) * pitch + (lane >> 4) * 16 + warp * (32 * pairs)
        row = warp * 16 + (lane & 3) * 2
        source, target = x + channel * 4, out + channel * 4
        number, parity = i32(0), i32(0)
        while chunk < end:
            if lookahead > 0:
                arrived(base, number, parity)
            sync_threads()  # nobody reads the chunk before this one any more
            ahead = chunk + lookahead
            free = i32(number - 1 if number > 0 else lookahead)
            place = i64(ahead) * heads + head
            key_place = i64(ahead) * groups + group
            fetch(base, free, ahead < end, sources, key_place, place, place * strips + strip)
            if lookahead == 0:
                arrived(base, number, parity)
                sync_threads()
            here = base + number * stage
            first_row = i64(load_b32(chunk_rows + i64(chunk) * 4) + row)
            upper = load_shared_f32x2(here + logs_at + row * 4)
            lower = load_shared_f32x2(here + logs_at + row * 4 + 32)
            total = load_shared_f32(here + logs_at + (CHUNK - 1) * 4)
            if role == CARRY:
                new = get_new(here + u_row)
                put_new(own + new_at + warp * WORD_BYTES, new)
                f0, f1 = fast_exp2(total - upper[0]), fast_exp2(total - upper[1])
                f8, f9 = fast_exp2(total - lower[0]), fast_exp2(total - lower[1])
                put_new(own + last_at + warp * WORD_BYTES, scaled(new, f0, f1, f8, f9))
            elif role == READ:
                values = load_x(source + first_row * x_stride, x_stride)
                sums = read(nothing(), own + state_at, here + a_row)
                f0, f1 = fast_exp2(upper[0]), fast_exp2(upper[1])
                sums = scaled(sums, f0, f1, fast_exp2(lower[0]), fast_exp2(lower[1]))
            sync_threads()
            if role == CARRY:
                state = add(scale_state(state, fast_exp2(total)), own + last_at, here + k_row)
                put_state(kept, state)
            elif role == READ:
                sums = weigh(sums, own + new_at, here + p_row)
                sums = plus(sums, times(values, skip))
                store_out(target + first_row * out_stride, out_stride, sums)
            chunk = i32(chunk + 1)
            wraps = number == lookahead
            number, parity = i32(0 if wraps else number + 1), i32(parity ^ 1 if wraps else parity)
        if role == CARRY:
            store_state(state_place, 4, state)

    return mamba2_prefill
