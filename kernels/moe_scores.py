"""Norm and router product for up to 8 rows, in one kernel: the scores of experts.

It gives the bits of ``rmsnorm`` and a step GEMM: a row's squares are added in the order of
``rmsnorm``, a score in that of ``gemm_step_plan``. Each thread block normalises the rows for itself
and has 8 experts, whose weights are asked for before the wait. The choice is ``moe_gate_up``'s,
which makes it sooner than it could be handed over, or with it all is ``moe_router``.

A score's products of the tensor core wait for one another along a chain, and nothing else takes
the kernel longer. Where a row has four chains, four warps take them side by side, each on a tensor
core of its own: an SM has four. The rest is kept short, in code as well: an SM finds none of it in
its instruction cache.

Rows lie in shared memory as TMA has them: 8 rows of 64 elements are 1,024 bytes, in which a row's
16-byte units are exchanged by its number, against bank conflicts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from atlas_kernels._cuda import device, f32, i32, i64
from atlas_kernels.gemm_step_plan import CHAINS
from atlas_kernels.moe_plan import NOT_YET
from atlas_kernels.moe_route import each_numbered
from atlas_kernels.moe_router_plan import ROUTER_COLUMNS, SCORES_TILES, RouterTile
from atlas_kernels.ptx_async import (
    copy16,
    copy_commit,
    copy_wait,
    launch_dependents,
    wait_prerequisites,
)
from atlas_kernels.ptx_math import divide, fast_rsqrt, pack_bf16, remainder, unpack_bf16
from atlas_kernels.ptx_memory import (
    dynamic_shared,
    load_b32x4,
    load_shared_f32x2,
    load_shared_f32x4,
    store_b32,
    store_b32x4,
    store_f32,
    store_shared_b32x4,
    store_shared_f32x2,
)
from atlas_kernels.ptx_mma import ldmatrix_x4, mma_bf16, mma_zero
from atlas_kernels.ptx_warp import (
    arrive_named,
    block_x,
    lane_id,
    num_blocks_x,
    shuffle_xor_f32,
    sync_named,
    sync_threads,
    thread_x,
)
from atlas_kernels.registry import kernel
from atlas_kernels.vector import access

THREADS = 256
_WARPS = THREADS // 32
_ROWS = access("bf16")
_INFINITY = np.float32(np.inf)


def _exchange(count: int, distance: int) -> Any:
    """(low, high, lane) → of ``count`` numbers of each the sums with those of lane ^ ``distance``.

    Lanes with the bit ``distance`` keep ``high``, the others ``low``.
    """
    if count == 1:

        @device
        def exchange_one(low, high, lane):
            is_high = lane & distance != 0
            kept = high[0] if is_high else low[0]
            sent = low[0] if is_high else high[0]
            return (kept + shuffle_xor_f32(sent, distance),)

        return exchange_one
    half = count // 2
    part = _exchange(half, distance)

    @device
    def exchange(low, high, lane):
        return part(low[:half], high[:half], lane) + part(low[half:], high[half:], lane)

    return exchange


def _lane_sums(count: int, distance: int = 16) -> Any:
    """(values, lane) → the sum over the lanes of one of ``count`` numbers, as ``warp_sum`` adds.

    With 8 numbers it is that of number ``lane / 4``: each lane is spared what others add for it.
    """
    if count == 1:

        @device
        def lane_sum(values, lane):
            total, step = values[0], i32(distance)
            while step > 0:
                total = total + shuffle_xor_f32(total, step)
                step = i32(step >> 1)
            return total

        return lane_sum
    half = count // 2
    exchange, rest = _exchange(half, distance), _lane_sums(half, distance // 2)

    @device
    def lane_sums(values, lane):
        return rest(exchange(values[:half], values[half:], lane), lane)

    return lane_sums


def _row_sum(vectors: int) -> Any:
    """(sums of vectors, lane) → their sum over the warp's lanes, in every lane.

    Vector i of a lane is what a lane of warp i has in ``rmsnorm``: the warps' sums first, then
    their sum, in the order of ``block_sum``.
    """
    warp_sums, last = _lane_sums(vectors), 32 // vectors

    @device
    def row_sum(values, lane):
        total, step = warp_sums(values, lane), i32(16)
        while step >= last:
            total = total + shuffle_xor_f32(total, step)
            step = i32(step >> 1)
        return total

    return row_sum


@device
def _words(_, vector, row, dim):
    """A vector of 8 elements as it lies in memory, the row's last one for those behind it."""
    return load_b32x4(row + min(vector * 16, i32(2 * dim - 16)))


