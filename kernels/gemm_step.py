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

from atlas_kernels._cuda import device, i32, i64
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
from atlas_kernels.ptx_wgmma import (
    descriptor,
    settle,
    store_accumulators,
    wgmma_stage,
    wgmma_wait0,
    wgmma_wait1,
    wgmma_zero,
)
from atlas_kernels.registry import kernel

_load_weights = tile_load(2, EVICT_FIRST)
_load_rows = tile_load(2, EVICT_LAST)
ARGS = "ptr ptr ptr ptr ptr i32 i32 i32 i64 i64 i32"


@device
def range_of(k, split, k_splits):
    """First element of a range of K and the one after its last."""
    steps = quotient(i32(k + (k_splits * RANGE_STEP - 1)), k_splits * RANGE_STEP)
    first = i32(split * steps * RANGE_STEP)
    return first, i32(max(first, min(i32(first + steps * RANGE_STEP), k)))


def _ask_weights(tile: StepTile) -> Any:
    """Ask for a stage of weights: (stage, its barrier, k, column, columns of the output)."""
    boxes, halves = tile.k_block // BOX_K, 2 if tile.gated else 1
    box_bytes, stage_bytes = tile.box_rows * BOX_K * 2, tile.stage_bytes

    @device
    def ask_weights(map_w, at, ready, at_k, column, num_columns):
        barrier_expect(ready, stage_bytes)
        for b in range(boxes):
            for half in range(halves):
                target = at + (b * halves + half) * box_bytes
                row = column + half * num_columns
                _load_weights(target, map_w, ready, at_k + b * BOX_K, row)

    return ask_weights


def _begin(tile: StepTile) -> Any:
    """By one thread: make the barriers, and ask for the first stages of weights."""
    stages, stage_bytes, k_block = tile.stages, tile.stage_bytes, tile.k_block
    barriers, consumer_warps = tile.barrier_offset, tile.columns // 16
    ask_weights = _ask_weights(tile)

    @device
    def begin(map_w, base, k0, steps, column, num_columns):
        full = i32(base + barriers)
        for i in range(stages):
            barrier_init(full + 8 * i, 1)
            barrier_init(full + 8 * (stages + i), consumer_warps)
        barrier_init_fence()
        for i in range(min(i32(stages), steps)):  # constants: no need to wait
            at, at_k = base + i * stage_bytes, k0 + i * k_block
            ask_weights(map_w, at, full + 8 * i, at_k, column, num_columns)

    return begin


def _produce(tile: StepTile) -> Any:
    """By the same thread: ask for all rows, and for the other stages of weights."""
    stages, stage_bytes, k_block = tile.stages, tile.stage_bytes, tile.k_block
    barriers, boxes = tile.barrier_offset, tile.k_block // BOX_K
    offset, box_bytes = tile.rows_offset, tile.rows * BOX_K * 2
    ask_weights = _ask_weights(tile)

    @device
    def produce(map_w, map_x, base, k0, steps, column, num_columns):
        stage, parity = i32(0), i32(1)
        for i in range(steps):
            at, ready = i32(base + stage * stage_bytes), i32(base + barriers + 8 * stage)
            at_k = i32(k0 + i * k_block)
            if i >= stages:
                barrier_wait(ready + 8 * stages, parity)
                ask_weights(map_w, at, ready, at_k, column, num_columns)
            for b in range(boxes):
                target = at + offset + b * box_bytes
                _load_rows(target, map_x, ready, at_k + b * BOX_K, 0)
            stage = i32(stage + 1)
            if stage == stages:
                stage, parity = i32(0), i32(parity ^ 1)

    return produce


