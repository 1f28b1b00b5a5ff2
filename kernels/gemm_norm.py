"""Step GEMM of sm_90a over rows that it normalises itself: rmsnorm(x) · Wᵀ for few rows.

Every thread block normalises all rows, while the first stages of its weights come: 8 to 40 KB from
the second-level cache, instead of a kernel of 1.4 µs before each product. ``NORM_WARPS`` warps play
the ``ROLE_WARPS`` of ``rmsnorm``, so that each row's sum has its order; the products are those of
``gemm_step``. The bits are those of the two kernels one after the other.

Warp w plays the warps w and w + 8 of ``rmsnorm``, for every row: its lanes have the units (of
eight elements) that the lanes of those have, and of longer rows those 512 units behind. The sums of
a row's warps meet in shared memory and are added as ``block_sum`` adds them, by every warp; its 16
lanes of zeros change nothing. Normalised rows stay in shared memory for all of K, as ``NormTile``
says.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from atlas_kernels._cuda import device, f32, i32, i64
from atlas_kernels.gemm_norm_plan import NORM_TILES, NORM_WARPS, ROLE_WARPS, UNIT, NormTile
from atlas_kernels.gemm_ring import (
    Rows,
    ring_begin,
    ring_consume,
    ring_prefetch,
    ring_produce,
    tile_write,
)
from atlas_kernels.ptx_async import async_fence, launch_dependents
from atlas_kernels.ptx_math import divide, fast_rsqrt, quotient, vector_zero
from atlas_kernels.ptx_memory import dynamic_shared
from atlas_kernels.ptx_state import sum_over_lanes
from atlas_kernels.ptx_units import (
    load_sums,
    load_units,
    load_weights,
    store_sums,
    store_units,
    unit_products,
    unit_squares,
)
from atlas_kernels.ptx_warp import block_x, sync_named, sync_threads, thread_x
from atlas_kernels.ptx_wgmma import descriptor
from atlas_kernels.registry import kernel
from atlas_kernels.turns import await_turn, end_turn

_LARGEST = 3.4028234663852886e38
_THREADS = 32 * NORM_WARPS
_COUNT = ROLE_WARPS // NORM_WARPS
"""Units of a row that a thread has at once, ``_THREADS`` units apart."""
_TURN = _COUNT * _THREADS
"""Units of a row until a thread of ``rmsnorm`` has its next."""
_BF16, _F32 = 2 * UNIT, 4 * UNIT  # bytes of a unit


def _normed_rows(tile: NormTile) -> Rows:
    """In their own place before the ring, for all of K."""
    room, pitch = tile.room, tile.unit_pitch
    stage = tile.k_block // UNIT * pitch
    steps = tuple(2 * j * pitch for j in range(tile.k_block // 16))
    at = device(lambda base, _, i: base - room + i * stage)
    return Rows(at, descriptor(8 * 16, pitch, swizzle=0), steps)


@device
def _row_factor(total, k, eps):
    """1 / sqrt(mean + eps) of a row's sum, with the bits of ``/``, which has a slow path."""
    mean = divide(total, f32(k))
    if total > f32(_LARGEST):
        mean = total
    return fast_rsqrt(mean + eps)


def _each(count: int, function: Any) -> Any:
    """(values, a, b) → a tuple of function(value, a, b)."""
    if count == 1:
        return device(lambda values, a, b: (function(values[0], a, b),))
    others = _each(count - 1, function)
    return device(lambda values, a, b: (function(values[0], a, b), *others(values[1:], a, b)))


