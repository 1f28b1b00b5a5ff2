"""Step GEMM over quantised weights with ``mma.sync``, for GPUs without ``wgmma`` (from sm_80 on).

W lies in cells (``quant_plan``). A warp takes 16 rows: each lane loads its own codes of them, half
a cell ahead, and makes bf16 of them in registers (``quant_decode``); x comes through shared memory
as in ``gemm_step_mma``. The order of summation is that of ``gemm_step_tiles``, and so are the bits.
"""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import device, i32, i64
from atlas_kernels.gemm_step_plan import MmaTile
from atlas_kernels.gemm_step_stage import row_copies, row_loads, sum_stores, writer
from atlas_kernels.ptx_async import (
    copy_commit,
    copy_wait,
    launch_dependents,
    wait_prerequisites,
)
from atlas_kernels.ptx_math import quotient
from atlas_kernels.ptx_memory import dynamic_shared
from atlas_kernels.ptx_mma import mma_columns
from atlas_kernels.ptx_warp import block_x, lane_id, sync_threads, thread_x
from atlas_kernels.ptx_wgmma import wgmma_zero
from atlas_kernels.quant_decode import GLOBAL, decoder
from atlas_kernels.quant_plan import CELL_ROWS, CELLS, QUANT_MMA_TILES
from atlas_kernels.registry import kernel


def _source(tile: MmaTile) -> Any:
    """(w, …) → where the cells of this warp's unit begin, and this lane's thread number in them.

    Past the last unit it is the last one's: nobody writes what comes of it.
    """
    gated, half = tile.gated, tile.columns // 2

    @device
    def source(w, unit_bytes, column0, num_columns):
        row = i32((thread_x() >> 5) * 16)
        last = quotient(i32(num_columns - 1), CELL_ROWS)
        unit = i32(0)
        if gated and row >= half:
            row = i32(row - half)
            unit = i32(last + 1)
        unit = i32(unit + min(quotient(i32(column0 + row), CELL_ROWS), last))
        return w + i64(unit) * unit_bytes, i32((row & (CELL_ROWS - 1)) * 4 + lane_id())

    return source


def _multiply(tile: MmaTile) -> Any:
    """A warp's products of 64 k: (accumulators, words of its two rows, stage) → accumulators."""
    load_rows, multiply = row_loads(tile), mma_columns(tile.rows)

    @device
    def multiply_stage(total, u, v, at):
        total = multiply(total, (u[0], v[0], u[1], v[1]), load_rows(at, 0))
        total = multiply(total, (u[2], v[2], u[3], v[3]), load_rows(at, 1))
        total = multiply(total, (u[4], v[4], u[5], v[5]), load_rows(at, 2))
        return multiply(total, (u[6], v[6], u[7], v[7]), load_rows(at, 3))

    return multiply_stage


@kernel(
    "gemm_step_mma",
    args="ptr ptr ptr ptr ptr i32 i32 i32 i64 i64 i64 i32",
    threads=lambda tile, type: tile.threads,
    shared=lambda tile, type: tile.shared_bytes,
    variants={name: (tile, name.rsplit("_", 2)[0]) for name, tile in QUANT_MMA_TILES.items()},
)
def make_gemm_step_quant(tile: MmaTile, type: str) -> Any:
    """out [m, n] = x [m, k] · Wᵀ + bias + residual, or gated [m, n / 2]; grid (tile.grid(n)).

    Arguments as ``gemm_step_mma``, without W's stride; gated: n a multiple of 64.
    """
    stages, stage_bytes, cell_bytes = tile.stages, tile.stage_bytes, CELLS[type].nbytes
    halves, box_rows, ahead = 2 if tile.gated else 1, tile.box_rows, tile.stages - 1
    source, copy_rows, multiply_stage = _source(tile), row_copies(tile), _multiply(tile)
    zero, store_sums, write = wgmma_zero(tile.rows), sum_stores(tile), writer(tile)
    wait, drain = copy_wait(stages - 2), copy_wait(0)
    found = decoder(type, GLOBAL, as_words=True)
    load, scales, decode = found.load, found.scales, found.decode

    def gemm_step_quant(
        w, x, bias, residual, out, n, k, m, x_stride, residual_stride, out_stride, option
    ):
        launch_dependents()
        base = dynamic_shared()
        column0, num_columns = i32(block_x() * box_rows), quotient(n, halves)
        steps = i32(quotient(i32(k + 127), 128) * 2)
        cells, own = source(w, i64(steps >> 1) * cell_bytes, column0, num_columns)
        upper = load(cells, own, i32(0)), scales(cells, own, i32(0))  # constants: no need to wait
        lower = load(cells, own + 32, i32(0)), scales(cells, own + 32, i32(0))
        wait_prerequisites()
        for i in range(ahead):
            copy_rows(x, x_stride, i32(base + i * stage_bytes), i, k, m)
            copy_commit()
        total = zero()
        stage, free = i32(0), i32(ahead)
        for i in range(steps):
            wait()
            sync_threads()  # the stage is there for all, and the one before is done with
            u, v = decode(upper[0], upper[1]), decode(lower[0], lower[1])
            following = min(i32(i + 1), i32(steps - 1))
            cell, half = cells + i64(following >> 1) * cell_bytes, i32(following & 1)
            upper = load(cell, own, half), scales(cell, own, half)
            lower = load(cell, own + 32, half), scales(cell, own + 32, half)
            total = multiply_stage(total, u, v, i32(base + stage * stage_bytes))
            copy_rows(x, x_stride, i32(base + free * stage_bytes), i + ahead, k, m)
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
