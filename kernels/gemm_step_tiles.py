"""Step GEMM of sm_90a over quantised weights: y = x · Wᵀ for 1 to 128 rows, as W is read.

W lies in cells (``quant_plan``), which bulk copies bring into a ring of shared memory; x comes by
TMA, as in ``gemm_step``. Each thread of a warp group takes the codes that it needs for the A
operand and turns them into bf16 in registers (``quant_decode``) while the products of the half
stage before run; ``wgmma`` multiplies them from there. The dequantised weights touch no memory.

The order of summation is that of a bf16 matrix of one chain, whatever the matrix' shape
(``gemm_step_plan``): k16 steps ascending in one float32 accumulator. So the bits are those of
``gemm_step`` on the weights rounded to bf16 and one chain, whatever the rows and the tile.
"""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import device, i32, i64
from atlas_kernels.gemm_step_epilogue import finish, finish_gated
from atlas_kernels.ptx_async import (
    EVICT_FIRST,
    EVICT_LAST,
    barrier_arrive,
    barrier_expect,
    barrier_init,
    barrier_init_fence,
    barrier_wait,
    bulk_load_with,
    launch_dependents,
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
    wgmma_stage_registers,
    wgmma_wait0,
    wgmma_wait1,
    wgmma_zero,
)
from atlas_kernels.quant_decode import SHARED, decoder, eight_zeros, interleaved
from atlas_kernels.quant_plan import CELL_K, CELL_ROWS, QUANT_TILES, QuantTile
from atlas_kernels.registry import kernel

_load_cells = bulk_load_with(EVICT_FIRST)
_load_rows = tile_load(2, EVICT_LAST)


def _ask_weights(tile: QuantTile) -> Any:
    """Ask for a stage of weights, a cell of each unit; units past the last are the last one."""
    cells, cell_bytes, stage_bytes = tile.groups * tile.units, tile.cell_bytes, tile.stage_bytes
    gated = tile.gated

    @device
    def ask_weights(w, at, ready, step, unit, num_units, unit_bytes):
        barrier_expect(ready, stage_bytes)
        begin = w + i64(step) * cell_bytes
        for c in range(cells):
            if gated:  # gate and up in turn, those after all gates
                own = min(i32(unit + (c >> 1)), i32(num_units - 1)) + (c & 1) * num_units
            else:
                own = min(i32(unit + c), i32(num_units - 1))
            _load_cells(at + c * cell_bytes, begin + i64(own) * unit_bytes, ready, cell_bytes)

    return ask_weights


def _begin(tile: QuantTile) -> Any:
    """By one thread: make the barriers, and ask for the first stages of weights."""
    stages, barriers, warps = tile.stages, tile.barrier_offset, 4 * tile.groups
    offset, weight_bytes, ask_weights = tile.weights_offset, tile.weight_bytes, _ask_weights(tile)

    @device
    def begin(w, base, steps, unit, num_units, unit_bytes):
        full = i32(base + barriers)
        for i in range(stages):
            barrier_init(full + 8 * i, 1)
            barrier_init(full + 8 * (stages + i), warps)
        barrier_init_fence()
        for i in range(min(i32(stages), steps)):  # constants: no need to wait
            at = i32(base + offset + i * weight_bytes)
            ask_weights(w, at, full + 8 * i, i, unit, num_units, unit_bytes)

    return begin


