"""Mixture of experts for up to 8 rows: every chosen expert's weights are read once.

Two kernels. ``moe_gate_up`` gives silu(gate) · up of every pair, ``moe_down`` the experts' outputs
and their weighted sum. A warp is a stream of its own: it takes 8 rows of an expert's weights at a
time, a *unit*, from global memory straight into registers, and multiplies all rows of activations
by them; rows that did not choose the expert are dropped. Weights of the shared expert are asked for
before the wait for the previous kernel, and those of ``moe_down`` while ``moe_gate_up`` still runs;
what of a warp's first unit finds no room in registers is brought into the second-level cache.
No gather, no scatter, no atomics; the order is that of ``moe_plan``.

``moe_gate_up`` lets the next kernel start only after its own wait: that one reads ids and weights,
which a kernel before this one wrote, before its wait.
"""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import device, f32, i32, i64
from atlas_kernels.activation import silu_mul
from atlas_kernels.moe_lists import IDS_AT, LIST_BYTES, lists
from atlas_kernels.moe_plan import (
    COLUMNS,
    DOWN_TILES,
    GATE_UP_TILES,
    MAX_PAIRS,
    MAX_ROWS,
    STAGED_GAP,
    DecodeTile,
)
from atlas_kernels.moe_product import (
    GROUP_BYTES,
    ask_groups,
    bring_groups,
    load_rows,
    multiply_groups,
    row_place,
    stage_rows,
)
from atlas_kernels.ptx_async import copy_wait, launch_dependents, wait_prerequisites
from atlas_kernels.ptx_math import fma, from_bf16, pack_bf16, quotient, to_bf16, unpack_bf16
from atlas_kernels.ptx_memory import (
    dynamic_shared,
    load_b32,
    load_f32,
    load_shared_b32,
    load_shared_f32,
    shared_buffer,
    store_b16,
    store_b32,
    store_shared_b32,
    store_shared_f32,
)
from atlas_kernels.ptx_mma import mma_zero
from atlas_kernels.ptx_warp import block_x, lane_id, lanes, num_blocks_x, sync_threads, thread_x
from atlas_kernels.registry import kernel

arrived = copy_wait(0)
_Y_BYTES = 2 * COLUMNS
_WEIGHTS_AT = LIST_BYTES
_RESIDUALS_AT = _WEIGHTS_AT + 4 * MAX_PAIRS
_OUTPUTS_AT = _RESIDUALS_AT + _Y_BYTES * MAX_ROWS
_lists = shared_buffer("atlas_moe_lists", LIST_BYTES)
_memory = shared_buffer("atlas_moe", _OUTPUTS_AT + _Y_BYTES * MAX_PAIRS)
"""Of ``moe_gate_up``, and of ``moe_down``."""


def _multiply_unit(tile: DecodeTile) -> Any:
    """(ring, activations, address of weights, groups of a unit, the next unit's address or 0).

    Gives the sums of a unit and the ring with the start of the next one.
    """
    depth, batch, staged, ahead = tile.depth, tile.depth * GROUP_BYTES, tile.is_staged, tile.ahead
    load, multiply = load_rows(ahead, staged=staged), multiply_groups(depth, ahead, staged=staged)
    address = i32 if staged else i64

    @device
    def multiply_unit(ring, rows, source, groups, following):
        left = groups
        total, held = mma_zero(), load(rows, groups)
        while left > 0:
            source = source + batch
            count = i32(left - depth)
            if count <= 0:
                source, count = following, i32(groups if following != 0 else 0)
            total, ring, held = multiply(total, ring, held, rows, left, source, count)
            rows, left = address(rows + batch), i32(left - depth)
        return total, ring

    return multiply_unit


def _activations(tile: DecodeTile) -> tuple[Any, Any]:
    """Two device functions, for all threads together.

    - (source, stride, rows, bytes of a row): ask for activations, if the tile is staged;
    - (source, stride, bytes of a row) → (where row 0 begins, bytes from row to row), once they
      are there.
    """
    if tile.is_staged:

        @device
        def ask_rows(source, stride, rows, row_bytes):
            stage_rows(dynamic_shared(), source, stride, rows, row_bytes)

        @device
        def staged(source, stride, row_bytes):
            arrived()
            sync_threads()
            return dynamic_shared(), i32(row_bytes + STAGED_GAP)

        return ask_rows, staged
    return (
        device(lambda source, stride, rows, row_bytes: None),
        device(lambda source, stride, row_bytes: (source, i64(stride))),
    )


