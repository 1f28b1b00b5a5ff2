"""gate · up of a mixture of experts for up to 8 rows: every chosen expert's weights are read once.

``moe_gate_up`` gives silu(gate) · up of every pair; ``moe_down``, the next kernel, what follows. A
warp is a stream of its own: it takes 16 rows of an expert's weights at a time, a unit, copies their
K in chunks into a ring of stages, and multiplies all rows of activations by them; rows that did not
choose the expert are dropped. Weights of the shared expert are asked for before the wait for the
previous kernel. No gather, no scatter, no atomics; the order is that of ``moe_plan``.

Weights are the tensor core's A, activations its B. A unit is 8 rows of gate and the same 8 of up;
those of a thread block lie next to each other (the shared expert's are dealt out one by one, the
others in ranges). What is asked for next is worked out anew with each unit, not each stage.

The choices are given, or each thread block makes them of the scores, a warp a row: sooner than one
could make them for all, and hand them over. As nothing else can go on meanwhile, and an SM finds
none of the code in its instruction cache, it is run once before the wait, on other numbers.

The next kernel starts only after this one's own wait: it reads ids before its wait, which a kernel
before this one wrote, or sees there that this one is about to.
"""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import device, f32, i32, i64
from atlas_kernels.activation import silu_mul
from atlas_kernels.moe_decode_stage import (
    expect_stage,
    load_gate_up,
    multiply_stage,
    stage_barriers,
    weights_line,
)
from atlas_kernels.moe_lists import (
    BARRIER_AT,
    IDS_AT,
    ask_rows,
    begin,
    entries_at,
    given_choices,
    list_experts,
    pair_of,
    row_number,
)
from atlas_kernels.moe_plan import GATE_UP_TILES, NO_UNIT, ROUTED_VARIANTS, DecodeTile
from atlas_kernels.moe_route import row_choice, row_weight
from atlas_kernels.ptx_async import (
    barrier_wait,
    launch_dependents,
    map_prefetch,
    wait_prerequisites,
)
from atlas_kernels.ptx_math import from_bf16, opaque, quotient, to_bf16
from atlas_kernels.ptx_memory import (
    dynamic_shared,
    load_l2_f32,
    load_shared_b32,
    store_b16,
    store_device_b32,
    store_f32,
    store_shared_b32,
)
from atlas_kernels.ptx_mma import mma_zero
from atlas_kernels.ptx_warp import (
    block_x,
    lane_id,
    lanes,
    num_blocks_x,
    shuffle_b32,
    sync_warp,
    thread_x,
)
from atlas_kernels.registry import kernel


