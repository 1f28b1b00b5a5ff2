"""Step GEMM over quantised weights as GGUF stores them: Q8_0, Q4_0, Q4_1.

As ``gemm_step_mma``, in the same order of summation; W's blocks lie in shared memory as they are,
and each warp turns its 16 rows into bf16 on their way to the tensor core: d · q (+ m) in float32,
an operation at a time, rounded once. So the result has the bits of a product with the dequantised
matrix in bf16.

A block is 32 elements: d (float16), m (float16, Q4_1 only), then 32 signed bytes, or 16 bytes whose
low halves are the first 16 elements (Q4: unsigned; Q4_0 subtracts 8).
Source: the GGUF specification; the package ``gguf``, quants.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from atlas_kernels._cuda import device, i32, i64
from atlas_kernels.gemm_step_plan import QUANT_TILES, MmaTile
from atlas_kernels.gemm_step_stage import (
    range_length,
    row_copies,
    row_loads,
    sum_stores,
    writer,
)
from atlas_kernels.ptx_async import (
    copy4_or_zero,
    copy_commit,
    copy_wait,
    launch_dependents,
    wait_prerequisites,
)
from atlas_kernels.ptx_math import (
    bits_float,
    from_f16,
    pack_bf16,
    permute_bytes,
    quotient,
    remainder,
)
from atlas_kernels.ptx_memory import dynamic_shared, load_shared_b16, load_shared_u16
from atlas_kernels.ptx_mma import mma_columns
from atlas_kernels.ptx_warp import block_x, lane_id, sync_threads, thread_x
from atlas_kernels.ptx_wgmma import wgmma_zero
from atlas_kernels.registry import kernel

_ZERO = np.float32(0)
_EXPONENT = 0x4B000000  # a byte below these bits is the float32 2**23 + byte


def _scales(type: str) -> Any:
    """(block) → d and m, 0 where there is none."""
    has_minimum = type == "q4_1"

    @device
    def scales(block):
        minimum = _ZERO
        if has_minimum:
            minimum = from_f16(load_shared_b16(i32(block + 2)))
        return from_f16(load_shared_b16(block)), minimum

    return scales


def _pair(type: str) -> Any:
    """(block, its scales, k16 step, element) → two neighbouring elements as a word of bf16."""
    offset = np.float32(2.0**23 + {"q8_0": 128, "q4_0": 8, "q4_1": 0}[type])
    has_bytes, has_minimum = type == "q8_0", type == "q4_1"
    first = 4 if has_minimum else 2

    @device
    def pair(block, scales, half, element):
        if has_bytes:
            word = i32(load_shared_u16(i32(block + first + half * 16 + element)) ^ 0x8080)
        else:
            word = i32((load_shared_u16(i32(block + first + element)) >> (half * 4)) & 0x0F0F)
        a = scales[0] * (bits_float(permute_bytes(word, _EXPONENT, 0x7440)) - offset)
        b = scales[0] * (bits_float(permute_bytes(word, _EXPONENT, 0x7441)) - offset)
        if has_minimum:
            return pack_bf16(a + scales[1], b + scales[1])
        return pack_bf16(a, b)

    return pair


def _weight_source(tile: MmaTile) -> Any:
    """() → where this lane's words of the warp's first lines are, and how many lines follow.

    A warp copies the 16 lines that it multiplies, as many at once as 32 words hold.
    """
    columns, gated, half = tile.columns, tile.gated, tile.columns // 2
    line_bytes, words = tile.line_bytes, tile.line_bytes // 4

    @device
    def weight_source(w, w_stride, per_range, column0, num_columns):
        sub, word = quotient(lane_id(), words), remainder(lane_id(), words)
        number = i32((thread_x() >> 5) * 16)
        split, row = quotient(number, columns), remainder(number, columns)
        if gated:
            column = i32(column0 + remainder(row, half) + sub)
            source_row = i32(column + quotient(row, half) * num_columns)
        else:
            column = i32(column0 + row + sub)
            source_row = column
        begin = i32(quotient(i32(split * per_range), 64) * line_bytes + word * 4)
        return w + i64(source_row) * w_stride + i64(begin), i32(num_columns - column)

    return weight_source


def _copy_weights(tile: MmaTile) -> Any:
    """Start copying a stage of W, with zeros past the last column and the ranges' ends."""
    columns, line_bytes, offset = tile.columns, tile.line_bytes, tile.weights_offset
    words = line_bytes // 4
    at_once = 32 // words
    copies = -(-16 // at_once)

    @device
    def copy_weights(source, left, w_stride, at, step, per_range, k):
        sub, word = quotient(lane_id(), words), remainder(lane_id(), words)
        number = i32((thread_x() >> 5) * 16)
        length = min(per_range, i32(k - quotient(number, columns) * per_range))
        inside = i32(step * 64) < length
        target = i32(at + offset + (number + sub) * line_bytes + word * 4)
        begin = source + i64(step * line_bytes)
        if sub < at_once:
            for i in range(copies):
                line = i * at_once
                if line + sub < 16:
                    size = i32(4 if inside and line < left else 0)
                    copy4_or_zero(target + line * line_bytes, begin + i64(line) * w_stride, size)

    return copy_weights


def _multiply(tile: MmaTile, type: str) -> Any:
    """A warp's products of one stage: (accumulators, stage) → accumulators, k ascending."""
    offset, line_bytes, block_bytes = tile.weights_offset, tile.line_bytes, tile.line_bytes // 2
    scales, pair = _scales(type), _pair(type)
    load_rows, multiply = row_loads(tile), mma_columns(tile.rows)

    @device
    def multiply_stage(total, at):
        lane = lane_id()
        element = i32((lane & 3) * 2)
        line = i32(at + offset + ((thread_x() >> 5) * 16 + (lane >> 2)) * line_bytes)
        for block in range(2):
            upper = i32(line + block * block_bytes)
            lower = i32(upper + 8 * line_bytes)
            of_upper, of_lower = scales(upper), scales(lower)
            for half in range(2):
                a = (
                    pair(upper, of_upper, i32(half), element),
                    pair(lower, of_lower, i32(half), element),
                    pair(upper, of_upper, i32(half), i32(element + 8)),
                    pair(lower, of_lower, i32(half), i32(element + 8)),
                )
                total = multiply(total, a, load_rows(at, block * 2 + half))
        return total

    return multiply_stage


@kernel(
    "gemm_step",
    args="ptr ptr ptr ptr ptr i32 i32 i32 i64 i64 i64 i64 i32",
    threads=lambda tile, type: tile.threads,
    shared=lambda tile, type: tile.shared_bytes,
    variants={name: (tile, name[:4]) for name, tile in QUANT_TILES.items()},
)
def make_gemm_step_quant(tile: MmaTile, type: str) -> Any:
    """out [m, n] = x [m, k] · Wᵀ + bias + residual, or gated [m, n / 2]; grid (tile.grid(n)).

    Arguments as ``gemm_step_mma``; W's rows of blocks lie a multiple of 4 bytes apart, and k is a
    multiple of 64.
    """
    splits, stages, stage_bytes = tile.k_splits, tile.stages, tile.stage_bytes
    halves, box_rows, ahead = 2 if tile.gated else 1, tile.box_rows, tile.stages - 1
    weight_source, copy_weights = _weight_source(tile), _copy_weights(tile)
    copy_rows, multiply_stage = row_copies(tile), _multiply(tile, type)
    zero, store_sums, write = wgmma_zero(tile.rows), sum_stores(tile), writer(tile)
    wait, drain = copy_wait(stages - 2), copy_wait(0)

    def gemm_step_quant(
        w, x, bias, residual, out, n, k, m, w_stride, x_stride, residual_stride, out_stride,
        option,
    ):  # fmt: skip
        launch_dependents()
        base = dynamic_shared()
        column0, num_columns = i32(block_x() * box_rows), quotient(n, halves)
        per_range = range_length(k, splits)
        source, left = weight_source(w, w_stride, per_range, column0, num_columns)
        for i in range(ahead):  # constants: no need to wait
            copy_weights(source, left, w_stride, i32(base + i * stage_bytes), i, per_range, k)
        wait_prerequisites()
        for i in range(ahead):
            copy_rows(x, x_stride, i32(base + i * stage_bytes), i, per_range, k, m)
            copy_commit()
        total = zero()
        stage, free = i32(0), i32(ahead)
        for i in range(quotient(per_range, 64)):
            wait()
            sync_threads()  # the stage is there for all, and the one before is done with
            total = multiply_stage(total, i32(base + stage * stage_bytes))
            at = i32(base + free * stage_bytes)
            copy_weights(source, left, w_stride, at, i + ahead, per_range, k)
            copy_rows(x, x_stride, at, i + ahead, per_range, k, m)
            copy_commit()
            free = stage
            stage = i32(stage + 1)
            if stage == stages:
                stage = i32(0)
        drain()
        sync_threads()  # the stages' memory is free
        store_sums(total, base)
        sync_threads()
        write(
            base, column0, num_columns, m, bias, residual, out, residual_stride, out_stride,
            option,
        )  # fmt: skip

    return gemm_step_quant
