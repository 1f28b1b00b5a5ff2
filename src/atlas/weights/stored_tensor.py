"""What the file formats share: a named tensor at a place in a mapped file, and reading it."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from atlas.errors import ModelFileError, UnsupportedModelError
from atlas.ops.blocks import FORMATS, BlockFormat, HostMatrix, dequantize
from atlas.weights.mapped_file import MappedFile


class StoredTensor(Protocol):
    """A tensor in a file: `shape` is row-major, `offset` in bytes from the file's start."""

    @property
    def name(self) -> str: ...
    @property
    def format(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def offset(self) -> int: ...


def matrix_view(file: MappedFile, tensor: StoredTensor) -> HostMatrix:
    """A tensor of two or more dimensions, without a copy; leading ones are merged into rows.

    Raises
    ------
    UnsupportedModelError
        The tensor's type has no :data:`~atlas.ops.blocks.FORMATS` entry.
    ModelFileError
        Fewer than two dimensions, or an empty one.
    """
    layout = _supported_format(file, tensor)
    if len(tensor.shape) < 2 or 0 in tensor.shape:
        raise ModelFileError(
            f"{file.path}: tensor {tensor.name} has shape {list(tensor.shape)}; "
            "a matrix needs 2 or more dimensions, none of them 0"
        )
    rows, cols = prod(tensor.shape[:-1]), tensor.shape[-1]
    row_elements = layout.row_elements(cols)
    data = file.array(layout.dtype, tensor.offset, rows * row_elements)
    return HostMatrix(layout.name, rows, cols, data.reshape(rows, row_elements))


def vector_copy(file: MappedFile, tensor: StoredTensor) -> NDArray[np.float32]:
    """A tensor as a new float32 array, flat.

    A quantised tensor must have one dimension. Errors as for :func:`matrix_view`.
    """
    layout = _supported_format(file, tensor)
    if not tensor.shape or 0 in tensor.shape or (layout.is_quantized and len(tensor.shape) > 1):
        raise ModelFileError(
            f"{file.path}: tensor {tensor.name} ({tensor.format}) has shape {list(tensor.shape)}; "
            "a vector needs 1 dimension that is not 0, or several of floats"
        )
    length = prod(tensor.shape)
    data = file.array(layout.dtype, tensor.offset, layout.row_elements(length))
    return dequantize(HostMatrix(layout.name, 1, length, data[None])).reshape(length)


def check_formats(path: str, tensors: Iterable[StoredTensor]) -> None:
    """Raise UnsupportedModelError naming every tensor type without support, and its tensors."""
    names: dict[str, list[str]] = {}
    for tensor in tensors:
        if tensor.format not in FORMATS:
            names.setdefault(tensor.format, []).append(tensor.name)
    if names:
        found = "; ".join(
            f"{format} in {len(users)} tensors ({', '.join(users[:3])}"
            f"{', …' if len(users) > 3 else ''})"
            for format, users in names.items()
        )
        raise UnsupportedModelError(
            f"{path}: tensor types that are not supported: {found}; supported: {', '.join(FORMATS)}"
        )


def _supported_format(file: MappedFile, tensor: StoredTensor) -> BlockFormat:
    layout = FORMATS.get(tensor.format)
    if layout is None:
        raise UnsupportedModelError(
            f"{file.path}: tensor {tensor.name} has type {tensor.format}, which is not "
            f"supported; supported: {', '.join(FORMATS)}"
        )
    return layout
