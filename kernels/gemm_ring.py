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
from atlas_kernels.ptx_math import quotient, remainder, vector_add
from atlas_kernels.ptx_memory import load_shared_f32x4
from atlas_kernels.ptx_mma import ldmatrix_x4, mma_bf16, mma_zero
from atlas_kernels.ptx_warp import sync_named, sync_warp, thread_x
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
    warps = tile.consumers // (32 * tile.chains)  # that read a stage
    arrivals = tile.sharers * warps  # who loads for others waits for them

    @device
    def begin(base, thread):
        if thread < 2 * stages:
            barrier_init(base + barriers + 8 * thread, 1 if thread < stages else arrivals)
            barrier_init_fence()

    return begin


def _block_of(tile: StepTile) -> Any:
    """(stage's number, stages of K) → its first block of 64 elements of K.

    Of a tile with several chains, stages are of each chain in turn.
    """
    boxes, chains = tile.k_block // BOX_K, tile.chains
    if chains == 1:
        return device(lambda i, steps: i32(i * boxes))

    @device
    def block_of(i, steps):
        before = quotient(i, chains)
        return i32(((i - before * chains) * quotient(steps, chains) + before) * boxes)

    return block_of


def ring_prefetch(tile: StepTile) -> Any:
    """By one thread: ask for the first stages of weights, which are no other kernel's.

    ``pace``, unless 0, is how many are on their way at a time.
    """
    stages, stage_bytes, block_of = tile.stages, tile.stage_bytes, _block_of(tile)
    barriers, ask_weights = tile.barrier_offset, _ask_weights(tile)

    @device
    def prefetch(map_w, base, steps, column0, rank, pace):
        i, end = i32(0), min(i32(stages), steps)
        while i < end:
            if pace > 0 and i >= pace:
                barrier_wait(i32(base + barriers + 8 * (i - pace)), 0)
            at, ready = i32(base + i * stage_bytes), i32(base + barriers + 8 * i)
            ask_weights(map_w, at, ready, block_of(i, steps), column0, rank)
            i = i32(i + 1)

    return prefetch


