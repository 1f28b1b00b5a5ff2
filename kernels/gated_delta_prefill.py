"""The gated delta rule from chunk to chunk of a prompt, after ``gated_delta_chunk``.

A thread block takes 16 or 32 columns of one value head's state through all chunks of a sequence, as
``chunk_pass`` says. Columns are independent and chunks come one after another, so a prompt cut at a
multiple of ``CHUNK`` gives the bits of one pass. Order: U, then − W S; 2^G q S, then P V';
2^G₆₃ S, then Σ kᵢ ⊗ V'ᵢ; each k16 steps ascending in one accumulator.

Rounded to bf16: q, k, W, U, P, and V' and the state as factors. Sums are float32.

Source: Yang, Kautz and Hatamizadeh, "Gated Delta Networks" (2024), arXiv 2412.06464, section 3.3.
"""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import i32, i64
from atlas_kernels.chunk_pass import (
    BULK_PASSES,
    CARRY,
    PAIR_PASSES,
    PASSES,
    READ,
    STRIP,
    STRIP_BYTES,
    THREADS,
    ChunkPass,
)
from atlas_kernels.gated_delta_head import DIMS
from atlas_kernels.ptx_async import launch_dependents, sync_cluster, wait_prerequisites
from atlas_kernels.ptx_math import fast_exp2, quotient, vector_scale
from atlas_kernels.ptx_memory import dynamic_shared, load_b32, load_shared_f32, load_shared_f32x2
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


def layout(dim: int, columns: int, stages: int, bulk: bool, paired: bool) -> ChunkPass:
    """A stage holds q, k and W."""
    return ChunkPass(dim, columns, stages, 3, bulk, paired)


def _variants(
    passes: dict[str, tuple[int, int]], bulk: bool, paired: bool = False
) -> dict[str, tuple[int, ...]]:
    return {
        f"{name}_{form}": (DIMS[name], *passes[form], bulk, paired)
        for name in DIMS
        for form in passes
    }


_SETTINGS: dict[str, Any] = {
    "args": "ptr " * 11 + "i32 i32 i64",
    "threads": THREADS,
    "shared": lambda *sizes: layout(*sizes).shared_bytes,
}


