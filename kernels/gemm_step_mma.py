"""Step GEMM of sm_80 and newer: y = x · Wᵀ for 1 to 128 rows, with ``mma.sync`` and ``cp.async``.

The order of summation is that of ``gemm_step_plan``; on Hopper it gives the bits of ``gemm_step``.
A warp takes 16 rows of W in one range of K; the ranges' sums meet in shared memory. W is the A of
the product, so few rows of x waste nothing. Stages of 64 k lie in shared memory as rows of 128
bytes whose 16-byte pieces are swapped by the row's number modulo 8, so that ``ldmatrix`` has no
bank conflicts.
"""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import device, i32, i64
from atlas_kernels.gemm_step_epilogue import add4, finish, finish_gated
from atlas_kernels.gemm_step_plan import MMA_TILES, RANGE_STEP, MmaTile
from atlas_kernels.ptx_async import (
    copy16_or_zero,
    copy_commit,
    copy_wait,
    launch_dependents,
    wait_prerequisites,
)
from atlas_kernels.ptx_math import quotient, remainder
from atlas_kernels.ptx_memory import dynamic_shared, load_shared_f32x4
from atlas_kernels.ptx_mma import ldmatrix_columns, ldmatrix_x4, mma_columns
from atlas_kernels.ptx_warp import block_x, lane_id, sync_threads, thread_x
from atlas_kernels.ptx_wgmma import store_accumulators, wgmma_zero
from atlas_kernels.registry import kernel


def _weight_lines(tile: MmaTile) -> Any:
    """() → where this thread's four pieces of each stage of W begin.

    Piece i is 16 bytes, number ``thread % 8``, of row 4 · warps · i + ``thread / 8`` of the tile.
    Past the last column it is the last column's: nobody writes what comes of it.
    """
    columns, gated, lines_each, half = tile.columns, tile.gated, 4 * tile.warps, tile.columns // 2

    @device
    def line(w, w_stride, i, per_range, column0, num_columns):
        number = i32((thread_x() >> 3) + i * lines_each)
        split, row = quotient(number, columns), remainder(number, columns)
        if gated:
            column = min(i32(column0 + remainder(row, half)), i32(num_columns - 1))
            source_row = i32(column + quotient(row, half) * num_columns)
        else:
            source_row = min(i32(column0 + row), i32(num_columns - 1))
        at_k = i32(split * per_range + (thread_x() & 7) * 8)
        return w + i64(source_row) * w_stride + i64(at_k) * 2

    @device
    def lines(w, w_stride, per_range, column0, num_columns):
        return (
            line(w, w_stride, 0, per_range, column0, num_columns),
            line(w, w_stride, 1, per_range, column0, num_columns),
            line(w, w_stride, 2, per_range, column0, num_columns),
            line(w, w_stride, 3, per_range, column0, num_columns),
        )

    return lines


@device
def _bytes_left(step, length):
    """16, or 0 where this thread's piece of the step lies past the range's end."""
    return i32(16 if step * 64 + (thread_x() & 7) * 8 < length else 0)


@device
def _place():
    """Where this thread's piece lies within a stage, for lines 0, 8, 16, … after ``thread / 8``."""
    line = thread_x() >> 3
    return i32(line * 128 + (((thread_x() ^ line) & 7) << 4))


def _copy_weights(tile: MmaTile) -> Any:
    """Start copying a stage of W, with zeros past the ranges' ends."""
    piece_bytes, splits = 4 * tile.warps * 128, tile.k_splits

    @device
    def copy_weights(lines, at, step, per_range, k):
        target, offset = i32(at + _place()), i64(step) * 128
        size = _bytes_left(step, min(per_range, k))
        other = size
        if splits == 2:  # its second half of the tile's lines
            other = _bytes_left(step, min(per_range, i32(k - per_range)))
        copy16_or_zero(target, lines[0] + offset, size)
        copy16_or_zero(target + piece_bytes, lines[1] + offset, size)
        copy16_or_zero(target + 2 * piece_bytes, lines[2] + offset, other)
        copy16_or_zero(target + 3 * piece_bytes, lines[3] + offset, other)

    return copy_weights


