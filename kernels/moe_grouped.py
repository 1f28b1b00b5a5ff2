"""Mixture of experts for many rows: products over pairs sorted by expert, with ``mma.sync``.

A thread block takes a tile of ``moe_sort``'s table: rows that chose one expert, gathered from x,
against columns of that expert's matrix. Stages of 64 k come by ``cp.async``: lines of 128 bytes
whose halves are swapped in odd lines, so that loads of 16 bytes, four lanes a line, meet no bank
twice. The order of summation is that of ``moe_plan``. Gate and up come in pairs of 8 columns, so
that both lie in one tile.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from atlas_kernels._cuda import device, f32, i32, i64
from atlas_kernels.activation import silu_mul
from atlas_kernels.moe_plan import GROUPED_TILES, GroupedTile
from atlas_kernels.ptx import instruction
from atlas_kernels.ptx_async import (
    copy16,
    copy_commit,
    copy_wait,
    launch_dependents,
    wait_prerequisites,
)
from atlas_kernels.ptx_math import pack_bf16, quotient, remainder, unpack_bf16, vector_zero
from atlas_kernels.ptx_memory import (
    dynamic_shared,
    load_b32,
    load_b32x4,
    load_shared_b64,
    load_shared_f32x4,
    shared_buffer,
    store_b32x2,
    store_shared_b64,
)
from atlas_kernels.ptx_warp import block_x, block_y, lane_id, sync_threads, thread_x
from atlas_kernels.registry import kernel

_VARIANTS = {f"bf16_{name}": (tile,) for name, tile in GROUPED_TILES.items()}
_sources = shared_buffer("atlas_moe_sources", 8 * 128)


@cache
def _load_lines(count: int) -> Any:
    """(address) → 16 bytes of every eighth of 8 · ``count`` lines of 128 bytes."""
    lines = []
    for i in range(count):
        registers = ", ".join(f"${4 * i + j}" for j in range(4))
        lines.append(f"ld.shared.v4.b32 {{{registers}}}, [${4 * count} + {1024 * i}];")
    return instruction(f"r{4 * count}", "r", "\n".join(lines))


@cache
def _multiply(rows: int, columns: int) -> Any:
    """(sums, a, b) → sums + a · b for ``rows`` tiles of 16 by ``columns`` tiles of 8.

    32 elements of K, of ``_load_lines``: two steps in the order of ``moe_plan``.
    """
    count, lines = 4 * rows * columns, []
    for step in (0, 1):
        for i in range(rows):
            low = 2 * count + 8 * i + 2 * step
            a = ", ".join(f"${low + r}" for r in (0, 4, 1, 5))
            for j in range(columns):
                c = ", ".join(f"${4 * (i * columns + j) + r}" for r in range(4))
                b = 2 * count + 8 * rows + 4 * j + 2 * step
                lines.append(
                    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
                    f" {{{c}}}, {{{a}}}, {{${b}, ${b + 1}}}, {{{c}}};"
                )
    words = f"r{8 * rows} r{4 * columns}"
    return instruction(f"+f{count}", words, "\n".join(lines), ordered=False, collective=True)


@cache
def _store_sums(rows: int, columns: int, pitch: int) -> Any:
    """(sums, address): as float32 to shared memory; the address is of the lane's first pair."""
    count, lines = 4 * rows * columns, []
    for i in range(0, count, 2):
        tile, column = i // (4 * columns), i // 4 % columns
        offset = (16 * tile + 8 * (i >> 1 & 1)) * pitch + 32 * column
        lines.append(f"st.shared.v2.f32 [${count} + {offset}], {{${i}, ${i + 1}}};")
    return instruction("", f"f{count} r", "\n".join(lines))