def _produce(tile: QuantTile) -> Any:
    """By the same thread: ask for all rows, and for the other stages of weights."""
    stages, barriers, row_bytes = tile.stages, tile.barrier_offset, tile.row_bytes
    offset, weight_bytes, ask_weights = tile.weights_offset, tile.weight_bytes, _ask_weights(tile)

    @device
    def produce(w, map_x, base, steps, unit, num_units, unit_bytes):
        stage, parity = i32(0), i32(1)
        for i in range(steps):
            ready = i32(base + barriers + 8 * stage)
            if i >= stages:
                barrier_wait(ready + 8 * stages, parity)
                at = i32(base + offset + stage * weight_bytes)
                ask_weights(w, at, ready, i, unit, num_units, unit_bytes)
            target = i32(base + stage * row_bytes)
            _load_rows(target, map_x, ready, i * CELL_K, 0)
            _load_rows(target + row_bytes // 2, map_x, ready, i * CELL_K + 64, 0)
            stage = i32(stage + 1)
            if stage == stages:
                stage, parity = i32(0), i32(parity ^ 1)

    return produce


def _fragments(tile: QuantTile) -> tuple[Any, Any, Any]:
    """The functions of ``Decoder`` for a group's one or two units: scales, load and decode.

    ``decode`` gives the A operand of four k16 steps.
    """
    found, cell_bytes = decoder(tile.type, SHARED, as_words=True), tile.cell_bytes
    scales, load, decode = found.all_scales, found.load, found.decode
    if tile.units == 1:
        return (
            scales,
            load,
            device(lambda codes, held, zeros: interleaved(decode(codes, held), zeros)),
        )

    @device
    def both_scales(cells, thread):
        u, v = scales(cells, thread), scales(i32(cells + cell_bytes), thread)
        return (u[0], v[0]), (u[1], v[1])

    @device
    def load_both(cells, thread, half):
        return load(cells, thread, half), load(i32(cells + cell_bytes), thread, half)

    @device
    def decode_both(codes, held, zeros):
        return interleaved(decode(codes[0], held[0]), decode(codes[1], held[1]))

    return both_scales, load_both, decode_both


def _consume(tile: QuantTile) -> Any:
    """By a warp group: the sums of its units, left in shared memory as float32.

    Half a stage's products run while the other half is decoded, into other registers.
    """
    rows, stages, pitch, consumers = tile.rows, tile.stages, tile.pitch, 128 * tile.groups
    row_bytes, weight_bytes = tile.row_bytes, tile.weight_bytes
    group_bytes, box_bytes = tile.units * tile.cell_bytes, tile.row_bytes // 2
    barriers, offset, constant = tile.barrier_offset, tile.weights_offset, descriptor(1024)
    multiply = wgmma_stage_registers(rows, (0, 32, 64, 96))
    scales, load, decode = _fragments(tile)
    zeros_a, zeros_b = eight_zeros
    zero, settled, store = wgmma_zero(rows), settle(rows), store_accumulators(rows, pitch)

    @device
    def consume(base, steps, thread, m):
        total, zeros, others = zero(), zeros_a(m), zeros_b(m)
        full, own = i32(base + barriers), i32(thread & 127)
        cells = i32(base + offset + (thread >> 7) * group_bytes)
        stage, parity, previous = i32(0), i32(0), i32(0)
        i = i32(0)
        while True:  # once at least: a way around the loop would set accumulators before the wait
            barrier_wait(full + 8 * stage, parity)
            at = i32(cells + stage * weight_bytes)
            b = i64(constant) | i64(((base + stage * row_bytes) & 0x3FFFF) >> 4)
            first, second = scales(at, own)
            codes = load(at, own, 0)
            wgmma_wait1()  # the first half's registers are free
            total = multiply(total, decode(codes, first, zeros), b)
            codes = load(at, own, 1)
            wgmma_wait1()  # those of the second half, and the stage before
            if thread & 31 == 0 and i > 0:
                barrier_arrive(full + 8 * (stages + previous))
            total = multiply(total, decode(codes, second, others), b + (box_bytes >> 4))
            i = i32(i + 1)
            if i == steps:
                break
            previous = stage
            stage = i32(stage + 1)
            if stage == stages:
                stage, parity = i32(0), i32(parity ^ 1)
        wgmma_wait0()
        total = settled(total)
        sync_named(1, consumers)  # all products are done: the stages' memory is free
        row, column = (thread & 3) * 2, (thread >> 5) * 16 + (thread >> 2 & 7)
        store(total, i32(base + row * pitch + column * 4))

    return consume


def _place(tile: QuantTile) -> Any:
    """Where in a row of the float32 tile four neighbouring columns of the output begin.

    A warp has eight rows of a unit in the upper half of its 16, of the other unit in the lower.
    """
    units = 1 if tile.gated else tile.units

    @device
    def place(column):
        group = quotient(i32(column), 32 * units)
        within = i32(column & 31)
        lower = i32(column >> 5 & (units - 1)) * 8
        return i32(group * 64 + (within >> 3) * 16 + lower + (within & 7)) * 4

    return place


def _write(tile: QuantTile) -> Any:
    """By all threads: the tile's rows from shared memory."""
    quads, pitch, gated, threads = tile.columns // 4, tile.pitch, tile.gated, tile.threads
    place = _place(tile)

    @device
    def write(
        base, column0, num_columns, m, bias, residual, out, residual_stride, out_stride, option
    ):
        for e in range(thread_x(), m * quads, threads):
            row, at = quotient(i32(e), quads), i32(remainder(i32(e), quads) * 4)
            column, source = i32(column0 + at), i32(base + row * pitch + place(at))
            if column < num_columns:
                total = load_shared_f32x4(source)
                if gated:
                    up = load_shared_f32x4(source + 32)
                    finish_gated(total, up, row, column, num_columns, bias, out, out_stride, option)
                else:
                    finish(
                        total, row, column, bias, residual, out, residual_stride, out_stride,
                        option,
                    )  # fmt: skip

    return write


@kernel(
    "gemm_step",
    args="ptr ptr ptr ptr ptr i32 i32 i32 i64 i64 i32",
    threads=lambda tile: tile.threads,
    min_blocks=lambda tile: tile.min_blocks,
    shared=lambda tile: tile.shared_bytes,
    arch="sm_90a",
    variants={name: (tile,) for name, tile in QUANT_TILES.items()},
)
def make_gemm_step_tiles(tile: QuantTile) -> Any:
    """out [m, n] = x [m, k] · Wᵀ + bias + residual, or gated [m, n / 2]; grid (tile.grid(n)).

    Arguments: W's units (``quant_plan``); the tensor map of x (bf16, boxes of 64 × ``rows``, the
    128-byte swizzle); bias (float32) and residual (bf16) or 0; out, bf16, or float32 where
    ``option`` is 1 (gated: bf16, no residual, n a multiple of 64, and ``option`` chooses gelu with
    tanh); n, k, m; strides in bytes.
    """
    begin, produce, consume, write = _begin(tile), _produce(tile), _consume(tile), _write(tile)
    consumers, cell_bytes, columns = 128 * tile.groups, tile.cell_bytes, tile.columns
    halves, units_each = 2 if tile.gated else 1, tile.columns // CELL_ROWS

    def gemm_step_tiles(
        w, map_x, bias, residual, out, n, k, m, residual_stride, out_stride, option
    ):
        launch_dependents()
        base, thread = dynamic_shared(), thread_x()
        num_columns = quotient(n, halves)
        num_units = quotient(i32(num_columns + (CELL_ROWS - 1)), CELL_ROWS)
        unit = i32(block_x() * units_each)
        steps = quotient(i32(k + (CELL_K - 1)), CELL_K)
        unit_bytes = i64(steps * cell_bytes)
        if thread == consumers:
            begin(w, base, steps, unit, num_units, unit_bytes)
        sync_threads()  # the barriers are ready
        wait_prerequisites()  # x, residual and what out held are other kernels'
        if thread < consumers:
            consume(base, steps, thread, m)
        elif thread == consumers:
            produce(w, map_x, base, steps, unit, num_units, unit_bytes)
        sync_threads()
        column0 = i32(block_x() * columns)
        write(
            base, column0, num_columns, m, bias, residual, out, residual_stride, out_stride, option
        )

    return gemm_step_tiles
