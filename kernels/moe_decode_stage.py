"""A warp's stage of 16 rows of weights: asked for, multiplied by up to 8 rows of activations."""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import device, i32, i64
from atlas_kernels.moe_plan import DecodeTile
from atlas_kernels.ptx import instruction
from atlas_kernels.ptx_async import EVICT_FIRST
from atlas_kernels.ptx_mma import ldmatrix_x4, mma_bf16
from atlas_kernels.ptx_warp import lane_id, lanes

copy_weights = instruction(
    "",
    "r l",
    f"{{ .reg .b64 h; mov.b64 h, {EVICT_FIRST};"
    " cp.async.cg.shared.global.L2::cache_hint.L2::256B [$0], [$1], 16, h; }",
)
"""``copy16`` of what is read once, from end to end: L2 fetches 256 bytes at a time, and gives
their place up first. Else a step's experts would drive out what each layer reads again: code,
tables."""


def ask_stage(tile: DecodeTile) -> tuple[Any, Any]:
    """Two device functions.

    - (address of a matrix, a unit's row, bytes of a row) → where this lane's part of it begins;
    - (stage, that address further on, bytes from row to row, to row 8, of a row): ask for it.
    """
    pitch, share = tile.pitch, tile.chunk // 8
    shift, rows = share.bit_length() - 1, 32 // share

    @device
    def part_of(matrix, row, row_bytes):
        lane = lane_id()
        return matrix + i64(i32(row + (lane >> shift))) * row_bytes + i64((lane & (share - 1)) * 16)

    @device
    def ask(place, source, row_bytes, half_bytes, num_bytes):
        lane = lane_id()
        piece = i32((lane & (share - 1)) * 16)
        if piece < num_bytes:
            target = i32(place + (lane >> shift) * pitch + piece)
            for half in range(2):
                at = source + half_bytes * half
                for i in range(0, 8, rows):
                    copy_weights(i32(target + (8 * half + i) * pitch), at)
                    at = at + row_bytes * rows

    return part_of, ask


def multiply_stage(tile: DecodeTile) -> Any:
    """(sums, stage, activations, k64 steps) → sums + 16 rows of weights · 8 of activations.

    ``stage`` is the int32 address of (row lane % 16, bytes 16 · (lane / 16)) of the weights,
    ``activations`` that of (row lane % 8, bytes 16 · (lane / 8)) of the activations.
    """
    most = tile.chunk // 64

    @device
    def multiply_64(total, stage, rows):
        b, d = ldmatrix_x4(rows), ldmatrix_x4(i32(rows + 64))
        w, v = ldmatrix_x4(stage), ldmatrix_x4(i32(stage + 32))
        y, z = ldmatrix_x4(i32(stage + 64)), ldmatrix_x4(i32(stage + 96))
        total = mma_bf16(total, w, (b[0], b[1]))
        total = mma_bf16(total, v, (b[2], b[3]))
        total = mma_bf16(total, y, (d[0], d[1]))
        return mma_bf16(total, z, (d[2], d[3]))

    @device
    def multiply(total, stage, rows, steps):
        if steps == most:  # unrolled, so that loads run ahead of the products
            for step in range(most):
                at = i32(step * 128)
                total = multiply_64(total, i32(stage + at), i32(rows + at))
        else:
            at, turn = i32(0), i32(lanes() * 4)
            while at < steps * 128:
                total = multiply_64(total, i32(stage + at), i32(rows + at))
                at = i32(at + turn)
        return total

    return multiply
