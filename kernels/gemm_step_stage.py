"""Stages and ends of the step GEMMs with ``mma.sync``: activations into shared memory, sums out.

A stage begins with 64 k of every row of x: lines of 128 bytes whose 16-byte pieces are swapped by
the line's number modulo 8, so that ``ldmatrix`` has no bank conflicts.
"""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import device, i32, i64
from atlas_kernels.gemm_step_epilogue import finish, finish_gated
from atlas_kernels.gemm_step_plan import MmaTile
from atlas_kernels.ptx_async import copy16_or_zero
from atlas_kernels.ptx_math import quotient, remainder
from atlas_kernels.ptx_memory import load_shared_f32x4
from atlas_kernels.ptx_mma import ldmatrix_columns
from atlas_kernels.ptx_warp import lane_id, thread_x
from atlas_kernels.ptx_wgmma import store_accumulators


@device
def bytes_left(step, k):
    """16, or 0 where this thread's piece of the step lies past the end of K."""
    has_some = step * 64 + (thread_x() & 7) * 8 < k
    return i32(i32(has_some) * 16)


@device
def place():
    """Where this thread's piece lies within a stage, for lines 0, 8, 16, … after ``thread / 8``."""
    line = thread_x() >> 3
    return i32(line * 128 + (((thread_x() ^ line) & 7) << 4))


def row_copies(tile: MmaTile) -> Any:
    """Start copying a stage of x; rows past ``m`` come as zeros."""
    rows, lines_each = tile.rows, 4 * tile.warps
    pieces = -(-rows // lines_each)

    @device
    def copy_rows(x, x_stride, at, step, k, m):
        target, size = i32(at + place()), bytes_left(step, k)
        source = x + i64(step) * 128 + i64(thread_x() & 7) * 16
        for i in range(pieces):
            row = i32((thread_x() >> 3) + i * lines_each)
            if row < rows:
                length = i32(size if row < m else 0)
                copy16_or_zero(target + i * lines_each * 128, source + i64(row) * x_stride, length)

    return copy_rows


def row_loads(tile: MmaTile) -> Any:
    """(stage, k16 step) → the B fragments of all rows of x."""
    rows = tile.rows
    load = ldmatrix_columns(rows, 128)

    @device
    def load_rows(at, step):
        lane = lane_id()
        line = (lane & 7) + (lane >> 4 if rows > 8 else 0) * 8
        return load(i32(at + line * 128 + ((step * 2 + (lane >> 3 & 1)) ^ (lane & 7)) * 16))

    return load_rows


def sum_stores(tile: MmaTile) -> Any:
    """(accumulators, base): a warp's sums into the float32 tile of shared memory."""
    rows, pitch = tile.rows, tile.pitch
    store = store_accumulators(rows, pitch)

    @device
    def store_sums(total, base):
        lane, warp = lane_id(), thread_x() >> 5
        row, column = (lane & 3) * 2, warp * 16 + (lane >> 2)
        store(total, i32(base + row * pitch + column * 4))

    return store_sums


def writer(tile: MmaTile) -> Any:
    """By all threads: the tile's rows from shared memory."""
    gated, pitch, threads = tile.gated, tile.pitch, tile.threads
    width = tile.columns // 2 if gated else tile.columns
    quads, half_bytes = width // 4, width * 4

    @device
    def write(
        base, column0, num_columns, m, bias, residual, out, residual_stride, out_stride, option
    ):
        e, count = thread_x(), i32(m * quads)
        while e < count:
            row, at = quotient(i32(e), quads), i32(remainder(i32(e), quads) * 4)
            column, source = i32(column0 + at), i32(base + row * pitch + at * 4)
            if column < num_columns:
                if gated:
                    gate = load_shared_f32x4(source)
                    up = load_shared_f32x4(i32(source + half_bytes))
                    finish_gated(gate, up, row, column, num_columns, bias, out, out_stride, option)
                else:
                    total = load_shared_f32x4(source)
                    finish(
                        total, row, column, bias, residual, out, residual_stride, out_stride,
                        option,
                    )  # fmt: skip
            e = i32(e + threads)

    return write