def _parts(tile: DecodeTile) -> tuple[Any, Any, Any, Any]:
    """What comes before the choices are known, and what comes after.

    - ``start`` (base, …) → a cursor: weights of the shared expert are asked for;
    - ``share_of`` (entries of the list, cursor, …) → which units this thread block takes;
    - ``go_on`` (base, cursor, that share, …) → a cursor: so are others;
    - ``finish`` (base, that cursor, …): everything else.

    A cursor of what is asked for next: this thread block's unit, its expert, its first column, and
    the first element of K.
    """
    warps, chunk, stage_bytes, stages = tile.warps, tile.chunk, tile.stage_bytes, tile.stages
    multiply, (arm, barrier_of), expect = (
        multiply_stage(tile),
        stage_barriers(tile),
        expect_stage(tile),
    )
    entries, x_offset = entries_at(tile), tile.list_bytes

    @device
    def unit_at(index, far, first):
        return i32(block_x() + index * num_blocks_x()) if index < far else i32(first + index)

    @device
    def known_of(known):
        """How many of this thread block's units, its first, are the shared expert's."""
        return quotient(i32(max(known - block_x(), i32(0)) + num_blocks_x() - 1), num_blocks_x())

    @device
    def deal(units, known, far):
        """How many units this thread block takes, and what is added to the numbers of others."""
        block, blocks = block_x(), num_blocks_x()
        begin = quotient(i32((units - known) * block), blocks)
        end = quotient(i32((units - known) * (block + 1)), blocks)
        return i32(far + end - begin), i32(known + begin - far)

    @device
    def place_of(index, far, first, inner):
        """Entry and first column of this thread block's unit ``index``."""
        unit = unit_at(index, far, first)
        entry = quotient(unit, inner >> 3)
        return entry, i32(unit * 8 - entry * inner)

    @device
    def expert_of(base, entry, w_shared, experts):
        """Which the list has, without a look at it where that may not be there yet."""
        expert = i32(experts)
        if entry > 0 or w_shared == 0:
            expert = load_shared_b32(base + entries + entry * 4)
        return expert

    @device
    def ask_next(base, ring, stage, w, w_shared, cursor, count, far, first, experts, dim, inner):
        """Ask for a stage, if there is one; the cursor after it."""
        index, expert, column, at_k = cursor
        if index < count:
            is_shared = expert == experts
            if lane_id() == 0:
                barrier = barrier_of(base, stage)
                expect(barrier)
                load_gate_up(
                    i32(ring + stage * stage_bytes), w_shared if is_shared else w, barrier,
                    0, column, 0, at_k >> 6, i32(0) if is_shared else expert,
                )  # fmt: skip
            at_k = i32(at_k + chunk)
            if at_k >= dim:
                index, at_k = i32(index + warps), i32(0)
                if index < count:
                    entry, column = place_of(index, far, first, inner)
                    expert = expert_of(base, entry, w_shared, experts)
        return index, expert, column, at_k

    @device
    def store_one(act, pair, column, inner, gate, up):
        if pair >= 0:
            value = f32(silu_mul(from_bf16(to_bf16(gate)), from_bf16(to_bf16(up))))
            store_b16(act + (i64(pair) * inner + column) * 2, to_bf16(value))

    @device
    def ring_of(base, m, dim):
        rings = i32(base + x_offset + m * (2 * dim + 16) + 1023) & -1024
        return i32(rings + (thread_x() >> 5) * (stages * stage_bytes))

    @device
    def start(base, w, w_shared, m, experts, dim, inner):
        ring, one = ring_of(base, m, dim), i32(lanes() >> 5)  # as a step: loops are not unrolled
        far = known_of(i32(inner >> 3 if w_shared != 0 else 0))
        warp = i32(thread_x() >> 5)
        index = i32(warp if warp < warps else NO_UNIT)
        asked, column, ahead = i32(0), i32(0), i32(0)
        if warp < warps:
            arm(base)
        if index < far:
            _, column = place_of(index, far, i32(0), inner)
            ahead = i32(min(stages, quotient(i32(dim + chunk - 1), chunk)))
        cursor = (index, i32(experts), i32(column), i32(0))
        while asked < ahead:  # constants: no need to wait
            cursor = ask_next(
                base, ring, asked, w, w_shared, cursor, far, far, i32(0), experts, dim, inner
            )
            asked = i32(asked + one)
        return asked, cursor

    @device
    def share_of(listed, asked, w_shared, inner):
        tiles = i32(inner >> 3)
        known = i32(tiles if w_shared != 0 else 0)
        far = known_of(known)
        count, first = deal(i32(listed * tiles), known, far)
        return count, far, first, place_of(asked[1][0], far, first, inner)

    @device
    def go_on(base, asked, share, w, w_shared, m, experts, dim, inner):
        stage, (index, expert, column, at_k) = asked
        count, far, first, unit = share
        ring, one = ring_of(base, m, dim), i32(lanes() >> 5)
        if at_k == 0 and index < count:
            expert, column = expert_of(base, unit[0], w_shared, experts), unit[1]
        cursor = (index, i32(expert), i32(column), at_k)
        while stage < stages:
            cursor = ask_next(
                base, ring, stage, w, w_shared, cursor, count, far, first, experts, dim, inner
            )
            stage = i32(stage + one)
        return cursor, count, far, first

    @device
    def finish(base, asked, w, w_shared, act, m, slots, experts, dim, inner):
        cursor, count, far, first = asked
        ring, one, lane = ring_of(base, m, dim), i32(lanes() >> 5), lane_id()
        warp, x_at = i32(thread_x() >> 5), i32(base + x_offset)
        barrier_wait(i32(base + BARRIER_AT), 0)
        own = i32(lane & 7)
        index = i32(warp if warp < warps else NO_UNIT)
        rows = i32(x_at + min(own, i32(m - 1)) * (2 * dim + 16) + (lane >> 3) * 16)
        line, stage, parity, turn = weights_line(), i32(0), i32(0), i32(one * chunk)
        while index < count:
            total, at_k = mma_zero(), i32(0)
            while at_k < dim:
                barrier_wait(barrier_of(base, stage), parity)
                steps = i32(min(chunk, dim - at_k) >> 6)
                weights = i32(ring + stage * stage_bytes + line)
                total = multiply(total, weights, i32(rows + at_k * 2), steps)
                sync_warp()  # all have read it
                cursor = ask_next(
                    base, ring, stage, w, w_shared, cursor, count, far, first, experts, dim, inner
                )
                at_k, stage = i32(at_k + turn), i32(stage + 1)
                if stage == stages:
                    stage, parity = i32(0), i32(parity ^ 1)
            entry, column = place_of(index, far, first, inner)
            expert = load_shared_b32(base + entries + entry * 4)
            pair = pair_of(base, own, expert, m, slots)
            # A lane holds gate and up of column lane / 4, of rows 2 (lane % 4) and the next.
            row, column = i32((lane & 3) * 2), i32(column + (lane >> 2))
            upper, lower = shuffle_b32(pair, row), shuffle_b32(pair, i32(row + 1))
            store_one(act, upper, column, inner, total[0], total[2])
            store_one(act, lower, column, inner, total[1], total[3])
            index = i32(index + warps)

    return start, share_of, go_on, finish


