"""Quantised weights into the cells of ``atlas_kernels.quant_plan``, in NumPy, at load.

Codes and scales are the file's own bits, put elsewhere; only ``b8`` has products of scales, which
``atlas.ops.blocks.integers`` defines.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from atlas_kernels.quant_plan import CELL_K, CELL_ROWS, CELLS, unit_bytes
from numpy.typing import NDArray

from atlas.errors import ShapeError
from atlas.ops.blocks import FORMATS, HostMatrix, integers

Bytes = NDArray[np.uint8]
_BLOCKS = CELL_K // 32
_SIGN = np.array([0, 0x80], np.uint8)  # of a little-endian float16


def pack_units(chunk: HostMatrix, format: str) -> Bytes:
    """Rows as units, uint8 [⌈rows / 32⌉, unit_bytes]; rows and columns past the end are zeros.

    Parameters
    ----------
    chunk : HostMatrix
        Quantised.
    format : str
        Of ``quant_plan.CELLS``: the chunk's own, or the ``b8`` form that it is widened to.

    Raises
    ------
    ShapeError
        The chunk's format does not become ``format``.
    """
    is_wide = format.startswith("b8")
    if chunk.format != format and not is_wide:
        raise ShapeError(f"{chunk.format} rows as {format}; allowed: {chunk.format}, b8_32, b8_16")
    cell, units = CELLS[format], -(-chunk.rows // CELL_ROWS)
    blocks = integers(chunk)
    out = np.zeros((units, -(-chunk.cols // CELL_K), cell.nbytes), np.uint8)
    at = _put(out, 0, _codes(_padded(blocks.q, CELL_K), format))
    if is_wide:
        if format != f"b8_{max(blocks.block_len, 16)}":
            raise ShapeError(f"{chunk.format} in blocks of {blocks.block_len} as {format}")
        pairs = np.stack([blocks.scale, blocks.minimum], axis=-1).reshape(chunk.rows, -1)
        scales = [_padded(pairs, 2 * CELL_K // blocks.block_len)]
    else:
        scales = _scales(chunk)
    for part in scales:
        at = _put(out, at, part)
    return out.reshape(units, unit_bytes(format, chunk.cols))


def _padded(rows: NDArray[Any], in_cell: int) -> NDArray[Any]:
    """[rows, n] as [units, cells, 32, in_cell], with zeros past the end."""
    count, width = rows.shape
    more = ((0, -count % CELL_ROWS), (0, -width % in_cell))
    full = np.pad(rows, more) if more[0][1] or more[1][1] else rows
    return full.reshape(-1, CELL_ROWS, full.shape[1] // in_cell, in_cell).swapaxes(1, 2)


def _put(out: Bytes, start: int, values: NDArray[Any]) -> int:
    """Copy [units, cells, …] to byte ``start`` of each cell; returns the byte after them."""
    flat = np.ascontiguousarray(values).reshape(*out.shape[:2], -1).view(np.uint8)
    out[..., start : start + flat.shape[-1]] = flat
    return start + int(flat.shape[-1])


def _codes(q: Bytes, format: str) -> Bytes:
    """Codes [units, cells, 32, 128] as bytes of a cell."""
    if format in ("q4_0", "q4_1", "q4_k"):
        return _nibbles(q)
    if format == "q6_k":
        return _sixes(q)
    # [units, cells, r, half, block, p, t, h] → [units, cells, half, r, t, block, p, h]
    return q.reshape(*q.shape[:3], 2, 2, 4, 4, 2).transpose(0, 1, 3, 2, 6, 4, 5, 7)


def _nibbles(q: Bytes) -> Bytes:
    """Values below 16 as [units, cells, r, t, block, 4 bytes]."""
    parts = q.reshape(*q.shape[:3], _BLOCKS, 2, 2, 4, 2)  # … block, p / 2, p % 2, t, h
    pairs: Bytes = parts[:, :, :, :, :, 0] | parts[:, :, :, :, :, 1] << np.uint8(4)
    return pairs.transpose(0, 1, 2, 5, 3, 6, 4)


def _sixes(q: Bytes) -> Bytes:
    """Values below 64 as [units, cells, half, 3, r, t, 4 bytes]."""
    # [units, cells, r, half, block, p, t, h] → [units, cells, half, r, t, 16]
    parts = q.reshape(*q.shape[:3], 2, 2, 4, 4, 2).transpose(0, 1, 3, 2, 6, 4, 5, 7)
    codes = parts.reshape(*parts.shape[:5], 16).astype(np.uint32)
    words = np.empty((*codes.shape[:3], 3, *codes.shape[3:5]), np.uint32)
    for w in range(3):
        word = codes[..., 15] >> np.uint32(2 * w) << np.uint32(30)
        for slot in range(5):
            word |= codes[..., 5 * w + slot] << np.uint32(6 * slot)
        words[:, :, :, w] = word
    return words.view(np.uint8)


def _scales(chunk: HostMatrix) -> list[Bytes]:
    """What a cell has behind its codes, each [units, cells, 32, bytes]."""
    layout = FORMATS[chunk.format]
    blocks = chunk.data.reshape(chunk.rows, -1, layout.block_bytes)

    def column(start: int, stop: int) -> Bytes:
        return blocks[..., start:stop]

    def cells(part: Bytes, in_cell: int) -> Bytes:
        return _padded(np.ascontiguousarray(part).reshape(chunk.rows, -1), in_cell)

    if chunk.format == "q4_k":
        low, high, mixed = column(4, 8), column(8, 12), column(12, 16)
        # Multipliers 0–3 are whole in their bytes; 4–7 keep their top two bits in those bytes.
        scale = np.concatenate([low & 63, (mixed & 15) | (low >> 6) << 4], axis=-1)
        least = np.concatenate([high & 63, (mixed >> 4) | (high >> 6) << 4], axis=-1)
        both = np.concatenate([column(0, 2), column(2, 4) ^ _SIGN], axis=-1)
        twice = np.repeat(both, 2, axis=1)  # of 256 weights: two cells
        return [cells(twice, 4), cells(scale, 4), cells(least, 4)]
    if chunk.format == "q6_k":
        return [cells(column(192, 208), 8), cells(np.repeat(column(208, 210), 2, axis=1), 2)]
    width = 4 if chunk.format == "q4_1" else 2
    return [cells(column(0, width), width * _BLOCKS)]
