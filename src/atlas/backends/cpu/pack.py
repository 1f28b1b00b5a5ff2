"""Weights repacked at load: 16 rows side by side, so that one vector holds 16 outputs.

``bodies.weight_blocks`` states the layouts. Quantised weights keep their integers and their own
scales; formats without a kernel of their own become ``b8_16`` or ``b8_32``: the same integers in
8 bits, with a float32 scale and minimum for each block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atlas import pages
from atlas.errors import ShapeError
from atlas.ops.blocks import HostMatrix, integers

Bytes = NDArray[np.uint8]
LANES = 16
_CHUNK_BYTES = 4 << 20  # of source rows, so that temporaries stay small
_NATIVE = ("f32", "f16", "bf16", "q4_0", "q4_1", "q8_0", "q4_k", "q6_k")


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    """A weight matrix [N, K] in the layout of the bodies.

    ``format`` names the body; ``source_format`` is what the file holds; ``groups`` counts the
    matrices stacked in it (experts), each with tiles of its own. ``data`` is uint8
    [tiles, tile_bytes]; a group's rows past its end are zeros.
    """

    format: str
    source_format: str
    rows: int
    cols: int
    groups: int
    tile_bytes: int
    data: Bytes

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.data.nbytes

    @property
    def is_quantized(self) -> bool:
        """Whether activations are quantised to meet these weights."""
        return self.format not in ("f32", "f16", "bf16")


def packed_format(source_format: str) -> str:
    """The body format that serves a file format."""
    if source_format in _NATIVE:
        return source_format
    return "b8_16" if source_format in ("q2_k", "q3_k") else "b8_32"


def tile_bytes(packed: str, cols: int) -> int:
    """Bytes of 16 rows of ``cols`` weights."""
    blocks = cols // 32
    by_block = {
        "q4_0": 288, "q4_1": 320, "q8_0": 544, "q4_k": 296, "q6_k": 420, "b8_32": 640, "b8_16": 768,
    }  # fmt: skip
    if packed in by_block:
        return blocks * by_block[packed]
    return cols * (64 if packed == "f32" else 32)


def pack(parts: Sequence[HostMatrix], groups: int = 1) -> PackedMatrix:
    """Stack matrices of one format and width, one under the other, and repack them.

    Parameters
    ----------
    parts : sequence of HostMatrix
    groups : int
        Each part holds this many matrices one under the other (experts); group g of the result
        stacks group g of every part and starts a tile of its own.

    Raises
    ------
    ShapeError
        The parts differ in format or columns, or do not divide into the groups.
    """
    first = parts[0]
    if any((part.format, part.cols) != (first.format, first.cols) for part in parts):
        raise ShapeError(
            "stacked matrices must agree in format and columns, got "
            + ", ".join(f"{part.format} [{part.rows}, {part.cols}]" for part in parts)
        )
    if any(part.rows % groups for part in parts):
        raise ShapeError(f"{[part.rows for part in parts]} rows do not divide into {groups} groups")
    rows = sum(part.rows for part in parts)
    name = packed_format(first.format)
    size = tile_bytes(name, first.cols)
    tiles = -(-(rows // groups) // LANES)
    data = _aligned(groups * tiles, size)
    for g in range(groups):
        members = [_group(part, g, groups) for part in parts]
        _pack_stack(members, _REPACK[name], data[g * tiles : (g + 1) * tiles])
    return PackedMatrix(name, first.format, rows, first.cols, groups, size, data)


def _group(part: HostMatrix, g: int, groups: int) -> HostMatrix:
    each = part.rows // groups
    return part.row_slice(g * each, (g + 1) * each)


def _pack_stack(
    parts: Sequence[HostMatrix], repack: Callable[[HostMatrix, Bytes], None], data: Bytes
) -> None:
    rows = sum(part.rows for part in parts)
    row_bytes = max(1, parts[0].nbytes // max(1, parts[0].rows))
    step = max(LANES, _CHUNK_BYTES // row_bytes // LANES * LANES)
    for start in range(0, rows, step):
        chunk = _rows(parts, start, min(rows, start + step))
        at = start // LANES
        repack(chunk, data[at : at + chunk.rows // LANES])


def _aligned(tiles: int, size: int) -> Bytes:
    """uint8 [tiles, size] at a multiple of 64, followed by 64 bytes that a vector may read."""
    raw = pages.zeros(tiles * size + 128, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + tiles * size].reshape(tiles, size)


def _rows(parts: Sequence[HostMatrix], start: int, stop: int) -> HostMatrix:
    """Rows start … stop − 1 of the stack, padded with zero rows to a multiple of 16."""
    pieces: list[NDArray[Any]] = []
    base = 0
    for part in parts:
        low, high = max(start - base, 0), min(stop - base, part.rows)
        if low < high:
            pieces.append(part.data[low:high])
        base += part.rows
    missing = -(stop - start) % LANES
    if missing:
        pieces.append(np.zeros((missing, pieces[0].shape[1]), pieces[0].dtype))
    data = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    return HostMatrix(parts[0].format, len(data), parts[0].cols, np.ascontiguousarray(data))


def _tiles(data: NDArray[Any], *shape: int) -> NDArray[Any]:
    return data.reshape(-1, LANES, *shape)


def _float(chunk: HostMatrix, out: Bytes) -> None:
    values = _tiles(chunk.data, chunk.cols).transpose(0, 2, 1)
    out.view(chunk.data.dtype).reshape(values.shape)[...] = values


def _put(out: Bytes, start: int, values: NDArray[Any]) -> int:
    """Copy values [tiles, …] to byte ``start`` of each tile; returns the byte after them."""
    flat = np.ascontiguousarray(values).reshape(len(out), -1).view(np.uint8)
    out[:, start : start + flat.shape[1]] = flat
    return start + flat.shape[1]


def _scales(blocks: Bytes, start: int) -> Bytes:
    """A float16 of each block [tiles, 16, blocks, bytes] as [tiles, blocks, 16, 2] bytes."""
    return blocks[..., start : start + 2].transpose(0, 2, 1, 3)


def _bytes(q: Bytes) -> Bytes:
    """uint8 [tiles, 16, blocks, 32] as [tiles, blocks, 8, 16, 4]: four columns a lane."""
    return q.reshape(*q.shape[:3], 8, 4).transpose(0, 2, 3, 1, 4)


def _nibbles(q: Bytes) -> Bytes:
    """Values below 16 [tiles, 16, blocks, 32] as [tiles, blocks, 4, 16, 4] bytes."""
    pairs = (q[..., :16] | q[..., 16:] << np.uint8(4)).astype(np.uint8, copy=False)
    return pairs.reshape(*q.shape[:3], 4, 4).transpose(0, 2, 3, 1, 4)


def _q4_0(chunk: HostMatrix, out: Bytes) -> None:
    blocks = _tiles(chunk.data, chunk.cols // 32, 18)
    at = _put(out, 0, _scales(blocks, 0))
    # ggml's byte j holds columns j and j + 16, as ours does.
    _put(out, at, blocks[..., 2:].reshape(*blocks.shape[:3], 4, 4).transpose(0, 2, 3, 1, 4))


def _q4_1(chunk: HostMatrix, out: Bytes) -> None:
    blocks = _tiles(chunk.data, chunk.cols // 32, 20)
    at = _put(out, 0, _scales(blocks, 0))
    at = _put(out, at, _scales(blocks, 2))
    _put(out, at, blocks[..., 4:].reshape(*blocks.shape[:3], 4, 4).transpose(0, 2, 3, 1, 4))


def _q8_0(chunk: HostMatrix, out: Bytes) -> None:
    blocks = _tiles(chunk.data, chunk.cols // 32, 34)
    at = _put(out, 0, _scales(blocks, 0))
    _put(out, at, _bytes(blocks[..., 2:] ^ np.uint8(0x80)))


def _q4_k(chunk: HostMatrix, out: Bytes) -> None:
    blocks = _tiles(chunk.data, chunk.cols // 256, 144)
    low, high, mixed = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    # Scales and minima 0–3 are whole in their bytes; 4–7 keep their top two bits in those bytes.
    scale = np.concatenate([low & 63, (mixed & 15) | (low >> 6) << 4], axis=-1)
    least = np.concatenate([high & 63, (mixed >> 4) | (high >> 6) << 4], axis=-1)
    least_scale = _scales(blocks, 2) ^ np.array([0, 0x80], np.uint8)  # the sign bit of −dmin
    at = _put(out, 0, _scales(blocks, 0))
    at = _put(out, at, least_scale)
    at = _put(out, at, scale.transpose(0, 2, 3, 1))
    at = _put(out, at, least.transpose(0, 2, 3, 1))
    _put(out, at, _nibbles(_tiles(integers(chunk).q, chunk.cols // 32, 32)))


def _q6_k(chunk: HostMatrix, out: Bytes) -> None:
    blocks = _tiles(chunk.data, chunk.cols // 256, 210)
    q = _tiles(integers(chunk).q, chunk.cols // 32, 32)
    high = (q >> 4).reshape(*q.shape[:3], 2, 4, 4)  # halves of a block, groups of four columns
    pairs = np.zeros((*q.shape[:3], 2, 4), np.uint8)
    for group in range(4):
        pairs |= high[..., group, :] << (2 * group)
    at = _put(out, 0, _scales(blocks, 208))
    at = _put(out, at, blocks[..., 192:208].transpose(0, 2, 3, 1))
    at = _put(out, at, _nibbles(q & np.uint8(15)))
    _put(out, at, pairs.transpose(0, 2, 3, 1, 4))


def _b8(chunk: HostMatrix, out: Bytes) -> None:
    blocks = integers(chunk)
    count = chunk.cols // blocks.block_len
    at = _put(out, 0, _tiles(blocks.scale, count).transpose(0, 2, 1))
    at = _put(out, at, _tiles(blocks.minimum, count).transpose(0, 2, 1))
    _put(out, at, _bytes(_tiles(blocks.q, chunk.cols // 32, 32)))


_REPACK: dict[str, Callable[[HostMatrix, Bytes], None]] = {
    "f32": _float,
    "f16": _float,
    "bf16": _float,
    "q4_0": _q4_0,
    "q4_1": _q4_1,
    "q8_0": _q8_0,
    "q4_k": _q4_k,
    "q6_k": _q6_k,
    "b8_32": _b8,
    "b8_16": _b8,
}