@kernel(
    "moe_gate_up",
    args="ptr ptr ptr ptr ptr i32 i32 i32 i32 i32 i64",
    threads=lambda tile: tile.threads,
    shared=lambda tile: tile.shared_bytes,
    min_blocks=lambda tile: tile.places,
    arch="sm_90",
    variants={f"bf16_{name}": (tile,) for name, tile in GATE_UP_TILES.items()},
)
def make_moe_gate_up(tile: DecodeTile) -> Any:
    """act[pair] = silu(gate) · up of x[row] by the pair's expert; grid (SMs · blocks an SM).

    Arguments: tensor maps (``gate_up_view``, ``tile.gate_up_box``) of the experts' [E, 2F, D] and
    of the shared expert's [1, 2F, D] (or 0), gate rows first; x [m, D]; ids int32 [m, slots]; act
    [m · slots, F]; m, slots, E, D, F; the stride of x in bytes. All bf16 and contiguous but x. A
    pair without a choice is not written.
    """
    (start, share_of, go_on, finish), list_them = _parts(tile), list_experts(tile)
    x_offset = tile.list_bytes

    def moe_gate_up(w, w_shared, x, ids, act, m, slots, experts, dim, inner, x_stride):
        base = dynamic_shared()
        begin(base)
        if thread_x() == 0:
            map_prefetch(w)
        cursor = start(base, w, w_shared, m, experts, dim, inner)
        wait_prerequisites()
        launch_dependents()
        if thread_x() < 32:
            ask_rows(base, i32(base + x_offset), x, x_stride, m, i32(2 * dim))
        expert = given_choices(base, ids, m, slots)
        listed = list_them(base, expert, m, slots, i32(experts if w_shared != 0 else -1))
        share = share_of(listed, cursor, w_shared, inner)
        asked = go_on(base, cursor, share, w, w_shared, m, experts, dim, inner)
        finish(base, asked, w, w_shared, act, m, slots, experts, dim, inner)

    return moe_gate_up


