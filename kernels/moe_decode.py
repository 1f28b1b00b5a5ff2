"""Mixture of experts for up to 8 rows: every chosen expert's weights are read once.

Two kernels. ``moe_gate_up`` gives silu(gate) · up of every pair, ``moe_down`` the experts' outputs
and their weighted sum. A warp is a stream of its own: it takes 8 rows of an expert's weights at a
time, copies their K in chunks into a ring of stages, and multiplies all rows of activations by
them; rows that did not choose the expert are dropped. Units of 8 rows are dealt out to the SMs in
turn, so that at one row each warp has about one and all weights are on their way at once. Weights
of the shared expert are asked for before the wait for the previous kernel, and all that fit of
``moe_down`` while ``moe_gate_up`` still runs. No gather, no scatter, no atomics; the order is that
of ``moe_plan``.

``moe_gate_up`` lets the next kernel start only after its own wait: that one reads ids and weights,
which a kernel before this one wrote, before its wait.
"""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import device, f32, i32, i64
from atlas_kernels.activation import silu_mul
from atlas_kernels.moe_lists import (
    BARRIER_AT,
    IDS_AT,
    ask_chunk,
    ask_rows,
    begin,
    entries_at,
    list_experts,
    multiply_chunk,
    pair_of,
    weights_at,
)
from atlas_kernels.moe_plan import DOWN_TILES, GATE_UP_TILES, WIDE, DecodeTile
from atlas_kernels.ptx_async import (
    barrier_wait,
    copy_commit,
    copy_wait,
    launch_dependents,
    wait_prerequisites,
)
from atlas_kernels.ptx_math import fma, pack_bf16, quotient, remainder, unpack_bf16
from atlas_kernels.ptx_memory import (
    dynamic_shared,
    load_b32,
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
    num_blocks_x,
    shuffle_b32,
    shuffle_xor_f32,
    sync_threads,
    sync_warp,
    thread_x,
)
from atlas_kernels.registry import kernel

COLUMNS = 8
_Y_BYTES = 2 * COLUMNS  # of a pair's outputs in shared memory
_WORDS = COLUMNS // 2


def _advance(tile: DecodeTile) -> Any:
    """The chunk after (index of a unit, k) in a warp's stream, whose units are ``stride`` apart."""
    chunk = tile.chunk

    @device
    def advance(unit, at_k, length, stride):
        at_k = i32(at_k + chunk)
        if at_k >= length:
            return i32(unit + stride), i32(0)
        return unit, at_k

    return advance


