"""A chain of products in one cooperative kernel: weights never wait for a kernel to end.

The thread blocks of ``gemm_chain``, one an SM, go through a program (``chain_plan``) together. One
warp asks for weights, product after product, as fast as the ring of shared memory takes them: it
waits for nobody but for room. Another asks for activations, once all thread blocks have arrived
behind the step that made them. Two warp groups multiply. So while all meet, while rows are
normalised, and while a step's first activations come, the weights of the next product do.

The products are those of ``gemm_step``, the norms those of ``rmsnorm``, and so are their bits.
"""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import device, i32, i64
from atlas_kernels.chain_norm import row_norm
from atlas_kernels.chain_plan import (
    AT,
    CHAIN_TILES,
    CONSUMERS,
    GATED,
    NORM,
    OWN_NORM,
    STEP_BYTES,
    THREADS,
    ChainTile,
)
from atlas_kernels.gemm_step_epilogue import finish, finish_gated
from atlas_kernels.gemm_step_plan import BOX_K
from atlas_kernels.grid_barrier import (
    COUNTER_BYTES,
    global_fence,
    grid_arrive,
    grid_goal,
    grid_wait,
)
from atlas_kernels.ptx_async import (
    EVICT_FIRST,
    EVICT_LAST,
    barrier_arrive,
    barrier_expect,
    barrier_init,
    barrier_init_fence,
    barrier_wait,
    launch_dependents,
    tile_load,
    wait_prerequisites,
)
from atlas_kernels.ptx_math import quotient, remainder
from atlas_kernels.ptx_memory import (
    dynamic_shared,
    load_constant_b64,
    load_shared_b32,
    load_shared_b64,
    load_shared_f32x4,
    store_shared_b64,
)
from atlas_kernels.ptx_warp import block_x, num_blocks_x, sync_named, sync_threads, thread_x
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

_load_weights, _load_rows = tile_load(2, EVICT_FIRST), tile_load(3, EVICT_LAST)


@device
def _number(step, at):
    """A field of a step that has 32 bits."""
    return load_shared_b32(i32(step + at))


@device
def _place(slot, parity, slots):
    """The slot of the ring behind one, and the parity of its phase."""
    slot = i32(slot + 1)
    if slot == slots:
        return i32(0), i32(parity ^ 1)
    return slot, parity


def _begin(tile: ChainTile) -> Any:
    """By the first threads: make the barriers, and bring the program to shared memory."""
    slots, barriers, program_at = tile.slots, tile.barrier_offset, tile.program_offset
    warps, words = CONSUMERS // 32, STEP_BYTES // 8

    @device
    def begin(base, program, counters, num_steps, thread):
        if thread < 2 * slots:  # full: who asks for weights and who asks for rows both arrive
            barrier_init(base + barriers + 8 * thread, 2 if thread < slots else warps)
            barrier_init_fence()
        if thread == THREADS - 1:
            barrier_init(base + barriers + 16 * slots, 1)
            barrier_init_fence()
            store_shared_b64(i32(base + barriers + 16 * slots + 8), grid_goal(counters))
        e = i32(thread)
        while e < num_steps * words:
            store_shared_b64(
                i32(base + program_at + 8 * e), load_constant_b64(program + i64(e) * 8)
            )
            e = i32(e + THREADS)

    return begin


def _ask_weights(tile: ChainTile) -> Any:
    """By one thread: ask for the weights of every product, in order, wherever there is room."""
    slots, slot_bytes, barriers = tile.slots, tile.slot_bytes, tile.barrier_offset
    program_at = tile.program_offset

    @device
    def ask_step(base, step, slot, parity):
        map_w, kind = load_shared_b64(i32(step + AT.map_w)), _number(step, AT.kind)
        box, blocks, k = (
            _number(step, AT.box),
            _number(step, AT.blocks),
            _number(step, AT.k),
        )
        units, columns = _number(step, AT.units), _number(step, AT.columns)
        half_bytes, halves = i32(box * (BOX_K * 2)), i32(2 if kind & GATED else 1)
        unit = i32(block_x())
        while unit < units:
            at_k, column0 = i32(0), i32(unit * box)
            while at_k < k:
                ready = i32(base + barriers + 8 * slot)
                barrier_wait(ready + 8 * slots, parity)
                count = min(blocks, quotient(i32(k - at_k + (BOX_K - 1)), BOX_K))
                barrier_expect(ready, count * halves * half_bytes)
                at = i32(base + slot * slot_bytes)
                while count > 0:
                    _load_weights(at, map_w, ready, at_k, column0)
                    at = i32(at + half_bytes)
                    if halves == 2:
                        _load_weights(at, map_w, ready, at_k, column0 + columns)
                        at = i32(at + half_bytes)
                    at_k, count = i32(at_k + BOX_K), i32(count - 1)
                slot, parity = _place(slot, parity, slots)
            unit = i32(unit + num_blocks_x())
        return slot, parity

    @device
    def ask_weights(base, num_steps):
        slot, parity, number = i32(0), i32(1), i32(0)
        while number < num_steps:
            slot, parity = ask_step(
                base, i32(base + program_at + number * STEP_BYTES), slot, parity
            )
            number = i32(number + 1)

    return ask_weights


