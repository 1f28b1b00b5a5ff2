"""Mixture of experts for up to 8 rows: every chosen expert's weights are read once.

Two kernels. ``moe_gate_up`` gives silu(gate) · up of every pair, ``moe_down`` the experts' outputs
and their weighted sum. A warp is a stream of its own: it takes 8 rows of an expert's weights at a
time, brings their K in chunks into a ring of stages by bulk copies, and multiplies all rows of
activations by them; rows that did not choose the expert are dropped. Weights of the shared expert
are asked for before the wait for the previous kernel, and those of ``moe_down`` while
``moe_gate_up`` still runs. No gather, no scatter, no atomics; the order is that of ``moe_plan``.

``moe_gate_up`` lets the next kernel start only after its own wait: that one reads the ids, which
the kernel before this one wrote, before its wait.
"""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import device, f32, i32, i64
from atlas_kernels.activation import silu_mul
from atlas_kernels.moe_lists import (
    COUNT_AT,
    ENTRIES_AT,
    IDS_AT,
    MAX_STAGES,
    ask_chunk,
    copy_rows,
    list_experts,
    multiply_chunk,
    pair_of,
)
from atlas_kernels.moe_plan import COLUMNS, DECODE_TILES, LIST_BYTES, DecodeTile
from atlas_kernels.ptx_async import (
    barrier_init,
    barrier_init_fence,
    barrier_wait,
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
    store_b32,
    store_shared_b32,
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

_Y_BYTES = 2 * COLUMNS  # of a pair's outputs in shared memory
_copied = copy_wait(0)


def _stages(tile: DecodeTile) -> Any:
    """Stages of a warp's ring when the activations take ``area`` bytes."""
    ring_bytes, limit = tile.warps * tile.stage_bytes, MAX_STAGES

    @device
    def stages(area):
        return i32(min(i32(limit), quotient(i32(tile_bytes - area), ring_bytes)))

    tile_bytes = tile.shared_bytes - LIST_BYTES
    return stages


def _advance(tile: DecodeTile) -> Any:
    """The chunk after (unit, k) in a warp's stream, whose units are ``stride`` apart."""
    chunk = tile.chunk

    @device
    def advance(unit, at_k, length, stride):
        at_k = i32(at_k + chunk)
        if at_k >= length:
            return i32(unit + stride), i32(0)
        return unit, at_k

    return advance


def _begin(tile: DecodeTile) -> Any:
    """Make all barriers, each for one arrival."""
    count = tile.warps * MAX_STAGES

    @device
    def begin(base):
        if thread_x() < count:
            barrier_init(base + thread_x() * 8, 1)
            barrier_init_fence()
        sync_threads()

    return begin


@kernel(
    "moe_gate_up",
    args="ptr ptr ptr ptr ptr i32 i32 i32 i32 i32 i64",
    threads=lambda tile: tile.threads,
    shared=lambda tile: tile.shared_bytes,
    min_blocks=lambda tile: tile.blocks_per_sm,
    arch="sm_90",
    variants={f"bf16_{name}": (tile,) for name, tile in DECODE_TILES.items()},
)
def make_moe_gate_up(tile: DecodeTile) -> Any:
    """act[pair] = silu(gate) · up of x[row] by the pair's expert; grid (SMs).

    Arguments: the experts' [E, 2F, D] and the shared expert's [2F, D] (or 0), gate rows first; x
    [m, D]; ids int32 [m, slots]; act [m · slots, F]; m, slots, E, D, F; the stride of x in bytes.
    All bf16 and contiguous but x. A pair without a choice is not written.
    """
    warps, threads, chunk, stage_bytes = tile.warps, tile.threads, tile.chunk, tile.stage_bytes
    begin, stages_of, advance, pitch = _begin(tile), _stages(tile), _advance(tile), tile.pitch
    ask, multiply = ask_chunk(tile), multiply_chunk(tile)

    @device
    def source_of(base, w, w_shared, unit, at_k, experts, dim, inner):
        """Where this lane's row begins: rows 0 … 3 of a unit are gate's, 4 … 7 up's."""
        tiles = quotient(inner, 4)
        entry, j = quotient(unit, tiles), remainder(unit, tiles)
        row = i64(j * 4 + (lane_id() & 3)) + (i64(inner) if lane_id() & 4 else i64(0))
        expert = experts
        if entry > 0 or w_shared == 0:
            expert = load_shared_b32(base + ENTRIES_AT + entry * 4)
        start = w_shared if expert == experts else w + i64(expert) * (i64(inner) * dim * 4)
        return start + (row * dim + at_k) * 2

    def moe_gate_up(w, w_shared, x, ids, act, m, slots, experts, dim, inner, x_stride):
        base, lane, warp = dynamic_shared(), lane_id(), i32(thread_x() >> 5)
        area, tiles = i32(m * (2 * dim + 16)), quotient(inner, 4)
        x_at = i32(base + LIST_BYTES)
        stages = stages_of(area)
        ring = i32(x_at + area + warp * stages * stage_bytes)
        full = i32(base + warp * (8 * MAX_STAGES))
        begin(base)
        stride = i32(num_blocks_x() * warps)
        unit = i32(warp * num_blocks_x() + block_x())
        # The cursor of what is asked for runs ahead of what is multiplied.
        next_unit, next_k, asked = unit, i32(0), i32(0)
        known = i32(tiles if w_shared != 0 else 0)
        while asked < stages and next_unit < known:  # constants: no need to wait
            source = source_of(base, w, w_shared, next_unit, next_k, experts, dim, inner)
            place, num_bytes = ring + asked * stage_bytes, i32(min(chunk, dim - next_k) * 2)
            ask(place, full + asked * 8, source, num_bytes)
            asked = i32(asked + 1)
            next_unit, next_k = advance(next_unit, next_k, dim, stride)
        wait_prerequisites()
        launch_dependents()
        if warp == 0:
            list_experts(base, ids, i32(m * slots), slots, experts if w_shared != 0 else i32(-1))
        copy_rows(x_at, x, x_stride, m, i32(2 * dim), threads)
        sync_threads()
        units = i32(load_shared_b32(base + COUNT_AT) * tiles)
        while asked < stages and next_unit < units:
            source = source_of(base, w, w_shared, next_unit, next_k, experts, dim, inner)
            place, num_bytes = ring + asked * stage_bytes, i32(min(chunk, dim - next_k) * 2)
            ask(place, full + asked * 8, source, num_bytes)
            asked = i32(asked + 1)
            next_unit, next_k = advance(next_unit, next_k, dim, stride)
        _copied()
        sync_threads()
        own = i32(lane & 7)
        rows = i32(x_at + min(own, i32(m - 1)) * (2 * dim + 16) + (lane >> 3) * 16)
        line = i32(own * pitch + (lane >> 3) * 16)
        stage, parity = i32(0), i32(0)
        while unit < units:
            total = mma_zero()
            for at_k in range(0, dim, chunk):
                place, barrier = i32(ring + stage * stage_bytes), i32(full + stage * 8)
                barrier_wait(barrier, parity)
                steps = quotient(i32(min(chunk, dim - at_k)), 64)
                total = multiply(total, i32(place + line), i32(rows + at_k * 2), steps)
                sync_warp()
                if next_unit < units:
                    source = source_of(base, w, w_shared, next_unit, next_k, experts, dim, inner)
                    ask(place, barrier, source, i32(min(chunk, dim - next_k) * 2))
                    next_unit, next_k = advance(next_unit, next_k, dim, stride)
                stage = i32(stage + 1)
                if stage == stages:
                    stage, parity = i32(0), i32(parity ^ 1)
            # Lanes t = 0, 1 of a row hold gate, t = 2, 3 up of the same columns.
            up0, up1 = shuffle_xor_f32(total[0], 2), shuffle_xor_f32(total[1], 2)
            entry, j = quotient(unit, tiles), remainder(unit, tiles)
            expert = load_shared_b32(base + ENTRIES_AT + entry * 4)
            pair = pair_of(base, i32(lane >> 2), expert, m, slots)
            if pair >= 0 and lane & 2 == 0:
                g0, g1 = unpack_bf16(pack_bf16(total[0], total[1]))
                u0, u1 = unpack_bf16(pack_bf16(up0, up1))
                column = i32(j * 4 + (lane & 1) * 2)
                value = pack_bf16(f32(silu_mul(g0, u0)), f32(silu_mul(g1, u1)))
                store_b32(act + (i64(pair) * inner + column) * 2, value)
            unit = i32(unit + stride)

    return moe_gate_up


@kernel(
    "moe_down",
    args="ptr ptr ptr ptr ptr ptr ptr i32 i32 i32 i32 i32 i64 i64",
    threads=lambda tile: tile.threads,
    shared=lambda tile: tile.shared_bytes,
    min_blocks=lambda tile: tile.blocks_per_sm,
    arch="sm_90",
    variants={f"bf16_{name}": (tile,) for name, tile in DECODE_TILES.items()},
)
def make_moe_down(tile: DecodeTile) -> Any:
    """out[row] = Σ over slots of weight · (W_down · act[pair]) + residual; grid (≤ D / 16).

    Arguments: the experts' [E, D, F] and the shared expert's [D, F] (or 0); ids int32 and weights
    float32 [m, slots]; act [m · slots, F]; residual (or 0) and out, bf16 [m, D], which may be the
    same; m, slots, E, D, F; strides of residual and out in bytes. The ids are read before the wait.
    """
    warps, threads, chunk, stage_bytes = tile.warps, tile.threads, tile.chunk, tile.stage_bytes
    begin, stages_of, advance, pitch = _begin(tile), _stages(tile), _advance(tile), tile.pitch
    ask, multiply = ask_chunk(tile), multiply_chunk(tile)

    @device
    def source_of(base, w, w_shared, unit, at_k, experts, dim, inner, entries):
        """Where this lane's row begins; a group of 16 columns has two units an expert."""
        halves = i32(entries * 2)
        group, rest = quotient(unit, halves), remainder(unit, halves)
        column = i32((block_x() + group * num_blocks_x()) * COLUMNS + (rest & 1) * 8)
        expert = load_shared_b32(base + ENTRIES_AT + (rest >> 1) * 4)
        start = w_shared if expert == experts else w + i64(expert) * (i64(inner) * dim * 2)
        return start + (i64(column + (lane_id() & 7)) * inner + at_k) * 2

    @device
    def combine(base, y_at, weights, residual, out, group, m, slots, residual_stride, out_stride):
        """Add each row's experts, two columns a thread."""
        for e in range(thread_x(), m * (COLUMNS // 2), threads):
            row, word = quotient(i32(e), COLUMNS // 2), remainder(i32(e), COLUMNS // 2)
            a = b = f32(0)
            for s in range(slots):
                pair = i32(row * slots + s)
                if load_shared_b32(base + IDS_AT + pair * 4) >= 0:
                    y0, y1 = unpack_bf16(load_shared_b32(y_at + pair * _Y_BYTES + word * 4))
                    weight = load_f32(weights + i64(pair) * 4)
                    a, b = fma(weight, y0, a), fma(weight, y1, b)
            column = i64(group * COLUMNS + word * 2) * 2
            if residual != 0:
                r0, r1 = unpack_bf16(load_b32(residual + row * residual_stride + column))
                a, b = a + r0, b + r1
            store_b32(out + row * out_stride + column, pack_bf16(a, b))

    def moe_down(
        w, w_shared, ids, weights, act, residual, out, m, slots, experts, dim, inner,
        residual_stride, out_stride,
    ):  # fmt: skip
        launch_dependents()
        base, lane, warp = dynamic_shared(), lane_id(), i32(thread_x() >> 5)
        pairs = i32(m * slots)
        y_at = i32(base + LIST_BYTES)
        act_at = i32(y_at + pairs * _Y_BYTES)
        area = i32(pairs * (2 * inner + 16 + _Y_BYTES))
        stages = stages_of(area)
        ring = i32(y_at + area + warp * stages * stage_bytes)
        full = i32(base + warp * (8 * MAX_STAGES))
        begin(base)
        if warp == 0:
            list_experts(base, ids, pairs, slots, experts if w_shared != 0 else i32(-1))
        sync_threads()
        entries = load_shared_b32(base + COUNT_AT)
        all_groups = quotient(dim, COLUMNS)
        groups = quotient(i32(all_groups - block_x() + num_blocks_x() - 1), num_blocks_x())
        units = i32(groups * entries * 2)
        unit, next_unit, next_k, asked = warp, warp, i32(0), i32(0)
        while asked < stages and next_unit < units:  # constants: no need to wait
            source = source_of(base, w, w_shared, next_unit, next_k, experts, dim, inner, entries)
            place, num_bytes = ring + asked * stage_bytes, i32(min(chunk, inner - next_k) * 2)
            ask(place, full + asked * 8, source, num_bytes)
            asked = i32(asked + 1)
            next_unit, next_k = advance(next_unit, next_k, inner, warps)
        wait_prerequisites()
        copy_rows(act_at, act, i64(inner) * 2, pairs, i32(2 * inner), threads)
        _copied()
        sync_threads()
        own, word = i32(lane & 7), i32(lane & 3)
        line = i32(own * pitch + (lane >> 3) * 16)
        stage, parity = i32(0), i32(0)
        for group in range(groups):
            end = i32((group + 1) * entries * 2)
            while unit < end:
                rest = remainder(unit, i32(entries * 2))
                expert = load_shared_b32(base + ENTRIES_AT + (rest >> 1) * 4)
                pair = pair_of(base, own, expert, m, slots)
                source_row = i32(act_at + max(pair, i32(0)) * (2 * inner + 16) + (lane >> 3) * 16)
                total = mma_zero()
                for at_k in range(0, inner, chunk):
                    place, barrier = i32(ring + stage * stage_bytes), i32(full + stage * 8)
                    barrier_wait(barrier, parity)
                    steps = quotient(i32(min(chunk, inner - at_k)), 64)
                    total = multiply(total, i32(place + line), i32(source_row + at_k * 2), steps)
                    sync_warp()
                    if next_unit < units:
                        source = source_of(
                            base, w, w_shared, next_unit, next_k, experts, dim, inner, entries
                        )
                        ask(place, barrier, source, i32(min(chunk, inner - next_k) * 2))
                        next_unit, next_k = advance(next_unit, next_k, inner, warps)
                    stage = i32(stage + 1)
                    if stage == stages:
                        stage, parity = i32(0), i32(parity ^ 1)
                target = shuffle_b32(pair, i32(lane >> 2))  # lane g < 8 knows the pair of row g
                if target >= 0:
                    at = i32(y_at + target * _Y_BYTES + (rest & 1) * 16 + word * 4)
                    store_shared_b32(at, pack_bf16(total[0], total[1]))
                unit = i32(unit + warps)
            sync_threads()
            columns = i32(block_x() + group * num_blocks_x())
            combine(
                base, y_at, weights, residual, out, columns, m, slots, residual_stride, out_stride
            )
            if group + 1 < groups:
                sync_threads()

    return moe_down
