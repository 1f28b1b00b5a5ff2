"""The Mamba-2 recurrence within chunks of a prompt: what ``mamba2_prefill`` needs of each.

With G the sum of the logarithms of the decays up to a row, base 2, a chunk takes the state S to

    out = 2^G c S + P (Δ x) + d x,   S ← 2^G₆₃ S + Σᵢ bᵢ ⊗ 2^(G₆₃ − Gᵢ) Δᵢ xᵢ

    P = tril(c bᵀ 2^(Gᵢ − Gⱼ))

A thread block takes a chunk of one head and writes Δ x, P, G, and of the group's first head c and
b: all but G in bf16. Nothing depends on other chunks.

Source: Dao and Gu, "Transformers are SSMs" (2024), arXiv 2405.21060, section 6.
"""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import device, f32, i32, i64
from atlas_kernels.chunk_pass import STRIP, STRIP_BYTES
from atlas_kernels.chunk_rows import LOG2_E, THREADS, copy_out, put_row, running_sums
from atlas_kernels.gates import exponential
from atlas_kernels.mamba2_step import time_step
from atlas_kernels.ptx_async import launch_dependents, wait_prerequisites
from atlas_kernels.ptx_chunk import decay_pairs
from atlas_kernels.ptx_math import pack_bf16, quotient
from atlas_kernels.ptx_memory import (
    dynamic_shared,
    load_b32,
    load_constant_f32,
    load_f32x4,
    load_shared_f32,
    store_b32x2,
    store_f32x2,
    store_shared_f32x2,
)
from atlas_kernels.ptx_state import global_row
from atlas_kernels.ptx_tile import tile_scores, tile_store_bf16
from atlas_kernels.ptx_warp import (
    block_x,
    block_y,
    lane_id,
    shuffle_b32,
    sync_threads,
    sync_warp,
    thread_x,
)
from atlas_kernels.recurrence_shapes import CHUNK, matrix_bytes, row_pitch
from atlas_kernels.registry import kernel
from atlas_kernels.vector import access

SIZES = {"n64": 64, "n128": 128}
VARIANTS = {f"{size}_{type}": (SIZES[size], type) for size in SIZES for type in ("bf16", "f32")}


def shared_bytes(size: int, type: str) -> int:
    """c (then P on its way out), b, and two numbers a row."""
    return 2 * CHUNK * row_pitch(size) + 2 * CHUNK * 4


