"""Step GEMM of sm_90a: y = x · Wᵀ for 1 to 128 rows, at the speed of reading W.

W ([n, k], as a checkpoint has it) and x come by TMA into a ring of shared memory, asked for by one
thread; a warp group multiplies up to 64 rows of W (the M of ``wgmma``) by all rows of x (its N), so
few rows waste no tensor time. Weights are asked for before the wait for the previous kernel. Rows
past ``m`` read as zeros and are not written.

Many rows are bound by what each SM takes in, not by the weights. There a cluster of two thread
blocks has the same columns and half of the rows each; of the weights, each loads half for both.

An output's order is that of ``gemm_step_plan``: it depends on its row of x and its row of W, and on
neither ``m`` nor the tile. Of a matrix with several chains, few rows have warps for each of them.
"""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import i32
from atlas_kernels.gemm_ring import (
    ring_begin,
    ring_consume,
    ring_prefetch,
    ring_produce,
    stage_rows,
    tile_write,
)
from atlas_kernels.gemm_step_plan import TILES, StepTile
from atlas_kernels.ptx_async import launch_dependents, sync_cluster, wait_prerequisites
from atlas_kernels.ptx_math import quotient, remainder
from atlas_kernels.ptx_memory import dynamic_shared
from atlas_kernels.ptx_warp import block_x, sync_threads, thread_x
from atlas_kernels.registry import kernel

ARGS = "ptr ptr ptr ptr ptr i32 i32 i32 i32 i64 i64 i32"


@kernel(
    "gemm_step",
    args=ARGS,
    threads=lambda tile: tile.threads,
    shared=lambda tile: tile.shared_bytes,
    cluster=lambda tile: tile.sharers,
    arch="sm_90a",
    variants={f"bf16_{name}": (tile,) for name, tile in TILES.items()},
)
def make_gemm_step(tile: StepTile) -> Any:
    """out [m, n] = x [m, k] · Wᵀ + bias + residual, or gated [m, n / 2]; grid (tile.grid(n)).

    Arguments: the tensor maps of W and of x (``tile.weight_view``, ``tile.row_view``), both bf16
    with the 128-byte swizzle; bias (float32) and residual (bf16) or 0; out, bf16, or float32
    where ``option`` is 1 (gated: bf16, no residual, and ``option`` chooses gelu with tanh); n, k,
    elements of K in a chain, m; strides in bytes. k is a multiple of 64, a chain that is not all of
    it one of ``k_block``; ``tile.adds`` and ``tile.chains`` say which tiles take such chains.
    """
    k_block, consumers, halves = tile.k_block, tile.consumers, 2 if tile.gated else 1
    rows, box_rows, sharers = tile.rows, tile.box_rows, tile.sharers
    begin, prefetch, produce = ring_begin(tile), ring_prefetch(tile), ring_produce(tile)
    consume, write = ring_consume(tile, stage_rows(tile)), tile_write(tile)
    sync_blocks = sync_threads if sharers == 1 else sync_cluster

    def gemm_step(
        map_w, map_x, bias, residual, out, n, k, chain, m, residual_stride, out_stride, option
    ):
        launch_dependents()
        base, thread = dynamic_shared(), thread_x()
        rank = i32(remainder(block_x(), sharers))
        column0, row0 = i32(quotient(block_x(), sharers) * box_rows), i32(rank * rows)
        num_columns, steps = quotient(n, halves), quotient(i32(k + (k_block - 1)), k_block)
        begin(base, thread)
        sync_blocks()  # the barriers are ready, in every thread block of the cluster
        if thread == consumers:
            prefetch(map_w, base, steps, column0, rank, 0)
        wait_prerequisites()  # x, residual and what out held are other kernels'
        if thread < consumers:
            consume(base, steps, quotient(i32(chain + (k_block - 1)), k_block), thread)
        elif thread == consumers:
            produce(map_w, map_x, base, steps, column0, row0, rank, 0)
        sync_threads()
        write(
            base, column0, row0, num_columns, m, bias, residual, out, residual_stride, out_stride,
            option,
        )  # fmt: skip
        if sharers > 1:
            sync_cluster()  # nobody leaves while others tell it of stages

    return gemm_step