@kernel(
    "moe_gate_up",
    args="ptr ptr ptr ptr ptr i32 i32 i32 i32 i32 i64",
    threads=lambda tile: tile.threads,
    shared=lambda tile: tile.shared_bytes,
    min_blocks=lambda tile: tile.places,
    arch="sm_90",
    variants={f"bf16_{name}": (t,) for name, t in GATE_UP_TILES.items() if t.unit != WIDE},
)
def make_moe_gate_up(tile: DecodeTile) -> Any:
    """act[pair] = silu(gate) · up of x[row] by the pair's expert; grid (SMs · blocks an SM).

    Arguments: the experts' [E, 2F, D] and the shared expert's [2F, D] (or 0), gate rows first; x
    [m, D]; ids int32 [m, slots]; act [m · slots, F]; m, slots, E, D, F; the stride of x in bytes.
    All bf16 and contiguous but x. A pair without a choice is not written.
    """
    warps, chunk, stage_bytes, stages = tile.warps, tile.chunk, tile.stage_bytes, tile.stages
    advance, list_them, pitch, near = _advance(tile), list_experts(tile), tile.pitch, tile.near
    ask, multiply, arrived = ask_chunk(tile), multiply_chunk(tile), copy_wait(stages - 1)
    entries, x_offset = entries_at(tile), tile.list_bytes

    @device
    def deal(units, known):
        """How many units this thread block takes, how many of them far apart, where others begin.

        The shared expert's, the first ``known``, are dealt out in turn: all blocks have their own.
        """
        block, blocks = block_x(), num_blocks_x()
        if near:
            far = quotient(i32(max(known - block, i32(0)) + blocks - 1), blocks)
            first = quotient(i32((units - known) * block), blocks)
            end = quotient(i32((units - known) * (block + 1)), blocks)
            return i32(far + end - first), far, i32(known + first - far)
        count = quotient(i32(max(units - block, i32(0)) + blocks - 1), blocks)
        return count, count, i32(0)

    @device
    def unit_at(index, far, first):
        """The number of this thread block's unit ``index``."""
        return i32(block_x() + index * num_blocks_x()) if index < far else i32(first + index)

    @device
    def ask_unit(place, base, w, w_shared, unit, at_k, experts, dim, inner):
        """Rows 0 … 3 of a unit are gate's, 4 … 7 up's."""
        tiles = quotient(inner, 4)
        entry, j = quotient(unit, tiles), remainder(unit, tiles)
        start = w_shared
        if entry > 0 or w_shared == 0:
            expert = load_shared_b32(base + entries + entry * 4)
            start = w + i64(expert) * (i64(inner) * dim * 4)
        start = start + (i64(j * 4) * dim + at_k) * 2
        ask(place, start, i64(dim) * 2, i64(inner) * dim * 2, i32(min(chunk, dim - at_k) * 2))

    def moe_gate_up(w, w_shared, x, ids, act, m, slots, experts, dim, inner, x_stride):
        base, lane, warp = dynamic_shared(), lane_id(), i32(thread_x() >> 5)
        tiles, x_at = quotient(inner, 4), i32(base + x_offset)
        ring = i32(x_at + m * (2 * dim + 16) + warp * (stages * stage_bytes))
        begin(base)
        # The cursor of what is asked for runs ahead of what is multiplied.
        index, next_index, next_k, asked = warp, warp, i32(0), i32(0)
        known = i32(tiles if w_shared != 0 else 0)
        unit = i32(block_x() + index * num_blocks_x())
        while asked < stages and unit < known:  # constants: no need to wait
            place = i32(ring + asked * stage_bytes)
            ask_unit(place, base, w, w_shared, unit, next_k, experts, dim, inner)
            copy_commit()
            asked = i32(asked + 1)
            next_index, next_k = advance(next_index, next_k, dim, i32(warps))
            unit = i32(block_x() + next_index * num_blocks_x())
        wait_prerequisites()
        launch_dependents()
        if warp == 0:
            ask_rows(base, x_at, x, x_stride, m, i32(2 * dim))
        shared_id = i32(experts if w_shared != 0 else -1)
        units = i32(list_them(base, ids, m, slots, shared_id) * tiles)
        count, far, first = deal(units, known)
        while asked < stages:  # a group for each stage, be it empty
            if next_index < count:
                place, unit = i32(ring + asked * stage_bytes), unit_at(next_index, far, first)
                ask_unit(place, base, w, w_shared, unit, next_k, experts, dim, inner)
                next_index, next_k = advance(next_index, next_k, dim, i32(warps))
            copy_commit()
            asked = i32(asked + 1)
        barrier_wait(i32(base + BARRIER_AT), 0)
        own = i32(lane & 7)
        rows = i32(x_at + min(own, i32(m - 1)) * (2 * dim + 16) + (lane >> 3) * 16)
        line = i32(own * pitch + (lane >> 3) * 16)
        stage = i32(0)
        while index < count:
            total = mma_zero()
            for at_k in range(0, dim, chunk):
                place = i32(ring + stage * stage_bytes)
                arrived()
                sync_warp()
                steps = quotient(i32(min(chunk, dim - at_k)), 64)
                total = multiply(total, i32(place + line), i32(rows + at_k * 2), steps)
                sync_warp()
                if next_index < count:
                    unit = unit_at(next_index, far, first)
                    ask_unit(place, base, w, w_shared, unit, next_k, experts, dim, inner)
                    next_index, next_k = advance(next_index, next_k, dim, i32(warps))
                copy_commit()
                stage = i32(stage + 1 if stage + 1 < stages else 0)
            # Lanes t = 0, 1 of a row hold gate, t = 2, 3 up of the same columns.
            up0, up1 = shuffle_xor_f32(total[0], 2), shuffle_xor_f32(total[1], 2)
            unit = unit_at(index, far, first)
            entry, j = quotient(unit, tiles), remainder(unit, tiles)
            expert = load_shared_b32(base + entries + entry * 4)
            pair = pair_of(base, i32(lane >> 2), expert, m, slots)
            if pair >= 0 and lane & 2 == 0:
                g0, g1 = unpack_bf16(pack_bf16(total[0], total[1]))
                u0, u1 = unpack_bf16(pack_bf16(up0, up1))
                column = i32(j * 4 + (lane & 1) * 2)
                value = pack_bf16(f32(silu_mul(g0, u0)), f32(silu_mul(g1, u1)))
                store_b32(act + (i64(pair) * inner + column) * 2, value)
            index = i32(index + warps)

    return moe_gate_up


