"""``moe_router`` of sm_90a: a score's chain of products is one of ``wgmma``, as in ``gemm_step``.

One that adds to the sums of the product before begins sooner than an ``mma.sync`` does. Of its 64
rows 8 are those of the router; the others are what lies behind, and nobody looks at their sums.
"""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import device, i32, i64
from atlas_kernels.moe_router import ARGS, SCORES_ARGS, THREADS, router_kernel, scores_kernel
from atlas_kernels.moe_router_plan import (
    ROUTER_ROWS,
    ROUTER_TILES,
    SCORES_TILES,
    RouterTile,
)
from atlas_kernels.ptx_async import async_fence
from atlas_kernels.ptx_wgmma import (
    descriptor,
    settle,
    wgmma_stage,
    wgmma_wait0,
    wgmma_wait1,
    wgmma_zero,
)
from atlas_kernels.registry import kernel

_STEPS = tuple(i // 4 * 1024 + i % 4 * 32 for i in range(8))
"""Of 128 elements of K: bytes from the first k16 step."""


def _multiply(tile: RouterTile) -> Any:
    """(base, dim), by a warp group → its scores."""
    rows_at, constant = tile.rows_at, descriptor(1024)
    multiply_128, zero = wgmma_stage(ROUTER_ROWS, _STEPS, _STEPS), wgmma_zero(ROUTER_ROWS)
    settled = settle(ROUTER_ROWS)

    @device
    def multiply(base, dim):
        total, at, end = zero(), i32(0), i32(16 * dim)
        while at < end:
            a = i64(constant) | i64(((base + at) & 0x3FFFF) >> 4)
            b = i64(constant) | i64(((base + rows_at + at) & 0x3FFFF) >> 4)
            total = multiply_128(total, a, b)
            wgmma_wait1()
            at = i32(at + 2048)
        wgmma_wait0()
        return settled(total)

    return multiply


@kernel(
    "moe_router_wgmma",
    args=ARGS,
    threads=THREADS,
    shared=lambda tile: tile.shared_bytes,
    arch="sm_90a",
    variants={name: (tile,) for name, tile in ROUTER_TILES.items()},
)
def make_moe_router_wgmma(tile: RouterTile) -> Any:
    """Grid and arguments are those of ``moe_router``."""
    return router_kernel(tile, _multiply(tile), 4, async_fence)


@kernel(
    "moe_scores_wgmma",
    args=SCORES_ARGS,
    threads=THREADS,
    shared=lambda tile: tile.shared_bytes,
    arch="sm_90a",
    variants={name: (tile,) for name, tile in SCORES_TILES.items()},
)
def make_moe_scores_wgmma(tile: RouterTile) -> Any:
    """Grid and arguments are those of ``moe_scores``."""
    return scores_kernel(tile, _multiply(tile), 4, async_fence)
