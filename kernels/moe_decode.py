"""Mixture of experts for up to 8 rows: every chosen expert's weights are read once.

Two kernels. ``moe_gate_up`` gives silu(gate) · up of every pair, ``moe_down`` the experts' outputs
and their weighted sum. A warp is a stream of its own: it takes 16 rows of an expert's weights at a
time, a unit, copies their K in chunks into a ring of stages, and multiplies all rows of activations
by them; rows that did not choose the expert are dropped. Weights of the shared expert are asked for
before the wait for the previous kernel, and all that fit of ``moe_down`` while ``moe_gate_up``
still runs. No gather, no scatter, no atomics; the order is that of ``moe_plan``.

Weights are the tensor core's A, activations its B. A unit of ``moe_gate_up`` is 8 rows of gate and
the same 8 of up; those of a thread block lie next to each other (the shared expert's are dealt out
one by one, the others in ranges). What is asked for next is known by an address, which is worked
out anew with each unit, not each stage.

``moe_gate_up`` lets the next kernel start only after its own wait: that one reads ids and weights,
which a kernel before this one wrote, before its wait.
"""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import device, f32, i32, i64
from atlas_kernels.activation import silu_mul
from atlas_kernels.moe_decode_stage import ask_stage, multiply_stage
from atlas_kernels.moe_lists import (
    BARRIER_AT,
    IDS_AT,
    ask_rows,
    begin,
    entries_at,
    list_experts,
    pair_of,
    weights_at,
)
from atlas_kernels.moe_plan import DOWN_TILES, GATE_UP_TILES, UNIT, DecodeTile
from atlas_kernels.ptx_async import (
    barrier_wait,
    copy_commit,
    copy_wait,
    launch_dependents,
    wait_prerequisites,
)
from atlas_kernels.ptx_math import (
    fma,
    from_bf16,
    pack_bf16,
    quotient,
    remainder,
    to_bf16,
    unpack_bf16,
)
from atlas_kernels.ptx_memory import (
    dynamic_shared,
    load_b32,
    load_f32,
    load_shared_b32,
    load_shared_f32,
    store_b16,
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
_NONE = 1 << 24
"""The first unit of a warp that only helps to list experts."""


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

    Arguments: the experts' [E, 2F, D] and the shared expert's [2F, D] (or 0), gate rows first; x
    [m, D]; ids int32 [m, slots]; act [m · slots, F]; m, slots, E, D, F; the stride of x in bytes.
    All bf16 and contiguous but x. A pair without a choice is not written.
    """
    warps, chunk, stage_bytes, stages = tile.warps, tile.chunk, tile.stage_bytes, tile.stages
    list_them, pitch, multiply = list_experts(tile), tile.pitch, multiply_stage(tile)
    (part_of, ask), arrived = ask_stage(tile), copy_wait(stages - 1)
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
    def place_of(base, index, far, first, inner):
        """Entry and first column of this thread block's unit ``index``."""
        unit = unit_at(index, far, first)
        entry = quotient(unit, inner >> 3)
        return entry, i32(unit * 8 - entry * inner)

    @device
    def source_of(base, w, w_shared, index, far, first, experts, dim, inner):
        """Where this lane's part of a unit begins."""
        entry, column = place_of(base, index, far, first, inner)
        start = w_shared
        if entry > 0 or w_shared == 0:
            expert = load_shared_b32(base + entries + entry * 4)
            start = w + i64(expert) * (i64(inner) * dim * 4)
        return part_of(start + i64(column) * dim * 2, i64(dim) * 2)

    @device
    def ask_next(
        base, place, w, w_shared, index, source, at_k, count, far, first, experts, dim, inner
    ):  # fmt: skip
        """Ask for a stage, if there is one; the cursor after it."""
        if index < count:
            size = i32(min(chunk, dim - at_k) * 2)
            ask(place, source, i64(dim) * 2, i64(inner) * dim * 2, size)
            source, at_k = source + 2 * chunk, i32(at_k + chunk)
            if at_k >= dim:
                index, at_k = i32(index + warps), i32(0)
                if index < count:
                    source = source_of(base, w, w_shared, index, far, first, experts, dim, inner)
        copy_commit()
        return index, source, at_k

    @device
    def store_one(act, pair, column, inner, gate, up):
        if pair >= 0:
            value = f32(silu_mul(from_bf16(to_bf16(gate)), from_bf16(to_bf16(up))))
            store_b16(act + (i64(pair) * inner + column) * 2, to_bf16(value))

    def moe_gate_up(w, w_shared, x, ids, act, m, slots, experts, dim, inner, x_stride):
        base, lane, warp = dynamic_shared(), lane_id(), i32(thread_x() >> 5)
        one = i32(lanes() >> 5)  # as a step: loops are not unrolled
        tiles, x_at = i32(inner >> 3), i32(base + x_offset)
        ring = i32(x_at + m * (2 * dim + 16) + warp * (stages * stage_bytes))
        begin(base)
        known = i32(tiles if w_shared != 0 else 0)
        far = known_of(known)
        # The cursor of what is asked for runs ahead of what is multiplied.
        index = i32(warp if warp < warps else _NONE)
        asked, next_index, source, next_k = i32(0), index, i64(0), i32(0)
        ahead = i32(0)
        if index < far:
            source = source_of(base, w, w_shared, index, far, i32(0), experts, dim, inner)
            ahead = i32(min(stages, quotient(i32(dim + chunk - 1), chunk)))
        while asked < ahead:  # constants: no need to wait
            next_index, source, next_k = ask_next(
                base, i32(ring + asked * stage_bytes), w, w_shared, next_index, source, next_k,
                far, far, i32(0), experts, dim, inner,
            )  # fmt: skip
            asked = i32(asked + one)
        wait_prerequisites()
        launch_dependents()
        if warp == 0:
            ask_rows(base, x_at, x, x_stride, m, i32(2 * dim))
        shared_id = i32(experts if w_shared != 0 else -1)
        units = i32(list_them(base, ids, m, slots, shared_id) * tiles)
        count, first = deal(units, known, far)
        if next_k == 0 and next_index < count:
            source = source_of(base, w, w_shared, next_index, far, first, experts, dim, inner)
        while asked < stages:  # a group for each stage, be it empty
            next_index, source, next_k = ask_next(
                base, i32(ring + asked * stage_bytes), w, w_shared, next_index, source, next_k,
                count, far, first, experts, dim, inner,
            )  # fmt: skip
            asked = i32(asked + one)
        barrier_wait(i32(base + BARRIER_AT), 0)
        own = i32(lane & 7)
        rows = i32(x_at + min(own, i32(m - 1)) * (2 * dim + 16) + (lane >> 3) * 16)
        line = i32((lane & 15) * pitch + (lane >> 4) * 16)
        stage, turn = i32(0), i32(one * chunk)
        while index < count:
            total, at_k = mma_zero(), i32(0)
            while at_k < dim:
                place = i32(ring + stage * stage_bytes)
                arrived()
                sync_warp()
                steps = i32(min(chunk, dim - at_k) >> 6)
                total = multiply(total, i32(place + line), i32(rows + at_k * 2), steps)
                sync_warp()
                next_index, source, next_k = ask_next(
                    base, place, w, w_shared, next_index, source, next_k,
                    count, far, first, experts, dim, inner,
                )  # fmt: skip
                stage, at_k = i32(stage + 1 if stage + 1 < stages else 0), i32(at_k + turn)
            entry, column = place_of(base, index, far, first, inner)
            expert = load_shared_b32(base + entries + entry * 4)
            pair = pair_of(base, own, expert, m, slots)
            # A lane holds gate and up of column lane / 4, of rows 2 (lane % 4) and the next.
            row, column = i32((lane & 3) * 2), i32(column + (lane >> 2))
            one, two = shuffle_b32(pair, row), shuffle_b32(pair, i32(row + 1))
            store_one(act, one, column, inner, total[0], total[2])
            store_one(act, two, column, inner, total[1], total[3])
            index = i32(index + warps)

    return moe_gate_up


@kernel(
    "moe_down",
    args="ptr ptr ptr ptr ptr ptr ptr i32 i32 i32 i32 i32 i64 i64",
    threads=lambda tile: tile.threads,
    shared=lambda tile: tile.shared_bytes,
    min_blocks=lambda tile: tile.places,
    arch="sm_90",
    variants={f"bf16_{name}": (tile,) for name, tile in DOWN_TILES.items()},
)
def make_moe_down(tile: DecodeTile) -> Any:
    """out[row] = Σ over slots of weight · (W_down · act[pair]) + residual; grid (≤ D / 16).

    Arguments: the experts' [E, D, F] and the shared expert's [D, F] (or 0); ids int32 and weights
    float32 [m, slots]; act [m · slots, F]; residual (or 0) and out, bf16 [m, D], which may be the
    same; m, slots, E, D, F; strides of residual and out in bytes. The ids and weights are read
    before the wait. A thread block takes 16 columns at a time, a warp one expert of them.
    """
    warps, chunk, stage_bytes, stages = tile.warps, tile.chunk, tile.stage_bytes, tile.stages
    list_them, pitch, multiply = list_experts(tile), tile.pitch, multiply_stage(tile)
    (part_of, ask), arrived = ask_stage(tile), copy_wait(stages - 1)
    entries, weights_offset, y_offset = entries_at(tile), weights_at(tile), tile.list_bytes

    @device
    def source_of(base, w, w_shared, unit, experts, dim, inner, count):
        """Where this lane's part of a unit begins: 16 rows of an expert."""
        group, entry = quotient(unit, count), remainder(unit, count)
        column = i32((block_x() + group * num_blocks_x()) * UNIT)
        expert = load_shared_b32(base + entries + entry * 4)
        start = w_shared
        if expert != experts:
            start = w + i64(expert) * (i64(inner) * dim * 2)
        return part_of(start + i64(column) * inner * 2, i64(inner) * 2)

    @device
    def ask_next(base, place, w, w_shared, unit, source, at_k, units, experts, dim, inner, count):
        """Ask for a stage, if there is one; the cursor after it."""
        if unit < units:
            size = i32(min(chunk, inner - at_k) * 2)
            ask(place, source, i64(inner) * 2, i64(inner) * 16, size)
            source, at_k = source + 2 * chunk, i32(at_k + chunk)
            if at_k >= inner:
                unit, at_k = i32(unit + warps), i32(0)
                if unit < units:
                    source = source_of(base, w, w_shared, unit, experts, dim, inner, count)
        copy_commit()
        return unit, source, at_k

    @device
    def combine(base, y_at, before, out, group, m, slots, out_stride):
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
            column = i64(group * UNIT + word * 2) * 2
            store_b32(out + row * out_stride + column, pack_bf16(a + r0, b + r1))

    @device
    def residual_word(residual, stride, group, m):
        """What this thread adds in ``combine``: −0 twice where there is no residual."""
        row, word = i32(thread_x() >> _WORD_SHIFT), i32(thread_x() & (_WORDS - 1))
        if residual != 0 and row < m:
            return load_b32(residual + row * stride + i64(group * UNIT + word * 2) * 2)
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

    def moe_down(
        w, w_shared, ids, weights, act, residual, out, m, slots, experts, dim, inner,
        residual_stride, out_stride,
    ):  # fmt: skip
        launch_dependents()
        base, lane, warp = dynamic_shared(), lane_id(), i32(thread_x() >> 5)
        one, asked = i32(lanes() >> 5), i32(0)
        pairs, y_at = i32(m * slots), i32(base + y_offset)
        act_at = i32(y_at + pairs * _Y_BYTES)
        ring = i32(act_at + pairs * (2 * inner + 16) + warp * (stages * stage_bytes))
        begin(base)
        shared_id = i32(experts if w_shared != 0 else -1)
        count = list_them(base, ids, m, slots, shared_id)
        all_groups = quotient(dim, UNIT)
        groups = quotient(i32(all_groups - block_x() + num_blocks_x() - 1), num_blocks_x())
        units = i32(groups * count)
        unit = i32(warp if warp < warps else _NONE)
        next_unit, source, next_k = unit, i64(0), i32(0)
        if unit < units:
            source = source_of(base, w, w_shared, unit, experts, dim, inner, count)
        while asked < stages:  # constants: no need to wait
            next_unit, source, next_k = ask_next(
                base, i32(ring + asked * stage_bytes), w, w_shared, next_unit, source, next_k,
                units, experts, dim, inner, count,
            )  # fmt: skip
            asked = i32(asked + one)
        if thread_x() < pairs:
            weight = load_f32(weights + i64(thread_x()) * 4)
            store_shared_f32(base + weights_offset + thread_x() * 4, weight)
        wait_prerequisites()
        if warp == 0:
            ask_rows(base, act_at, act, i64(inner) * 2, pairs, i32(2 * inner))
        sync_threads()
        before = residual_word(residual, residual_stride, block_x(), m)
        own, row = i32(lane & 7), i32((lane & 3) * 2)
        line = i32((lane & 15) * pitch + (lane >> 4) * 16)
        stage, turn = i32(0), i32(one * chunk)
        for group in range(groups):
            columns = i32(block_x() + group * num_blocks_x())
            if group > 0:
                before = residual_word(residual, residual_stride, columns, m)
            end = i32((group + 1) * count)
            while unit < end:
                expert = load_shared_b32(base + entries + remainder(unit, count) * 4)
                pair = pair_of(base, own, expert, m, slots)
                rows = i32(act_at + max(pair, i32(0)) * (2 * inner + 16) + (lane >> 3) * 16)
                barrier_wait(i32(base + BARRIER_AT), 0)  # once it is over, at no cost
                total, at_k = mma_zero(), i32(0)
                while at_k < inner:
                    place = i32(ring + stage * stage_bytes)
                    arrived()
                    sync_warp()
                    steps = i32(min(chunk, inner - at_k) >> 6)
                    total = multiply(total, i32(place + line), i32(rows + at_k * 2), steps)
                    sync_warp()
                    next_unit, source, next_k = ask_next(
                        base, place, w, w_shared, next_unit, source, next_k,
                        units, experts, dim, inner, count,
                    )  # fmt: skip
                    stage, at_k = i32(stage + 1 if stage + 1 < stages else 0), i32(at_k + turn)
                store_outputs(y_at, shuffle_b32(pair, row), total[0], total[2])
                store_outputs(y_at, shuffle_b32(pair, i32(row + 1)), total[1], total[3])
                unit = i32(unit + warps)
            sync_threads()
            combine(base, y_at, before, out, columns, m, slots, out_stride)
            if group + 1 < groups:
                sync_threads()

    return moe_down
