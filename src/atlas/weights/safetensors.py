"""Hugging Face folders: zero-copy weights of one or several mapped safetensors files."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from math import prod
from types import TracebackType
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from atlas.errors import ModelFileError
from atlas.ops.blocks import FORMATS, HostMatrix
from atlas.weights.mapped_file import MappedFile
from atlas.weights.stored_tensor import check_formats, matrix_view, vector_copy

MAX_HEADER_BYTES = 32 << 20  # a table of 90,000 tensors takes about 12 MB
MAX_JSON_BYTES = 16 << 20
MAX_DIMS = 8
_DTYPES = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class SafetensorsTensor:
    """Where a tensor lies in a folder.

    Parameters
    ----------
    name : str
    format : str
        ``f32``, ``f16``, ``bf16``, or the file's name of a dtype that is not supported: ``I64``.
    shape : tuple of int
        Row-major.
    offset, nbytes : int
        Of the bytes, from the start of `file`.
    file : str
        File name inside the folder.
    """

    name: str
    format: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    file: str


class SafetensorsFolder:
    """The open weights of a folder with ``model.safetensors`` or its sharded form.

    With both ``model.safetensors`` and an index, the single file is read (as transformers does).
    A tensor of an unsupported dtype does not prevent opening; asking for it does.

    Parameters
    ----------
    path : str or os.PathLike
        The folder.

    Attributes
    ----------
    path : str
    tensors : dict of str to SafetensorsTensor

    Raises
    ------
    ModelFileError
        Folder, index or a shard is missing, damaged or hostile, or they contradict each other.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.tensors: dict[str, SafetensorsTensor] = {}
        self._files: dict[str, MappedFile] = {}
        try:
            if os.path.isfile(os.path.join(self.path, _SINGLE)):
                self._add(_SINGLE)
            elif os.path.isfile(os.path.join(self.path, _INDEX)):
                self._add_shards()
            else:
                raise ModelFileError(
                    f"{self.path}: no safetensors weights; needs {_SINGLE} or {_INDEX}"
                )
        except ModelFileError:
            self.close()
            raise

    @property
    def identity(self) -> tuple[tuple[str, int, int], ...]:
        """What tells these contents from others: path, size and time of change of each file."""
        return tuple(self._files[name].identity for name in sorted(self._files))

    def matrix(self, name: str) -> HostMatrix:
        """A view of a tensor with two or more dimensions, the leading ones merged into rows.

        Copied where the file does not align the tensor to its element size.
        """
        tensor = self._tensor(name)
        return matrix_view(self._files[tensor.file], tensor)

    def vector(self, name: str) -> NDArray[np.float32]:
        """A 1-D tensor as a new float32 array."""
        tensor = self._tensor(name)
        return vector_copy(self._files[tensor.file], tensor)

    def check_supported(self) -> None:
        """Raise UnsupportedModelError naming every dtype without support, with tensors."""
        check_formats(self.path, self.tensors.values())

    def release(self, name: str) -> None:
        """Drop a tensor's pages from memory (it was repacked); its views stay valid."""
        tensor = self._tensor(name)
        self._files[tensor.file].release(tensor.offset, tensor.nbytes)

    def close(self) -> None:
        """Close the files; views handed out stay valid. Idempotent."""
        for file in self._files.values():
            file.close()

    def __enter__(self) -> SafetensorsFolder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"SafetensorsFolder({self.path!r}, {len(self.tensors)} tensors)"

    def _tensor(self, name: str) -> SafetensorsTensor:
        try:
            return self.tensors[name]
        except KeyError:
            raise ModelFileError(
                f"{self.path}: no tensor {name} among its {len(self.tensors)}"
            ) from None

    def _add(self, file_name: str) -> list[SafetensorsTensor]:
        file = MappedFile(os.path.join(self.path, file_name))
        self._files[file_name] = file
        tensors = _read_table(file, file_name)
        _check_with_library(file.path, {tensor.name for tensor in tensors})
        for tensor in tensors:
            if tensor.name in self.tensors:
                raise ModelFileError(
                    f"{self.path}: tensor {tensor.name} is in {self.tensors[tensor.name].file} "
                    f"and in {file_name}; allowed: one file"
                )
            self.tensors[tensor.name] = tensor
        return tensors

    def _add_shards(self) -> None:
        index_path = os.path.join(self.path, _INDEX)
        weight_map = read_json(index_path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelFileError(
                f"{index_path}: weight_map is {_short(weight_map)}; "
                "needs an object of tensor name to file name"
            )
        for name, file_name in weight_map.items():
            if not _is_plain_name(file_name):
                raise ModelFileError(
                    f"{index_path}: tensor {name} is in {_short(file_name)}; allowed: the name "
                    "of a .safetensors file in the same folder"
                )
        for file_name in sorted(set(weight_map.values())):
            for tensor in self._add(file_name):
                if weight_map.get(tensor.name) != file_name:
                    raise ModelFileError(
                        f"{index_path}: {file_name} holds tensor {tensor.name}, which the index "
                        f"places in {weight_map.get(tensor.name, 'no file')}"
                    )
        for name, file_name in weight_map.items():
            if name not in self.tensors:
                raise ModelFileError(f"{index_path}: tensor {name} is not in {file_name}")


def read_json(path: str | os.PathLike[str], max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Read a JSON object such as ``config.json``.

    Raises
    ------
    ModelFileError
        Missing, empty, longer than `max_bytes`, not UTF-8 or JSON, nested too deeply, a key
        twice in one object, or not an object.
    """
    file = MappedFile(path)
    try:
        if file.size > max_bytes:
            raise ModelFileError(f"{file.path}: {file.size} bytes; allowed: at most {max_bytes}")
        return _parse_object(file.buffer[:], file.path)
    finally:
        file.close()


def _parse_object(text: bytes, path: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        parsed: dict[str, Any] = {}
        for key, value in pairs:
            if key in parsed:
                raise ModelFileError(f"{path}: key {_short(key)} appears twice in one object")
            parsed[key] = value
        return parsed

    try:
        parsed = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except ValueError as error:  # not UTF-8, not JSON, or a number of too many digits
        raise ModelFileError(f"{path}: not valid JSON: {error}") from error
    except RecursionError:
        raise ModelFileError(f"{path}: JSON nested too deeply") from None
    if not isinstance(parsed, dict):
        raise ModelFileError(f"{path}: holds {_short(parsed)}; needs a JSON object")
    return parsed


def _read_table(file: MappedFile, file_name: str) -> list[SafetensorsTensor]:
    """The tensor table of one file: tensors that tile its data without hole or overlap."""
    if file.size < 8:
        raise ModelFileError(f"{file.path}: {file.size} bytes; a safetensors file has 8 or more")
    header_bytes = int.from_bytes(file.buffer[:8], "little")
    limit = min(MAX_HEADER_BYTES, file.size - 8)
    if header_bytes > limit:
        raise ModelFileError(
            f"{file.path}: the header length is {header_bytes}; allowed: at most {limit}"
        )
    data_start = 8 + header_bytes
    header = _parse_object(file.buffer[8:data_start], file.path)
    header.pop("__metadata__", None)
    tensors = [
        _read_entry(file, file_name, data_start, name, entry) for name, entry in header.items()
    ]
    end = data_start
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.nbytes)):
        if tensor.offset != end:
            raise ModelFileError(
                f"{file.path}: tensor {tensor.name} begins at byte {tensor.offset}; "
                f"allowed: {end}, where the one before it ends"
            )
        end += tensor.nbytes
    if end != file.size:
        raise ModelFileError(f"{file.path}: tensors end at byte {end}, the file at {file.size}")
    return tensors


def _read_entry(
    file: MappedFile, file_name: str, data_start: int, name: str, entry: object
) -> SafetensorsTensor:
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, span = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    data_bytes = file.size - data_start
    if (
        not name.isprintable()
        or not isinstance(dtype, str)
        or not _are_sizes(shape, MAX_DIMS)
        or not _are_sizes(span, 2)
        or len(span) != 2
        or not span[0] <= span[1] <= data_bytes
    ):
        raise ModelFileError(
            f"{file.path}: tensor {_short(name)} is {_short(entry)}; needs dtype, shape (at most "
            f"{MAX_DIMS} sizes) and data_offsets [begin, end] within {data_bytes} bytes"
        )
    begin, end = span
    format = _DTYPES.get(dtype, dtype.upper())
    layout = FORMATS.get(format)
    if layout is not None and prod(shape) * layout.block_bytes != end - begin:
        raise ModelFileError(
            f"{file.path}: tensor {name} {dtype} {shape} has {end - begin} bytes; "
            f"needs {prod(shape) * layout.block_bytes}"
        )
    return SafetensorsTensor(name, format, tuple(shape), data_start + begin, end - begin, file_name)


def _check_with_library(path: str, names: set[str]) -> None:
    """A second opinion on the header, from the library that defines the format."""
    try:
        with safe_open(path, framework="numpy") as opened:
            found = set(opened.keys())
    except (SafetensorError, OSError) as error:
        raise ModelFileError(f"{path}: {error}") from error
    if found != names:
        raise ModelFileError(f"{path}: the header can be read in two ways: {_short(names ^ found)}")


def _are_sizes(value: object, max_len: int) -> TypeGuard[list[int]]:
    return (
        isinstance(value, list)
        and len(value) <= max_len
        and all(type(size) is int and 0 <= size < 2**63 for size in value)
    )


def _is_plain_name(value: object) -> bool:
    return (
        isinstance(value, str)
        and value.endswith(".safetensors")
        and not any(letter in value for letter in "/\\\0")
    )


def _short(value: object) -> str:
    """A value of unknown size, fit for a message."""
    text = repr(value)
    return text if len(text) <= 100 else text[:100] + "…"
