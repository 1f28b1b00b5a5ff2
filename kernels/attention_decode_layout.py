"""What lies where in the shared memory of a thread block of decode attention.

The warps' buffers of keys and values; the queries; the first and last key of each row. Results take
the place of the buffers, and the warps' maxima and sums lie behind them.
"""

from __future__ import annotations

from atlas_kernels.kv_store import BLOCK_LEN

THREADS = 128
WARPS = THREADS // 32
LIMIT_BYTES = 8  # of a row: first and last key


def key_pitch(dim: int) -> int:
    """Bytes from a row of keys, values or queries to the next: no bank conflicts."""
    return 2 * dim + 16


def result_pitch(dim: int) -> int:
    """Bytes from a row of results to the next."""
    return 4 * dim + 16


def stages(dim: int) -> int:
    """Blocks of keys and values in flight for each warp."""
    return 2 if dim <= 128 else 1


def queries_at(dim: int) -> int:
    """Where the queries lie, after the warps' buffers."""
    return WARPS * stages(dim) * 2 * BLOCK_LEN * key_pitch(dim)


def limits_at(dim: int, tiles: int) -> int:
    """Where the rows' limits lie, after the queries."""
    return queries_at(dim) + 16 * tiles * key_pitch(dim)


def sums_at(dim: int, tiles: int) -> int:
    """Where the warps' maxima and sums lie, 8 bytes a row, after their results."""
    return WARPS * 16 * tiles * result_pitch(dim)


def shared_bytes(dim: int, tiles: int) -> int:
    """Dynamic shared memory of ``attention_decode``."""
    rows = 16 * tiles
    assert sums_at(dim, tiles) + WARPS * rows * 8 <= queries_at(dim)
    return limits_at(dim, tiles) + rows * LIMIT_BYTES


def resident_blocks(dim: int, tiles: int, holds: bool = False) -> int:
    """Thread blocks that an SM shall hold."""
    return 3 if tiles * dim <= 128 and not holds else 2
