"""What follows ``moe_gate_up``: the experts' outputs and their weighted sum, for up to 8 rows.

Streams, units and order are as there; all weights that fit are asked for while that kernel still
runs. It lets this one start only after its own wait, so ids may be read before this one's wait: a
kernel before it wrote them, or left word that it writes them itself, with all else to do.

Thread blocks come when an SM's of that kernel have left. At one row, each warp has the choices in
its lanes and needs no list: it asks for its first weights as soon as they are there.
"""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import device, f32, i32, i64
from atlas_kernels.moe_decode_stage import (
    expect_stage,
    load_down,
    multiply_stage,
    stage_barriers,
    weights_line,
)
from atlas_kernels.moe_lists import (
    BARRIER_AT,
    IDS_AT,
    ask_rows,
    awaited_choice,
    begin,
    entries_at,
    list_experts,
    pair_of,
    weights_at,
)
from atlas_kernels.moe_plan import DOWN_TILES, UNIT, DownTile
from atlas_kernels.ptx_async import (
    barrier_wait,
    launch_dependents,
    map_prefetch,
    wait_prerequisites,
)
from atlas_kernels.ptx_math import fma, pack_bf16, unpack_bf16
from atlas_kernels.ptx_memory import (
    dynamic_shared,
    load_b32,
    load_device_b32,
    load_f32,
    load_shared_b32,
    load_shared_f32,
    store_b32,
    store_shared_b32,
    store_shared_f32,
)
from atlas_kernels.ptx_mma import mma_zero
from atlas_kernels.ptx_warp import (
    block_x,
    lane_id,
    lanes,
    num_blocks_x,
    shuffle_b32,
    shuffle_xor_b32,
    sync_threads,
    sync_warp,
    thread_x,
)
from atlas_kernels.registry import kernel

_Y_BYTES = 2 * UNIT  # of a pair's outputs in shared memory
_WORDS = UNIT // 2
_WORD_SHIFT = _WORDS.bit_length() - 1


def _choices(tile: DownTile) -> tuple[Any, Any]:
    """Two device functions, of an entry of the list of experts to read:

    - (base, own, entry, experts, shared expert's weights) → its expert;
    - (base, row, entry, m, slots, shared expert's weights) → a row's pair with it, or −1.

    ``own`` are a single row's choices, in the lanes of each warp, which then needs no list.
    """
    entries = entries_at(tile)

    @device
    def listed_expert(base, own, entry, experts, w_shared):
        return load_shared_b32(base + entries + entry * 4)

    @device
    def listed_pair(base, row, entry, m, slots, w_shared):
        return pair_of(base, row, load_shared_b32(base + entries + entry * 4), m, slots)

    @device
    def own_expert(base, own, entry, experts, w_shared):
        slot = i32(entry - 1 if w_shared != 0 else entry)
        expert = max(shuffle_b32(own, slot), i32(0))  # of −1 the result is dropped
        return i32(experts if slot < 0 else expert)

    @device
    def own_pair(base, row, entry, m, slots, w_shared):
        slot = i32(entry - 1 if w_shared != 0 else entry)
        slot = i32(slots - 1 if slot < 0 else slot)
        return i32(slot if row == 0 else -1)

    return (own_expert, own_pair) if tile.rows == 1 else (listed_expert, listed_pair)


