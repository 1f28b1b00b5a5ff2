"""The gated delta rule within chunks of a prompt: what ``gated_delta_prefill`` needs of each.

With G the sum of the logarithms of the decays up to a row, base 2, and T = (I + A)⁻¹,
A = tril(β k kᵀ 2^(Gᵢ − Gⱼ), −1), a chunk takes the state S to

    V' = U − W S,   out = 2^G q S + P V',   S ← 2^G₆₃ S + Σᵢ kᵢ ⊗ 2^(G₆₃ − Gᵢ) V'ᵢ

    U = T β V,   W = T β 2^G K,   P = tril(q kᵀ 2^(Gᵢ − Gⱼ))

A thread block takes a chunk of one value head and writes −W, U, P, G, and of the group's first head
q and k, normalised: all but G in bf16, ready for the tensor cores. The inverse is computed in
float32: its two diagonal halves by forward substitution, a thread a column, then the rest by
products. Orders are fixed within a chunk, so nothing depends on other chunks.

Source: Yang et al., "Parallelizing Linear Transformers with the Delta Rule" (2024), arXiv
2406.06484, section 3; Yang, Kautz and Hatamizadeh, "Gated Delta Networks" (2024), arXiv 2412.06464.
"""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import device, f32, i64
from atlas_kernels.chunk_pass import STRIP, STRIP_BYTES
from atlas_kernels.chunk_rows import LOG2_E, THREADS, copy_out, put_row, running_sums
from atlas_kernels.gated_delta_head import DIMS, NORM_EPS, TYPES
from atlas_kernels.gates import log_decay, sigmoid
from atlas_kernels.ptx_async import launch_dependents, wait_prerequisites
from atlas_kernels.ptx_chunk import (
    decay_pairs,
    invert_column,
    scaled_words,
    store_column,
)
from atlas_kernels.ptx_math import fast_exp2, fast_rsqrt, fma, quotient, vector_add_squares
from atlas_kernels.ptx_memory import (
    dynamic_shared,
    load_b32,
    load_constant_f32,
    load_shared_f32,
    load_shared_f32x4,
    store_f32x2,
    store_shared_f32x2,
    store_shared_f32x4,
)
from atlas_kernels.ptx_state import global_row
from atlas_kernels.ptx_tile import tile_fill, tile_scores, tile_store, tile_store_bf16, tile_values
from atlas_kernels.ptx_warp import (
    block_x,
    block_y,
    lane_id,
    shuffle_b32,
    shuffle_xor_f32,
    sync_threads,
    sync_warp,
    thread_x,
)
from atlas_kernels.recurrence_shapes import CHUNK, matrix_bytes, row_pitch
from atlas_kernels.registry import kernel
from atlas_kernels.vector import access

HALF = CHUNK // 2
MATRIX_PITCH = 4 * CHUNK + 32  # of float32: lanes of a fragment meet no bank twice
VARIANTS = {f"{size}_{type}": (DIMS[size], type) for size in DIMS for type in TYPES}


def shared_bytes(dim: int, type: str) -> int:
    """q (then what is on its way out), k, v, the matrix, and three numbers a row."""
    return 3 * CHUNK * row_pitch(dim) + CHUNK * MATRIX_PITCH + 3 * CHUNK * 4