def _product(tile: GroupedTile, *, gated: bool) -> Any:
    """A device function: the tile's sums, left in shared memory as float32."""
    stages, stage_bytes, rows = tile.stages, tile.stage_bytes, tile.rows
    across, ahead = tile.columns // tile.warp_columns, tile.stages - 1
    tall, wide = tile.warp_rows // 16, tile.warp_columns // 8
    warp_rows, warp_columns, weights_at = tile.warp_rows, tile.warp_columns, tile.rows * 128
    lines_each, pitch = tile.threads // 8, tile_pitch(tile)
    weight_lines = tile.columns // lines_each
    lines_apart = lines_each // 2 if gated else lines_each  # rows of W between a thread's lines
    load_a, load_b = _load_lines(2 * tall), _load_lines(wide)
    multiply, store = _multiply(tall, wide), _store_sums(tall, wide, pitch)
    zero, wait, drain = vector_zero(4 * tall * wide), copy_wait(stages - 2), copy_wait(0)

    @device
    def weight_row(column0, num_columns):
        """The row of W of this thread's first line."""
        line = thread_x() >> 3
        if gated:
            return i32(column0 + (line >> 4) * 8 + (line & 7) + (line >> 3 & 1) * num_columns)
        return i32(column0 + line)

    @device
    def copy_stage(at, step, sources, weights, weight_stride):
        line, piece = thread_x() >> 3, thread_x() & 7
        place = i32(line * 128 + (piece ^ (line & 1) * 4) * 16)
        along = i64(step) * 128 + piece * 16
        for i in range(line, rows, lines_each):
            source = load_shared_b64(sources + i * 8)
            copy16(i32(at + i * 128 + (piece ^ (i & 1) * 4) * 16), source + along)
        for i in range(weight_lines):
            target = i32(at + weights_at + place + i * (lines_each * 128))
            copy16(target, weights + i * (lines_apart * weight_stride) + along)
        copy_commit()

    @device
    def product(base, sources, weights, weight_stride, steps):
        lane, warp = lane_id(), i32(thread_x() >> 5)
        first_row = i32(quotient(warp, across) * warp_rows)
        first_column = i32(remainder(warp, across) * warp_columns)
        for i in range(ahead):
            if i < steps:
                copy_stage(i32(base + i * stage_bytes), i, sources, weights, weight_stride)
            else:
                copy_commit()
        a_at = i32((first_row + (lane >> 2)) * 128 + (lane & 3) * 16)
        b_at = i32(weights_at + (first_column + (lane >> 2)) * 128 + (lane & 3) * 16)
        swapped = i32((lane >> 2 & 1) * 64)
        total = zero()
        stage, free = i32(0), i32(ahead)
        for i in range(steps):
            wait()
            sync_threads()  # the stage is there for all, and the one before is done with
            if i + ahead < steps:
                copy_stage(
                    i32(base + free * stage_bytes), i + ahead, sources, weights, weight_stride
                )
            else:
                copy_commit()
            at = i32(base + stage * stage_bytes)
            for half in range(0, 128, 64):
                side = half ^ swapped
                total = multiply(
                    total, load_a(i32(at + a_at + side)), load_b(i32(at + b_at + side))
                )
            free = stage
            stage = i32(stage + 1)
            if stage == stages:
                stage = i32(0)
        drain()
        sync_threads()  # the stages' memory is free
        corner = i32((first_row + (lane >> 2)) * pitch + (first_column + (lane & 3) * 2) * 4)
        store(total, i32(base + corner))
        sync_threads()

    return product, weight_row


def tile_pitch(tile: GroupedTile) -> int:
    """Bytes between rows of the float32 tile."""
    return (tile.columns + 4) * 4


@device
def _gated_pair(g0, g1, u0, u1):
    """silu · mul of two columns, both rounded to bf16 first: as if they had been stored."""
    a, b = unpack_bf16(pack_bf16(g0, g1))
    c, d = unpack_bf16(pack_bf16(u0, u1))
    return pack_bf16(f32(silu_mul(a, c)), f32(silu_mul(b, d)))