@kernel(
    "moe_gate_up",
    args="ptr ptr ptr ptr ptr i32 i32 i32 i32 i32 i64",
    threads=lambda tile: tile.threads,
    shared=lambda tile: tile.shared_bytes,
    min_blocks=lambda tile: tile.blocks_per_sm,
    arch="sm_90",
    variants={f"bf16_{name}": (tile,) for name, tile in GATE_UP_TILES.items()},
)
def make_moe_gate_up(tile: DecodeTile) -> Any:
    """act[pair] = silu(gate) · up of x[row] by the pair's expert; grid (SMs · blocks an SM).

    Arguments: the experts' [E, 2F, D] and the shared expert's [2F, D] (or 0), gate rows first; x
    [m, D]; ids int32 [m, slots]; act [m · slots, F]; m, slots, E, D, F; the stride of x in bytes.
    All bf16 and contiguous but x. What is written for a pair without a choice is of no use.
    """
    warps, depth = tile.warps, tile.depth
    list_them, key_of, expert_of, pair_of = lists(tile)
    ask, bring, multiply_unit = ask_groups(depth), bring_groups(depth), _multiply_unit(tile)
    ask_rows, activations = _activations(tile)
    address = i32 if tile.is_staged else i64

    @device
    def weights_at(start, column, dim, inner):
        """Where this lane's part of a unit begins: even rows of it are gate's, odd ones up's."""
        lane = lane_id()
        row = i32(column + (lane >> 3) + (inner if lane & 4 != 0 else 0))
        return start + i64(row) * dim * 2 + i64((lane & 3) * 16)

    @device
    def split(unit, inner):
        """Entry and first column of a unit."""
        entry = quotient(unit, inner >> 2)
        return entry, i32(unit * 4 - entry * inner)

    @device
    def unit_at(base, w, w_shared, ids, unit, slots, experts, dim, inner):
        """Where this lane's part of a unit begins."""
        entry, column = split(unit, inner)
        shared_id, start = experts if w_shared != 0 else i32(-1), w_shared
        expert = expert_of(ids, key_of(base, entry, slots, shared_id), slots, shared_id)
        if expert != experts:
            start = w + i64(expert) * (i64(inner) * dim * 4)
        return weights_at(start, column, dim, inner)

    @device
    def activate(total, act, pair, column, inner):
        """A lane holds gate and up of one column."""
        if pair >= 0:
            gate, up = from_bf16(to_bf16(total[0])), from_bf16(to_bf16(total[1]))
            place = act + (i64(pair) * inner + column + (lane_id() & 3)) * 2
            store_b16(place, to_bf16(f32(silu_mul(gate, up))))

    def moe_gate_up(w, w_shared, x, ids, act, m, slots, experts, dim, inner, x_stride):
        base = _lists()
        lane, warp, groups = lane_id(), i32(thread_x() >> 5), i32(dim >> 6)
        unit, stride = i32(warp * num_blocks_x() + block_x()), i32(num_blocks_x() * warps)
        known = i32(inner >> 2 if w_shared != 0 else 0)
        source = weights_at(w_shared, i32(unit * 4), dim, inner)
        count = groups if unit < known else i32(0)
        ring = ask(source, count)  # constants: no need to wait
        bring(source, lane, count)
        wait_prerequisites()
        launch_dependents()
        ask_rows(x, x_stride, m, i32(dim * 2))
        shared_id = experts if w_shared != 0 else i32(-1)
        units = i32(list_them(base, ids, i32(m * slots), slots, shared_id) * (inner >> 2))
        if unit < units:
            source = unit_at(base, w, w_shared, ids, unit, slots, experts, dim, inner)
            if unit >= known:
                ring = ask(source, groups)
        rows, pitch = activations(x, x_stride, i32(dim * 2))
        rows = address(rows + row_place(lane) + min(i32(lane >> 2), i32(m - 1)) * pitch)
        while unit < units:
            following = i64(0)
            if unit + stride < units:
                following = unit_at(
                    base, w, w_shared, ids, i32(unit + stride), slots, experts, dim, inner
                )
            total, ring = multiply_unit(ring, rows, source, groups, following)
            entry, column = split(unit, inner)
            pair = pair_of(base, key_of(base, entry, slots, shared_id), m, slots, lane)
            activate(total, act, pair, column, inner)
            source, unit = following, i32(unit + stride)

    return moe_gate_up


@device
def _store_choices(base, ids, weights, pairs):
    """Into shared memory, for ``_combine``."""
    p = thread_x()
    if p < pairs:
        store_shared_b32(base + IDS_AT + p * 4, load_b32(ids + i64(p) * 4))
        store_shared_f32(base + _WEIGHTS_AT + p * 4, load_f32(weights + i64(p) * 4))


@device
def _residual_word(residual, stride, m):
    """What this thread adds in ``_combine``: −0 twice where there is no residual."""
    row, word = i32(thread_x() >> 2), i32(thread_x() & 3)
    if residual != 0 and row < m:
        return load_b32(residual + row * stride + i64(block_x() * COLUMNS + word * 2) * 2)
    return i32(-0x7FFF8000)