def ring_produce(tile: StepTile) -> Any:
    """By the same thread: ask for the stages' rows, and for the other stages of weights."""
    stages, stage_bytes, block_of = tile.stages, tile.stage_bytes, _block_of(tile)
    barriers, offset, has_rows = tile.barrier_offset, tile.rows_offset, tile.row_bytes > 0
    ask_weights = _ask_weights(tile)

    @device
    def produce(map_w, map_x, base, steps, column0, row0, rank, pace):
        stage, parity, i = i32(0), i32(1), i32(0)
        while i < steps:
            at, ready = i32(base + stage * stage_bytes), i32(base + barriers + 8 * stage)
            block = block_of(i, steps)
            if i >= stages:
                if pace > 0:
                    before = i32(i - pace)
                    turn = quotient(before, stages)
                    barrier_wait(i32(base + barriers + 8 * (before - turn * stages)), turn & 1)
                barrier_wait(ready + 8 * stages, parity)
                ask_weights(map_w, at, ready, block, column0, rank)
            if has_rows:
                _load_rows(at + offset, map_x, ready, 0, row0, block)
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
    at : (ring, stage's address, its first element of K) → address
    constant : int
        Of the descriptor.
    steps : tuple of int
        Byte offsets of the k16 steps.
    pair : (address, lane, j) → address
        Of the lane's 16 bytes of two k16 steps, the j-th two, as ``ldmatrix_x4`` wants it.
    """

    at: Any
    constant: int
    steps: tuple[int, ...]
    pair: Any


def stage_rows(tile: StepTile) -> Rows:
    """Behind the weights of each stage, as TMA writes them: units exchanged by the row's number."""
    offset, rows = tile.rows_offset, tile.rows
    steps = tuple(j // 4 * rows * 128 + j % 4 * 32 for j in range(tile.k_block // 16))

    @device
    def pair(at, lane, j):
        row, unit = lane & 7, i32((lane >> 3) + (j & 1) * 4)
        return i32(at + (j >> 1) * (rows * 128) + row * 128 + (unit ^ row) * 16)

    return Rows(device(lambda base, at, k: at + offset), descriptor(1024), steps, pair)


def ring_consume(tile: StepTile, source: Rows) -> Any:
    """(base, stages of K, stages of a chain, thread): sums, left in shared memory as float32.

    By ``tile.consumers`` threads.
    """
    if tile.chains > 1:
        return _consume_side_by_side(tile, source)
    return _consume_in_turn(tile, source)


def _consume_in_turn(tile: StepTile, source: Rows) -> Any:
    """By a warp group: its columns' sums, one chain after the other.

    A stage is given back once the next one's products are under way: waiting for the products of
    each stage would take longer than they do.
    """
    rows, stages, stage_bytes, pitch = tile.rows, tile.stages, tile.stage_bytes, tile.pitch
    barriers, consumers, k_block = tile.barrier_offset, tile.consumers, tile.k_block
    weights, activations, rows_at = descriptor(1024), source.constant, source.at
    steps = tuple(j // 4 * tile.columns * 128 + j % 4 * 32 for j in range(tile.k_block // 16))
    multiply = wgmma_stage(rows, steps, source.steps)
    zero, settled, store = wgmma_zero(rows), settle(rows), store_accumulators(rows, pitch)
    give_back, add, adds = _give_back(tile.sharers), vector_add(rows // 2), tile.adds

    @device
    def one_chain(base, begin, end, cursor, thread):
        total = zero()
        full = i32(base + barriers)
        stage, parity, previous = cursor
        i = begin
        while i < end:
            barrier_wait(full + 8 * stage, parity)
            at = i32(base + stage * stage_bytes)
            a = i64(weights) | i64(((at + (thread >> 7) * 8192) & 0x3FFFF) >> 4)
            b = i64(activations) | i64((rows_at(base, at, i * k_block) & 0x3FFFF) >> 4)
            total = multiply(total, a, b)
            wgmma_wait1()
            if i > 0:
                give_back(i32(full + 8 * (stages + previous)), thread & 31)
            previous = stage
            i, stage = i32(i + 1), i32(stage + 1)
            if stage == stages:
                stage, parity = i32(0), i32(parity ^ 1)
        wgmma_wait0()
        return settled(total), (stage, parity, previous)

    @device
    def consume(base, steps, chain_steps, thread):
        total, cursor = one_chain(
            base, i32(0), i32(chain_steps), (i32(0), i32(0), i32(0)), thread
        )  # fmt: skip
        if adds:
            end = i32(chain_steps)
            while end < steps:
                begin, end = end, i32(end + chain_steps)
                more, cursor = one_chain(base, begin, end, cursor, thread)
                total = add(total, more)
        sync_named(1, consumers)  # all products are done: the stages' memory is free
        row, column = (thread & 3) * 2, (thread >> 5) * 16 + (thread >> 2 & 7)
        store(total, i32(base + row * pitch + column * 4))

    return consume


def _consume_side_by_side(tile: StepTile, source: Rows) -> Any:
    """By warps, each with a chain of 16 columns: its sums, in the float32 tile of its chain."""
    stages, stage_bytes, pitch, chains = tile.stages, tile.stage_bytes, tile.pitch, tile.chains
    barriers, consumers, k_block = tile.barrier_offset, tile.consumers, tile.k_block
    block_bytes, sums_bytes = tile.columns * 128, tile.sums_bytes
    rows_at, pair, store = source.at, source.pair, store_accumulators(tile.rows, pitch)
    block_of = _block_of(tile)

    @device
    def weights(at, lane, unit, step):
        """Of a k16 step: the lane's 16 bytes of 16 rows of W."""
        row, piece = lane & 15, i32((step & 3) * 2 + (lane >> 4))
        line = at + (step >> 2) * block_bytes + (unit * 16 + row) * 128
        return i32(line + (piece ^ (row & 7)) * 16)

    @device
    def multiply(total, at, rows, lane, unit):
        for j in range(k_block // 32):
            b = ldmatrix_x4(pair(rows, lane, j))
            a = ldmatrix_x4(weights(at, lane, unit, 2 * j))
            c = ldmatrix_x4(weights(at, lane, unit, 2 * j + 1))
            total = mma_bf16(total, a, (b[0], b[1]))
            total = mma_bf16(total, c, (b[2], b[3]))
        return total

    @device
    def consume(base, steps, chain_steps, thread):
        lane, warp, full = i32(thread & 31), i32(thread >> 5), i32(base + barriers)
        unit = quotient(warp, chains)
        chain = i32(warp - unit * chains)
        total, stage, parity, i = mma_zero(), chain, i32(0), chain
        while i < steps:
            barrier_wait(full + 8 * stage, parity)
            at = i32(base + stage * stage_bytes)
            rows = rows_at(base, at, block_of(i, steps) * BOX_K)
            total = multiply(total, at, i32(rows), lane, unit)
            sync_warp()
            if lane == 0:
                barrier_arrive(full + 8 * (stages + stage))
            i, stage = i32(i + chains), i32(stage + chains)
            if stage >= stages:
                stage, parity = i32(stage - stages), i32(parity ^ 1)
        sync_named(1, consumers)  # all products are done: the stages' memory is free
        row, column = (lane & 3) * 2, unit * 16 + (lane >> 2)
        store(total, i32(base + chain * sums_bytes + row * pitch + column * 4))

    return consume


def _load_sums(tile: StepTile) -> Any:
    """(address) → four columns' sums, those of all chains added in ascending order."""
    if tile.chains == 1:
        return load_shared_f32x4
    sums_bytes, chains, add = tile.sums_bytes, tile.chains, vector_add(4)

    @device
    def load_sums(source):
        total = load_shared_f32x4(source)
        for chain in range(1, chains):
            total = add(total, load_shared_f32x4(i32(source + chain * sums_bytes)))
        return total

    return load_sums


def tile_write(tile: StepTile) -> Any:
    """By all threads: the tile's rows from shared memory."""
    rows, quads, pitch, gated = tile.rows, tile.box_rows // 4, tile.pitch, tile.gated
    threads, half_bytes, load_sums = tile.threads, tile.box_rows * 4, _load_sums(tile)

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
                sums = load_sums(source)
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
