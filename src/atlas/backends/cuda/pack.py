"""Weight matrices as they lie in device memory: which format, how many bytes, which row where.

bf16 keeps the order of a checkpoint, rows of K weights one under the other; other float formats and
experts become bf16 when they are loaded, rounded to nearest even, which
``MatrixLayout.is_converted`` discloses. Quantised weights keep their integers and scales, in the
units of 32 rows that ``atlas_kernels.quant_plan`` describes. A gate and its up projection are
stacked as any matrices are: all gate rows, then all up rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from atlas_kernels.quant_plan import CELL_ROWS, CELLS, WIDENED, num_units, unit_bytes
from numpy.typing import NDArray

from atlas.backends.cuda.array import DeviceArray
from atlas.backends.cuda.check import require
from atlas.backends.cuda.pack_cells import pack_units
from atlas.errors import ShapeError
from atlas.ops.blocks import HostMatrix, dequantize

_BF16_ALIGN = 8  # weights in 16 bytes, the unit of TMA and cp.async


class Shaped(Protocol):
    """What a layout depends on; a ``HostMatrix`` is one."""

    @property
    def format(self) -> str: ...
    @property
    def rows(self) -> int: ...
    @property
    def cols(self) -> int: ...


@dataclass(frozen=True, slots=True)
class MatrixLayout:
    """A matrix [rows, cols] on the device.

    ``format`` is what lies there, ``source_format`` what the file holds; ``groups`` counts the
    matrices stacked in it (experts).
    """

    format: str
    source_format: str
    rows: int
    cols: int
    groups: int = 1

    @property
    def shape(self) -> tuple[int, int]:
        """Pieces that lie one after another, and the bytes of each: rows, or units of 32 rows."""
        if self.is_quantized:
            return num_units(self.rows), unit_bytes(self.format, self.cols)
        return self.rows, 2 * self.cols

    @property
    def piece_rows(self) -> int:
        """Rows in a piece."""
        return CELL_ROWS if self.is_quantized else 1

    @property
    def nbytes(self) -> int:
        """Bytes in device memory."""
        pieces, piece_bytes = self.shape
        return pieces * piece_bytes

    @property
    def is_quantized(self) -> bool:
        """Whether weights are integers with scales."""
        return self.format in CELLS

    @property
    def is_converted(self) -> bool:
        """Whether weights were rounded to another format than the file's."""
        return not self.is_quantized and self.format != self.source_format


@dataclass(frozen=True, slots=True, eq=False)
class DeviceMatrix:
    """A weight matrix of the device; ``data`` is uint8 of the layout's shape."""

    layout: MatrixLayout
    data: DeviceArray

    @property
    def format(self) -> str:
        """What lies in device memory."""
        return self.layout.format

    @property
    def source_format(self) -> str:
        """What the file holds."""
        return self.layout.source_format

    @property
    def rows(self) -> int:
        """Output features, of all groups together."""
        return self.layout.rows

    @property
    def cols(self) -> int:
        """Input features."""
        return self.layout.cols

    @property
    def groups(self) -> int:
        """Matrices stacked in it."""
        return self.layout.groups

    @property
    def nbytes(self) -> int:
        """Bytes in device memory."""
        return self.layout.nbytes

    @property
    def is_quantized(self) -> bool:
        """Whether weights are integers with scales."""
        return self.layout.is_quantized

    @property
    def values(self) -> DeviceArray:
        """bfloat16 [rows, cols] of a matrix that is not quantised."""
        if self.format != "bf16":
            raise ShapeError(f"a {self.format} matrix has no elements; allowed: bf16")
        data = self.data
        shape, strides = (self.rows, self.cols), (2 * self.cols, 2)
        return DeviceArray(data.address, shape, "bfloat16", strides, data.owner)


def layout(parts: Sequence[Shaped], groups: int = 1) -> MatrixLayout:
    """The layout of matrices of one format and width stacked into one.

    Parameters
    ----------
    parts : sequence
        With ``format``, ``rows`` and ``cols``.
    groups : int
        Each part holds this many matrices one under the other (experts); group g of the result
        stacks group g of every part.

    Raises
    ------
    ShapeError
        The parts differ in format or columns, or do not divide into the groups.
    CapabilityError
        No kernel takes rows of this length.
    """
    first = parts[0]
    if any((part.format, part.cols) != (first.format, first.cols) for part in parts):
        raise ShapeError(
            "stacked matrices must agree in format and columns, got "
            + ", ".join(f"{part.format} [{part.rows}, {part.cols}]" for part in parts)
        )
    if any(part.rows % groups for part in parts):
        raise ShapeError(f"{[part.rows for part in parts]} rows do not divide into {groups} groups")
    kept = WIDENED.get(first.format, first.format)
    format = kept if kept in CELLS and groups == 1 else "bf16"
    require(
        first.cols % _BF16_ALIGN == 0,
        "a matrix's number of columns", first.cols, f"multiples of {_BF16_ALIGN}",
    )  # fmt: skip
    return MatrixLayout(format, first.format, sum(part.rows for part in parts), first.cols, groups)


@dataclass(frozen=True, slots=True)
class RowRun:
    """Rows ``first`` … ``first + count − 1`` of part ``part``, which lie at ``target`` in all."""

    part: int
    first: int
    count: int
    target: int


def row_runs(part_rows: Sequence[int], groups: int = 1) -> list[RowRun]:
    """Where the rows of stacked matrices go, targets ascending."""
    runs, target = [], 0
    for group in range(groups):
        for part, rows in enumerate(part_rows):
            each = rows // groups
            runs.append(RowRun(part, group * each, each, target))
            target += each
    return runs


def host_rows(part: HostMatrix, first: int, stop: int) -> NDArray[np.uint8]:
    """Rows of a source in bf16, uint8 [stop − first, 2 · cols]; a view where the file has bf16."""
    rows = part.row_slice(first, stop)
    if part.format == "bf16":
        return _as_bytes(rows.data)
    return _as_bytes(to_bf16(dequantize(rows)))


def host_units(
    parts: Sequence[HostMatrix], first: int, stop: int, matrix: MatrixLayout
) -> NDArray[np.uint8]:
    """Units of stacked, quantised matrices as they lie on the device, uint8 [stop − first, bytes].

    A unit may hold the last rows of one part and the first of the next.
    """
    begin, end, base = first * CELL_ROWS, min(stop * CELL_ROWS, matrix.rows), 0
    pieces = []
    for part in parts:
        low, high = max(begin - base, 0), min(end - base, part.rows)
        if low < high:
            pieces.append(part.data[low:high])
        base += part.rows
    data = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    chunk = HostMatrix(parts[0].format, len(data), matrix.cols, np.ascontiguousarray(data))
    return pack_units(chunk, matrix.format)


def to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of float32 values rounded to bfloat16, to nearest even; a NaN stays one."""
    bits = values.view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    if is_nan.any():
        rounded[is_nan] = 0x7FC0
    return rounded


def _as_bytes(data: NDArray[Any]) -> NDArray[np.uint8]:
    return data.view(np.uint8).reshape(len(data), -1)
