"""The ring of a chain: who asks for weights and for activations, and who multiplies them.

A slot of shared memory holds some blocks of 64 k of a thread block's rows of W (``ChainStep.box``,
of gates and of ups), then as many of x. Two warps ask, each by one thread, with one copy for each
slot; two warp groups multiply, 64 rows of W each. Each function makes a device function for a tile.
"""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import device, i32, i64
from atlas_kernels.chain_plan import AT, GATED, NORM, OWN_NORM, STEP_BYTES, ChainTile
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
from atlas_kernels.ptx_memory import load_shared_b32, load_shared_b64
from atlas_kernels.ptx_warp import block_x, num_blocks_x
from atlas_kernels.ptx_wgmma import (
    descriptor,
    settle,
    store_accumulators,
    wgmma_stage,
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
def next_slot(slot, parity, slots):
    """The slot of the ring behind one, and the parity of its phase."""
    slot = i32(slot + 1)
    if slot == slots:
        return i32(0), i32(parity ^ 1)
    return slot, parity


def ask_weights(tile: ChainTile) -> Any:
    """By one thread: ask for the weights of every product, in order, wherever there is room."""
    slots, slot_bytes, barriers = tile.slots, tile.slot_bytes, tile.barrier_offset
    program_at = tile.program_offset

    @device
    def ask_step(base, step, slot, parity):
        map_w, is_gated = load_shared_b64(i32(step + AT.map_w)), number_of(step, AT.kind) & GATED
        box, blocks, units = (
            number_of(step, AT.box),
            number_of(step, AT.blocks),
            number_of(step, AT.units),
        )
        num_blocks = quotient(i32(number_of(step, AT.k) + (BOX_K - 1)), BOX_K)
        num_bytes = i32(blocks * box * (BOX_K * 2))
        if is_gated:
            num_bytes = i32(2 * num_bytes)
        unit = i32(block_x())
        while unit < units:
            block, column0 = i32(0), i32(unit * box)
            while block < num_blocks:
                at, ready = i32(base + slot * slot_bytes), i32(base + barriers + 8 * slot)
                barrier_wait(ready + 8 * slots, parity)
                barrier_expect(ready, num_bytes)
                if is_gated:
                    _load_gated(at, map_w, ready, 0, column0, 0, block)
                else:
                    _load_weights(at, map_w, ready, 0, column0, block)
                block = i32(block + blocks)
                slot, parity = next_slot(slot, parity, slots)
            unit = i32(unit + num_blocks_x())
        return slot, parity

    @device
    def ask(base, num_steps):
        slot, parity, number = i32(0), i32(1), i32(0)
        while number < num_steps:
            step = i32(base + program_at + number * STEP_BYTES)
            slot, parity = ask_step(base, step, slot, parity)
            number = i32(number + 1)

    return ask


def ask_rows(tile: ChainTile) -> Any:
    """By one thread: ask for the activations of every product, once they have been written."""
    slots, slot_bytes, barriers = tile.slots, tile.slot_bytes, tile.barrier_offset
    program_at, row_bytes = tile.program_offset, tile.rows * BOX_K * 2
    normed, goal_at = tile.normed_offset, tile.goal_offset

    @device
    def ask_step(base, step, slot, parity):
        map_x, kind = load_shared_b64(i32(step + AT.map_x)), number_of(step, AT.kind)
        blocks, units = number_of(step, AT.blocks), number_of(step, AT.units)
        num_blocks = quotient(i32(number_of(step, AT.k) + (BOX_K - 1)), BOX_K)
        behind = i32(blocks * number_of(step, AT.box) * (BOX_K * 2))
        if kind & GATED:
            behind = i32(2 * behind)
        place = i32(block_x() if kind & OWN_NORM else 0)
        unit = i32(block_x())
        while unit < units:
            block = i32(0)
            while block < num_blocks:
                at, ready = i32(base + slot * slot_bytes), i32(base + barriers + 8 * slot)
                barrier_wait(ready + 8 * slots, parity)
                barrier_expect(ready, blocks * row_bytes)
                _load_rows(at + behind, map_x, ready, 0, 0, block, place)
                block = i32(block + blocks)
                slot, parity = next_slot(slot, parity, slots)
            unit = i32(unit + num_blocks_x())
        return slot, parity

    @device
    def ask(base, counters, num_steps):
        slot, parity, number, turn = i32(0), i32(1), i32(0), i32(0)
        goal = load_shared_b64(i32(base + goal_at))
        while number < num_steps:
            step = i32(base + program_at + number * STEP_BYTES)
            kind = number_of(step, AT.kind)
            if kind & OWN_NORM:
                barrier_wait(base + normed, turn)
                turn = i32(turn ^ 1)
            elif number > 0:
                grid_wait(counters + i64(number - 1) * COUNTER_BYTES, goal)
            if kind & NORM == 0:
                global_fence()
                slot, parity = ask_step(base, step, slot, parity)
            number = i32(number + 1)

    return ask


def multiply_columns(tile: ChainTile) -> Any:
    """By two warp groups: sums of a thread block's columns at once, left as float32.

    A slot is given back once products of the next one are under way.
    """
    rows, slots, slot_bytes, pitch = tile.rows, tile.slots, tile.slot_bytes, tile.pitch
    barriers, sums, constant = tile.barrier_offset, tile.sums_offset, descriptor(1024)
    multiply = wgmma_stage(rows, (0, 32, 64, 96), (0, 32, 64, 96))
    zero, settled, store = wgmma_zero(rows), settle(rows), store_accumulators(rows, pitch)

    @device
    def products(base, thread, width, blocks, k, slot, parity):
        """Of a group that has columns."""
        total, group_at = zero(), i32((thread >> 7) * (64 * BOX_K * 2))
        at_k, block, previous = i32(0), i32(0), i32(-1)
        a = b = i32(0)
        while at_k < k:
            if block == 0:
                barrier_wait(base + barriers + 8 * slot, parity)
                a = i32(base + slot * slot_bytes)
                b = i32(a + blocks * width * (BOX_K * 2))
            total = multiply(
                total,
                i64(constant) | i64(((a + group_at) & 0x3FFFF) >> 4),
                i64(constant) | i64((b & 0x3FFFF) >> 4),
            )
            wgmma_wait1()
            if block == 0 and previous >= 0 and thread & 31 == 0:
                barrier_arrive(base + barriers + 8 * (slots + previous))
            a, b = i32(a + width * (BOX_K * 2)), i32(b + rows * (BOX_K * 2))
            at_k, block = i32(at_k + BOX_K), i32(block + 1)
            if block == blocks or at_k >= k:
                previous, block = slot, i32(0)
                slot, parity = next_slot(slot, parity, slots)
        wgmma_wait0()
        total = settled(total)
        row, column = (thread & 3) * 2, (thread >> 5) * 16 + (thread >> 2 & 7)
        store(total, i32(base + sums + row * pitch + column * 4))
        if thread & 31 == 0:
            barrier_arrive(base + barriers + 8 * (slots + previous))
        return slot, parity

    @device
    def passes(base, thread, blocks, k, slot, parity):
        """Of a group that has none: it gives back what it has not read."""
        at_k = i32(0)
        while at_k < k:
            full = i32(base + barriers + 8 * slot)
            barrier_wait(full, parity)
            if thread & 31 == 0:
                barrier_arrive(full + 8 * slots)
            slot, parity = next_slot(slot, parity, slots)
            at_k = i32(at_k + blocks * BOX_K)
        return slot, parity

    return products, passes