@kernel(
    "mamba2_chunk",
    args="ptr " * 13 + "i32 i32 i32 i64 i64 f32 f32",
    threads=THREADS,
    min_blocks=4,
    shared=shared_bytes,
    variants=VARIANTS,
)
def make_mamba2_chunk(size: int, type: str) -> Any:
    """Grid (chunks, H); a state of N = ``size``, heads of P = ``dim`` elements, a multiple of 16.

    ``x`` [T, H, P], ``b``, ``c`` [T, G, N] float32 after the convolution, with one stride; ``dt``
    [T, H] of the variant's type; ``chunk_rows`` int32 [chunks]: a chunk's first row; ``num_chunks``
    int32: how many there are, at most those of the grid. Written:
    ``q`` (c), ``k`` (b) bf16 [chunks, G, 64, N] and ``p`` bf16 [chunks, H, 64, 64], with
    ``row_pitch`` from row to row; ``u`` (Δ x) bf16 [chunks, H, P / 16, 64, 16], ``logs`` float32
    [chunks, H, 64] (G). Strides in bytes.
    """
    pitch = row_pitch(size)
    k_at = CHUNK * pitch
    logs_at = 2 * CHUNK * pitch
    steps_at = logs_at + CHUNK * 4
    load_time, item = access(type, 1).load, access(type, 1).item_bytes
    scores_of, to_diagonal = tile_scores(size, CHUNK, 1, pitch), decay_pairs(False)
    store_p, p_pitch = tile_store_bf16(CHUNK, 1, pitch), row_pitch(CHUNK)
    copy_p, wide_bytes, p_bytes = (
        copy_out(2 * CHUNK, pitch, p_pitch),
        matrix_bytes(size),
        matrix_bytes(CHUNK),
    )
    row_of, put = global_row(size), put_row(size)

    @device
    def gates(base, dt, first_row, decay_log, bias, stride, bounds, logs):
        """A warp: the rows' Δ and G."""
        lane = lane_id()
        at = dt + (first_row + 2 * lane) * stride
        first = time_step(load_time(at)[0], bias, bounds[0], bounds[1])
        second = time_step(load_time(at + stride)[0], bias, bounds[0], bounds[1])
        rate = -exponential(decay_log) * f32(LOG2_E)
        sums = running_sums(rate * first, rate * second)
        store_shared_f32x2(base + steps_at + lane * 8, (first, second))
        store_shared_f32x2(base + logs_at + lane * 8, sums)
        store_f32x2(logs + lane * 8, sums)

    @device
    def piece(i, dim):
        """Row and byte of a piece of 4 elements of x; past the last, that again."""
        i = min(i, CHUNK * (dim >> 2) - 1)
        row = quotient(i, dim >> 2)
        return i32(row), i32((i - row * (dim >> 2)) * 16)

    @device
    def push(base, strips, row, at, v):
        """Δ x."""
        step = load_shared_f32(base + steps_at + row * 4)
        words = (pack_bf16(v[0] * step, v[1] * step), pack_bf16(v[2] * step, v[3] * step))
        target = strips + (at >> 6) * STRIP_BYTES + row * (2 * STRIP) + ((at & 63) >> 1)
        store_b32x2(target, words)

    def mamba2_chunk(
        x, b, c, dt, decay_log, dt_bias, chunk_rows, num_chunks,
        q_out, k_out, u_out, p_out, logs_out, heads, groups, dim, stride, dt_stride, dt_min, dt_max,
    ):  # fmt: skip
        launch_dependents()
        wait_prerequisites()
        if block_x() >= load_b32(num_chunks):
            return
        base, lane, warp = dynamic_shared(), lane_id(), shuffle_b32(thread_x() >> 5, 0)
        chunk, head = i64(block_x()), block_y()
        per_group = quotient(heads, groups)
        group = quotient(head, per_group)
        is_first = head == group * per_group
        first_row = i64(load_b32(chunk_rows + chunk * 4))
        place = chunk * heads + head
        row = warp * 16 + (lane >> 3)
        column = (lane & 7) * 4
        key_place = (chunk * groups + group) * wide_bytes
        source = (first_row + row) * stride + (group * size + column) * 4
        reads, keys = row_of(c + source), row_of(b + source)
        if warp == 0:
            rate = load_constant_f32(decay_log + head * 4)
            bias = load_constant_f32(dt_bias + head * 4)
            logs = logs_out + place * (CHUNK * 4)
            gates(base, dt + head * item, first_row, rate, bias, dt_stride, (dt_min, dt_max), logs)
        for i in range(0, 16, 4):
            at = (row + i) * pitch + column * 2
            next_reads, next_keys = reads, keys
            if i < 12:  # asked for while these are used
                ahead = source + (i + 4) * stride
                next_reads, next_keys = row_of(c + ahead), row_of(b + ahead)
            put(base + at, q_out + key_place + at, is_first, f32(1), reads)
            put(base + at + k_at, k_out + key_place + at, is_first, f32(1), keys)
            reads, keys = next_reads, next_keys
        sync_threads()

        values, strips = x + first_row * stride + head * dim * 4, u_out + place * (dim * 2 * CHUNK)
        for i in range(thread_x(), CHUNK * (dim >> 2), 4 * THREADS):
            r0, at0 = piece(i, dim)
            r1, at1 = piece(i + THREADS, dim)
            r2, at2 = piece(i + 2 * THREADS, dim)
            r3, at3 = piece(i + 3 * THREADS, dim)
            v0, v1 = load_f32x4(values + r0 * stride + at0), load_f32x4(values + r1 * stride + at1)
            v2, v3 = load_f32x4(values + r2 * stride + at2), load_f32x4(values + r3 * stride + at3)
            push(base, strips, r0, at0, v0)
            push(base, strips, r1, at1, v1)
            push(base, strips, r2, at2, v2)
            push(base, strips, r3, at3, v3)
        own = base + warp * 16 * pitch
        q_row = own + (lane & 15) * pitch + (lane >> 4) * 16
        k_row = base + k_at + (lane & 7) * pitch + (lane >> 4) * (8 * pitch) + (lane & 8) * 2
        upper = warp * 16 + (lane >> 2)
        log_upper = load_shared_f32(base + logs_at + upper * 4)
        log_lower = load_shared_f32(base + logs_at + (upper + 8) * 4)
        pair = (lane & 3) * 2
        weights = scores_of(q_row, k_row)
        weights = to_diagonal(weights, upper, log_upper, upper + 8, log_lower, base + logs_at, pair)
        sync_warp()
        store_p(weights, own + (lane >> 2) * pitch + pair * 2)
        copy_p(p_out + place * p_bytes + warp * (16 * p_pitch), own)

    return mamba2_chunk