def _ask_rows(tile: ChainTile) -> Any:
    """By one thread: ask for the activations of every product, once they have been written."""
    slots, slot_bytes, barriers = tile.slots, tile.slot_bytes, tile.barrier_offset
    program_at, row_bytes = tile.program_offset, tile.rows * BOX_K * 2
    normed, goal_at = barriers + 16 * slots, barriers + 16 * slots + 8

    @device
    def ask_step(base, step, slot, parity):
        map_x, kind = load_shared_b64(i32(step + AT.map_x)), _number(step, AT.kind)
        box, blocks, k = (
            _number(step, AT.box),
            _number(step, AT.blocks),
            _number(step, AT.k),
        )
        units, width = _number(step, AT.units), i32(box * (2 if kind & GATED else 1))
        place = i32(block_x() if kind & OWN_NORM else 0)
        unit = i32(block_x())
        while unit < units:
            at_k = i32(0)
            while at_k < k:
                ready = i32(base + barriers + 8 * slot)
                barrier_wait(ready + 8 * slots, parity)
                count = min(blocks, quotient(i32(k - at_k + (BOX_K - 1)), BOX_K))
                barrier_expect(ready, count * row_bytes)
                at = i32(base + slot * slot_bytes + count * width * (BOX_K * 2))
                while count > 0:
                    _load_rows(at, map_x, ready, at_k, 0, place)
                    at = i32(at + row_bytes)
                    at_k, count = i32(at_k + BOX_K), i32(count - 1)
                slot, parity = _place(slot, parity, slots)
            unit = i32(unit + num_blocks_x())
        return slot, parity

    @device
    def ask_rows(base, counters, num_steps):
        slot, parity, number, turn = i32(0), i32(1), i32(0), i32(0)
        goal = load_shared_b64(i32(base + goal_at))
        while number < num_steps:
            step = i32(base + program_at + number * STEP_BYTES)
            kind = _number(step, AT.kind)
            if kind & OWN_NORM:
                barrier_wait(base + normed, turn)
                turn = i32(turn ^ 1)
            elif number > 0:
                grid_wait(counters + i64(number - 1) * COUNTER_BYTES, goal)
            if kind & NORM == 0:
                global_fence()
                slot, parity = ask_step(base, step, slot, parity)
            number = i32(number + 1)

    return ask_rows


def _multiply(tile: ChainTile) -> Any:
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
            full = i32(base + barriers + 8 * slot)
            if block == 0:
                barrier_wait(full, parity)
                a = i32(base + slot * slot_bytes)
                count = min(blocks, quotient(i32(k - at_k + (BOX_K - 1)), BOX_K))
                b = i32(a + count * width * (BOX_K * 2))
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
                slot, parity = _place(slot, parity, slots)
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
            slot, parity = _place(slot, parity, slots)
            at_k = i32(at_k + blocks * BOX_K)
        return slot, parity

    return products, passes


def _write(tile: ChainTile) -> Any:
    """By the threads that multiply: a thread block's columns from shared memory."""
    sums, pitch = tile.sums_offset, tile.pitch

    @device
    def write(base, step, column0, m, thread):
        bias, out = load_shared_b64(i32(step + AT.bias)), load_shared_b64(i32(step + AT.out))
        residual = load_shared_b64(i32(step + AT.residual))
        residual_stride = load_shared_b64(i32(step + AT.residual_stride))
        out_stride, option = (
            load_shared_b64(i32(step + AT.out_stride)),
            _number(step, AT.option),
        )
        columns, box, kind = (
            _number(step, AT.columns),
            _number(step, AT.box),
            _number(step, AT.kind),
        )
        quads = i32(box >> 2)
        e = i32(thread)
        while e < m * quads:
            row, at = quotient(e, quads), i32(remainder(e, quads) * 4)
            column, source = i32(column0 + at), i32(base + sums + row * pitch + at * 4)
            if column < columns:
                total = load_shared_f32x4(source)
                if kind & GATED:
                    up = load_shared_f32x4(i32(source + box * 4))
                    finish_gated(total, up, row, column, columns, bias, out, out_stride, option)
                else:
                    finish(
                        total, row, column, bias, residual, out, residual_stride, out_stride,
                        option,
                    )  # fmt: skip
            e = i32(e + CONSUMERS)

    return write