def _consume(tile: StepTile) -> Any:
    """By a warp group: its 64 columns' sums over the range, left in shared memory as float32."""
    rows, stages, stage_bytes, pitch = tile.rows, tile.stages, tile.stage_bytes, tile.pitch
    barriers, offset, consumers = tile.barrier_offset, tile.rows_offset, 2 * tile.columns
    constant = descriptor(1024)
    steps_of = [(j // 4, j % 4 * 32) for j in range(tile.k_block // 16)]
    multiply = wgmma_stage(
        rows,
        tuple(box * tile.columns * 128 + within for box, within in steps_of),
        tuple(box * rows * 128 + within for box, within in steps_of),
        wait=not tile.overlap,
    )
    zero, settled, store = wgmma_zero(rows), settle(rows), store_accumulators(rows, pitch)
    # With overlap a stage is given back once the next one's products are under way.
    overlap = tile.overlap

    @device
    def consume(base, steps, thread):
        total = zero()
        full = i32(base + barriers)
        stage, parity, previous = i32(0), i32(0), i32(0)
        for i in range(steps):
            barrier_wait(full + 8 * stage, parity)
            at = i32(base + stage * stage_bytes)
            a = i64(constant) | i64(((at + (thread >> 7) * 8192) & 0x3FFFF) >> 4)
            b = i64(constant) | i64(((at + offset) & 0x3FFFF) >> 4)
            total = multiply(total, a, b)
            if overlap:
                wgmma_wait1()
                if thread & 31 == 0 and i > 0:
                    barrier_arrive(full + 8 * (stages + previous))
                previous = stage
            elif thread & 31 == 0:
                barrier_arrive(full + 8 * (stages + stage))
            stage = i32(stage + 1)
            if stage == stages:
                stage, parity = i32(0), i32(parity ^ 1)
        wgmma_wait0()
        total = settled(total)
        sync_named(1, consumers)  # all products are done: the stages' memory is free
        row, column = (thread & 3) * 2, (thread >> 5) * 16 + (thread >> 2 & 7)
        store(total, i32(base + row * pitch + column * 4))

    return consume


def _sum_of_ranges(k_splits: int) -> Any:
    """Load four sums of the tile; those of several ranges, added in ascending order."""
    if k_splits == 1:
        return load_shared_f32x4

    @device
    def load(address):
        total = load_cluster_f32x4(map_rank(address, 0))
        for rank in range(1, k_splits):
            total = add4(total, load_cluster_f32x4(map_rank(address, rank)))
        return total

    return load


def _write(tile: StepTile) -> Any:
    """By all threads: the tile's rows from shared memory, each block of the cluster its part."""
    rows_each, quads = tile.rows // tile.k_splits, tile.box_rows // 4
    pitch, gated, threads, half_bytes = tile.pitch, tile.gated, tile.threads, tile.box_rows * 4
    sums = _sum_of_ranges(tile.k_splits)

    @device
    def write(
        base, split, column0, num_columns, m, bias, residual, out, residual_stride, out_stride,
        option,
    ):  # fmt: skip
        first = i32(split * rows_each)
        count = i32(min(i32(rows_each), i32(m - first)) * quads)
        for e in range(thread_x(), count, threads):
            row, at = i32(first + quotient(i32(e), quads)), i32(remainder(i32(e), quads) * 4)
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
    bf16 with the 128-byte swizzle; bias (float32) and residual (bf16) or 0; out, bf16, or float32
    where ``option`` is 1 (gated: bf16, no residual, and ``option`` chooses gelu with tanh); n, k,
    m; strides in bytes.
    """
    splits, box_rows, k_block, consumers = (
        tile.k_splits,
        tile.box_rows,
        tile.k_block,
        2 * tile.columns,
    )
    halves = 2 if tile.gated else 1
    begin, produce, consume, write = _begin(tile), _produce(tile), _consume(tile), _write(tile)
    sync_blocks = sync_threads if splits == 1 else sync_cluster

    def gemm_step(
        map_w, map_x, bias, residual, out, n, k, m, residual_stride, out_stride, option
    ):
        launch_dependents()
        base, thread = dynamic_shared(), thread_x()
        split = remainder(block_x(), splits)
        column0 = i32(quotient(block_x(), splits) * box_rows)
        num_columns = quotient(n, halves)
        k0, k_end = range_of(k, split, splits)
        steps = quotient(i32(k_end - k0 + (k_block - 1)), k_block)
        if thread == consumers:
            begin(map_w, base, k0, steps, column0, num_columns)
        sync_blocks()  # the barriers are ready, in every thread block of the cluster
        wait_prerequisites()  # x, residual and what out held are other kernels'
        if thread < consumers:
            consume(base, steps, thread)
        elif thread == consumers:
            produce(map_w, map_x, base, k0, steps, column0, num_columns)
        sync_blocks()
        write(
            base, split, column0, num_columns, m, bias, residual, out, residual_stride, out_stride,
            option,
        )  # fmt: skip
        if splits > 1:
            sync_cluster()  # nobody leaves while its memory is read

    return gemm_step
