"""What follows ``moe_gate_up``: the experts' outputs and their weighted sum, for up to 8 rows.

Streams, units and order are as there; all weights that fit are asked for while that kernel still
runs. It lets this one start only after its own wait, so ids may be read before this one's wait: a
kernel before it wrote them, or left word that it writes them itself, with all else to do.
"""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import device, f32, i32, i64
from atlas_kernels.moe_decode_stage import ask_stage, multiply_stage
from atlas_kernels.moe_lists import (
    BARRIER_AT,
    IDS_AT,
    ask_rows,
    awaited_choices,
    begin,
    entries_at,
    list_experts,
    pair_of,
    weights_at,
)
from atlas_kernels.moe_plan import DOWN_TILES, NO_UNIT, UNIT, DecodeTile
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


def _parts(tile: DecodeTile) -> tuple[Any, Any]:
    """What comes before the wait, once experts are listed, and what comes after.

    - ``start`` (base, entries of the list, …) → a cursor: weights of experts are asked for;
    - ``finish`` (base, the same, cursor, …): everything else.
    """
    warps, chunk, stage_bytes, stages = tile.warps, tile.chunk, tile.stage_bytes, tile.stages
    pitch, multiply = tile.pitch, multiply_stage(tile)
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

    @device
    def groups_of(dim):
        """How many groups of 16 columns this thread block takes."""
        all_groups = quotient(dim, UNIT)
        return quotient(i32(all_groups - block_x() + num_blocks_x() - 1), num_blocks_x())

    @device
    def places_of(base, pairs, inner):
        """Where outputs lie, activations, and this warp's ring."""
        y_at = i32(base + y_offset)
        act_at = i32(y_at + pairs * _Y_BYTES)
        rings = i32(act_at + pairs * (2 * inner + 16))
        return y_at, act_at, i32(rings + (thread_x() >> 5) * (stages * stage_bytes))

    @device
    def start(base, count, w, w_shared, m, slots, experts, dim, inner):
        _, _, ring = places_of(base, i32(m * slots), inner)
        units, warp = i32(groups_of(dim) * count), i32(thread_x() >> 5)
        unit = i32(warp if warp < warps else NO_UNIT)
        asked, source, at_k, one = i32(0), i64(0), i32(0), i32(lanes() >> 5)
        if unit < units:
            source = source_of(base, w, w_shared, unit, experts, dim, inner, count)
        while asked < stages:  # constants: no need to wait
            unit, source, at_k = ask_next(
                base, i32(ring + asked * stage_bytes), w, w_shared, unit, source, at_k,
                units, experts, dim, inner, count,
            )  # fmt: skip
            asked = i32(asked + one)
        return unit, source, at_k

    @device
    def finish(
        base, count, cursor, w, w_shared, weights, act, residual, out, m, slots, experts, dim,
        inner, residual_stride, out_stride,
    ):  # fmt: skip
        next_unit, source, next_k = cursor
        p, lane, one, pairs = thread_x(), lane_id(), i32(lanes() >> 5), i32(m * slots)
        y_at, act_at, ring = places_of(base, pairs, inner)
        groups, warp = groups_of(dim), i32(p >> 5)
        units, unit = i32(groups * count), i32(warp if warp < warps else NO_UNIT)
        wait_prerequisites()
        if warp == 0:
            ask_rows(base, act_at, act, i64(inner) * 2, pairs, i32(2 * inner))
        sync_threads()
        weight = load_f32(weights + i64(min(p, i32(pairs - 1))) * 4)
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
            if p < pairs:  # they have come by now
                store_shared_f32(base + weights_offset + p * 4, weight)
            sync_threads()
            combine(base, y_at, before, out, columns, m, slots, out_stride)
            if group + 1 < groups:
                sync_threads()

    return start, finish


@kernel(
    "moe_down",
    args="ptr ptr ptr ptr ptr ptr ptr i32 i32 i32 i32 i32 i32 i64 i64",
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
    same; m, slots, E, D, F; whether the kernel before may still be about to write ids; strides of
    residual and out in bytes. Ids are read before the wait: if so, again and again while they are
    ``NOT_YET``. A thread block takes 16 columns at a time, a warp one expert of them.
    """
    (start, finish), list_them = _parts(tile), list_experts(tile)

    def moe_down(
        w, w_shared, ids, weights, act, residual, out, m, slots, experts, dim, inner, is_awaited,
        residual_stride, out_stride,
    ):  # fmt: skip
        launch_dependents()
        base = dynamic_shared()
        begin(base)
        expert = awaited_choices(base, ids, m, slots, is_awaited)
        count = list_them(base, expert, m, slots, i32(experts if w_shared != 0 else -1))
        cursor = start(base, count, w, w_shared, m, slots, experts, dim, inner)
        finish(
            base, count, cursor, w, w_shared, weights, act, residual, out, m, slots, experts, dim,
            inner, residual_stride, out_stride,
        )  # fmt: skip

    return moe_down
