"""What prepares a chunk of a prompt: rows on their way to the tensor cores, and sums of decays."""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import device, i32
from atlas_kernels.ptx_chunk import put_row_words, row_words
from atlas_kernels.ptx_math import quotient
from atlas_kernels.ptx_memory import load_shared_b32x4, store_b32x4
from atlas_kernels.ptx_warp import lane_id, shuffle_f32, sync_warp

THREADS = 128
"""Four warps, each with 16 rows of a chunk; eight lanes share a row."""
LOG2_E = 1.4426950408889634


@device
def running_sums(first, second):
    """Sums of a warp's numbers, two a lane, up to each of a lane's own: doubling distances."""
    lane = lane_id()
    total = first + second
    step = i32(1)
    while step < 32:
        before = shuffle_f32(total, max(lane - step, 0))
        total = total + before if lane >= step else total
        step = i32(step * 2)
    before = shuffle_f32(total, max(lane - 1, 0))
    low = before + first if lane > 0 else first
    return low, low + second


def put_row(dim: int) -> Any:
    """(shared, target, write, factor, values): a row times a factor, as bf16, by eight lanes.

    To shared memory and, with ``write``, to ``target``; ``values`` come from ``global_row``.
    """
    words_of = row_words(dim)
    to_shared, to_global = put_row_words(dim, "shared"), put_row_words(dim, "global")

    @device
    def put(shared, target, write, factor, values):
        words = words_of(values, factor)
        to_shared(i32(shared), words)
        if write:
            to_global(target, words)

    return put


def copy_out(row_bytes: int, pitch: int, target_pitch: int, strip: int = 0) -> Any:
    """(target, source): a warp's 16 rows from shared memory, 16 bytes a lane.

    With ``strip``, each row is cut into pieces of ``target_pitch`` bytes that lie ``strip`` apart.
    """
    per_row, width = row_bytes // 16, target_pitch // 16 if strip else row_bytes // 16

    @device
    def copy(target, source):
        sync_warp()
        for i in range(lane_id(), 16 * per_row, 32):
            row = quotient(i, per_row)
            column = i - row * per_row
            piece = quotient(column, width)
            data = load_shared_b32x4(source + row * pitch + column * 16)
            at = row * target_pitch + piece * strip + (column - piece * width) * 16
            store_b32x4(target + at, data)
        sync_warp()

    return copy