def _parts(tile: DownTile) -> tuple[Any, Any, Any]:
    """What comes before the wait, once experts are listed, and what comes after.

    - ``arm`` (base): make a warp's barriers;
    - ``start`` (base, own, entries of the list, …) → a cursor: weights of experts are asked for;
    - ``finish`` (base, the same, cursor, …): everything else.
    """
    warps, chunk, stage_bytes, stages = tile.warps, tile.chunk, tile.stage_bytes, tile.stages
    ahead, multiply, (arm, barrier_of), expect = (
        tile.ahead,
        multiply_stage(tile),
        stage_barriers(tile),
        expect_stage(tile),
    )
    weights_offset, y_offset = weights_at(tile), tile.list_bytes
    expert_at, pair_at = _choices(tile)

    @device
    def unit_at(column, entry, count, dim):
        """An entry beyond the list is one of this thread block's next columns."""
        while entry >= count and column < dim:
            column, entry = i32(column + num_blocks_x() * UNIT), i32(entry - count)
        return column, entry

    @device
    def ask_next(base, own, ring, stage, w, w_shared, cursor, count, experts, dim, inner):
        """Ask for a stage, if there is one; the cursor after it."""
        column, entry, expert, at_k = cursor
        if column < dim:
            is_shared = expert == experts
            if lane_id() == 0:
                barrier = barrier_of(base, stage)
                expect(barrier)
                row = i32(column if is_shared else column + expert * dim)
                place = i32(ring + stage * stage_bytes)
                load_down(place, w_shared if is_shared else w, barrier, 0, row, at_k >> 6)
            at_k = i32(at_k + chunk)
            if at_k >= inner:
                column, entry = unit_at(column, i32(entry + warps), count, dim)
                at_k = i32(0)
                if column < dim:
                    expert = expert_at(base, own, entry, experts, w_shared)
        return column, entry, expert, at_k

    @device
    def combine(base, y_at, before, out, column, m, slots, out_stride):
        """Add each row's experts, two columns a thread; nothing here waits for global memory."""
        row, word = i32(thread_x() >> _WORD_SHIFT), i32(thread_x() & (_WORDS - 1))
        if row < m:
            a = b = f32(0)
            for s in range(slots):
                pair = i32(row * slots + s)
                expert = load_shared_b32(base + IDS_AT + pair * 4)
                weight = load_shared_f32(base + weights_offset + pair * 4)
                y0, y1 = unpack_bf16(load_shared_b32(y_at + pair * _Y_BYTES + word * 4))
                c, d = fma(weight, y0, a), fma(weight, y1, b)
                a, b = (c if expert >= 0 else a), (d if expert >= 0 else b)
            r0, r1 = unpack_bf16(before)
            at = out + row * out_stride + i64(column + word * 2) * 2
            store_b32(at, pack_bf16(a + r0, b + r1))

    @device
    def residual_word(residual, stride, column, m):
        """What this thread adds in ``combine``: −0 twice where there is no residual."""
        row, word = i32(thread_x() >> _WORD_SHIFT), i32(thread_x() & (_WORDS - 1))
        if residual != 0 and row < m:
            return load_b32(residual + row * stride + i64(column + word * 2) * 2)
        return i32(-0x7FFF8000)

    @device
    def store_outputs(y_at, pair, upper, lower):
        """Columns g (lane / 4) and g + 8 of a pair: even lanes of g store two columns at a time."""
        lane = lane_id()
        is_even = lane & 4 == 0
        mine = pack_bf16(upper, lower)
        other = shuffle_xor_b32(mine, i32(4))
        low, high = (mine, other) if is_even else (other, mine)
        word = i32(low & 0xFFFF | high << 16)
        if not is_even:
            word = i32((low >> 16) & 0xFFFF | high & -0x10000)
        if pair >= 0:
            at = i32(y_at + pair * _Y_BYTES + (lane >> 3) * 4)
            store_shared_b32(at if is_even else i32(at + 16), word)

    @device
    def places_of(base, pairs, inner):
        """Where outputs lie, activations, and this warp's ring."""
        y_at = i32(base + y_offset)
        act_at = i32(y_at + pairs * _Y_BYTES)
        rings = i32(act_at + pairs * (2 * inner + 16) + 1023) & -1024
        return y_at, act_at, i32(rings + (thread_x() >> 5) * (stages * stage_bytes))

    @device
    def ask_stages(
        base, own, places, first, last, w, w_shared, cursor, count, experts, dim, inner
    ):  # fmt: skip
        """Ask for stages ``first`` to ``last - 1`` of the ring."""
        stage, one = first, i32(lanes() >> 5)  # as a step: the loop is not unrolled
        while stage < last:
            cursor = ask_next(
                base, own, places[2], stage, w, w_shared, cursor, count, experts, dim, inner
            )
            stage = i32(stage + one)
        return cursor

    @device
    def start(base, own, count, w, w_shared, m, slots, experts, dim, inner):
        first, warp = i32(block_x() * UNIT), i32(thread_x() >> 5)
        expert, places = i32(0), places_of(base, i32(m * slots), inner)
        column, entry = unit_at(first, warp, count, dim)
        if column < dim:
            expert = expert_at(base, own, entry, experts, w_shared)
        cursor = (column, entry, i32(expert), i32(0))
        return ask_stages(  # constants: no need to wait
            base, own, places, i32(0), i32(ahead), w, w_shared, cursor, count, experts, dim, inner
        )

    @device
    def finish(
        base, own, count, cursor, w, w_shared, weights, act, residual, out, m, slots, experts, dim,
        inner, residual_stride, out_stride,
    ):  # fmt: skip
        p, lane, one, pairs = thread_x(), lane_id(), i32(lanes() >> 5), i32(m * slots)
        places = places_of(base, pairs, inner)
        y_at, act_at, ring = places
        wait_prerequisites()
        if p < 32 and count > 0:  # what nobody waits for would come when this block has left
            ask_rows(base, act_at, act, i64(inner) * 2, pairs, i32(2 * inner))
        cursor = ask_stages(
            base, own, places, i32(ahead), i32(stages), w, w_shared, cursor, count, experts, dim,
            inner,
        )  # fmt: skip
        sync_threads()
        weight = load_f32(weights + i64(min(p, i32(pairs - 1))) * 4)
        row, line = i32((lane & 3) * 2), weights_line()
        stage, parity, turn = i32(0), i32(0), i32(one * chunk)
        entry, column = i32(p >> 5), i32(block_x() * UNIT)
        while column < dim:
            before = residual_word(residual, residual_stride, column, m)
            while entry < count:
                pair = pair_at(base, i32(lane & 7), entry, m, slots, w_shared)
                rows = i32(act_at + max(pair, i32(0)) * (2 * inner + 16) + (lane >> 3) * 16)
                barrier_wait(i32(base + BARRIER_AT), 0)  # once it is over, at no cost
                total, at_k = mma_zero(), i32(0)
                while at_k < inner:
                    barrier_wait(barrier_of(base, stage), parity)
                    steps = i32(min(chunk, inner - at_k) >> 6)
                    weights_at_stage = i32(ring + stage * stage_bytes + line)
                    total = multiply(total, weights_at_stage, i32(rows + at_k * 2), steps)
                    sync_warp()  # all have read it
                    cursor = ask_next(
                        base, own, ring, stage, w, w_shared, cursor, count, experts, dim, inner
                    )
                    at_k, stage = i32(at_k + turn), i32(stage + 1)
                    if stage == stages:
                        stage, parity = i32(0), i32(parity ^ 1)
                store_outputs(y_at, shuffle_b32(pair, row), total[0], total[2])
                store_outputs(y_at, shuffle_b32(pair, i32(row + 1)), total[1], total[3])
                entry = i32(entry + warps)
            entry = i32(entry - count)
            if p < pairs:  # they have come by now
                store_shared_f32(base + weights_offset + p * 4, weight)
            sync_threads()
            combine(base, y_at, before, out, column, m, slots, out_stride)
            column = i32(column + num_blocks_x() * UNIT)
            if column < dim:
                sync_threads()

    return arm, start, finish


