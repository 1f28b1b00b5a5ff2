"""The ring of the step GEMM: who asks for stages of shared memory, multiplies them and writes sums.

Each function makes a device function for a tile. ``base`` is where the ring lies: its stages, then
a barrier for each that is full and one for each that is empty. Activations lie in the stages
(``stage_rows``) or elsewhere in shared memory: ``ring_consume`` is told where.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from atlas_kernels._cuda import device, i32, i64
from atlas_kernels.gemm_step_epilogue import finish, finish_gated
from atlas_kernels.gemm_step_plan import BOX_K, StepTile
from atlas_kernels.ptx_async import (
    EVICT_FIRST,
    EVICT_LAST,
    barrier_arrive,
    barrier_arrive_cluster,
    barrier_expect,
    barrier_init,
    barrier_init_fence,
    barrier_wait,
    map_rank,
    tile_load,
    tile_multicast,
)
from atlas_kernels.ptx_math import quotient, remainder
from atlas_kernels.ptx_memory import load_shared_f32x4
from atlas_kernels.ptx_warp import sync_named, thread_x
from atlas_kernels.ptx_wgmma import (
    descriptor,
    settle,
    store_accumulators,
    wgmma_stage,
    wgmma_wait0,
    wgmma_wait1,
    wgmma_zero,
)

_load_rows = tile_load(3, EVICT_LAST)


def _ask_weights(tile: StepTile) -> Any:
    """Ask for a stage of weights: this thread block's part of it, if the cluster shares them."""
    boxes, stage_bytes = tile.k_block // BOX_K, tile.stage_bytes
    if tile.sharers == 1:
        load, load_gated = tile_load(3, EVICT_FIRST), tile_load(4, EVICT_FIRST)
        gated = tile.gated

        @device
        def ask_weights(map_w, at, ready, block, column0, rank):
            barrier_expect(ready, stage_bytes)
            if gated:
                load_gated(at, map_w, ready, 0, column0, 0, block)
            else:
                load(at, map_w, ready, 0, column0, block)

        return ask_weights

    shared, everyone = tile_multicast(3, EVICT_FIRST), (1 << tile.sharers) - 1
    box_bytes, part = tile.box_rows * BOX_K * 2, tile.weight_box

    @device
    def ask_part(map_w, at, ready, block, column0, rank):
        barrier_expect(ready, stage_bytes)
        for b in range(boxes):
            target = at + b * box_bytes + rank * (part * BOX_K * 2)
            shared(target, map_w, ready, everyone, 0, column0 + rank * part, block + b)

    return ask_part


def ring_begin(tile: StepTile) -> Any:
    """By the first threads, one each: make the barriers."""
    stages, barriers = tile.stages, tile.barrier_offset
    arrivals = tile.sharers * tile.consumers // 32  # who loads for others waits for them

    @device
    def begin(base, thread):
        if thread < 2 * stages:
            barrier_init(base + barriers + 8 * thread, 1 if thread < stages else arrivals)
            barrier_init_fence()

    return begin


def ring_prefetch(tile: StepTile) -> Any:
    """By one thread: ask for the first stages of weights, which are no other kernel's.

    ``pace``, unless 0, is how many are on their way at a time.
    """
    stages, stage_bytes, boxes = tile.stages, tile.stage_bytes, tile.k_block // BOX_K
    barriers, ask_weights = tile.barrier_offset, _ask_weights(tile)

    @device
    def prefetch(map_w, base, steps, column0, rank, pace):
        i, end = i32(0), min(i32(stages), steps)
        while i < end:
            if pace > 0 and i >= pace:
                barrier_wait(i32(base + barriers + 8 * (i - pace)), 0)
            at, ready = i32(base + i * stage_bytes), i32(base + barriers + 8 * i)
            ask_weights(map_w, at, ready, i32(i * boxes), column0, rank)
            i = i32(i + 1)

    return prefetch


def ring_produce(tile: StepTile) -> Any:
    """By the same thread: ask for the stages' rows, and for the other stages of weights."""
    stages, stage_bytes, boxes = tile.stages, tile.stage_bytes, tile.k_block // BOX_K
    barriers, offset, has_rows = tile.barrier_offset, tile.rows_offset, tile.row_bytes > 0
    ask_weights = _ask_weights(tile)

    @device
    def produce(map_w, map_x, base, steps, column0, row0, rank, pace):
        stage, parity, i = i32(0), i32(1), i32(0)
        while i < steps:
            at, ready = i32(base + stage * stage_bytes), i32(base + barriers + 8 * stage)
            if i >= stages:
                if pace > 0:
                    before = i32(i - pace)
                    turn = quotient(before, stages)
                    barrier_wait(i32(base + barriers + 8 * (before - turn * stages)), turn & 1)
                barrier_wait(ready + 8 * stages, parity)
                ask_weights(map_w, at, ready, i32(i * boxes), column0, rank)
            if has_rows:
                _load_rows(at + offset, map_x, ready, 0, row0, i * boxes)
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


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the activations of a stage lie in shared memory.

    Attributes
    ----------
    at : (ring, stage's address, its number from the first of K on) → address
    constant : int
        Of the descriptor.
    steps : tuple of int
        Byte offsets of the k16 steps.
    """

    at: Any
    constant: int
    steps: tuple[int, ...]


def stage_rows(tile: StepTile) -> Rows:
    """Behind the weights of each stage, as TMA writes them."""
    offset, rows = tile.rows_offset, tile.rows
    steps = tuple(j // 4 * rows * 128 + j % 4 * 32 for j in range(tile.k_block // 16))
    return Rows(device(lambda base, at, i: at + offset), descriptor(1024), steps)


def ring_consume(tile: StepTile, source: Rows) -> Any:
    """By a warp group: its columns' sums, left in shared memory as float32.

    A stage is given back once the next one's products are under way: waiting for the products of
    each stage would take longer than they do.
    """
    rows, stages, stage_bytes, pitch = tile.rows, tile.stages, tile.stage_bytes, tile.pitch
    barriers, consumers = tile.barrier_offset, tile.consumers
    weights, activations, rows_at = descriptor(1024), source.constant, source.at
    steps = tuple(j // 4 * tile.columns * 128 + j % 4 * 32 for j in range(tile.k_block // 16))
    multiply = wgmma_stage(rows, steps, source.steps)
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
            a = i64(weights) | i64(((at + (thread >> 7) * 8192) & 0x3FFFF) >> 4)
            b = i64(activations) | i64((rows_at(base, at, i) & 0x3FFFF) >> 4)
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


def tile_write(tile: StepTile) -> Any:
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
