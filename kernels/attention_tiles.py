"""Which rows a thread block of prefill attention takes, in a batch of ragged chunks."""

from __future__ import annotations

from atlas_kernels._cuda import device, i32, i64
from atlas_kernels.attention_plan import WGMMA_ROWS
from atlas_kernels.ptx_math import first_bit
from atlas_kernels.ptx_memory import load_b32
from atlas_kernels.ptx_warp import ballot, lane_id, shuffle_b32


@device
def find_tile(index, sequences, first_rows, cu_rows, positions):
    """(sequence, tile of 128 positions counted from its chunk's last), or (−1, 0) past the end.

    First the last tile of every chunk, which see most keys; then the other tiles, one chunk after
    another, from the last to the first. Every lane of the warp takes part.
    """
    if index < sequences:
        return i32(index), i32(0)
    lane, left = lane_id(), i32(index - sequences)
    for base in range(0, sequences, 32):
        own = i32(min(base + lane, sequences - 1))
        begin = load_b32(first_rows + own * 4)
        rows = load_b32(cu_rows + own * 4 + 4) - begin
        others = i32(0)
        if rows > 0 and base + lane < sequences:
            start = load_b32(positions + i64(begin) * 4)
            others = i32((start + rows - 1) // WGMMA_ROWS - start // WGMMA_ROWS)
        total = others  # of this lane's sequence and those before it
        for step in range(5):
            below = shuffle_b32(total, i32(lane - (1 << step)))
            total += below if lane >= 1 << step else i32(0)
        behind = ballot(i32(1) if total > left else i32(0))
        if behind != 0:
            owner = first_bit(behind)
            before = shuffle_b32(total, owner) - shuffle_b32(others, owner)
            return i32(base + owner), i32(left - before + 1)
        left -= shuffle_b32(total, 31)
    return i32(-1), i32(0)