def _copy_rows(tile: MmaTile) -> Any:
    """Start copying a stage of x; rows past ``m`` come as zeros."""
    rows, lines, lines_each = tile.rows, tile.k_splits * tile.rows, 4 * tile.warps
    offset, pieces = tile.k_splits * tile.columns * 128, -(-lines // lines_each)

    @device
    def copy_rows(x, x_stride, at, step, per_range, k, m):
        target = i32(at + offset + _place())
        size = _bytes_left(step, min(per_range, k))
        second = _bytes_left(step, min(per_range, i32(k - per_range)))
        source = x + i64(step) * 128 + i64(thread_x() & 7) * 16
        for i in range(pieces):
            line = i32((thread_x() >> 3) + i * lines_each)
            if line < lines:
                split, row = quotient(line, rows), remainder(line, rows)
                length = i32((second if split > 0 else size) if row < m else 0)
                begin = i64(row) * x_stride + i64(split * per_range) * 2
                copy16_or_zero(target + i * lines_each * 128, source + begin, length)

    return copy_rows


def _multiply(tile: MmaTile) -> Any:
    """A warp's products of one stage: (accumulators, stage) → accumulators, k ascending."""
    rows, columns = tile.rows, tile.columns
    warps = tile.warps // tile.k_splits  # of a range
    offset = tile.k_splits * columns * 128
    load_columns, multiply = ldmatrix_columns(rows, 128), mma_columns(rows)

    @device
    def multiply_stage(total, at):
        lane, warp = lane_id(), thread_x() >> 5
        split, own = quotient(i32(warp), warps), remainder(i32(warp), warps)
        line = at + (split * columns + own * 16 + (lane & 15)) * 128
        row = at + offset + (split * rows + (lane & 7) + (lane >> 4 if rows > 8 else 0) * 8) * 128
        for step in range(4):
            a = ldmatrix_x4(i32(line + ((step * 2 + (lane >> 4)) ^ (lane & 7)) * 16))
            b = load_columns(i32(row + ((step * 2 + (lane >> 3 & 1)) ^ (lane & 7)) * 16))
            total = multiply(total, a, b)
        return total

    return multiply_stage


def _sum_of_ranges(tile: MmaTile) -> Any:
    """Load four sums of the tile; those of several ranges, added in ascending order."""
    splits, range_bytes = tile.k_splits, tile.rows * tile.pitch

    @device
    def load(address):
        total = load_shared_f32x4(address)
        for split in range(1, splits):
            total = add4(total, load_shared_f32x4(i32(address + split * range_bytes)))
        return total

    return load


def _write(tile: MmaTile) -> Any:
    """By all threads: the tile's rows from shared memory."""
    gated, pitch, threads = tile.gated, tile.pitch, tile.threads
    width = tile.columns // 2 if gated else tile.columns
    quads, half_bytes, sums = width // 4, width * 4, _sum_of_ranges(tile)

    @device
    def write(
        base, column0, num_columns, m, bias, residual, out, residual_stride, out_stride, out_is_f32
    ):
        for e in range(thread_x(), m * quads, threads):
            row, at = quotient(i32(e), quads), i32(remainder(i32(e), quads) * 4)
            column, source = i32(column0 + at), i32(base + row * pitch + at * 4)
            if column < num_columns:
                if gated:
                    gate, up = sums(source), sums(i32(source + half_bytes))
                    finish_gated(gate, up, row, column, num_columns, bias, out, out_stride)
                else:
                    total = sums(source)
                    finish(
                        total, row, column, bias, residual, out, residual_stride, out_stride,
                        out_is_f32,
                    )  # fmt: skip

    return write


@kernel(
    "gemm_step_mma",
    args="ptr ptr ptr ptr ptr i32 i32 i32 i64 i64 i64 i64 i32",
    threads=lambda tile: tile.threads,
    shared=lambda tile: tile.shared_bytes,
    variants={f"bf16_{name}": (tile,) for name, tile in MMA_TILES.items()},
)
def make_gemm_step_mma(tile: MmaTile) -> Any:
    """out [m, n] = x [m, k] · Wᵀ + bias + residual, or gated [m, n / 2]; grid (tile.grid(n)).

    Arguments: W and x (bf16, rows a multiple of 16 bytes apart, k a multiple of 8); bias (float32)
    and residual (bf16) or 0; out, bf16 or float32 as ``out_is_f32`` says (gated: bf16, no
    residual); n, k, m; strides in bytes.
    """
    rows, columns, splits, stages = tile.rows, tile.columns, tile.k_splits, tile.stages
    stage_bytes, pitch, halves = tile.stage_bytes, tile.pitch, 2 if tile.gated else 1
    box_rows, warps = columns // halves, tile.warps // splits
    weight_lines, copy_weights, copy_rows = (
        _weight_lines(tile),
        _copy_weights(tile),
        _copy_rows(tile),
    )
    zero, multiply_stage, write = wgmma_zero(rows), _multiply(tile), _write(tile)
    store, ahead = store_accumulators(rows, pitch), stages - 1
    wait, drain = copy_wait(stages - 2), copy_wait(0)

    def gemm_step_mma(
        w, x, bias, residual, out, n, k, m, w_stride, x_stride, residual_stride, out_stride,
        out_is_f32,
    ):  # fmt: skip
        launch_dependents()
        base = dynamic_shared()
        column0, num_columns = i32(block_x() * box_rows), quotient(n, halves)
        per_range = quotient(i32(k + (splits * RANGE_STEP - 1)), splits * RANGE_STEP)
        per_range = i32(per_range * RANGE_STEP)
        steps = quotient(i32(per_range), 64)
        lines = weight_lines(w, w_stride, per_range, column0, num_columns)
        for i in range(ahead):  # constants: no need to wait
            copy_weights(lines, i32(base + i * stage_bytes), i, per_range, k)
        wait_prerequisites()
        for i in range(ahead):
            copy_rows(x, x_stride, i32(base + i * stage_bytes), i, per_range, k, m)
            copy_commit()
        total = zero()
        stage, free = i32(0), i32(ahead)
        for i in range(steps):
            wait()
            sync_threads()  # the stage is there for all, and the one before is done with
            total = multiply_stage(total, i32(base + stage * stage_bytes))
            at = i32(base + free * stage_bytes)
            copy_weights(lines, at, i + ahead, per_range, k)
            copy_rows(x, x_stride, at, i + ahead, per_range, k, m)
            copy_commit()
            free = stage
            stage = i32(stage + 1)
            if stage == stages:
                stage = i32(0)
        drain()
        sync_threads()  # the stages' memory is free
        lane, warp = lane_id(), thread_x() >> 5
        split, own = quotient(i32(warp), warps), remainder(i32(warp), warps)
        row, column = split * rows + (lane & 3) * 2, own * 16 + (lane >> 2)
        store(total, i32(base + row * pitch + column * 4))
        sync_threads()
        write(
            base, column0, num_columns, m, bias, residual, out, residual_stride, out_stride,
            out_is_f32,
        )  # fmt: skip

    return gemm_step_mma
