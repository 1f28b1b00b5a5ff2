"""GGUF files: metadata and zero-copy weights of a mapped file."""

from __future__ import annotations

import os
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from atlas.errors import ModelFileError
from atlas.ops.blocks import HostMatrix
from atlas.weights.gguf_header import GgufTensor, parse_header
from atlas.weights.mapped_file import MappedFile
from atlas.weights.stored_tensor import check_formats, matrix_view, vector_copy

__all__ = ["GgufFile", "GgufTensor"]


class GgufFile:
    """An open GGUF file, version 2 or 3, little-endian.

    Opening checks the whole header, hostile or not, in time and memory bounded by its size
    (at most 64 MiB). A tensor of an unsupported type does not prevent it; asking for it does.

    Parameters
    ----------
    path : str or os.PathLike

    Attributes
    ----------
    path : str
    version : int
    metadata : dict of str to object
        int, float, bool or str; number arrays are NumPy arrays, string arrays lists. A string in
        an array that is not UTF-8 holds its invalid bytes as lone surrogates
        (``surrogateescape``); elsewhere strings must be UTF-8.
    tensors : dict of str to GgufTensor

    Raises
    ------
    ModelFileError
        The file is missing, damaged or hostile; the message names path, item, value and limit.
    UnsupportedModelError
        Version 1, big-endian, or one shard of a split file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = MappedFile(path)
        self.path = self._file.path
        try:
            header = parse_header(self._file)
        except ModelFileError:
            self._file.close()
            raise
        self.version = header.version
        self.metadata = header.metadata
        self.tensors = header.tensors

    @property
    def identity(self) -> tuple[tuple[str, int, int], ...]:
        """What tells these contents from others: path, size and time of change."""
        return (self._file.identity,)

    def matrix(self, name: str) -> HostMatrix:
        """A view of a tensor with two or more dimensions, the leading ones merged into rows.

        A stack of experts ``[E, N, K]`` is a matrix of E·N rows and K columns.
        """
        return matrix_view(self._file, self._tensor(name))

    def vector(self, name: str) -> NDArray[np.float32]:
        """A 1-D tensor, dequantised: a new float32 array."""
        return vector_copy(self._file, self._tensor(name))

    def check_supported(self) -> None:
        """Raise UnsupportedModelError naming every tensor type without support, with tensors."""
        check_formats(self.path, self.tensors.values())

    def release(self, name: str) -> None:
        """Drop a tensor's pages from memory (it was repacked); its views stay valid."""
        tensor = self._tensor(name)
        self._file.release(tensor.offset, tensor.nbytes)

    def close(self) -> None:
        """Close the file; views handed out stay valid. Idempotent."""
        self._file.close()

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"GgufFile({self.path!r}, {len(self.tensors)} tensors)"

    def _tensor(self, name: str) -> GgufTensor:
        try:
            return self.tensors[name]
        except KeyError:
            raise ModelFileError(
                f"{self.path}: no tensor {name} among its {len(self.tensors)}"
            ) from None
