"""The ring of a chain: who asks for weights and for activations, and who multiplies them.

A slot of shared memory holds some blocks of 64 k of a thread block's rows of W (``ChainStep.box``,
of gates and of ups), then as many of x. Slots go round the ring one after another, of whatever
sizes the steps want. Two warps ask, each by one thread, with one copy for each slot; two warp
groups multiply, 64 rows of W each. Each function makes a device function for a tile.
"""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import device, i32, i64
from atlas_kernels.chain_plan import AT, GATED, NORM, OWN_NORM, SLOTS, STEP_BYTES, ChainTile
from atlas_kernels.gemm_step_plan import BOX_K
from atlas_kernels.grid_barrier import COUNTER_BYTES, global_fence, grid_wait
from atlas_kernels.ptx_async import (
    EVICT_FIRST,
    EVICT_LAST,
    barrier_arrive,
    barrier_expect,
    barrier_wait,
    tile_load,
)
from atlas_kernels.ptx_math import quotient
from atlas_kernels.ptx_memory import load_shared_b32, load_shared_b64, store_shared_b32
from atlas_kernels.ptx_warp import block_x, num_blocks_x
from atlas_kernels.ptx_wgmma import (
    descriptor,
    settle,
    store_accumulators,
    wgmma_blocks,
    wgmma_wait0,
    wgmma_wait1,
    wgmma_zero,
)

_load_weights, _load_gated = tile_load(3, EVICT_FIRST), tile_load(4, EVICT_FIRST)
_load_rows = tile_load(4, EVICT_LAST)


@device
def number_of(step, at):
    """A field of a step that has 32 bits."""
    return load_shared_b32(i32(step + at))