def _consume(tile: ChainTile) -> Any:
    """By two warp groups: every step of the program."""
    program_at, goal_at = tile.program_offset, tile.barrier_offset + 16 * tile.slots + 8
    normed = tile.barrier_offset + 16 * tile.slots
    (products, passes), write, normalise = _multiply(tile), _write(tile), row_norm(tile)

    @device
    def consume_step(base, step, m, thread, slot, parity):
        box, blocks, k = (
            _number(step, AT.box),
            _number(step, AT.blocks),
            _number(step, AT.k),
        )
        units, kind = _number(step, AT.units), _number(step, AT.kind)
        width, unit = i32(box * (2 if kind & GATED else 1)), i32(block_x())
        while unit < units:
            if thread >> 7 << 6 < width:
                slot, parity = products(base, thread, width, blocks, k, slot, parity)
            else:
                slot, parity = passes(base, thread, blocks, k, slot, parity)
            sync_named(1, CONSUMERS)  # all sums are there
            write(base, step, i32(unit * box), m, thread)
            sync_named(1, CONSUMERS)  # and may be overwritten
            unit = i32(unit + num_blocks_x())
        return slot, parity

    @device
    def consume(base, counters, num_steps, m, thread):
        slot, parity, number = i32(0), i32(0), i32(0)
        goal = load_shared_b64(i32(base + goal_at))
        while number < num_steps:
            step = i32(base + program_at + number * STEP_BYTES)
            kind = _number(step, AT.kind)
            if kind & (NORM | OWN_NORM):
                if thread < 32 and number > 0:  # a whole warp, which goes on together
                    grid_wait(counters + i64(number - 1) * COUNTER_BYTES, goal)
                sync_named(1, CONSUMERS)
                row, apart = i32(block_x()), i32(num_blocks_x())
                if kind & OWN_NORM:
                    row = i32(0)
                while row < m:
                    normalise(base, step, row, i32(block_x()), thread)
                    sync_named(1, CONSUMERS)  # its sums have been read
                    row = i32(row + apart)
                global_fence()
                sync_named(1, CONSUMERS)
                if kind & OWN_NORM and thread == 0:
                    barrier_arrive(base + normed)
            if kind & NORM == 0:
                slot, parity = consume_step(base, step, m, thread, slot, parity)
                global_fence()
                sync_named(1, CONSUMERS)
            if thread == 0:
                grid_arrive(counters + i64(number) * COUNTER_BYTES)
            number = i32(number + 1)

    return consume


@kernel(
    "gemm_chain",
    args="ptr ptr i32 i32",
    threads=THREADS,
    shared=lambda tile: tile.shared_bytes,
    cooperative=True,
    arch="sm_90a",
    variants={f"bf16_{rows}": (tile,) for rows, tile in CHAIN_TILES.items()},
)
def make_gemm_chain(tile: ChainTile) -> Any:
    """Run a program of ``num_steps`` steps for ``m`` rows; grid (SMs).

    ``program``: ``ChainStep`` after ``ChainStep``; ``counters``: one of ``COUNTER_BYTES`` for each,
    zero at first and the program's own.
    """
    begin, ask_weights, ask_rows = _begin(tile), _ask_weights(tile), _ask_rows(tile)
    consume = _consume(tile)

    def gemm_chain(program, counters, num_steps, m):
        launch_dependents()
        base, thread = dynamic_shared(), thread_x()
        begin(base, program, counters, num_steps, thread)
        sync_threads()  # barriers and program are there
        if thread == CONSUMERS:
            ask_weights(base, num_steps)
        elif thread == CONSUMERS + 32:
            wait_prerequisites()
            ask_rows(base, counters, num_steps)
        elif thread < CONSUMERS:
            wait_prerequisites()
            consume(base, counters, num_steps, m, thread)

    return gemm_chain