@kernel(
    "moe_down",
    args="ptr ptr ptr ptr ptr ptr ptr i32 i32 i32 i32 i32 i32 i64 i64",
    threads=lambda tile: tile.threads,
    shared=lambda tile: tile.shared_bytes,
    min_blocks=lambda tile: tile.places,
    arch="sm_90",
    variants={f"bf16_{name}": (tile,) for name, tile in DOWN_TILES.items()},
)
def make_moe_down(tile: DownTile) -> Any:
    """out[row] = Σ over slots of weight · (W_down · act[pair]) + residual; grid (≤ D / 16).

    Arguments: tensor maps (``down_view``, ``tile.down_box``) of the experts' [E · D, F] and of the
    shared expert's [D, F] (or 0); ids int32 and weights
    float32 [m, slots]; act [m · slots, F]; residual (or 0) and out, bf16 [m, D], which may be the
    same; m, slots, E, D, F; whether the kernel before may still be about to write ids; strides of
    residual and out in bytes. Ids are read before the wait: if so, again and again while they are
    ``NOT_YET``. A thread block takes 16 columns at a time, a warp one expert of them.
    """
    (arm, start, finish), list_them, one_row = _parts(tile), list_experts(tile), tile.rows == 1

    def moe_down(
        w, w_shared, ids, weights, act, residual, out, m, slots, experts, dim, inner, is_awaited,
        residual_stride, out_stride,
    ):  # fmt: skip
        launch_dependents()
        base, p, own, count = dynamic_shared(), thread_x(), i32(-1), i32(slots)
        if p == 0:
            map_prefetch(w)
            if w_shared != 0:
                map_prefetch(w_shared)
        arm(base)
        pair = i32(min(lane_id() if one_row else p, i32(m * slots - 1)))
        own = awaited_choice(ids, pair, load_device_b32(ids + i64(pair) * 4), is_awaited)
        if not one_row:
            own = i32(own if p < m * slots else -1)
            if p < m * slots:
                store_shared_b32(base + IDS_AT + p * 4, own)
            count = list_them(base, own, m, slots, i32(experts if w_shared != 0 else -1))
        cursor = start(base, own, count, w, w_shared, m, slots, experts, dim, inner)
        begin(base)
        if one_row and p < slots:
            store_shared_b32(base + IDS_AT + p * 4, own)
        finish(
            base, own, count, cursor, w, w_shared, weights, act, residual, out, m, slots, experts,
            dim, inner, residual_stride, out_stride,
        )  # fmt: skip

    return moe_down