@device
def _wait(base, barriers, number, later):
    """For a slot to be full, or (``later``: 8 · ``SLOTS``) to have been given back."""
    barrier = i32(base + barriers + later + 8 * (number & (SLOTS - 1)))
    barrier_wait(barrier, i32(number // SLOTS & 1))


def _places(tile: ChainTile) -> tuple[Any, Any]:
    """Where slots lie: one after another, at the beginning where the end has no room.

    ``place(head, size)`` → offset; ``take(base, sizes, size, head, free, tail, number)`` → the same
    once all that lay there has been given back, and the new ``head, free, tail``: where the next
    may begin, bytes that nobody holds, and the oldest slot that somebody may. Each of the two that
    ask goes through this by itself, and keeps the sizes of slots in memory of its own.
    """
    ring, barriers = tile.ring_bytes, tile.barrier_offset

    @device
    def place(head, size):
        return i32(0 if head + size > ring else head)

    @device
    def take(base, sizes, size, head, free, tail, number):
        at = place(head, size)
        need = i32(size if at == head else size + ring - head)
        while free < need or number - tail >= SLOTS:
            _wait(base, barriers, tail, 8 * SLOTS)
            free = i32(free + load_shared_b32(sizes + 4 * (tail & (SLOTS - 1))))
            tail = i32(tail + 1)
        store_shared_b32(sizes + 4 * (number & (SLOTS - 1)), need)
        return at, i32(at + size), i32(free - need), tail

    return place, take


def ask_weights(tile: ChainTile) -> Any:
    """By one thread: ask for the weights of every product, in order, wherever there is room."""
    barriers, program_at, ring = tile.barrier_offset, tile.program_offset, tile.ring_bytes
    sizes_at, row_bytes = tile.sizes_offset, tile.rows * BOX_K * 2
    _, take = _places(tile)

    @device
    def ask_step(base, step, head, free, tail, number):
        map_w, is_gated = load_shared_b64(i32(step + AT.map_w)), number_of(step, AT.kind) & GATED
        blocks, units = number_of(step, AT.blocks), number_of(step, AT.units)
        num_blocks, box = quotient(number_of(step, AT.k), BOX_K), number_of(step, AT.box)
        num_bytes = i32(blocks * box * (BOX_K * 2))
        if is_gated:
            num_bytes = i32(2 * num_bytes)
        size, unit = i32(num_bytes + blocks * row_bytes), i32(block_x())
        while unit < units:
            block, column0 = i32(0), i32(unit * box)
            while block < num_blocks:
                at, head, free, tail = take(
                    base, i32(base + sizes_at), size, head, free, tail, number
                )
                ready = i32(base + barriers + 8 * (number & (SLOTS - 1)))
                barrier_expect(ready, num_bytes)
                if is_gated:
                    _load_gated(base + at, map_w, ready, 0, column0, 0, block)
                else:
                    _load_weights(base + at, map_w, ready, 0, column0, block)
                block, number = i32(block + blocks), i32(number + 1)
            unit = i32(unit + num_blocks_x())
        return head, free, tail, number

    @device
    def ask(base, num_steps):
        head, free, tail, number, i = i32(0), i32(ring), i32(0), i32(0), i32(0)
        while i < num_steps:
            step = i32(base + program_at + i * STEP_BYTES)
            head, free, tail, number = ask_step(base, step, head, free, tail, number)
            i = i32(i + 1)

    return ask


def ask_rows(tile: ChainTile) -> Any:
    """By one thread: ask for the activations of every product, once they have been written."""
    barriers, program_at, ring = tile.barrier_offset, tile.program_offset, tile.ring_bytes
    sizes_at, row_bytes = tile.sizes_offset + 4 * SLOTS, tile.rows * BOX_K * 2
    normed, goal_at, (_, take) = tile.normed_offset, tile.goal_offset, _places(tile)

    @device
    def ask_step(base, step, head, free, tail, number):
        map_x, kind = load_shared_b64(i32(step + AT.map_x)), number_of(step, AT.kind)
        blocks, units = number_of(step, AT.blocks), number_of(step, AT.units)
        num_blocks = quotient(number_of(step, AT.k), BOX_K)
        behind = i32(blocks * number_of(step, AT.box) * (BOX_K * 2))
        if kind & GATED:
            behind = i32(2 * behind)
        size, copy = i32(behind + blocks * row_bytes), i32(block_x() if kind & OWN_NORM else 0)
        unit = i32(block_x())
        while unit < units:
            block = i32(0)
            while block < num_blocks:
                at, head, free, tail = take(
                    base, i32(base + sizes_at), size, head, free, tail, number
                )
                ready = i32(base + barriers + 8 * (number & (SLOTS - 1)))
                barrier_expect(ready, blocks * row_bytes)
                _load_rows(base + at + behind, map_x, ready, 0, 0, block, copy)
                block, number = i32(block + blocks), i32(number + 1)
            unit = i32(unit + num_blocks_x())
        return head, free, tail, number

    @device
    def ask(base, counters, num_steps):
        head, free, tail, number, i = i32(0), i32(ring), i32(0), i32(0), i32(0)
        goal, turn = load_shared_b64(i32(base + goal_at)), i32(0)
        while i < num_steps:
            step = i32(base + program_at + i * STEP_BYTES)
            kind = number_of(step, AT.kind)
            if kind & OWN_NORM:
                barrier_wait(base + normed, turn)
                turn = i32(turn ^ 1)
            elif i > 0:
                grid_wait(counters + i64(i - 1) * COUNTER_BYTES, goal)
            if kind & NORM == 0:
                global_fence()
                head, free, tail, number = ask_step(base, step, head, free, tail, number)
            i = i32(i + 1)

    return ask


def multiply_columns(tile: ChainTile, blocks: int) -> Any:
    """By a warp group: sums of its columns, left as float32, from slots of ``blocks`` blocks.

    A slot is given back once products of the next one are under way.
    """
    rows, pitch, barriers = tile.rows, tile.pitch, tile.barrier_offset
    sums, (place, _) = tile.ring_bytes, _places(tile)
    multiply = wgmma_blocks(rows, blocks, descriptor(1024))
    zero, settled, store = wgmma_zero(rows), settle(rows), store_accumulators(rows, pitch)

    @device
    def give_back(base, thread, number):
        if thread & 31 == 0:
            barrier_arrive(base + barriers + 8 * SLOTS + 8 * (number & (SLOTS - 1)))

    @device
    def products(base, thread, width, k, head, number):
        total, step, group_at = zero(), i32(width * (BOX_K * 2)), i32((thread >> 7) * 8192)
        size, left = i32(blocks * (step + rows * BOX_K * 2)), quotient(k, BOX_K)
        first, behind = number, i32(blocks * step)
        while left > 0:
            at = i32(base + place(head, size))
            _wait(base, barriers, number, 0)
            a, b = i32(at + group_at & 0x3FFFF), i32(at + behind & 0x3FFFF)
            total = multiply(total, a >> 4, b >> 4, step >> 4)
            wgmma_wait1()
            if number > first:
                give_back(base, thread, i32(number - 1))
            head, left, number = i32(at - base + size), i32(left - blocks), i32(number + 1)
        wgmma_wait0()
        total = settled(total)
        row, column = (thread & 3) * 2, (thread >> 5) * 16 + (thread >> 2 & 7)
        store(total, i32(base + sums + row * pitch + column * 4))
        give_back(base, thread, i32(number - 1))
        return head, number

    return products


def pass_columns(tile: ChainTile) -> Any:
    """By a warp group that has no columns: it gives back what it has not read."""
    barriers, row_bytes, (place, _) = tile.barrier_offset, tile.rows * BOX_K * 2, _places(tile)

    @device
    def passes(base, thread, width, blocks, k, head, number):
        size, left = i32(blocks * (width * (BOX_K * 2) + row_bytes)), quotient(k, BOX_K)
        while left > 0:
            head = i32(place(head, size) + size)
            _wait(base, barriers, number, 0)
            if thread & 31 == 0:
                barrier_arrive(base + barriers + 8 * SLOTS + 8 * (number & (SLOTS - 1)))
            left, number = i32(left - blocks), i32(number + 1)
        return head, number

    return passes