def _normalise(tile: NormTile) -> Any:
    """By the first warps: rows to shared memory, normalised; zeros past ``m`` and past k.

    ``unit`` is the thread's first, ``weights`` those of its first turn; ``width`` the units that
    products read.
    """
    held, pitch, room, sums_offset = tile.held, tile.unit_pitch, tile.room, tile.sums_offset
    load, load_more = load_units(held, _COUNT, _THREADS * _BF16), _weights()
    zero, squares = vector_zero(held * _COUNT), unit_squares(held * _COUNT)
    add_lanes = sum_over_lanes(held * _COUNT, (16, 8, 4, 2, 1))
    put_sums = store_sums(held, _COUNT, 4 * ROLE_WARPS, 4 * NORM_WARPS)
    get_sums, add_warps = load_sums(held, 4 * ROLE_WARPS), sum_over_lanes(held, (8, 4, 2, 1))
    factors_of, products = _each(held, _row_factor), unit_products(held, _COUNT)
    store = store_units(held, _COUNT, 16, _THREADS * pitch)

    @device
    def normalise(base, x, norm, weights, unit, width, m, k, x_stride, eps):
        lane = i32(thread_x() & 31)
        source, left = x + i64(unit) * _BF16, i32((quotient(k, UNIT) - unit) * _BF16)
        words = load(source, x_stride, m, left)
        total = squares(zero(), words)
        turn = i32(_TURN)
        while turn < width:
            skip = i32(turn * _BF16)
            total = squares(total, load(source + skip, x_stride, m, i32(left - skip)))
            turn = i32(turn + _TURN)
        total = add_lanes(total)
        sums = i32(base + sums_offset)
        if lane == 0:
            put_sums(i32(sums + (thread_x() >> 5) * 4), total)
        sync_named(2, _THREADS)
        total = add_warps(get_sums(i32(sums + (lane & (ROLE_WARPS - 1)) * 4)))
        factors = factors_of(total, k, eps)
        target, behind = i32(base - room + unit * pitch), i32((width - unit) * pitch)
        store(target, behind, products(words, factors, weights))
        turn = i32(_TURN)
        while turn < width:
            skip = i32(turn * _BF16)
            words = load(source + skip, x_stride, m, i32(left - skip))
            more = load_more(norm, i32(unit + turn), k)
            skip = i32(turn * pitch)
            store(i32(target + skip), i32(behind - skip), products(words, factors, more))
            turn = i32(turn + _TURN)
        async_fence()  # wgmma reads what these threads wrote

    return normalise


@cache
def _weights() -> Any:
    """Weights of a thread's units from ``unit`` on."""
    load = load_weights(_COUNT, _THREADS * _F32)

    @device
    def weights(norm, unit, k):
        return load(norm + i64(unit) * _F32, i32((quotient(k, UNIT) - unit) * _F32))

    return weights


@kernel(
    "gemm_step_norm",
    args="ptr ptr ptr ptr ptr i32 i32 i32 i64 i64 i32 f32 ptr ptr",
    threads=lambda tile: tile.threads,
    min_blocks=lambda tile: tile.min_blocks,
    shared=lambda tile: tile.shared_bytes,
    arch="sm_90a",
    variants={f"bf16_{name}": (tile,) for name, tile in NORM_TILES.items()},
)
def make_gemm_step_norm(tile: NormTile) -> Any:
    """out [m, n] = rmsnorm(x [m, k]) · Wᵀ + bias, or gated [m, n / 2]; grid (tile.grid(n)).

    Arguments: the tensor map of W, as in ``gemm_step``; x (bf16, not ``out``), norm weight
    (float32); bias (float32) or 0; out and ``option`` as in ``gemm_step``; n, k (a multiple of 64),
    m (up to ``held``); strides in bytes; ``turns``.
    """
    k_block, consumers, asker = tile.k_block, tile.consumers, tile.asker
    box_rows, room, halves = tile.box_rows, tile.room, 2 if tile.gated else 1
    begin, prefetch, produce = ring_begin(tile), ring_prefetch(tile), ring_produce(tile)
    consume, write = ring_consume(tile, _normed_rows(tile)), tile_write(tile)
    normalise, weights_of = _normalise(tile), _weights()

    def gemm_step_norm(
        map_w,
        x,
        norm,
        bias,
        out,
        n,
        k,
        m,
        x_stride,
        out_stride,
        option,
        eps,
        turn_before,
        turn_own,
    ):
        launch_dependents()
        base, thread = i32(dynamic_shared() + room), thread_x()
        column0 = i32(block_x() * box_rows)
        num_columns, steps = quotient(n, halves), quotient(i32(k + (k_block - 1)), k_block)
        begin(base, thread)
        sync_threads()  # the barriers are ready
        if thread == asker:
            prefetch(map_w, base, steps, column0, 0)
        weights = weights_of(norm, thread, k)
        await_turn(turn_before, turn_own)  # x and what out held are other kernels'
        if thread < _THREADS:
            width = i32(steps * (k_block // UNIT))
            normalise(base, x, norm, weights, thread, width, m, k, x_stride, eps)
        if thread < asker:
            sync_named(3, asker)  # all rows are there
        if thread < consumers:
            consume(base, steps, thread)
        elif thread == asker:
            produce(map_w, 0, base, steps, column0, 0, 0)
        sync_threads()
        write(base, column0, 0, num_columns, m, bias, 0, out, 0, out_stride, option)
        end_turn(turn_own)

    return gemm_step_norm