@kernel(
    "gated_delta_chunk",
    args="ptr " * 13 + "i32 i32 i64 i64",
    threads=THREADS,
    min_blocks=3,
    shared=shared_bytes,
    variants=VARIANTS,
)
def make_gated_delta_chunk(dim: int, type: str) -> Any:
    """Grid (chunks, HV), K = V = ``dim``.

    ``qkv`` [T, 2·HK·K + HV·V] float32 after the convolution, ``a`` and ``b`` [T, HV] of the
    variant's type; ``chunk_rows`` int32 [chunks]: a chunk's first row; ``num_chunks``
    int32: how many there are, at most those of the grid. Written: ``q``, ``k`` bf16
    [chunks, HK, 64, K], ``w`` bf16 [chunks, HV, 64, K], ``p`` bf16 [chunks, HV, 64, 64], all of
    these with ``row_pitch`` from row to row; ``u`` bf16 [chunks, HV, V / 16, 64, 16] and ``logs``
    float32 [chunks, HV, 64] (G). Strides in bytes.
    """
    pitch = row_pitch(dim)
    k_at, v_at = CHUNK * pitch, 2 * CHUNK * pitch
    matrix_at = 3 * CHUNK * pitch
    logs_at = matrix_at + CHUNK * MATRIX_PITCH
    beta_at, write_at = logs_at + CHUNK * 4, logs_at + CHUNK * 8
    load_gate, item = access(type, 1).load, access(type, 1).item_bytes

    scores_of, values_of = tile_scores(dim, CHUNK, 1, pitch), tile_values(dim, CHUNK, 1, pitch)
    below, to_diagonal = decay_pairs(True), decay_pairs(False)
    store_matrix = tile_store(CHUNK, 1, MATRIX_PITCH)
    store_p, store_rows = tile_store_bf16(CHUNK, 1, pitch), tile_store_bf16(dim, 1, pitch)
    invert, put_column = invert_column(HALF, MATRIX_PITCH), store_column(HALF, MATRIX_PITCH)
    words, no_values = scaled_words(MATRIX_PITCH), tile_fill(dim // 2, 0.0)
    row_of, add_squares = global_row(dim), vector_add_squares(dim // 8)
    put, p_pitch = put_row(dim), row_pitch(CHUNK)
    copy_p, copy_w = copy_out(2 * CHUNK, pitch, p_pitch), copy_out(2 * dim, pitch, pitch)
    copy_u = copy_out(2 * dim, pitch, 2 * STRIP, STRIP_BYTES)
    wide_bytes, p_bytes = matrix_bytes(dim), matrix_bytes(CHUNK)
    scale = f32(dim**-0.5)

    @device
    def gates(base, a, b, first_row, decay_log, bias, stride, logs):
        """A warp: the rows' β and G, and the factors of the columns of T."""
        lane = lane_id()
        at = (first_row + 2 * lane) * stride
        low = log_decay(load_gate(a + at)[0], decay_log, bias) * f32(LOG2_E)
        high = log_decay(load_gate(a + at + stride)[0], decay_log, bias) * f32(LOG2_E)
        low, high = running_sums(low, high)
        beta_low, beta_high = sigmoid(load_gate(b + at)[0]), sigmoid(load_gate(b + at + stride)[0])
        place = base + lane * 8
        store_shared_f32x2(place + logs_at, (low, high))
        store_shared_f32x2(place + beta_at, (beta_low, beta_high))
        written = (-beta_low * fast_exp2(low), -beta_high * fast_exp2(high))
        store_shared_f32x2(place + write_at, written)
        store_f32x2(logs + lane * 8, (low, high))

    @device
    def row_factor(values):
        """1 / √(Σ x² + eps) of a row, by eight lanes."""
        total = add_squares(f32(0), values)
        total = total + shuffle_xor_f32(total, 1)
        total = total + shuffle_xor_f32(total, 2)
        return fast_rsqrt(total + shuffle_xor_f32(total, 4) + f32(NORM_EPS))

    @device
    def half_product(target, left, right, sign):
        """A 32 × 32 product of float32 by the thread block: 2 × 4 elements a thread."""
        row, column = (thread_x() >> 3) * 2, (thread_x() & 7) * 16
        upper = left + row * MATRIX_PITCH
        a0, a1, a2, a3 = f32(0), f32(0), f32(0), f32(0)
        b0, b1, b2, b3 = f32(0), f32(0), f32(0), f32(0)
        for m in range(HALF):
            x, y = load_shared_f32(upper + m * 4), load_shared_f32(upper + MATRIX_PITCH + m * 4)
            z = load_shared_f32x4(right + m * MATRIX_PITCH + column)
            a0, a1, a2, a3 = fma(x, z[0], a0), fma(x, z[1], a1), fma(x, z[2], a2), fma(x, z[3], a3)
            b0, b1, b2, b3 = fma(y, z[0], b0), fma(y, z[1], b1), fma(y, z[2], b2), fma(y, z[3], b3)
        place = target + row * MATRIX_PITCH + column
        store_shared_f32x4(place, (sign * a0, sign * a1, sign * a2, sign * a3))
        store_shared_f32x4(place + MATRIX_PITCH, (sign * b0, sign * b1, sign * b2, sign * b3))

    def gated_delta_chunk(
        qkv, a, b, decay_log, dt_bias, chunk_rows, num_chunks,
        q_out, k_out, w_out, u_out, p_out, logs_out,
        key_heads, value_heads, qkv_stride, gate_stride,
    ):  # fmt: skip
        launch_dependents()
        wait_prerequisites()
        if block_x() >= load_b32(num_chunks):
            return
        base, lane, warp = dynamic_shared(), lane_id(), shuffle_b32(thread_x() >> 5, 0)
        chunk, head = i64(block_x()), block_y()
        group = quotient(value_heads, key_heads)
        key_head = quotient(head, group)
        is_first = head == key_head * group
        first_row = i64(load_b32(chunk_rows + chunk * 4))
        place = chunk * value_heads + head
        row = warp * 16 + (lane >> 3)
        column = (lane & 7) * 4
        key_place = (chunk * key_heads + key_head) * wide_bytes
        source = qkv + (first_row + row) * qkv_stride + (key_head * dim + column) * 4
        keys = source + key_heads * (dim * 4)
        values = source + (2 * key_heads + head - key_head) * (dim * 4)
        q, k, v = row_of(source), row_of(keys), row_of(values)
        if warp == 0:
            rate = load_constant_f32(decay_log + head * 4)
            bias = load_constant_f32(dt_bias + head * 4)
            shift = i64(head) * item
            logs = logs_out + place * (CHUNK * 4)
            gates(base, a + shift, b + shift, first_row, rate, bias, gate_stride, logs)
        for i in range(0, 16, 4):
            at = (row + i) * pitch + column * 2
            shared = base + at
            next_q, next_k, next_v = q, k, v
            if i < 12:  # asked for while these are used
                ahead = (i + 4) * qkv_stride
                next_q, next_k = row_of(source + ahead), row_of(keys + ahead)
                next_v = row_of(values + ahead)
            put(shared, q_out + key_place + at, is_first, row_factor(q) * scale, q)
            put(shared + k_at, k_out + key_place + at, is_first, row_factor(k), k)
            put(shared + v_at, q_out, False, f32(1), v)
            q, k, v = next_q, next_k, next_v
        sync_threads()

        own = base + warp * 16 * pitch  # the warp's rows of q: room for what goes out
        q_row = own + (lane & 15) * pitch + (lane >> 4) * 16
        k_row = base + k_at + (lane & 7) * pitch + (lane >> 4) * (8 * pitch) + (lane & 8) * 2
        upper = warp * 16 + (lane >> 2)
        log_upper = load_shared_f32(base + logs_at + upper * 4)
        log_lower = load_shared_f32(base + logs_at + (upper + 8) * 4)
        columns, pair = base + logs_at, (lane & 3) * 2
        fragment = own + (lane >> 2) * pitch + (lane & 3) * 4
        weights = scores_of(q_row, k_row)
        weights = to_diagonal(weights, upper, log_upper, upper + 8, log_lower, columns, pair)
        sync_warp()
        store_p(weights, fragment)
        copy_p(p_out + place * p_bytes + warp * (16 * p_pitch), own)
        matrix = scores_of(q_row + k_at, k_row)
        matrix = below(matrix, upper, log_upper, upper + 8, log_lower, columns, pair)
        store_matrix(matrix, base + matrix_at + upper * MATRIX_PITCH + pair * 4)
        sync_warp()
        for i in range(lane, 16 * (CHUNK // 4), 32):  # A's rows times β
            r = warp * 16 + (i >> 4)
            at = base + matrix_at + r * MATRIX_PITCH + (i & 15) * 16
            beta, x = load_shared_f32(base + beta_at + r * 4), load_shared_f32x4(at)
            store_shared_f32x4(at, (beta * x[0], beta * x[1], beta * x[2], beta * x[3]))
        sync_threads()

        corner = base + matrix_at
        if warp < 2:
            half = corner + warp * (HALF * MATRIX_PITCH + HALF * 4)
            inverse = invert(half, lane)
            sync_warp()
            put_column(half + lane * 4, inverse)
        sync_threads()
        lower_left = corner + HALF * MATRIX_PITCH
        half_product(corner + HALF * 4, lower_left, corner, f32(1))
        sync_threads()
        half_product(lower_left, lower_left + HALF * 4, corner + HALF * 4, f32(-1))
        sync_threads()
        for i in range(thread_x(), HALF * (HALF // 4), THREADS):
            at = corner + (i >> 3) * MATRIX_PITCH + HALF * 4 + (i & 7) * 16
            store_shared_f32x4(at, (f32(0), f32(0), f32(0), f32(0)))
        sync_threads()

        t_row = corner + upper * MATRIX_PITCH + pair * 4
        b_row = base + (lane & 15) * pitch + (lane >> 4) * 16
        factors = words(t_row, base + write_at + pair * 4)
        store_rows(values_of(no_values(), factors, b_row + k_at), fragment)
        copy_w(w_out + place * wide_bytes + warp * (16 * pitch), own)
        factors = words(t_row, base + beta_at + pair * 4)
        store_rows(values_of(no_values(), factors, b_row + v_at), fragment)
        strips = place * (dim // STRIP) * STRIP_BYTES
        copy_u(u_out + strips + warp * (16 * 2 * STRIP), own)

    return gated_delta_chunk
