"""Tensor-core and asynchronous instructions of sm_80 for the PTX machine.

``mma`` sums its 16 products in float64, k ascending, and rounds once. What ``cp.async`` copies
arrives in shared memory only at the wait for its group, so that a missing wait shows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

WARP = 32
Array = np.ndarray[Any, Any]
Copies = list[tuple[Array, Array]]
_LANE = np.arange(WARP)
_G, _T = _LANE // 4, _LANE % 4
# (row, k) of the first half of A's registers, (k, column) of B's, (row, column) of C's.
_A = [(_G + 8 * (i & 1), 2 * _T + 8 * (i >> 1)) for i in range(4)]
_B = [(2 * _T + 8 * i, _G) for i in range(2)]
_C = [(_G + 8 * (i >> 1), 2 * _T + (i & 1)) for i in range(4)]


def warps_of(active: Array) -> Array:
    """Numbers of the active warps, which must be whole."""
    whole = active.reshape(-1, WARP)
    assert (whole.all(axis=1) | ~whole.any(axis=1)).all(), "a warp's instruction without its warp"
    return np.flatnonzero(whole.all(axis=1))


def _halves(words: Array) -> tuple[Array, Array]:
    """A register of each lane as its two bf16 values."""
    bits = words.astype(np.uint32)
    return (bits << 16).view(np.float32), (bits & np.uint32(0xFFFF0000)).view(np.float32)


def mma(c: list[Array], a: list[Array], b: list[Array]) -> list[Array]:
    """m16n8k16 of one warp, bf16: registers of 32 lanes each, C's as float32."""
    left, right, total = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))
    for words, (row, k) in zip(a, _A, strict=True):
        left[row, k], left[row, k + 1] = _halves(words)
    for words, (k, column) in zip(b, _B, strict=True):
        right[k, column], right[k + 1, column] = _halves(words)
    for values, at in zip(c, _C, strict=True):
        total[at] = values
    for k in range(16):
        total += left[:, k, None] * right[k]
    return [total[at].astype(np.float32) for at in _C]


def ldmatrix(shared: Array, addresses: Array, count: int, *, transposed: bool) -> list[Array]:
    """The registers of one warp."""
    registers = []
    for i in range(count):
        rows = addresses[8 * i : 8 * i + 8].astype(np.int64)
        assert not (rows % 16).any(), "ldmatrix wants rows of 16 bytes, aligned"
        matrix = np.ascontiguousarray(shared[rows[:, None] + np.arange(16)]).view(np.uint16)
        matrix = (matrix.T if transposed else matrix).astype(np.uint64)
        registers.append(matrix[_G, 2 * _T] | matrix[_G, 2 * _T + 1] << np.uint64(16))
    return registers


class Copies16:
    """``cp.async`` groups of each warp of a thread block."""

    def __init__(self, num_warps: int) -> None:
        self.open: list[Copies] = [[] for _ in range(num_warps)]
        self.groups: list[list[Copies]] = [[] for _ in range(num_warps)]

    def copy(self, active: Array, places: Array, data: Array) -> None:
        """4 or 16 bytes for each active thread, at places in shared memory."""
        warp = np.flatnonzero(active) // WARP
        for number in np.unique(warp):
            mine = warp == number
            self.open[number].append((places[mine], data[mine]))

    def commit(self, active: Array) -> None:
        for warp in warps_of(active):
            self.groups[warp].append(self.open[warp])
            self.open[warp] = []

    def wait(self, active: Array, pending: int, shared: Array) -> None:
        for warp in warps_of(active):
            while len(self.groups[warp]) > pending:
                for places, data in self.groups[warp].pop(0):
                    shared[places[:, None] + np.arange(data.shape[1])] = data
