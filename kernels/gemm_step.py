"""Step GEMM of sm_90a: y = x · Wᵀ for 1 to 128 rows, at the speed of reading W.

W ([n, k], as a checkpoint has it) and x come by TMA into a ring of shared memory, asked for by one
thread; a warp group multiplies 64 rows of W (the M of ``wgmma``) by all rows of x (its N), so few
rows waste no tensor time. Weights are asked for before the wait for the previous kernel. Rows past
``m`` read as zeros and are not written. With two ranges of K a cluster of two thread blocks shares
a tile: the sums meet in shared memory, and each block writes half of the rows.

The order of summation is that of ``gemm_step_plan``: an output depends on its row of x, its row of
W and the matrix, and on neither ``m`` nor the tile.
"""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import i32, i64
from atlas_kernels.gemm_step_epilogue import add4, finish, finish_gated
from atlas_kernels.gemm_step_plan import BOX_K, RANGE_STEP, TILES, StepTile
from atlas_kernels.ptx_async import (
    EVICT_FIRST,
    EVICT_LAST,
    barrier_arrive,
    barrier_expect,
    barrier_init,
    barrier_init_fence,
    barrier_wait,
    launch_dependents,
    load_cluster_f32x4,
    map_rank,
    sync_cluster,
    tile_load,
    wait_prerequisites,
)
from atlas_kernels.ptx_math import quotient, remainder
from atlas_kernels.ptx_memory import dynamic_shared, load_shared_f32x4
from atlas_kernels.ptx_warp import block_x, sync_named, sync_threads, thread_x
from atlas_kernels.ptx_wgmma import descriptor, store_accumulators, wgmma_stage, wgmma_zero
from atlas_kernels.registry import kernel

_load_weights = tile_load(2, EVICT_FIRST)
_load_rows = tile_load(2, EVICT_LAST)
ARGS = "ptr ptr ptr ptr ptr i32 i32 i32 i64 i64 i32"


def _sum_of_ranges(k_splits: int) -> Any:
    """Load four sums of the tile; of several ranges, added in ascending order."""
    if k_splits == 1:
        return load_shared_f32x4
    from atlas_kernels._cuda import device

    @device
    def load(address):
        total = load_cluster_f32x4(map_rank(address, 0))
        for rank in range(1, k_splits):
            total = add4(total, load_cluster_f32x4(map_rank(address, rank)))
        return total

    return load