@kernel(
    "moe_grouped_gate_up",
    args="ptr ptr ptr ptr ptr ptr i32 i32 i32 i32 i64",
    threads=lambda tile: tile.threads,
    shared=lambda tile: tile.shared_bytes,
    variants=_VARIANTS,
)
def make_moe_grouped_gate_up(tile: GroupedTile) -> Any:
    """act[position] = silu(gate) · up of its pair's row; grid (F / 64, tiles).

    Arguments: the experts' [E, 2F, D] and the shared expert's [2F, D] (or 0), gate rows first; x
    [T, D]; ``order`` and ``tiles`` of ``moe_sort``; act [pairs, F], in the order of ``order``; E,
    slots, D, F (multiples of 64); the stride of x in bytes.
    """
    rows, threads, pitch, columns = tile.rows, tile.threads, tile_pitch(tile), tile.columns // 2
    product, weight_row = _product(tile, gated=True)
    quads = columns // 4

    def moe_grouped_gate_up(
        w, w_shared, x, order, tiles, act, experts, slots, dim, inner, x_stride
    ):
        launch_dependents()
        wait_prerequisites()
        expert, first, count, _ = load_b32x4(tiles + i64(block_y()) * 16)
        if count == 0:
            return
        base, sources = dynamic_shared(), _sources()
        for i in range(thread_x(), rows, threads):
            pair = load_b32(order + i64(first + min(i, count - 1)) * 4)
            store_shared_b64(sources + i * 8, x + i64(quotient(pair, slots)) * x_stride)
        column0 = i32(block_x() * columns)
        start = w_shared if expert == experts else w + i64(expert) * (i64(inner) * dim * 4)
        weights = start + i64(weight_row(column0, inner)) * dim * 2
        sync_threads()
        product(base, sources, weights, i64(dim) * 2, quotient(dim, 64))
        for e in range(thread_x(), count * quads, threads):
            row, at = quotient(i32(e), quads), i32(remainder(i32(e), quads) * 4)
            source = i32(base + row * pitch + ((at >> 3) * 16 + (at & 7)) * 4)
            gate, up = load_shared_f32x4(source), load_shared_f32x4(source + 32)
            left = _gated_pair(gate[0], gate[1], up[0], up[1])
            right = _gated_pair(gate[2], gate[3], up[2], up[3])
            target = act + (i64(first + row) * inner + column0 + at) * 2
            store_b32x2(target, (left, right))

    return moe_grouped_gate_up


@kernel(
    "moe_grouped_down",
    args="ptr ptr ptr ptr ptr ptr i32 i32 i32",
    threads=lambda tile: tile.threads,
    shared=lambda tile: tile.shared_bytes,
    variants=_VARIANTS,
)
def make_moe_grouped_down(tile: GroupedTile) -> Any:
    """y[pair] = W_down · act[position], bf16 [pairs, D]; grid (⌈D / 128⌉, tiles).

    Arguments: the experts' [E, D, F] and the shared expert's [D, F] (or 0); act [pairs, F];
    ``order`` and ``tiles`` of ``moe_sort``; y; E, D (a multiple of 128), F (of 64).
    """
    rows, threads, pitch, columns = tile.rows, tile.threads, tile_pitch(tile), tile.columns
    product, weight_row = _product(tile, gated=False)
    quads = columns // 4

    def moe_grouped_down(w, w_shared, act, order, tiles, y, experts, dim, inner):
        launch_dependents()
        wait_prerequisites()
        expert, first, count, _ = load_b32x4(tiles + i64(block_y()) * 16)
        if count == 0:
            return
        base, sources = dynamic_shared(), _sources()
        for i in range(thread_x(), rows, threads):
            source = act + i64(first + min(i, count - 1)) * inner * 2
            store_shared_b64(sources + i * 8, source)
        column0 = i32(block_x() * columns)
        start = w_shared if expert == experts else w + i64(expert) * (i64(inner) * dim * 2)
        weights = start + i64(weight_row(column0, dim)) * inner * 2
        sync_threads()
        product(base, sources, weights, i64(inner) * 2, quotient(inner, 64))
        for e in range(thread_x(), count * quads, threads):
            row, at = quotient(i32(e), quads), i32(remainder(i32(e), quads) * 4)
            values = load_shared_f32x4(i32(base + row * pitch + at * 4))
            pair = load_b32(order + i64(first + row) * 4)
            words = (pack_bf16(values[0], values[1]), pack_bf16(values[2], values[3]))
            store_b32x2(y + (i64(pair) * dim + column0 + at) * 2, words)

    return moe_grouped_down
