"""Step GEMM of sm_80 and newer: y = x · Wᵀ for 1 to 128 rows, with ``mma.sync`` and ``cp.async``.

The order of summation is that of ``gemm_step_plan``; on Hopper it gives the bits of ``gemm_step``.
A warp takes 16 rows of W. W is the A of the product, so few rows of x waste nothing. A stage holds
64 k of x, then of W, both laid out as ``gemm_step_stage`` says.
"""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import device, i32, i64
from atlas_kernels.gemm_step_plan import MMA_TILES, MmaTile
from atlas_kernels.gemm_step_stage import (
    bytes_left,
    place,
    row_copies,
    row_loads,
    sum_stores,
    writer,
)
from atlas_kernels.ptx_async import (
    copy16_or_zero,
    copy_commit,
    copy_wait,
    launch_dependents,
    wait_prerequisites,
)
from atlas_kernels.ptx_math import quotient, remainder, vector_add
from atlas_kernels.ptx_memory import dynamic_shared
from atlas_kernels.ptx_mma import ldmatrix_x4, mma_columns
from atlas_kernels.ptx_warp import block_x, lane_id, sync_threads, thread_x
from atlas_kernels.ptx_wgmma import wgmma_zero
from atlas_kernels.registry import kernel


def _weight_lines(tile: MmaTile) -> Any:
    """() → where this thread's four pieces of each stage of W begin.

    Piece i is 16 bytes, number ``thread % 8``, of row 4 · warps · i + ``thread / 8`` of the tile.
    Past the last column it is the last column's: nobody writes what comes of it.
    """
    gated, lines_each, half = tile.gated, 4 * tile.warps, tile.columns // 2

    @device
    def line(w, w_stride, i, column0, num_columns):
        row = i32((thread_x() >> 3) + i * lines_each)
        if gated:
            column = min(i32(column0 + remainder(row, half)), i32(num_columns - 1))
            source_row = i32(column + quotient(row, half) * num_columns)
        else:
            source_row = min(i32(column0 + row), i32(num_columns - 1))
        return w + i64(source_row) * w_stride + i64(thread_x() & 7) * 16

    @device
    def lines(w, w_stride, column0, num_columns):
        return (
            line(w, w_stride, 0, column0, num_columns),
            line(w, w_stride, 1, column0, num_columns),
            line(w, w_stride, 2, column0, num_columns),
            line(w, w_stride, 3, column0, num_columns),
        )

    return lines


def _copy_weights(tile: MmaTile) -> Any:
    """Start copying a stage of W, with zeros past the end of K."""
    piece_bytes, offset = 512 * tile.warps, tile.weights_offset

    @device
    def copy_weights(lines, at, step, k):
        target, begin = i32(at + offset + place()), i64(step) * 128
        size = bytes_left(step, k)
        copy16_or_zero(target, lines[0] + begin, size)
        copy16_or_zero(target + piece_bytes, lines[1] + begin, size)
        copy16_or_zero(target + 2 * piece_bytes, lines[2] + begin, size)
        copy16_or_zero(target + 3 * piece_bytes, lines[3] + begin, size)

    return copy_weights


def _multiply(tile: MmaTile) -> Any:
    """A warp's products of one stage: (accumulators, stage) → accumulators, k ascending."""
    offset, load_rows, multiply = tile.weights_offset, row_loads(tile), mma_columns(tile.rows)

    @device
    def multiply_stage(total, at):
        lane = lane_id()  # of 16 lines of W, which the warps share out in order
        line = at + offset + ((thread_x() >> 5) * 16 + (lane & 15)) * 128
        for step in range(4):
            a = ldmatrix_x4(i32(line + ((step * 2 + (lane >> 4)) ^ (lane & 7)) * 16))
            total = multiply(total, a, load_rows(at, step))
        return total

    return multiply_stage


@kernel(
    "gemm_step_mma",
    args="ptr ptr ptr ptr ptr i32 i32 i32 i32 i64 i64 i64 i64 i32",
    threads=lambda tile: tile.threads,
    shared=lambda tile: tile.shared_bytes,
    variants={f"bf16_{name}": (tile,) for name, tile in MMA_TILES.items()},
)
def make_gemm_step_mma(tile: MmaTile) -> Any:
    """out [m, n] = x [m, k] · Wᵀ + bias + residual, or gated [m, n / 2]; grid (tile.grid(n)).

    Arguments: W and x (bf16, rows a multiple of 16 bytes apart, k a multiple of 8); bias (float32)
    and residual (bf16) or 0; out, bf16, or float32 where ``option`` is 1 (gated: bf16, no residual,
    and ``option`` chooses gelu with tanh); n, k, elements of K in a chain (all, or of what is not
    gated a multiple of 64), m; strides in bytes.
    """
    stages, stage_bytes = tile.stages, tile.stage_bytes
    halves, box_rows, ahead = 2 if tile.gated else 1, tile.box_rows, tile.stages - 1
    weight_lines, copy_weights, copy_rows = (
        _weight_lines(tile),
        _copy_weights(tile),
        row_copies(tile),
    )
    zero, multiply_stage = wgmma_zero(tile.rows), _multiply(tile)
    store_sums, write, add = sum_stores(tile), writer(tile), vector_add(tile.rows // 2)
    wait, drain, has_chains = copy_wait(stages - 2), copy_wait(0), not tile.gated

    def gemm_step_mma(
        w, x, bias, residual, out, n, k, chain, m, w_stride, x_stride, residual_stride, out_stride,
        option,
    ):  # fmt: skip
        launch_dependents()
        base = dynamic_shared()
        column0, num_columns = i32(block_x() * box_rows), quotient(n, halves)
        steps = quotient(i32(k + 63), 64)
        lines = weight_lines(w, w_stride, column0, num_columns)
        for i in range(ahead):  # constants: no need to wait
            copy_weights(lines, i32(base + i * stage_bytes), i, k)
        wait_prerequisites()
        for i in range(ahead):
            copy_rows(x, x_stride, i32(base + i * stage_bytes), i, k, m)
            copy_commit()
        total, before = zero(), zero()
        stage, free, chain_steps = i32(0), i32(ahead), quotient(i32(chain + 63), 64)
        end = chain_steps
        for i in range(steps):
            wait()
            sync_threads()  # the stage is there for all, and the one before is done with
            total = multiply_stage(total, i32(base + stage * stage_bytes))
            if has_chains and i + 1 == end:
                before = total if end == chain_steps else add(before, total)
                total, end = zero(), i32(end + chain_steps)
            at = i32(base + free * stage_bytes)
            copy_weights(lines, at, i + ahead, k)
            copy_rows(x, x_stride, at, i + ahead, k, m)
            copy_commit()
            free = stage
            stage = i32(stage + 1)
            if stage == stages:
                stage = i32(0)
        drain()
        sync_threads()  # the stages' memory is free
        store_sums(before if has_chains else total, base)
        sync_threads()
        write(
            base, column0, num_columns, m, bias, residual, out, residual_stride, out_stride,
            option,
        )  # fmt: skip

    return gemm_step_mma