@kernel(
    "gemm_step",
    args=ARGS,
    threads=lambda tile: tile.threads,
    shared=lambda tile: tile.shared_bytes,
    cluster=lambda tile: tile.k_splits,
    arch="sm_90a",
    variants={f"bf16_{name}": (tile,) for name, tile in TILES.items()},
)
def make_gemm_step(tile: StepTile) -> Any:
    """out [m, n] = x [m, k] · Wᵀ + bias + residual, or gated [m, n / 2]; grid (tile.grid(n)).

    Arguments: the tensor maps of W (boxes of 64 × ``box_rows``) and of x (64 × ``rows``), both
    bf16 with the 128-byte swizzle; bias (float32) and residual (bf16) or 0; out, bf16 or float32
    as ``out_is_f32`` says (gated: bf16, no residual); n, k, m; strides in bytes.
    """
    rows, columns, k_block, stages = tile.rows, tile.columns, tile.k_block, tile.stages
    splits, gated, box_rows = tile.k_splits, tile.gated, tile.box_rows
    boxes, halves = k_block // BOX_K, 2 if gated else 1
    box_bytes, stage_bytes, pitch = box_rows * BOX_K * 2, tile.stage_bytes, tile.pitch
    rows_offset, rows_box_bytes = columns * k_block * 2, rows * BOX_K * 2
    barriers, consumers, threads = tile.barrier_offset, 2 * columns, tile.threads
    rows_each, quads = rows // splits, box_rows // 4
    constant = descriptor(1024)
    steps_of = [(j // 4, j % 4 * 32) for j in range(k_block // 16)]
    multiply = wgmma_stage(
        rows,
        tuple(box * columns * 128 + offset for box, offset in steps_of),
        tuple(box * rows_box_bytes + offset for box, offset in steps_of),
        wait=True,
    )
    zero, store = wgmma_zero(rows), store_accumulators(rows, pitch)
    sum_of_ranges, sync_blocks = (
        _sum_of_ranges(splits),
        sync_threads if splits == 1 else sync_cluster,
    )

    def gemm_step(
        map_w, map_x, bias, residual, out, n, k, m, residual_stride, out_stride, out_is_f32
    ):
        launch_dependents()
        base, thread = dynamic_shared(), thread_x()
        full = i32(base + barriers)
        empty = i32(full + 8 * stages)
        split = remainder(block_x(), splits)
        column0 = i32(quotient(block_x(), splits) * box_rows)
        num_columns = i32(n >> (halves - 1))
        per_range = quotient(i32(k + (splits * RANGE_STEP - 1)), splits * RANGE_STEP)
        k0 = i32(split * per_range * RANGE_STEP)
        k_end = min(i32(k0 + per_range * RANGE_STEP), k)
        steps = i32(0)
        if k_end > k0:
            steps = quotient(i32(k_end - k0 + (k_block - 1)), k_block)
        if thread == consumers:
            for i in range(stages):
                barrier_init(full + 8 * i, 1)
                barrier_init(empty + 8 * i, consumers // 32)
            barrier_init_fence()
            for i in range(min(i32(stages), steps)):  # constants: no need to wait
                barrier_expect(full + 8 * i, stage_bytes)
                for b in range(boxes):
                    for half in range(halves):
                        _load_weights(
                            base + i * stage_bytes + (b * halves + half) * box_bytes,
                            map_w,
                            full + 8 * i,
                            k0 + i * k_block + b * BOX_K,
                            column0 + half * num_columns,
                        )
        sync_blocks()  # the barriers are ready, in every thread block of the cluster
        if thread >= consumers:
            wait_prerequisites()
            if thread == consumers:
                stage, parity = i32(0), i32(1)
                for i in range(steps):
                    at = i32(base + stage * stage_bytes)
                    ready = i32(full + 8 * stage)
                    at_k = i32(k0 + i * k_block)
                    if i >= stages:
                        barrier_wait(empty + 8 * stage, parity)
                        barrier_expect(ready, stage_bytes)
                        for b in range(boxes):
                            for half in range(halves):
                                _load_weights(
                                    at + (b * halves + half) * box_bytes,
                                    map_w,
                                    ready,
                                    at_k + b * BOX_K,
                                    column0 + half * num_columns,
                                )
                    for b in range(boxes):
                        _load_rows(
                            at + rows_offset + b * rows_box_bytes,
                            map_x,
                            ready,
                            at_k + b * BOX_K,
                            0,
                        )
                    stage = i32(stage + 1)
                    if stage == stages:
                        stage, parity = i32(0), i32(parity ^ 1)
        else:
            total = zero()
            stage, parity = i32(0), i32(0)
            for _ in range(steps):
                barrier_wait(full + 8 * stage, parity)
                at = i32(base + stage * stage_bytes)
                a = i64(constant) | i64(((at + (thread >> 7) * 8192) & 0x3FFFF) >> 4)
                b = i64(constant) | i64(((at + rows_offset) & 0x3FFFF) >> 4)
                total = multiply(total, a, b)
                if thread & 31 == 0:
                    barrier_arrive(empty + 8 * stage)
                stage = i32(stage + 1)
                if stage == stages:
                    stage, parity = i32(0), i32(parity ^ 1)
            sync_named(1, consumers)  # all products are done: the stages' memory is free
            lane_row, lane_column = (thread & 3) * 2, (thread >> 5) * 16 + (thread >> 2 & 7)
            store(total, i32(base + lane_row * pitch + lane_column * 4))
            wait_prerequisites()  # what residual and out held is another kernel's
        sync_blocks()
        count = i32(min(i32(rows_each), i32(m - split * rows_each)) * quads)
        for e in range(thread, count, threads):
            row = i32(split * rows_each + quotient(i32(e), quads))
            at = i32(remainder(i32(e), quads) * 4)
            column = i32(column0 + at)
            if column < num_columns:
                source = i32(base + row * pitch + at * 4)
                if gated:
                    gate = sum_of_ranges(source)
                    up = sum_of_ranges(i32(source + box_rows * 4))
                    up_bias = bias + i64(num_columns) * 4
                    finish_gated(gate, up, row, column, bias, up_bias, out, out_stride)
                else:
                    finish(
                        sum_of_ranges(source),
                        row,
                        column,
                        bias,
                        residual,
                        out,
                        residual_stride,
                        out_stride,
                        out_is_f32,
                    )
        if splits > 1:
            sync_cluster()  # nobody leaves while its memory is read

    return gemm_step
