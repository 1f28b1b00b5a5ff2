"""A warp's stages of 16 rows of weights: asked for, multiplied by up to 8 rows of activations.

A stage is one copy by TMA: blocks of 64 elements of K, 16 rows of 128 bytes each, in which a row's
16-byte units are exchanged by its number (the 128-byte swizzle). Its barrier counts the bytes. One
lane asks; the warp that waits is the one that asks for what comes into the same place next.
"""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import device, i32
from atlas_kernels.moe_plan import DecodeTile
from atlas_kernels.ptx_async import (
    EVICT_FIRST,
    barrier_expect,
    barrier_init,
    barrier_init_fence,
    tile_load,
)
from atlas_kernels.ptx_mma import ldmatrix_x4, mma_bf16
from atlas_kernels.ptx_warp import lane_id, lanes, sync_warp, thread_x

load_gate_up = tile_load(5, EVICT_FIRST)
load_down = tile_load(3, EVICT_FIRST)
"""``tile_load`` of what is read once, from end to end: its place in L2 is given up first. Else a
step's experts would drive out what each layer reads again: code, tables."""


def stage_barriers(tile: DecodeTile) -> tuple[Any, Any]:
    """Two device functions, of a warp's own barriers.

    - (base): make them;
    - (base, stage) → the address of a stage's.
    """
    stages, at = tile.stages, tile.barriers_at

    @device
    def barrier_of(base, stage):
        return i32(base + at + ((thread_x() >> 5) * stages + stage) * 8)

    @device
    def arm(base):
        if lane_id() < stages:
            barrier_init(barrier_of(base, lane_id()), 1)
            barrier_init_fence()
        sync_warp()

    return arm, barrier_of


def expect_stage(tile: DecodeTile) -> Any:
    """(barrier): a stage's bytes are to come."""
    num_bytes = tile.stage_bytes

    @device
    def expect(barrier):
        barrier_expect(barrier, num_bytes)

    return expect


def multiply_stage(tile: DecodeTile) -> Any:
    """(sums, stage, activations, k64 steps) → sums + 16 rows of weights · 8 of activations.

    ``stage`` is the int32 address of row lane % 16 and of unit lane / 16, exchanged, of the
    weights, ``activations`` that of (row lane % 8, bytes 16 · (lane / 8)) of the activations.
    """
    most = tile.chunk // 64

    @device
    def multiply_64(total, stage, rows):
        b, d = ldmatrix_x4(rows), ldmatrix_x4(i32(rows + 64))
        w, v = ldmatrix_x4(stage), ldmatrix_x4(i32(stage ^ 32))
        y, z = ldmatrix_x4(i32(stage ^ 64)), ldmatrix_x4(i32(stage ^ 96))
        total = mma_bf16(total, w, (b[0], b[1]))
        total = mma_bf16(total, v, (b[2], b[3]))
        total = mma_bf16(total, y, (d[0], d[1]))
        return mma_bf16(total, z, (d[2], d[3]))

    @device
    def multiply(total, stage, rows, steps):
        if steps == most:  # unrolled, so that loads run ahead of the products
            for step in range(most):
                total = multiply_64(total, i32(stage + step * 2048), i32(rows + step * 128))
        else:
            i, one = i32(0), i32(lanes() >> 5)
            while i < steps:
                total = multiply_64(total, i32(stage + i * 2048), i32(rows + i * 128))
                i = i32(i + one)
        return total

    return multiply


@device
def weights_line():
    """Of a stage: where the lane's row of weights lies, and in it the lane's unit."""
    lane = lane_id()
    return i32((lane & 15) * 128 + ((lane >> 4) ^ (lane & 7)) * 16)
