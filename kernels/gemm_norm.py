"""Step GEMM of sm_90a over a row that it normalises itself: rmsnorm(x) · Wᵀ for one row.

Every thread block normalises the row, while the first stages of its weights come: up to 10 KB from
the second-level cache, instead of a kernel of 1.4 µs before each product. ``NORM_WARPS`` warps play
the ``ROLE_WARPS`` of ``rmsnorm``, so that the row's sum has its order; the products are those of
``gemm_step``. The bits are those of the two kernels one after the other.

Warp w plays the warps w and w + 8 of ``rmsnorm``: its lanes have the units (of eight elements) that
the lanes of those have, and of a longer row those 512 units behind. The sums of the warps meet in
shared memory and are added as ``block_sum`` adds them, by every warp; its 16 lanes of zeros change
nothing. The normalised row stays in shared memory for all of K, as ``NormTile`` says.

A tile ``split<columns>`` is for matrices of several chains, the others for those of one.
"""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import device, f32, i32, i64
from atlas_kernels.gemm_norm_plan import (
    NORM_TILES,
    NORM_WARPS,
    ROLE_WARPS,
    ROW_BYTES,
    UNIT,
    NormTile,
)
from atlas_kernels.gemm_ring import (
    Rows,
    ring_begin,
    ring_consume,
    ring_prefetch,
    ring_produce,
    tile_write,
)
from atlas_kernels.ptx_async import async_fence, launch_dependents, wait_prerequisites
from atlas_kernels.ptx_math import divide, fast_rsqrt, opaque, quotient, vector_zero
from atlas_kernels.ptx_memory import dynamic_shared, load_shared_f32, store_shared_f32
from atlas_kernels.ptx_state import sum_over_lanes
from atlas_kernels.ptx_units import (
    load_units,
    load_weights,
    store_units,
    unit_products,
    unit_squares,
)
from atlas_kernels.ptx_warp import block_x, sync_named, sync_threads, thread_x
from atlas_kernels.ptx_wgmma import descriptor
from atlas_kernels.registry import kernel

_LARGEST = 3.4028234663852886e38
_THREADS = 32 * NORM_WARPS
_COUNT = ROLE_WARPS // NORM_WARPS
"""Units of a row that a thread has at once, ``_THREADS`` units apart."""
_TURN = _COUNT * _THREADS
"""Units of a row until a thread of ``rmsnorm`` has its next."""
_BF16, _F32 = 2 * UNIT, 4 * UNIT  # bytes of a unit