@device
def _combine(base, out, m, slots, out_stride):
    """Add each row's experts, two columns a thread; nothing here waits for global memory.

    It runs once, and is not unrolled.
    """
    row, word = i32(thread_x() >> 2), i32(thread_x() & 3)
    if row < m:
        a = b = f32(0)
        pair = i32(row * slots)
        end, step = i32(pair + slots), i32(lanes() >> 5)
        while pair < end:
            expert = load_shared_b32(base + IDS_AT + pair * 4)
            weight = load_shared_f32(base + _WEIGHTS_AT + pair * 4)
            y0, y1 = unpack_bf16(load_shared_b32(base + _OUTPUTS_AT + pair * _Y_BYTES + word * 4))
            c, d = fma(weight, y0, a), fma(weight, y1, b)
            a, b = (c if expert >= 0 else a), (d if expert >= 0 else b)
            pair = i32(pair + step)
        r0, r1 = unpack_bf16(load_shared_b32(base + _RESIDUALS_AT + thread_x() * 4))
        column = i64(block_x() * COLUMNS + word * 2) * 2
        store_b32(out + row * out_stride + column, pack_bf16(a + r0, b + r1))


@kernel(
    "moe_down",
    args="ptr ptr ptr ptr ptr ptr ptr i32 i32 i32 i32 i32 i64 i64",
    threads=lambda tile: tile.threads,
    shared=lambda tile: tile.shared_bytes,
    min_blocks=lambda tile: tile.blocks_per_sm,
    arch="sm_90",
    variants={f"bf16_{name}": (tile,) for name, tile in DOWN_TILES.items()},
)
def make_moe_down(tile: DecodeTile) -> Any:
    """out[row] = Σ over slots of weight · (W_down · act[pair]) + residual; grid (D / 8).

    Arguments: the experts' [E, D, F] and the shared expert's [D, F] (or 0); ids int32 and weights
    float32 [m, slots]; act [m · slots, F]; residual (or 0) and out, bf16 [m, D], which may be the
    same; m, slots, E, D, F; strides of residual and out in bytes. The ids and weights are read
    before the wait. A thread block takes 8 columns, a warp one expert of them at a time.
    """
    warps, depth = tile.warps, tile.depth
    list_them, key_of, expert_of, pair_of = lists(tile)
    ask, bring, multiply_unit = ask_groups(depth), bring_groups(depth), _multiply_unit(tile)
    ask_rows, activations = _activations(tile)
    address = i32 if tile.is_staged else i64

    @device
    def unit_at(base, w, w_shared, ids, entry, slots, experts, dim, inner):
        """Where this lane's part of an entry's 8 rows begins."""
        lane = lane_id()
        shared_id, start = experts if w_shared != 0 else i32(-1), w_shared
        expert = expert_of(ids, key_of(base, entry, slots, shared_id), slots, shared_id)
        if expert != experts:
            start = w + i64(expert) * (i64(inner) * dim * 2)
        row = i32(block_x() * COLUMNS + (lane >> 2))
        return start + i64(row) * inner * 2 + i64((lane & 3) * 16)

    def moe_down(
        w, w_shared, ids, weights, act, residual, out, m, slots, experts, dim, inner,
        residual_stride, out_stride,
    ):  # fmt: skip
        launch_dependents()
        base = _memory()
        lane, entry, groups = lane_id(), i32(thread_x() >> 5), i32(inner >> 6)
        pairs, shared_id = i32(m * slots), experts if w_shared != 0 else i32(-1)
        entries = list_them(base, ids, pairs, slots, shared_id)
        source, more = w, i32(0)
        if entry < entries:
            source = unit_at(base, w, w_shared, ids, entry, slots, experts, dim, inner)
            more = groups
        ring = ask(source, more)
        bring(source, lane, more)
        _store_choices(base, ids, weights, pairs)
        wait_prerequisites()
        ask_rows(act, i64(inner * 2), pairs, i32(inner * 2))
        before = _residual_word(residual, residual_stride, m)
        rows, pitch = activations(act, i64(inner * 2), i32(inner * 2))
        rows = rows + row_place(lane)
        if thread_x() < MAX_ROWS * 4:
            store_shared_b32(base + _RESIDUALS_AT + thread_x() * 4, before)
        while entry < entries:
            pair = pair_of(base, key_of(base, entry, slots, shared_id), m, slots, lane)
            own = address(rows + max(pair, i32(0)) * pitch)
            entry = i32(entry + warps)
            following = i64(0)
            if entry < entries:
                following = unit_at(base, w, w_shared, ids, entry, slots, experts, dim, inner)
            total, ring = multiply_unit(ring, own, source, groups, following)
            if pair >= 0:
                at = i32(base + _OUTPUTS_AT + pair * _Y_BYTES + (lane & 3) * 4)
                store_shared_b32(at, pack_bf16(total[0], total[1]))
            source = following
        sync_threads()
        _combine(base, out, m, slots, out_stride)

    return moe_down