@kernel(
    "moe_gate_up",
    args=(
        "ptr ptr ptr ptr ptr ptr ptr ptr ptr ptr"
        " i32 i32 i32 i32 i32 i32 i32 i32 i32 f32 f32 i64 i64"
    ),
    threads=lambda tile, _: tile.threads,
    shared=lambda tile, _: tile.shared_bytes,
    min_blocks=lambda tile, _: tile.places,
    arch="sm_90",
    variants={
        f"bf16_{name}_{experts}": (tile, count)
        for name, tile in GATE_UP_TILES.items()
        for experts, count in ROUTED_VARIANTS.items()
    },
)
def make_routed_gate_up(tile: DecodeTile, count: int) -> Any:
    """``moe_gate_up`` that makes the choices of the rows' scores; the first block writes them.

    ``scores`` [m, columns], their stride, and what decides on choices and weights are those of
    ``moe_router``; bias and ``active`` are read before the wait, and of ``constants`` 4 E bytes.
    """
    (start, share_of, go_on, finish), list_them = _parts(tile), list_experts(tile)
    x_offset = tile.list_bytes
    choose, weigh = row_choice(count, load_l2_f32), row_weight(load_l2_f32)
    last_warp, one_row = tile.threads // 32 - 1, tile.rows == 1

    def moe_gate_up(
        w, w_shared, constants, x, scores, bias, active, ids, weights, act, m, slots, experts, dim,
        inner, columns, top_k, use_sigmoid, normalize, epsilon, scaling, x_stride, scores_stride,
    ):  # fmt: skip
        base, lane, row = dynamic_shared(), lane_id(), i32(thread_x() >> 5)  # a warp's row
        begin(base)
        if thread_x() == 0:
            map_prefetch(w)
        cursor = start(base, w, w_shared, m, experts, dim, inner)
        number, place = row_number(active, m), i32(base + IDS_AT + row * slots * 4)
        its_scores, last = i64(scores + row * scores_stride), i64(0)
        if columns > experts:
            last = i64(its_scores + experts * 4)
        share, turn = share_of(i32(slots), cursor, w_shared, inner), opaque(i32(1))
        chosen = (i32(-1), i32(0), f32(0), f32(0), f32(0))
        while turn >= 0:  # first on constants, and with a single choice
            read, behind, choices = i64(constants), i64(0), i32(1)
            if turn == 0:
                wait_prerequisites()
                launch_dependents()
                if row == last_warp:
                    ask_rows(base, i32(base + x_offset), x, x_stride, m, i32(2 * dim))
                read, behind, choices = its_scores, last, i32(top_k)
            chosen = choose(place, number, read, behind, bias, experts, choices, slots, use_sigmoid)
            if row < m and lane < slots:
                store_shared_b32(i32(place + lane * 4), chosen[0])
            shared_id = i32(experts if w_shared != 0 else -1)
            listed = list_them(base, chosen[0], m, slots, shared_id)
            if not one_row:  # of which each choice is listed
                share = share_of(listed, cursor, w_shared, inner)
            turn = i32(turn - 1)
        asked = go_on(base, cursor, share, w, w_shared, m, experts, dim, inner)
        if block_x() == 0:
            at, is_mine = i64(row * slots + lane) * 4, row < m and lane < slots
            if is_mine:
                store_device_b32(ids + at, chosen[0])
            weight = weigh(
                chosen, number, its_scores, last, bias, experts, top_k, slots,
                use_sigmoid, normalize, epsilon, scaling,
            )  # fmt: skip
            if is_mine:
                store_f32(weights + at, weight)
        finish(base, asked, w, w_shared, act, m, slots, experts, dim, inner)

    return moe_gate_up
