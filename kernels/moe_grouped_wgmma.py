"""Mixture of experts for many rows on Hopper: sorted pairs by ``wgmma``, weights by TMA.

A tile is up to 160 rows that chose one expert (the N of ``wgmma``: 16, 32, … as many as there are)
by 256 rows of its matrix (four blocks of 64, its M). Two warp groups multiply; each has 64 rows of
both halves of the tile, which are gate and up of the same columns. The other warps bring stages of
64 k: weights by TMA, rows of x by ``cp.async``, since they lie anywhere, and activations, which
lie in the order of the pairs, by TMA again. Thread blocks stay, and take every so many tiles of
``moe_sort``'s table; the next tile's memory is asked for while this one's sums are written. The
order of summation is that of ``moe_plan``.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from atlas_kernels._cuda import device, i32, i64
from atlas_kernels.moe_grouped import gated_pair
from atlas_kernels.moe_grouped_feed import produce_tiles
from atlas_kernels.moe_plan import WGMMA_TILES, WgmmaTile
from atlas_kernels.ptx import instruction
from atlas_kernels.ptx_async import (
    barrier_arrive_if,
    barrier_init,
    barrier_init_fence,
    barrier_wait,
    launch_dependents,
    map_acquire,
    wait_prerequisites,
)
from atlas_kernels.ptx_math import pack_bf16, quotient
from atlas_kernels.ptx_memory import (
    dynamic_shared,
    load_b32,
    load_shared_b32,
    load_shared_b32x4,
    load_shared_f32x4,
    store_b32x4_if,
    store_shared_b32,
)
from atlas_kernels.ptx_warp import (
    lane_id,
    shuffle_b32,
    sync_named,
    sync_threads,
    thread_x,
)
from atlas_kernels.ptx_wgmma import (
    descriptor,
    set_max_registers,
    settle,
    wgmma_stage,
    wgmma_wait0,
    wgmma_wait1,
    wgmma_zero,
)
from atlas_kernels.registry import kernel

ADDRESS = 0x3FFFF
_VARIANTS = {f"bf16_{name}": (tile,) for name, tile in WGMMA_TILES.items()}


@cache
def _store_chunk(n: int, chunk: int, pitch: int) -> Any:
    """(sums, address): those of 16 rows as float32 to shared memory, [row][64 · half + column]."""
    lines = []
    for i in range(16):
        half, group, e = i >> 3, i >> 2 & 1, i & 3
        register = half * (n // 2) + 4 * (2 * chunk + group) + e
        offset = (8 * group + (e & 1)) * pitch + (64 * half + 8 * (e >> 1)) * 4
        lines.append(f"st.shared.f32 [${n} + {offset}], ${register};")
    return instruction("", f"f{n} r", "\n".join(lines))


@device
def _write_gated(buffer, pairs, out, first, token, count, column, width):
    """Eight columns of a row below ``count``: silu · mul, in the order of the pairs."""
    gate, more_gate = load_shared_f32x4(buffer), load_shared_f32x4(buffer + 16)
    up, more_up = load_shared_f32x4(buffer + 256), load_shared_f32x4(buffer + 272)
    a = gated_pair(gate[0], gate[1], up[0], up[1])
    b = gated_pair(gate[2], gate[3], up[2], up[3])
    c = gated_pair(more_gate[0], more_gate[1], more_up[0], more_up[1])
    d = gated_pair(more_gate[2], more_gate[3], more_up[2], more_up[3])
    target = out + (i64(first + token) * width + column) * 2
    is_inside = i32(token < count) & i32(column < width)
    store_b32x4_if(target, (a, b, c, d), is_inside)


@device
def _write_plain(buffer, pairs, out, first, token, count, column, width):
    """Eight columns of both halves of a row below ``count``, at its pair."""
    pair = i64(load_shared_b32(pairs + token * 4))
    for half in range(2):
        v, w = load_shared_f32x4(buffer + half * 256), load_shared_f32x4(buffer + half * 256 + 16)
        low, high = pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3])
        words = (low, high, pack_bf16(w[0], w[1]), pack_bf16(w[2], w[3]))
        at = i32(column + half * 128)
        target = out + (pair * width + at) * 2
        store_b32x4_if(target, words, i32(1) if token < count and at < width else i32(0))


def _store_any(n: int, chunk: int, pitch: int) -> Any:
    """(sums, address, which): ``_store_chunk`` of a chunk from ``chunk`` on."""
    store = _store_chunk(n, chunk, pitch)
    if 16 * (chunk + 1) >= n:
        return device(lambda total, address, which: store(total, address))
    others = _store_any(n, chunk + 1, pitch)

    @device
    def store_any(total, address, which):
        if which == chunk:
            store(total, address)
        else:
            others(total, address, which)

    return store_any


def _write_tile(n: int, pitch: int, *, gated: bool) -> Any:
    """By a warp group: its sums, 16 rows at a time through its buffer."""
    store, write_row = _store_any(n, 0, pitch), _write_gated if gated else _write_plain

    @device
    def write_tile(total, buffer, pairs, out, first, count, column, width, group, thread):
        lane = thread & 31
        corner = i32((lane & 3) * 2 * pitch + ((thread >> 5) * 16 + (lane >> 2)) * 4)
        source, at = (
            i32(buffer + (thread >> 3) * pitch + (thread & 7) * 32),
            i32(column + (thread & 7) * 8),
        )
        for chunk in range(quotient(i32(count + 15), 16)):
            store(total, i32(buffer + corner), chunk)
            sync_named(1 + group, 128)
            write_row(source, pairs, out, first, i32(chunk * 16 + (thread >> 3)), count, at, width)
            sync_named(1 + group, 128)  # the buffer may be written again

    return write_tile


def _multiply_tile(tile: WgmmaTile, n: int, *, gated: bool) -> Any:
    """By a warp group: its sums of a tile of up to ``n`` rows, written; the ring's next place."""
    stages, stage_bytes, barriers_at = tile.stages, tile.stage_bytes, tile.barriers_at
    weights_bytes, pitch = tile.weights_bytes, tile.pitch
    buffers_at, buffer_bytes, rows_at, pairs_bytes = (
        tile.buffers_at, tile.buffer_bytes, tile.rows_at, 4 * tile.rows,
    )  # fmt: skip
    constant = descriptor(1024)
    steps_of = tuple(32 * step for step in range(4))
    multiply = wgmma_stage(n, steps_of, steps_of, blocks=(0, weights_bytes // 2))
    zero, settled = wgmma_zero(2 * n), settle(2 * n)
    write = _write_tile(n, pitch, gated=gated)
    is_long = n > 128

    @device
    def release(barrier, wanted):
        """Give a stage back to the producers."""
        is_first = i32(lane_id() == 0)
        barrier_arrive_if(barrier, is_first & i32(wanted))

    @device
    def multiply_tile(
        base, order, out, first, count, column, width, steps, stage, parity, group, thread
    ):
        pairs = i32(base + rows_at + group * pairs_bytes)
        pair, late_pair = i32(0), i32(0)
        if not gated:  # asked for now, needed when the sums are there
            pair = load_b32(order + i64(first + min(thread, i32(count - 1))) * 4)
            if is_long:
                late_pair = load_b32(order + i64(first + min(thread + 128, i32(count - 1))) * 4)
        total = zero()
        previous = i32(0)
        for i in range(steps):
            full = i32(base + barriers_at + 8 * stage)
            barrier_wait(full, parity)
            at = i32(base + stage * stage_bytes)
            a = i64(constant) | i64(((at + group * 8192) & ADDRESS) >> 4)
            b = i64(constant) | i64(((at + weights_bytes) & ADDRESS) >> 4)
            total = multiply(total, a, b)
            wgmma_wait1()
            release(previous, i > 0)
            previous = i32(full + 8 * stages)
            stage = i32(stage + 1)
            if stage == stages:
                stage, parity = i32(0), i32(parity ^ 1)
        wgmma_wait0()
        total = settled(total)
        release(previous, True)
        if not gated:
            store_shared_b32(pairs + thread * 4, pair)
            if is_long and thread < 32:
                store_shared_b32(pairs + 512 + thread * 4, late_pair)
        buffer = i32(base + buffers_at + group * buffer_bytes)
        own = i32(column + group * 64)
        write(total, buffer, pairs, out, first, count, own, width, group, thread)
        return stage, parity

    return multiply_tile


def _multiply_any(tile: WgmmaTile, sizes: tuple[int, ...], *, gated: bool) -> Any:
    """``_multiply_tile`` with the first of ``sizes`` that has room for the tile's rows."""
    multiply = _multiply_tile(tile, sizes[0], gated=gated)
    if len(sizes) == 1:
        return multiply
    others, room = _multiply_any(tile, sizes[1:], gated=gated), sizes[0]

    @device
    def multiply_any(
        base, order, out, first, count, column, width, steps, stage, parity, group, thread
    ):
        if count <= room:
            stage, parity = multiply(
                base, order, out, first, count, column, width, steps, stage, parity, group, thread
            )
        else:
            stage, parity = others(
                base, order, out, first, count, column, width, steps, stage, parity, group, thread
            )
        return stage, parity

    return multiply_any


def _consume(tile: WgmmaTile, *, gated: bool) -> Any:
    """By a warp group: the tiles that the producers announce, until they announce the end."""
    barriers_at, notes_at = tile.barriers_at, tile.notes_at
    multiply_any = _multiply_any(tile, tile.sizes, gated=gated)

    @device
    def consume(base, order, out, width, steps, group, thread):
        stage, parity = i32(0), i32(0)
        while True:
            barrier_wait(i32(base + barriers_at + 8 * stage), parity)
            note = load_shared_b32x4(i32(base + notes_at + 16 * stage))
            count = shuffle_b32(note[1], 0)
            if count < 0:
                break
            stage, parity = multiply_any(
                base, order, out, note[0], count, note[2], width, steps, stage, parity, group,
                thread,
            )  # fmt: skip

    return consume


def _begin(tile: WgmmaTile, *, gathered: bool) -> Any:
    """Make the barriers."""
    stages, barriers_at = tile.stages, tile.barriers_at
    arrivals, releases = 5 if gathered else 1, 8

    @device
    def begin(base):
        if thread_x() == 0:
            for i in range(stages):
                barrier_init(base + barriers_at + 8 * i, arrivals)
                barrier_init(base + barriers_at + 8 * (stages + i), releases)
            barrier_init_fence()
        sync_threads()

    return begin


@kernel(
    "moe_grouped_wgmma_gate_up",
    args="ptr ptr ptr ptr ptr ptr i32 i32 i32 i32 i32 i64",
    threads=lambda tile: tile.threads,
    shared=lambda tile: tile.shared_bytes,
    arch="sm_90a",
    lto=True,
    variants=_VARIANTS,
)
def make_moe_grouped_wgmma_gate_up(tile: WgmmaTile) -> Any:
    """act[position] = silu(gate) · up of its pair's row; any grid.

    Arguments: tensor maps of the experts' [E · 2F, D] and of the shared expert's [2F, D] (or 0),
    gate rows first, in boxes of [128, 64]; x [T, D]; ``order`` and ``tiles`` of ``moe_sort``; act
    [pairs, F], in the order of ``order``; entries of ``tiles``, E, slots, D, F (multiples of 64);
    the stride of x in bytes.
    """
    begin = _begin(tile, gathered=True)
    produce, consume = produce_tiles(tile, gathered=True), _consume(tile, gated=True)
    fewer, more = set_max_registers(56, more=False), set_max_registers(224, more=True)

    def moe_grouped_wgmma_gate_up(
        w, w_shared, x, order, tiles, act, num_tiles, experts, slots, dim, inner, x_stride
    ):
        launch_dependents()
        wait_prerequisites()
        base, warp = dynamic_shared(), shuffle_b32(thread_x() >> 5, 0)
        begin(base)
        steps = quotient(dim, 64)
        if warp >= 8:
            fewer()
            if thread_x() == 256:
                map_acquire(w)
                if w_shared != 0:
                    map_acquire(w_shared)
            columns = quotient(inner + 127, 128)
            produce(
                base, w, w_shared, x, order, tiles, num_tiles, experts, slots, steps, columns,
                i32(128), i32(2 * inner), inner, x_stride,
            )  # fmt: skip
        else:
            more()
            consume(base, order, act, inner, steps, i32(warp >> 2), i32(thread_x() & 127))

    return moe_grouped_wgmma_gate_up


@kernel(
    "moe_grouped_wgmma_down",
    args="ptr ptr ptr ptr ptr ptr i32 i32 i32 i32",
    threads=lambda tile: tile.threads,
    shared=lambda tile: tile.shared_bytes,
    arch="sm_90a",
    lto=True,
    variants=_VARIANTS,
)
def make_moe_grouped_wgmma_down(tile: WgmmaTile) -> Any:
    """y[pair] = W_down · act[position], bf16 [pairs, D]; any grid.

    Arguments: tensor maps of the experts' [E · D, F] and of the shared expert's [D, F] (or 0) in
    boxes of [128, 64], and of act [pairs, F] in boxes of [32, 64]; ``order`` and ``tiles`` of
    ``moe_sort``; y; entries of ``tiles``, E, D (a multiple of 128), F (of 64).
    """
    begin = _begin(tile, gathered=False)
    produce, consume = produce_tiles(tile, gathered=False), _consume(tile, gated=False)
    fewer, more = set_max_registers(40, more=False), set_max_registers(232, more=True)

    def moe_grouped_wgmma_down(w, w_shared, act, order, tiles, y, num_tiles, experts, dim, inner):
        launch_dependents()
        wait_prerequisites()
        base, warp = dynamic_shared(), shuffle_b32(thread_x() >> 5, 0)
        begin(base)
        steps = quotient(inner, 64)
        if warp >= 8:
            fewer()
            if warp == 8:
                if thread_x() == 256:
                    map_acquire(w)
                    map_acquire(act)
                    if w_shared != 0:
                        map_acquire(w_shared)
                columns = quotient(dim + 255, 256)
                produce(
                    base, w, w_shared, act, order, tiles, num_tiles, experts, i32(1), steps,
                    columns, i32(256), dim, i32(128), i64(0),
                )  # fmt: skip
        else:
            more()
            consume(base, order, y, dim, steps, i32(warp >> 2), i32(thread_x() & 127))

    return moe_grouped_wgmma_down