@kernel(
    "moe_down",
    args="ptr ptr ptr ptr ptr ptr ptr i32 i32 i32 i32 i32 i64 i64",
    threads=lambda tile: tile.threads,
    shared=lambda tile: tile.shared_bytes,
    min_blocks=lambda tile: tile.places,
    arch="sm_90",
    variants={f"bf16_{name}": (t,) for name, t in DOWN_TILES.items() if t.unit != WIDE},
)
def make_moe_down(tile: DecodeTile) -> Any:
    """out[row] = Σ over slots of weight · (W_down · act[pair]) + residual; grid (≤ D / 8).

    Arguments: the experts' [E, D, F] and the shared expert's [D, F] (or 0); ids int32 and weights
    float32 [m, slots]; act [m · slots, F]; residual (or 0) and out, bf16 [m, D], which may be the
    same; m, slots, E, D, F; strides of residual and out in bytes. The ids and weights are read
    before the wait. A thread block takes 8 columns at a time, a warp one expert of them.
    """
    warps, chunk, stage_bytes, stages = tile.warps, tile.chunk, tile.stage_bytes, tile.stages
    advance, list_them, pitch = _advance(tile), list_experts(tile), tile.pitch
    ask, multiply, arrived = ask_chunk(tile), multiply_chunk(tile), copy_wait(stages - 1)
    entries, weights_offset, y_offset = entries_at(tile), weights_at(tile), tile.list_bytes

    @device
    def ask_unit(place, base, w, w_shared, unit, at_k, experts, dim, inner, count):
        group, entry = quotient(unit, count), remainder(unit, count)
        column = i32((block_x() + group * num_blocks_x()) * COLUMNS)
        expert = load_shared_b32(base + entries + entry * 4)
        start = w_shared
        if expert != experts:
            start = w + i64(expert) * (i64(inner) * dim * 2)
        start = start + (i64(column) * inner + at_k) * 2
        ask(place, start, i64(inner) * 2, i64(inner) * 8, i32(min(chunk, inner - at_k) * 2))

    @device
    def combine(base, y_at, before, out, group, m, slots, out_stride):
        """Add each row's experts, two columns a thread; nothing here waits for global memory."""
        row, word = i32(thread_x() >> 2), i32(thread_x() & 3)
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
            column = i64(group * COLUMNS + word * 2) * 2
            store_b32(out + row * out_stride + column, pack_bf16(a + r0, b + r1))

    @device
    def residual_word(residual, stride, group, m):
        """What this thread adds in ``combine``: −0 twice where there is no residual."""
        row, word = i32(thread_x() >> 2), i32(thread_x() & 3)
        if residual != 0 and row < m:
            return load_b32(residual + row * stride + i64(group * COLUMNS + word * 2) * 2)
        return i32(-0x7FFF8000)

    def moe_down(
        w, w_shared, ids, weights, act, residual, out, m, slots, experts, dim, inner,
        residual_stride, out_stride,
    ):  # fmt: skip
        launch_dependents()
        base, lane, warp = dynamic_shared(), lane_id(), i32(thread_x() >> 5)
        pairs, y_at = i32(m * slots), i32(base + y_offset)
        act_at = i32(y_at + pairs * _Y_BYTES)
        ring = i32(act_at + pairs * (2 * inner + 16) + warp * (stages * stage_bytes))
        begin(base)
        shared_id = i32(experts if w_shared != 0 else -1)
        count = list_them(base, ids, m, slots, shared_id)
        all_groups = quotient(dim, COLUMNS)
        groups = quotient(i32(all_groups - block_x() + num_blocks_x() - 1), num_blocks_x())
        units = i32(groups * count)
        unit, next_unit, next_k = warp, warp, i32(0)
        for asked in range(stages):  # constants: no need to wait
            if next_unit < units:
                place = i32(ring + asked * stage_bytes)
                ask_unit(place, base, w, w_shared, next_unit, next_k, experts, dim, inner, count)
                next_unit, next_k = advance(next_unit, next_k, inner, i32(warps))
            copy_commit()
        if thread_x() < pairs:
            weight = load_f32(weights + i64(thread_x()) * 4)
            store_shared_f32(base + weights_offset + thread_x() * 4, weight)
        wait_prerequisites()
        if warp == 0:
            ask_rows(base, act_at, act, i64(inner) * 2, pairs, i32(2 * inner))
        sync_threads()
        before = residual_word(residual, residual_stride, block_x(), m)
        own, word = i32(lane & 7), i32(lane & 3)
        line = i32(own * pitch + (lane >> 3) * 16)
        stage = i32(0)
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
                total = mma_zero()
                for at_k in range(0, inner, chunk):
                    place = i32(ring + stage * stage_bytes)
                    arrived()
                    sync_warp()
                    steps = quotient(i32(min(chunk, inner - at_k)), 64)
                    total = multiply(total, i32(place + line), i32(rows + at_k * 2), steps)
                    sync_warp()
                    if next_unit < units:
                        ask_unit(
                            place, base, w, w_shared, next_unit, next_k, experts, dim, inner, count
                        )
                        next_unit, next_k = advance(next_unit, next_k, inner, i32(warps))
                    copy_commit()
                    stage = i32(stage + 1 if stage + 1 < stages else 0)
                target = shuffle_b32(pair, i32(lane >> 2))  # lane g < 8 knows the pair of row g
                if target >= 0:
                    at = i32(y_at + target * _Y_BYTES + word * 4)
                    store_shared_b32(at, pack_bf16(total[0], total[1]))
                unit = i32(unit + warps)
            sync_threads()
            combine(base, y_at, before, out, columns, m, slots, out_stride)
            if group + 1 < groups:
                sync_threads()

    return moe_down
