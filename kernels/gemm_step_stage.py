"""Stages and ends of the step GEMMs with ``mma.sync``: activations into shared memory, sums out.

A stage begins with 64 k of every row of x in each range: lines of 128 bytes whose 16-byte pieces
are swapped by the line's number modulo 8, so that ``ldmatrix`` has no bank conflicts.
"""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import device, i32, i64
from atlas_kernels.gemm_step_epilogue import add4, finish, finish_gated
from atlas_kernels.gemm_step_plan import RANGE_STEP, MmaTile
from atlas_kernels.ptx_async import copy16_or_zero
from atlas_kernels.ptx_math import quotient, remainder
from atlas_kernels.ptx_memory import load_shared_f32x4
from atlas_kernels.ptx_mma import ldmatrix_columns
from atlas_kernels.ptx_warp import lane_id, thread_x
from atlas_kernels.ptx_wgmma import store_accumulators


@device
def range_length(k, k_splits):
    """Elements in a range of K; the last one has what is left."""
    return i32(quotient(i32(k + (k_splits * RANGE_STEP - 1)), k_splits * RANGE_STEP) * RANGE_STEP)


@device
def bytes_left(step, length):
    """16, or 0 where this thread's piece of the step lies past the range's end."""
    return i32(16 if step * 64 + (thread_x() & 7) * 8 < length else 0)


@device
def place():
    """Where this thread's piece lies within a stage, for lines 0, 8, 16, … after ``thread / 8``."""
    line = thread_x() >> 3
    return i32(line * 128 + (((thread_x() ^ line) & 7) << 4))


def row_copies(tile: MmaTile) -> Any:
    """Start copying a stage of x; rows past ``m`` come as zeros."""
    rows, lines, lines_each = tile.rows, tile.k_splits * tile.rows, 4 * tile.warps
    pieces = -(-lines // lines_each)

    @device
    def copy_rows(x, x_stride, at, step, per_range, k, m):
        target = i32(at + place())
        size = bytes_left(step, min(per_range, k))
        second = bytes_left(step, min(per_range, i32(k - per_range)))
        source = x + i64(step) * 128 + i64(thread_x() & 7) * 16
        for i in range(pieces):
            line = i32((thread_x() >> 3) + i * lines_each)
            if line < lines:
                split, row = quotient(line, rows), remainder(line, rows)
                length = i32((second if split > 0 else size) if row < m else 0)
                begin = i64(row) * x_stride + i64(split * per_range) * 2
                copy16_or_zero(target + i * lines_each * 128, source + begin, length)

    return copy_rows


def row_loads(tile: MmaTile) -> Any:
    """(stage, k16 step) → the B fragments of all rows of x, in this warp's range."""
    rows, warps = tile.rows, tile.warps // tile.k_splits
    load = ldmatrix_columns(rows, 128)

    @device
    def load_rows(at, step):
        lane, split = lane_id(), quotient(i32(thread_x() >> 5), warps)
        line = split * rows + (lane & 7) + (lane >> 4 if rows > 8 else 0) * 8
        return load(i32(at + line * 128 + ((step * 2 + (lane >> 3 & 1)) ^ (lane & 7)) * 16))

    return load_rows


def sum_stores(tile: MmaTile) -> Any:
    """(accumulators, base): a warp's sums into its range's float32 tile of shared memory."""
    rows, pitch, warps = tile.rows, tile.pitch, tile.warps // tile.k_splits
    store = store_accumulators(rows, pitch)

    @device
    def store_sums(total, base):
        lane, warp = lane_id(), thread_x() >> 5
        split, own = quotient(i32(warp), warps), remainder(i32(warp), warps)
        row, column = split * rows + (lane & 3) * 2, own * 16 + (lane >> 2)
        store(total, i32(base + row * pitch + column * 4))

    return store_sums


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


def writer(tile: MmaTile) -> Any:
    """By all threads: the tile's rows from shared memory."""
    gated, pitch, threads = tile.gated, tile.pitch, tile.threads
    width = tile.columns // 2 if gated else tile.columns
    quads, half_bytes, sums = width // 4, width * 4, _sum_of_ranges(tile)

    @device
    def write(
        base, column0, num_columns, m, bias, residual, out, residual_stride, out_stride, option
    ):
        for e in range(thread_x(), m * quads, threads):
            row, at = quotient(i32(e), quads), i32(remainder(i32(e), quads) * 4)
            column, source = i32(column0 + at), i32(base + row * pitch + at * 4)
            if column < num_columns:
                if gated:
                    gate, up = sums(source), sums(i32(source + half_bytes))
                    finish_gated(gate, up, row, column, num_columns, bias, out, out_stride, option)
                else:
                    total = sums(source)
                    finish(
                        total, row, column, bias, residual, out, residual_stride, out_stride,
                        option,
                    )  # fmt: skip

    return write
