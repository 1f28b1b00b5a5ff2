"""TMA tiles and ``wgmma`` of sm_90a for the PTX machine.

A tensor map is this machine's own: int64 address, shape, stride in bytes and rows of a box.
``wgmma`` sums as ``mma`` does here, 16 products in float64, and does so at once: registers of
products in flight are the assembler's to keep apart.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
_MAP = np.dtype("<i8")
_BOX_BYTES = 128  # of the innermost dimension: the width of the swizzle
_LANE = np.arange(128)
_ROW, _T = _LANE // 32 * 16 + _LANE % 32 // 4, _LANE % 4
# (row, k) of the first half of A's registers and (row, column) of eight columns' accumulators.
_A = [(_ROW + 8 * (i & 1), 2 * _T + 8 * (i >> 1)) for i in range(4)]
_C = [(_ROW + 8 * (i >> 1), 2 * _T + (i & 1)) for i in range(4)]


def encode_map(
    address: int, shape: tuple[int, ...], box: tuple[int, ...], strides: tuple[int, ...] | None
) -> bytes:
    """128 bytes for a bf16 matrix [rows, k]; a box holds 64 k."""
    rows, k = shape
    assert box[1] * 2 == _BOX_BYTES
    words = np.zeros(16, _MAP)
    words[:5] = address, rows, k, strides[0] if strides else 2 * k, box[0]
    return words.tobytes()


def map_address(encoded: Array) -> int:
    """Where the matrix of a map begins."""
    return int(encoded.view(_MAP)[0])


def tile(encoded: Array, column: int, row: int, read: Any) -> Array:
    """The bytes of a box from (column, row) on, as they lie in shared memory.

    ``read(addresses, size)`` returns bytes of global memory. What lies outside is zero.
    """
    address, rows, k, stride, count = encoded.view(_MAP)[:5]
    found = np.zeros((count, _BOX_BYTES), np.uint8)
    here = np.arange(row, row + count)
    inside = np.flatnonzero((here >= 0) & (here < rows))
    width = int(min(64, k - column))
    if width > 0 and inside.size:
        assert stride % 16 == 0
        starts = address + here[inside] * stride + 2 * column
        pieces = (starts[:, None] + 2 * np.arange(width)).reshape(-1)
        found[inside, : 2 * width] = read(pieces.astype(np.uint64), 2).reshape(len(inside), -1)
    swizzled = np.arange(8) ^ np.arange(count)[:, None] % 8
    chunks = found.reshape(count, 8, 16)
    out = np.empty_like(chunks)
    np.put_along_axis(out, swizzled[..., None], chunks, axis=1)
    return out.reshape(-1)


def _matrix(shared: Array, descriptor: int, rows: int) -> Array:
    """[rows, 16] of bf16 that a K-major descriptor with the 128-byte swizzle names."""
    assert descriptor >> 62 == 1, "another swizzle"
    start, group = (descriptor & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4
    row = np.arange(rows)
    at = (start + row // 8 * group + row % 8 * 128)[:, None] + 2 * np.arange(16)
    at ^= (at >> 7 & 7) << 4
    bits = shared[at].astype(np.uint32) | shared[at + 1].astype(np.uint32) << 8
    return (bits << 16).view(np.float32).astype(np.float64)


def _registers(words: list[Array]) -> Array:
    """[64, 16] of the four A registers of a warp group."""
    found = np.zeros((64, 16))
    for register, (row, k) in zip(words, _A, strict=True):
        bits = register.astype(np.uint32)
        found[row, k] = (bits << 16).view(np.float32)
        found[row, k + 1] = (bits & np.uint32(0xFFFF0000)).view(np.float32)
    return found


def wgmma(shared: Array, c: list[Array], a: list[Array] | int, b: int) -> list[Array]:
    """m64nNk16 of one warp group: accumulators of 128 threads each, as float32."""
    n = 2 * len(c)
    left = _matrix(shared, a, 64) if isinstance(a, int) else _registers(a)
    right = _matrix(shared, b, n).T
    total = np.zeros((64, n))
    for i, values in enumerate(c):
        row, column = _C[i % 4]
        total[row, column + 8 * (i // 4)] = values
    for k in range(16):
        total += left[:, k, None] * right[k]
    return [
        total[_C[i % 4][0], _C[i % 4][1] + 8 * (i // 4)].astype(np.float32) for i in range(len(c))
    ]
