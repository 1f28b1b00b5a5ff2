"""Weight matrices as they lie in device memory: which format, how many bytes, which row where.

A matrix keeps the order of a checkpoint: rows of K weights, one under the other. bf16 stays as it
is, and so do the blocks of Q8_0, Q4_0 and Q4_1; every other format becomes bf16 when it is loaded,
rounded to nearest even, which ``MatrixLayout.is_converted`` discloses. A gate and its up projection
are stacked as any matrices are: all gate rows, then all up rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from atlas.backends.cuda.array import DeviceArray
from atlas.backends.cuda.check import require
from atlas.errors import ShapeError
from atlas.ops.blocks import FORMATS, HostMatrix, dequantize

_KEPT = ("q8_0", "q4_0", "q4_1")
_PAIR = 64  # weights in the two blocks that a line of the quantised step GEMM holds
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
    def row_bytes(self) -> int:
        """Bytes from a row to the next."""
        layout = FORMATS[self.format]
        return layout.row_elements(self.cols) * layout.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes in device memory."""
        return self.rows * self.row_bytes

    @property
    def is_quantized(self) -> bool:
        """Whether rows are blocks of integers."""
        return FORMATS[self.format].is_quantized

    @property
    def is_converted(self) -> bool:
        """Whether weights were rounded to another format than the file's."""
        return self.format != self.source_format


@dataclass(frozen=True, slots=True, eq=False)
class DeviceMatrix:
    """A weight matrix of the device; ``data`` is uint8 [rows, row_bytes]."""

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
        """Whether rows are blocks of integers."""
        return self.layout.is_quantized

    @property
    def values(self) -> DeviceArray:
        """bfloat16 [rows, cols] of a matrix that is not quantised."""
        if self.format != "bf16":
            raise ShapeError(f"a {self.format} matrix has no elements; allowed: bf16")
        data = self.data
        strides = (self.layout.row_bytes, 2)
        return DeviceArray(data.address, (self.rows, self.cols), "bfloat16", strides, data.owner)


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
    is_kept = first.format in _KEPT and first.cols % _PAIR == 0 and groups == 1
    format = first.format if is_kept else "bf16"
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


def host_rows(part: HostMatrix, first: int, stop: int, matrix: MatrixLayout) -> NDArray[np.uint8]:
    """Rows of a source as they lie on the device, uint8 [stop − first, row_bytes].

    A view where the bytes are the file's.
    """
    rows = part.row_slice(first, stop)
    if part.format == matrix.format:
        return _as_bytes(rows.data)
    return _as_bytes(to_bf16(dequantize(rows)))


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