@device
def _squares(words, vector, _, dim):
    """Their sum, as ``rmsnorm`` adds them."""
    a, b = unpack_bf16(words[0])
    c, d = unpack_bf16(words[1])
    e, f = unpack_bf16(words[2])
    g, h = unpack_bf16(words[3])
    total = _add_squares(f32(0), (a, b, c, d, e, f, g, h))
    return total if vector * 8 < dim else f32(0)


_add_squares = _ROWS.add_squares


@device
def _place(row, at):
    """Where 16 bytes of one of 8 rows lie; ``at`` counts the row's bytes."""
    return i32((at >> 7) * 1024 + row * 128 + ((at ^ (row << 4)) & 112))


def _ask(tile: RouterTile) -> Any:
    """Start copying what is constant: 8 rows of the router, from ``first`` on, and the norm.

    Past the last row it is the last one's: nobody stores what comes of it.
    """
    norm_at = tile.norm_at

    @device
    def ask(base, router, norm, first, columns, dim):
        at, end = i32(thread_x() * 16), i32(2 * dim)
        while at < end:
            for j in range(ROUTER_COLUMNS):
                source = router + i64(min(i32(first + j), i32(columns - 1))) * end
                copy16(i32(base + _place(i32(j), at)), source + at)
            at = i32(at + THREADS * 16)
        at, end = i32(thread_x() * 16), i32(4 * dim)
        while at < end:
            copy16(i32(base + norm_at + at), norm + at)
            at = i32(at + THREADS * 16)

    return ask


def _normalise(tile: RouterTile) -> Any:
    """By a warp: its vectors of a row, normalised, to shared memory, and to ``out`` if not 0."""
    rows_at, norm_at = tile.rows_at, tile.norm_at
    load, scale, mul = _ROWS.load, _ROWS.scale, _ROWS.mul

    @device
    def normalise(base, number, row, factor, first, step, dim, out):
        at, end = i32(first * 512 + lane_id() * 16), i32(2 * dim)
        while at < end:
            a, b, c, d = load_shared_f32x4(i32(base + norm_at + at * 2))
            e, f, g, h = load_shared_f32x4(i32(base + norm_at + at * 2 + 16))
            v = mul(scale(load(row + at), factor), (a, b, c, d, e, f, g, h))
            words = (
                pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]),
                pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]),
            )  # fmt: skip
            store_shared_b32x4(i32(base + rows_at + _place(number, at)), words)
            if out != 0:
                store_b32x4(out + at, words)
            at = i32(at + step * 512)

    return normalise


@device
def _load_64(weights, rows):
    """Fragments of 64 elements of K, 32 in each pair of loads."""
    return (
        (ldmatrix_x4(weights), ldmatrix_x4(rows)),
        (ldmatrix_x4(i32(weights ^ 64)), ldmatrix_x4(i32(rows ^ 64))),
    )


@device
def _multiply_32(total, pair):
    """Two steps of 16; the lower 8 rows of the tensor core's A are zeros."""
    a, b, zero = pair[0], pair[1], i32(0)
    total = mma_bf16(total, (a[0], zero, a[1], zero), (b[0], b[1]))
    return mma_bf16(total, (a[2], zero, a[3], zero), (b[2], b[3]))


def _multiply(tile: RouterTile) -> Any:
    """(first, chain), by a warp → sums over a chain, whose router weights lie at ``first``.

    They are those of expert ``lane / 4`` and rows 2 (lane % 4) and next. Loads run ahead of the
    products, past the end into what lies there.
    """
    rows_at = tile.rows_at

    @device
    def multiply(first, chain):
        lane, total, at, end = lane_id(), mma_zero(), i32(0), i32(16 * chain)
        weights = i32(first + _place(i32(lane & 7), i32((lane >> 3) * 16)))
        rows = i32(weights + rows_at)
        held = _load_64(weights, rows)
        while at < end:
            others = _load_64(i32(weights + at + 1024), i32(rows + at + 1024))
            total = _multiply_32(_multiply_32(total, held[0]), held[1])
            held = _load_64(i32(weights + at + 2048), i32(rows + at + 2048))
            total = _multiply_32(_multiply_32(total, others[0]), others[1])
            at = i32(at + 2048)
        return total[0], total[1]

    return multiply


