"""The reverse of ``pack_cells``: what units of quantised weights stand for, weight by weight."""

from __future__ import annotations

from typing import Any

import numpy as np
from atlas_kernels.quant_plan import CELL_K, CELLS

Array = np.ndarray[Any, Any]
_K = np.arange(CELL_K)
_BLOCK, _P, _T, _H = _K // 32, _K % 32 // 8, _K % 8 // 2, _K % 2
_WITHOUT_OFFSET = {"q8_0": 128, "q4_0": 8, "q6_k": 32}


def unit_weights(units: Array, format: str, rows: int, cols: int) -> Array:
    """float32 [rows, cols] of uint8 [units, bytes]."""
    cell = CELLS[format]
    cells = units.reshape(len(units), -1, cell.nbytes)
    values = np.empty((*cells.shape[:2], 32, CELL_K), np.float32)
    for r in range(32):
        q = _codes(cells, format, r).astype(np.float32) - np.float32(_WITHOUT_OFFSET.get(format, 0))
        scale, minimum = _scales(cells[..., cell.code_bytes :], format, r)
        values[:, :, r] = q * scale
        if minimum is not None:
            values[:, :, r] += minimum
    return values.swapaxes(1, 2).reshape(len(units) * 32, -1)[:rows, :cols].copy()


def _codes(cells: Array, format: str, r: int) -> Array:
    """Codes of row r, [units, cells, 128]."""
    thread = 4 * r + _T
    if format.startswith("q8") or format.startswith("b8"):
        at = _BLOCK // 2 * 2048 + thread * 16 + _BLOCK % 2 * 8 + _P * 2 + _H
        return cells[..., at]
    if format == "q6_k":
        words = cells[..., :3072].copy().view("<u4").reshape(*cells.shape[:2], 2, 3, 128)
        codes = np.empty((*cells.shape[:2], CELL_K), np.uint32)
        for k in range(CELL_K):
            i = 8 * (_BLOCK[k] % 2) + 2 * _P[k] + _H[k]
            three = words[:, :, _BLOCK[k] // 2, :, thread[k]]
            if i < 15:
                codes[..., k] = three[..., i // 5] >> np.uint32(6 * (i % 5)) & 63
            else:
                codes[..., k] = sum(three[..., w] >> 30 << 2 * w for w in range(3))
        return codes
    word = cells[..., :2048].copy().view("<u4")[..., thread * 4 + _BLOCK]
    return word >> (4 * _P + 16 * _H).astype(np.uint32) & 15


def _scales(raw: Array, format: str, r: int) -> tuple[Array, Array | None]:
    """Scale and minimum of each weight of row r, [units, cells, 128]."""

    def of(dtype: str, start: int, count: int) -> Array:
        size = np.dtype(dtype).itemsize * count
        part = raw[..., start + r * size : start + (r + 1) * size].copy().view(dtype)
        return part.astype(np.float32)

    if format in ("q8_0", "q4_0"):
        return of("<f2", 0, 4)[..., _BLOCK], None
    if format == "q4_1":
        pairs = of("<f2", 0, 8)
        return pairs[..., 2 * _BLOCK], pairs[..., 2 * _BLOCK + 1]
    if format == "q4_k":
        both = of("<f2", 0, 2)
        multipliers, minima = of("u1", 128, 4), of("u1", 256, 4)
        return both[..., :1] * multipliers[..., _BLOCK], both[..., 1:] * minima[..., _BLOCK]
    if format == "q6_k":
        return of("<f2", 256, 1) * of("i1", 0, 8)[..., _K // 16], None
    length = int(format[3:])
    pairs = of("<f4", 0, 2 * CELL_K // length)
    return pairs[..., 2 * (_K // length)], pairs[..., 2 * (_K // length) + 1]