def _normed_row(tile: NormTile) -> Rows:
    """In its own place before the ring, for all of K."""
    steps = tuple(32 * j for j in range(tile.k_block // 16))
    at = device(lambda base, _, k: base - ROW_BYTES + 2 * k)
    pair = device(lambda at, lane, j: i32(at + 64 * j + (lane >> 3) * 16))  # one row, eight times
    return Rows(at, descriptor(8 * _BF16, _BF16, swizzle=0), steps, pair)


@device
def _row_factor(total, k, eps):
    """1 / sqrt(mean + eps) of a row's sum, with the bits of ``/``, which has a slow path."""
    mean = divide(total, f32(k))
    if total > f32(_LARGEST):
        mean = total
    return fast_rsqrt(mean + eps)


_weights_from = load_weights(_COUNT, _THREADS * _F32)


@device
def _weights(norm, unit, k):
    """Weights of a thread's units from ``unit`` on."""
    return _weights_from(norm + i64(unit) * _F32, i32((quotient(k, UNIT) - unit) * _F32))


def _normalise(sums_offset: int) -> Any:
    """By the first warps: the row to shared memory, normalised; zeros past k.

    ``unit`` is the thread's first, ``weights`` those of its first turn; ``width`` the units that
    products read.
    """
    load, store = load_units(_COUNT, _THREADS * _BF16), store_units(_COUNT, _THREADS * _BF16)
    zero, squares, products = vector_zero(_COUNT), unit_squares(_COUNT), unit_products(_COUNT)
    add_lanes, add_warps = sum_over_lanes(_COUNT, (16, 8, 4, 2, 1)), sum_over_lanes(1, (8, 4, 2, 1))

    @device
    def normalise(base, x, norm, weights, unit, width, k, eps):
        lane = i32(thread_x() & 31)
        source, left = x + i64(unit) * _BF16, i32((quotient(k, UNIT) - unit) * _BF16)
        words = load(source, left)
        total = squares(zero(), words)
        turn = i32(_TURN)
        while turn < width:
            skip = i32(turn * _BF16)
            total = squares(total, load(source + skip, i32(left - skip)))
            turn = i32(turn + _TURN)
        total = add_lanes(total)
        sums = i32(base + sums_offset)
        if lane == 0:
            own = i32(sums + (thread_x() >> 5) * 4)
            store_shared_f32(own, total[0])
            store_shared_f32(own + 4 * NORM_WARPS, total[1])
        sync_named(2, _THREADS)
        total = add_warps((load_shared_f32(sums + (lane & (ROLE_WARPS - 1)) * 4),))
        factor = _row_factor(total[0], k, eps)
        target, behind = i32(base - ROW_BYTES + unit * _BF16), i32((width - unit) * _BF16)
        store(target, behind, products(words, factor, weights))
        turn = i32(_TURN)
        while turn < width:
            skip = i32(turn * _BF16)
            words = load(source + skip, i32(left - skip))
            more = _weights(norm, i32(unit + turn), k)
            store(i32(target + skip), i32(behind - skip), products(words, factor, more))
            turn = i32(turn + _TURN)
        async_fence()  # wgmma reads what these threads wrote

    return normalise


@kernel(
    "gemm_step_norm",
    args="ptr ptr ptr ptr ptr i32 i32 i32 i32 f32",
    threads=lambda tile: tile.threads,
    min_blocks=lambda tile: tile.min_blocks,
    shared=lambda tile: tile.shared_bytes,
    arch="sm_90a",
    variants={f"bf16_{name}": (tile,) for name, tile in NORM_TILES.items()},
)
def make_gemm_step_norm(tile: NormTile) -> Any:
    """out [1, n] = rmsnorm(x [1, k]) · Wᵀ + bias, or gated [1, n / 2]; grid (tile.grid(n)).

    Arguments: the tensor map of W, as in ``gemm_step``; x (bf16, not ``out``), norm weight
    (float32); bias (float32) or 0; out and ``option`` as in ``gemm_step``; n, k (a multiple of 64);
    ``pace`` as in ``gemm_norm_plan``.
    """
    k_block, consumers, asker = tile.k_block, tile.consumers, tile.asker
    box_rows, halves, chains = tile.box_rows, 2 if tile.gated else 1, tile.chains
    begin, prefetch, produce = ring_begin(tile), ring_prefetch(tile), ring_produce(tile)
    consume, write = ring_consume(tile, _normed_row(tile)), tile_write(tile)
    normalise = _normalise(tile.sums_offset)

    def gemm_step_norm(map_w, x, norm, bias, out, n, k, option, pace, eps):
        launch_dependents()
        base, thread = i32(dynamic_shared() + ROW_BYTES), thread_x()
        column0 = i32(block_x() * box_rows)
        num_columns, steps = quotient(n, halves), quotient(i32(k + (k_block - 1)), k_block)
        begin(base, thread)
        sync_threads()  # the barriers are ready
        if thread == asker:
            prefetch(map_w, base, steps, column0, 0, pace)
        weights = _weights(norm, thread, k)
        wait_prerequisites()  # x and what out held are other kernels'
        if thread < _THREADS:
            width = i32(steps * (k_block // UNIT))
            normalise(base, x, norm, weights, thread, width, k, eps)
        if thread < asker:
            sync_named(3, asker)  # the row is there
        if thread < consumers:
            consume(base, steps, steps if chains == 1 else quotient(steps, chains), thread)
        elif thread == asker:
            produce(map_w, 0, base, steps, column0, 0, 0, pace)
        sync_threads()
        count = opaque(1)  # of rows: a loop that the compiler knows to be short would be unrolled
        write(base, column0, 0, num_columns, count, bias, 0, out, 0, 0, option)

    return gemm_step_norm
