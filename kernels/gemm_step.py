"""Step GEMM of sm_90a: y = x · Wᵀ for 1 to 128 rows, at the speed of reading W.

W ([n, k], as a checkpoint has it) and x come by TMA into a ring of shared memory, asked for by one
thread; a warp group multiplies up to 64 rows of W (the M of ``wgmma``) by all rows of x (its N), so
few rows waste no tensor time. Weights are asked for before the wait for the previous kernel. Rows
past ``m`` read as zeros and are not written.

Many rows are bound by what each SM takes in, not by the weights. There a cluster of two thread
blocks has the same columns and half of the rows each; of the weights, each loads half for both.

An output is one float32 accumulator over k16 steps, ascending: it depends on its row of x and its
row of W, and on neither ``m`` nor the tile.
"""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import device, i32, i64
from atlas_kernels.gemm_step_epilogue import finish, finish_gated
from atlas_kernels.gemm_step_plan import BOX_K, TILES, StepTile
from atlas_kernels.ptx_async import (
    EVICT_FIRST,
    EVICT_LAST,
    barrier_arrive,
    barrier_arrive_cluster,
    barrier_expect,
    barrier_init,
    barrier_init_fence,
    barrier_wait,
    launch_dependents,
    map_rank,
    sync_cluster,
    tile_load,
    tile_multicast,
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

_load_rows = tile_load(2, EVICT_LAST)
ARGS = "ptr ptr ptr ptr ptr i32 i32 i32 i64 i64 i32"


def _load_weights(sharers: int) -> Any:
    """Load a part of a box, for every thread block of the cluster."""
    if sharers == 1:
        return tile_load(2, EVICT_FIRST)
    shared, everyone = tile_multicast(2, EVICT_FIRST), (1 << sharers) - 1

    @device
    def load(target, map, ready, at_k, row):
        shared(target, map, ready, everyone, at_k, row)

    return load


def _ask_weights(tile: StepTile) -> Any:
    """Ask for a stage of weights: this thread block's part of it, if the cluster shares them."""
    boxes, halves, part = tile.k_block // BOX_K, 2 if tile.gated else 1, tile.weight_box
    box_bytes, stage_bytes = tile.box_rows * BOX_K * 2, tile.stage_bytes
    load = _load_weights(tile.sharers)

    @device
    def ask_weights(map_w, at, ready, at_k, column0, num_columns, rank):
        barrier_expect(ready, stage_bytes)
        for b in range(boxes):
            for half in range(halves):
                target = at + (b * halves + half) * box_bytes + rank * (part * BOX_K * 2)
                row = column0 + half * num_columns + rank * part
                load(target, map_w, ready, at_k + b * BOX_K, row)

    return ask_weights


def _begin(tile: StepTile) -> Any:
    """By the first threads, one each: make the barriers."""
    stages, barriers = tile.stages, tile.barrier_offset
    arrivals = tile.sharers * tile.consumers // 32  # who loads for others waits for them

    @device
    def begin(base, thread):
        if thread < 2 * stages:
            barrier_init(base + barriers + 8 * thread, 1 if thread < stages else arrivals)
            barrier_init_fence()

    return begin


def _prefetch(tile: StepTile) -> Any:
    """By one thread: ask for the first stages of weights, which are no other kernel's."""
    stages, stage_bytes, k_block = tile.stages, tile.stage_bytes, tile.k_block
    barriers, ask_weights = tile.barrier_offset, _ask_weights(tile)

    @device
    def prefetch(map_w, base, steps, column0, num_columns, rank):
        i, end = i32(0), min(i32(stages), steps)
        while i < end:
            at, ready = i32(base + i * stage_bytes), i32(base + barriers + 8 * i)
            ask_weights(map_w, at, ready, i32(i * k_block), column0, num_columns, rank)
            i = i32(i + 1)

    return prefetch


def _produce(tile: StepTile) -> Any:
    """By the same thread: ask for all rows, and for the other stages of weights."""
    stages, stage_bytes, k_block = tile.stages, tile.stage_bytes, tile.k_block
    barriers, boxes = tile.barrier_offset, tile.k_block // BOX_K
    offset, box_bytes = tile.rows_offset, tile.rows * BOX_K * 2
    ask_weights = _ask_weights(tile)

    @device
    def produce(map_w, map_x, base, steps, column0, num_columns, row0, rank):
        stage, parity, i = i32(0), i32(1), i32(0)
        while i < steps:
            at, ready = i32(base + stage * stage_bytes), i32(base + barriers + 8 * stage)
            at_k = i32(i * k_block)
            if i >= stages:
                barrier_wait(ready + 8 * stages, parity)
                ask_weights(map_w, at, ready, at_k, column0, num_columns, rank)
            for b in range(boxes):
                _load_rows(at + offset + b * box_bytes, map_x, ready, at_k + b * BOX_K, row0)
            i, stage = i32(i + 1), i32(stage + 1)
            if stage == stages:
                stage, parity = i32(0), i32(parity ^ 1)

    return produce


def _give_back(sharers: int) -> Any:
    """A warp is done with a stage: tell every thread block that loads into it."""
    if sharers == 1:

        @device
        def give_back(empty, lane):
            if lane == 0:
                barrier_arrive(empty)

        return give_back

    @device
    def give_back(empty, lane):
        if lane < sharers:
            barrier_arrive_cluster(map_rank(empty, lane))

    return give_back


def _consume(tile: StepTile) -> Any:
    """By a warp group: its columns' sums, left in shared memory as float32.

    A stage is given back once the next one's products are under way: waiting for the products of
    each stage would take longer than they do.
    """
    rows, stages, stage_bytes, pitch = tile.rows, tile.stages, tile.stage_bytes, tile.pitch
    barriers, offset, consumers = tile.barrier_offset, tile.rows_offset, tile.consumers
    constant = descriptor(1024)
    steps_of = [(j // 4, j % 4 * 32) for j in range(tile.k_block // 16)]
    multiply = wgmma_stage(
        rows,
        tuple(box * tile.columns * 128 + within for box, within in steps_of),
        tuple(box * rows * 128 + within for box, within in steps_of),
    )
    zero, settled, store = wgmma_zero(rows), settle(rows), store_accumulators(rows, pitch)
    give_back = _give_back(tile.sharers)

    @device
    def consume(base, steps, thread):
        total = zero()
        full = i32(base + barriers)
        stage, parity, previous, i = i32(0), i32(0), i32(0), i32(0)
        while i < steps:
            barrier_wait(full + 8 * stage, parity)
            at = i32(base + stage * stage_bytes)
            a = i64(constant) | i64(((at + (thread >> 7) * 8192) & 0x3FFFF) >> 4)
            b = i64(constant) | i64(((at + offset) & 0x3FFFF) >> 4)
            total = multiply(total, a, b)
            wgmma_wait1()
            if i > 0:
                give_back(i32(full + 8 * (stages + previous)), thread & 31)
            previous = stage
            i, stage = i32(i + 1), i32(stage + 1)
            if stage == stages:
                stage, parity = i32(0), i32(parity ^ 1)
        wgmma_wait0()
        total = settled(total)
        sync_named(1, consumers)  # all products are done: the stages' memory is free
        row, column = (thread & 3) * 2, (thread >> 5) * 16 + (thread >> 2 & 7)
        store(total, i32(base + row * pitch + column * 4))

    return consume


def _write(tile: StepTile) -> Any:
    """By all threads: the tile's rows from shared memory."""
    rows, quads, pitch, gated = tile.rows, tile.box_rows // 4, tile.pitch, tile.gated
    threads, half_bytes = tile.threads, tile.box_rows * 4

    @device
    def write(
        base, column0, row0, num_columns, m, bias, residual, out, residual_stride, out_stride,
        option,
    ):  # fmt: skip
        count = i32(min(i32(rows), i32(m - row0)) * quads)
        e = thread_x()
        while e < count:
            own, at = quotient(i32(e), quads), i32(remainder(i32(e), quads) * 4)
            row, column = i32(row0 + own), i32(column0 + at)
            source = i32(base + own * pitch + at * 4)
            if column < num_columns:
                sums = load_shared_f32x4(source)
                if gated:
                    up = load_shared_f32x4(i32(source + half_bytes))
                    finish_gated(sums, up, row, column, num_columns, bias, out, out_stride, option)
                else:
                    finish(
                        sums, row, column, bias, residual, out, residual_stride, out_stride,
                        option,
                    )  # fmt: skip
            e = i32(e + threads)

    return write


@kernel(
    "gemm_step",
    args=ARGS,
    threads=lambda tile: tile.threads,
    shared=lambda tile: tile.shared_bytes,
    cluster=lambda tile: tile.sharers,
    arch="sm_90a",
    variants={f"bf16_{name}": (tile,) for name, tile in TILES.items()},
)
def make_gemm_step(tile: StepTile) -> Any:
    """out [m, n] = x [m, k] · Wᵀ + bias + residual, or gated [m, n / 2]; grid (tile.grid(n)).

    Arguments: the tensor maps of W (boxes of 64 × ``weight_box``) and of x (64 × ``rows``), both
    bf16 with the 128-byte swizzle; bias (float32) and residual (bf16) or 0; out, bf16, or float32
    where ``option`` is 1 (gated: bf16, no residual, and ``option`` chooses gelu with tanh); n, k,
    m; strides in bytes.
    """
    k_block, consumers, halves = tile.k_block, tile.consumers, 2 if tile.gated else 1
    rows, box_rows, sharers = tile.rows, tile.box_rows, tile.sharers
    begin, prefetch, produce = _begin(tile), _prefetch(tile), _produce(tile)
    consume, write = _consume(tile), _write(tile)
    sync_blocks = sync_threads if sharers == 1 else sync_cluster

    def gemm_step(map_w, map_x, bias, residual, out, n, k, m, residual_stride, out_stride, option):
        launch_dependents()
        base, thread = dynamic_shared(), thread_x()
        rank = i32(remainder(block_x(), sharers))
        column0, row0 = i32(quotient(block_x(), sharers) * box_rows), i32(rank * rows)
        num_columns, steps = quotient(n, halves), quotient(i32(k + (k_block - 1)), k_block)
        begin(base, thread)
        sync_blocks()  # the barriers are ready, in every thread block of the cluster
        if thread == consumers:
            prefetch(map_w, base, steps, column0, num_columns, rank)
        wait_prerequisites()  # x, residual and what out held are other kernels'
        if thread < consumers:
            consume(base, steps, thread)
        elif thread == consumers:
            produce(map_w, map_x, base, steps, column0, num_columns, row0, rank)
        sync_threads()
        write(
            base, column0, row0, num_columns, m, bias, residual, out, residual_stride, out_stride,
            option,
        )  # fmt: skip
        if sharers > 1:
            sync_cluster()  # nobody leaves while others tell it of stages

    return gemm_step