def _add_chains(tile: RouterTile) -> Any:
    """(base, warp, sums), by the first ``CHAINS`` warps → by the first, what their sums add up to.

    Ascending: ((c0 + c1) + c2) + c3. The others only leave theirs.
    """
    sums_at, threads = tile.sums_at, 32 * CHAINS

    @device
    def add_chains(base, warp, sums):
        low, high = sums
        place = i32(base + sums_at + lane_id() * 8)
        if warp > 0:
            store_shared_f32x2(i32(place + warp * 256), sums)
            arrive_named(1, threads)
        else:
            sync_named(1, threads)
            for i in range(1, CHAINS):
                others = load_shared_f32x2(i32(place + i * 256))
                low, high = low + others[0], high + others[1]
        return low, high

    return add_chains


@device
def _store_scores(sums, scores, stride, first, rows, columns):
    """By the first warp."""
    column, row = i32(first + (lane_id() >> 2)), i32((lane_id() & 3) * 2)
    target = scores + row * stride + i64(column) * 4
    if column < columns and row < rows:
        store_f32(target, sums[0])
    if column < columns and row + 1 < rows:
        store_f32(target + stride, sums[1])


def row_scores_of(tile: RouterTile) -> Any:
    """By a thread block: rows normalised, stored and multiplied by 8 rows of the router.

    The first warp has stored the scores; the others do not wait for it.
    """
    vectors = tile.vectors
    ask, normalise, arrived = _ask(tile), _normalise(tile), copy_wait(0)
    words_of, squares_of = each_numbered(vectors, _words), each_numbered(vectors, _squares)
    row_sum, nothing = _row_sum(vectors), (0,) * vectors
    multiply, add_chains = _multiply(tile), _add_chains(tile)

    @device
    def row_scores(
        base, x, norm, router, normed, scores, m, dim, chain, columns, eps, x_stride,
        normed_stride, scores_stride,
    ):  # fmt: skip
        lane, warp = lane_id(), i32(thread_x() >> 5)
        first, blocks = i32(block_x() * ROUTER_COLUMNS), num_blocks_x()
        ask(base, router, norm, first, columns, dim)
        copy_commit()
        # 1, 2, 4 or 8 rows, of which the last may be the same one, and the warps of each.
        shift = i32(i32(m > 1) + i32(m > 2) + i32(m > 4))
        row = min(i32(warp & ((1 << shift) - 1)), i32(m - 1))
        source = x + row * x_stride
        wait_prerequisites()
        words = words_of(nothing, lane, source, dim)
        arrived()
        sync_threads()  # the norm's weights are there, while the rows are on their way
        total = row_sum(squares_of(words, lane, i32(0), dim), lane)
        mean = divide(total, f32(dim))
        mean = mean if total < _INFINITY else total
        factor = fast_rsqrt(mean + eps)
        out = i64(0)
        if remainder(row, blocks) == block_x():
            out = normed + row * normed_stride
        normalise(base, row, source, factor, warp >> shift, i32(_WARPS >> shift), dim, out)
        sync_threads()
        if warp * chain < dim:
            sums = multiply(i32(base + warp * chain * 16), chain)
            if chain < dim:
                sums = add_chains(base, warp, sums)
            if warp == 0:
                _store_scores(sums, scores, scores_stride, first, m, columns)

    return row_scores


@kernel(
    "moe_scores",
    args="ptr ptr ptr ptr ptr ptr i32 i32 i32 i32 i32 f32 i64 i64 i64",
    threads=THREADS,
    shared=lambda tile: tile.shared_bytes,
    variants={name: (tile,) for name, tile in SCORES_TILES.items()},
)
def make_moe_scores(tile: RouterTile) -> Any:
    """``moe_router`` without the choice, which ``moe_gate_up`` then makes; its grid and arguments.

    Its ids, int32 [m, slots], ``pairs`` of them, are set to ``NOT_YET``.
    """
    row_scores = row_scores_of(tile)

    def moe_scores(
        x, norm, router, normed, scores, ids, m, pairs, dim, chain, columns, eps, x_stride,
        normed_stride, scores_stride,
    ):  # fmt: skip
        launch_dependents()
        row_scores(
            dynamic_shared(), x, norm, router, normed, scores, m, dim, chain, columns, eps,
            x_stride, normed_stride, scores_stride,
        )  # fmt: skip
        if block_x() == 0 and thread_x() < pairs:
            store_b32(ids + thread_x() * 4, NOT_YET)

    return moe_scores
