"""How a warp of decode attention asks for one head of a block: keys or values of 16 positions."""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import device, i32, i64
from atlas_kernels.kv_store import BLOCK_LEN
from atlas_kernels.ptx_async import copy16_or_zero_if
from atlas_kernels.ptx_math import quotient
from atlas_kernels.ptx_memory import prefetch_l2
from atlas_kernels.ptx_warp import lane_id

LINE_BYTES = 128


def block_copy(dim: int) -> Any:
    """A device function of (target, source, seen, wanted): start copying to shared memory, if
    ``wanted`` is not 0; rows from ``seen`` on become zeros."""
    chunks = dim // 8  # of 16 bytes in a row
    per_lane = BLOCK_LEN * chunks // 32

    if 32 % chunks == 0:  # a lane copies the same columns of every row it meets

        @device
        def copy(target, source, seen, wanted):
            first_row = quotient(lane_id(), chunks)
            target, source = target + (lane_id() + first_row) * 16, source + lane_id() * 16
            left = i32(seen - first_row)
            for i in range(per_lane):
                row = 32 * i // chunks
                num_bytes = i32(16) if left > row else i32(0)
                at = target + (32 * i + row) * 16
                copy16_or_zero_if(at, source + 32 * i * 16, num_bytes, wanted)

    else:

        @device
        def copy(target, source, seen, wanted):
            for i in range(per_lane):
                chunk = lane_id() + 32 * i
                row = quotient(chunk, chunks)
                num_bytes = i32(16) if row < seen else i32(0)
                at = target + (chunk + row) * 16
                copy16_or_zero_if(at, source + chunk * 16, num_bytes, wanted)

    return copy


def block_prefetch(dim: int) -> Any:
    """A device function of (source, seen): ask L2 for the cache lines of rows before ``seen``."""
    lines = BLOCK_LEN * 2 * dim // LINE_BYTES

    @device
    def prefetch(source, seen):
        for i in range(-(-lines // 32)):
            line = i32(lane_id() + 32 * i)
            if line < lines and quotient(line * (LINE_BYTES // 2), dim) < seen:
                prefetch_l2(source + i64(line) * LINE_BYTES)

    return prefetch