@kernel(
    "gated_delta_prefill",
    **_SETTINGS,
    cluster=2,
    arch="sm_90a",  # elsewhere multicast within a cluster may be slow, the assembler warns
    variants=_variants(PAIR_PASSES, True, True),
)
@kernel("gated_delta_prefill", **_SETTINGS, arch="sm_90", variants=_variants(BULK_PASSES, True))
@kernel("gated_delta_prefill", **_SETTINGS, variants=_variants(PASSES, False))
def make_gated_delta_prefill(dim: int, columns: int, stages: int, bulk: bool, paired: bool) -> Any:
    """Grid (N · HV · V / columns), K = V = ``dim``.

    ``q`` … ``logs`` as ``gated_delta_chunk`` wrote them, ``chunk_rows`` int32 [chunks];
    ``cu_chunks`` int32 [N + 1]: sequence n has the chunks ``cu_chunks[n]`` … ``cu_chunks[n + 1]``
    − 1; its state is at ``slots[n]`` of ``states`` float32 [S, HV, K, V], updated. ``out`` [T, HV,
    V] float32, ``out_stride`` in bytes.
    """
    at, lookahead = layout(dim, columns, stages, bulk, paired), stages - 1
    stage, tiles, pairs = at.stage, at.tiles, at.pairs
    k_at, w_at, p_at, u_at, logs_at = at.k, at.w, at.p, at.u, at.logs
    state_at, new_at, last_at = at.state, at.new, at.last
    prepare, fetch, arrived = at.prepare(), at.fetch(), at.arrived()
    release, wait_release = at.release(), at.wait_release()
    pitch, p_pitch, state_words, new_words = (
        row_pitch(dim),
        row_pitch(CHUNK),
        dim // 16,
        CHUNK // 16,
    )
    read, weigh = read_rows(state_words, tiles), read_rows(new_words, tiles)
    put_state, put_new = put_words(pairs, tiles, state_words), put_words(1, tiles, new_words)
    get_new, nothing = get_rows(tiles, STRIP_BYTES), tile_fill(8 * tiles, 0.0)
    add, scaled = add_rows(pairs, tiles, pitch), scale_rows(tiles)
    scale_state, store_out = vector_scale(8 * pairs * tiles), store_piece(1, tiles, 4)
    load_state, store_state = load_piece(pairs, tiles, 4), store_piece(pairs, tiles, 4)
    strips, line = dim // STRIP, dim * 4

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
        role, warp = warp >> 2, warp & 3
        sources, strip = (q, k, p, u, logs, w), quotient(column, STRIP)
        prepare(base)
        for ahead in range(lookahead):
            place = i64(chunk + ahead) * value_heads + head
            key_place = i64(chunk + ahead) * key_heads + key_head
            present = chunk + ahead < end
            fetch(base, ahead, present, sources, key_place, place, place * strips + strip)

        slot = load_b32(slots + sequence * 4)
        key = warp * (16 * pairs) + (lane & 3) * 2
        state_place = states + (i64(slot) * value_heads + head) * (dim * dim * 4)
        state_place += (key * dim + column + (lane >> 2)) * 4
        own = base + lane * 16
        kept = own + state_at + warp * (pairs * WORD_BYTES)
        state = load_state(state_place, line)
        if role == CARRY:
            put_state(kept, state)
        sums = nothing()

        b_row = warp * 16 + (lane & 7) + (lane >> 4) * 8
        a_row, p_row = b_row * pitch + (lane & 8) * 2, p_at + b_row * p_pitch + (lane & 8) * 2
        u_row = u_at + b_row * (2 * STRIP) + (lane & 8) * 2
        k_row = k_at + (lane & 15) * pitch + (lane >> 4) * 16 + warp * (32 * pairs)
        row = warp * 16 + (lane & 3) * 2
        target = out + (head * dim + column + (lane >> 2)) * 4
        number, parity, turn = i32(0), i32(0), i32(0)
        while chunk < end:
            if lookahead > 0:
                arrived(base, number, parity)
            sync_threads()  # nobody reads the chunk before this one any more
            ahead = chunk + lookahead
            free = i32(number - 1 if number > 0 else lookahead)
            place = i64(ahead) * value_heads + head
            key_place = i64(ahead) * key_heads + key_head
            if paired:
                release(base)
            else:
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
                new = read(get_new(here + u_row), own + state_at, here + w_at + a_row)
                put_new(own + new_at + warp * WORD_BYTES, new)
                f0, f1 = fast_exp2(total - upper[0]), fast_exp2(total - upper[1])
                f8, f9 = fast_exp2(total - lower[0]), fast_exp2(total - lower[1])
                put_new(own + last_at + warp * WORD_BYTES, scaled(new, f0, f1, f8, f9))
            elif role == READ:
                sums = read(nothing(), own + state_at, here + a_row)
                f0, f1 = fast_exp2(upper[0]), fast_exp2(upper[1])
                sums = scaled(sums, f0, f1, fast_exp2(lower[0]), fast_exp2(lower[1]))
            sync_threads()
            if role == CARRY:
                state = add(scale_state(state, fast_exp2(total)), own + last_at, here + k_row)
                put_state(kept, state)
            elif role == READ:
                sums = weigh(sums, own + new_at, here + p_row)
                store_out(target + first_row * out_stride, out_stride, sums)
            elif paired:
                wait_release(base, turn & 1)
                fetch(base, free, ahead < end, sources, key_place, place, place * strips + strip)
            turn = i32(turn + 1)
            chunk = i32(chunk + 1)
            wraps = number == lookahead
            number, parity = i32(0 if wraps else number + 1), i32(parity ^ 1 if wraps else parity)
        if role == CARRY:
            store_state(state_place, line, state)
        if paired:
            sync_cluster()  # the other may still write here

    return gated_delta_prefill
