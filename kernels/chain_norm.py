"""RMS normalisation of a row by the thread blocks of a chain: the bits of ``rmsnorm``.

``NORM_WARPS`` warps play the ``ROLE_WARPS`` of ``rmsnorm``, as in ``gemm_norm``: warp w the warps w
and w + 8. The result goes to global memory, from where TMA brings it.
"""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import device, i32, i64
from atlas_kernels.chain_plan import AT, CONSUMERS, NORM_WARPS, OWN_NORM, ROLE_WARPS, ChainTile
from atlas_kernels.gemm_norm import row_factor, unit_weights
from atlas_kernels.ptx_math import quotient, vector_zero
from atlas_kernels.ptx_memory import load_shared_b32, load_shared_b64, load_shared_f32
from atlas_kernels.ptx_state import sum_over_lanes
from atlas_kernels.ptx_units import (
    load_sums,
    load_units,
    store_sums,
    store_units,
    unit_products,
    unit_squares,
)
from atlas_kernels.ptx_warp import sync_named

_UNIT, _BF16 = 8, 16  # elements of a unit, and its bytes
_COUNT = ROLE_WARPS // NORM_WARPS
_TURN = _COUNT * CONSUMERS
"""Units of a row until a thread has its next."""


def row_norm(tile: ChainTile) -> Any:
    """By the threads that multiply: row ``row`` of a step's source to its target.

    A step with ``OWN_NORM`` has a row for each thread block (``own``) there.
    """
    parts = tile.parts_offset
    load, weights_of = load_units(1, _COUNT, CONSUMERS * _BF16), unit_weights()
    zero, squares = vector_zero(_COUNT), unit_squares(_COUNT)
    add_lanes, add_warps = sum_over_lanes(_COUNT, (16, 8, 4, 2, 1)), sum_over_lanes(1, (8, 4, 2, 1))
    put_sums, get_sums = store_sums(1, _COUNT, 0, 4 * NORM_WARPS), load_sums(1, 0)
    products = unit_products(1, _COUNT)
    store = store_units(1, _COUNT, 0, CONSUMERS * _BF16, "global")

    @device
    def normalise(base, step, row, own, thread):
        k, kind = load_shared_b32(i32(step + AT.k)), load_shared_b32(i32(step + AT.kind))
        norm, eps = load_shared_b64(i32(step + AT.norm)), load_shared_f32(i32(step + AT.eps))
        stride = load_shared_b64(i32(step + AT.source_stride))
        source = load_shared_b64(i32(step + AT.source)) + i64(row) * stride + i64(thread) * _BF16
        left, lane = i32((quotient(k, _UNIT) - thread) * _BF16), i32(thread & 31)
        words, weights = load(source, i64(0), i32(1), left), weights_of(norm, thread, k)
        total = squares(zero(), words)
        turn = i32(_TURN)
        while turn * _UNIT < k:
            skip = i32(turn * _BF16)
            total = squares(total, load(source + skip, i64(0), i32(1), i32(left - skip)))
            turn = i32(turn + _TURN)
        total = add_lanes(total)
        if lane == 0:
            put_sums(i32(base + parts + (thread >> 5) * 4), total)
        sync_named(1, CONSUMERS)
        sums = add_warps(get_sums(i32(base + parts + (lane & (ROLE_WARPS - 1)) * 4)))
        factors = (row_factor(sums[0], k, eps),)
        at = i32(own if kind & OWN_NORM else row)
        target = load_shared_b64(i32(step + AT.target)) + i64(thread) * _BF16
        target = target + i64(at) * load_shared_b64(i32(step + AT.target_stride))
        store(target, left, products(words, factors, weights))
        turn = i32(_TURN)
        while turn * _UNIT < k:
            skip = i32(turn * _BF16)
            words = load(source + skip, i64(0), i32(1), i32(left - skip))
            more = weights_of(norm, i32(thread + turn), k)
            store(target + skip, i32(left - skip), products(words, factors, more))
            turn = i32(turn + _TURN)

    return normalise
