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
    SLOTS,
    STEP_BYTES,
    THREADS,
    ChainTile,
)
from atlas_kernels.chain_ring import (
    ask_rows,
    ask_weights,
    multiply_columns,
    number_of,
    pass_columns,
)
from atlas_kernels.gemm_step_epilogue import finish, finish_gated
from atlas_kernels.grid_barrier import (
    COUNTER_BYTES,
    global_fence,
    grid_arrive,
    grid_goal,
    grid_wait,
)
from atlas_kernels.ptx_async import (
    barrier_arrive,
    barrier_init,
    barrier_init_fence,
    launch_dependents,
    wait_prerequisites,
)
from atlas_kernels.ptx_math import quotient, remainder
from atlas_kernels.ptx_memory import (
    dynamic_shared,
    load_constant_b64,
    load_shared_b64,
    load_shared_f32x4,
    store_shared_b64,
)
from atlas_kernels.ptx_warp import block_x, num_blocks_x, sync_named, sync_threads, thread_x
from atlas_kernels.registry import kernel


def _begin(tile: ChainTile) -> Any:
    """By the first threads: make the barriers, and bring the program to shared memory."""
    barriers, program_at = tile.barrier_offset, tile.program_offset
    normed_at, goal_at = tile.normed_offset, tile.goal_offset
    warps, words = CONSUMERS // 32, STEP_BYTES // 8

    @device
    def begin(base, program, counters, num_steps, thread):
        if thread < 2 * SLOTS:  # full: who asks for weights and who asks for rows both arrive
            barrier_init(base + barriers + 8 * thread, 2 if thread < SLOTS else warps)
            barrier_init_fence()
        if thread == THREADS - 1:
            barrier_init(base + normed_at, 1)
            barrier_init_fence()
            store_shared_b64(i32(base + goal_at), grid_goal(counters))
        e = i32(thread)
        while e < num_steps * words:
            store_shared_b64(
                i32(base + program_at + 8 * e), load_constant_b64(program + i64(e) * 8)
            )
            e = i32(e + THREADS)

    return begin


def _write(tile: ChainTile) -> Any:
    """By the threads that multiply: a thread block's columns from shared memory."""
    sums, pitch = tile.ring_bytes, tile.pitch

    @device
    def write(base, step, column0, m, thread):
        bias, out = load_shared_b64(i32(step + AT.bias)), load_shared_b64(i32(step + AT.out))
        residual = load_shared_b64(i32(step + AT.residual))
        residual_stride = load_shared_b64(i32(step + AT.residual_stride))
        out_stride, option = (
            load_shared_b64(i32(step + AT.out_stride)),
            number_of(step, AT.option),
        )
        columns, box, kind = (
            number_of(step, AT.columns),
            number_of(step, AT.box),
            number_of(step, AT.kind),
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


def _norm_step(tile: ChainTile) -> Any:
    """By the threads that multiply: the row that is the product's own, or this block's of all."""
    normed, normalise = tile.normed_offset, row_norm(tile)

    @device
    def norm_step(base, step, counter, goal, number, m, thread):
        kind, row, apart = number_of(step, AT.kind), i32(block_x()), i32(num_blocks_x())
        if thread < 32 and number > 0:  # a whole warp, which goes on together
            grid_wait(counter - COUNTER_BYTES, goal)
        sync_named(1, CONSUMERS)
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

    return norm_step


def _consume(tile: ChainTile) -> Any:
    """By two warp groups: every step of the program."""
    program_at, goal_at, norm_step = tile.program_offset, tile.goal_offset, _norm_step(tile)
    of_one, of_two, of_four = (multiply_columns(tile, blocks) for blocks in (1, 2, 4))
    passes, write = pass_columns(tile), _write(tile)

    @device
    def consume_step(base, step, m, thread, head, slot):
        box, blocks, k = (
            number_of(step, AT.box),
            number_of(step, AT.blocks),
            number_of(step, AT.k),
        )
        units, kind = number_of(step, AT.units), number_of(step, AT.kind)
        width, unit = i32(box * (2 if kind & GATED else 1)), i32(block_x())
        while unit < units:
            if thread >> 7 << 6 >= width:
                head, slot = passes(base, thread, width, blocks, k, head, slot)
            elif blocks == 4:
                head, slot = of_four(base, thread, width, k, head, slot)
            elif blocks == 2:
                head, slot = of_two(base, thread, width, k, head, slot)
            else:
                head, slot = of_one(base, thread, width, k, head, slot)
            sync_named(1, CONSUMERS)  # all sums are there
            write(base, step, i32(unit * box), m, thread)
            sync_named(1, CONSUMERS)  # and may be overwritten
            unit = i32(unit + num_blocks_x())
        return head, slot

    @device
    def consume(base, counters, num_steps, m, thread):
        head, slot, number = i32(0), i32(0), i32(0)
        goal = load_shared_b64(i32(base + goal_at))
        while number < num_steps:
            step = i32(base + program_at + number * STEP_BYTES)
            counter = counters + i64(number) * COUNTER_BYTES
            kind = number_of(step, AT.kind)
            if kind & (NORM | OWN_NORM):
                norm_step(base, step, counter, goal, number, m, thread)
            if kind & NORM == 0:
                head, slot = consume_step(base, step, m, thread, head, slot)
                global_fence()
                sync_named(1, CONSUMERS)
            if thread == 0:
                grid_arrive(counter)
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
    begin, weights, rows = _begin(tile), ask_weights(tile), ask_rows(tile)
    consume = _consume(tile)

    def gemm_chain(program, counters, num_steps, m):
        launch_dependents()
        base, thread = dynamic_shared(), thread_x()
        begin(base, program, counters, num_steps, thread)
        sync_threads()  # barriers and program are there
        if thread == CONSUMERS:
            weights(base, num_steps)
        elif thread == CONSUMERS + 32:
            wait_prerequisites()
            rows(base, counters, num_steps)
        elif thread < CONSUMERS:
            wait_prerequisites()
            consume(base, counters, num_steps, m, thread)

    return gemm_chain
