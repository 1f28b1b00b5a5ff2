"""Parse the header of a GGUF file: one pass, every count checked against the bytes left.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. A header is hostile until
proven otherwise: no loop runs and no array is made before its length is known to fit.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from typing import Any, NoReturn

import numpy as np

from atlas.errors import ModelFileError, UnsupportedModelError
from atlas.ops.blocks import FORMATS, name_of_ggml
from atlas.weights.mapped_file import MappedFile

MAX_HEADER_BYTES = 64 << 20  # a vocabulary of 262,144 tokens takes about 6 MB
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_NAME_BYTES = 65535
MAX_ARRAYS = 1 << 16
MAX_ARRAY_DEPTH = 4
MAX_DIMS = 4
MAX_ALIGNMENT = 1 << 20

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", _BOOL: "?",
    10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_DTYPES = {type_id: np.dtype(code) for type_id, code in _SCALARS.items()}
_MIN_KEY_BYTES = 8 + 1 + 4 + 1  # length, one letter, type, smallest value
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8  # length, one letter, dims, one dim, type, offset


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies in the file.

    Parameters
    ----------
    name : str
    format : str
        Lower-case name of the ggml type, supported or not.
    shape : tuple of int
        Row-major: the reverse of ggml's dimensions, so the last one is contiguous.
    offset : int
        Of the first byte, from the start of the file.
    nbytes : int
        0 for a type whose block size is not known here.
    """

    name: str
    format: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What stands before the tensor data: version, metadata, tensor table."""

    version: int
    metadata: dict[str, object]
    tensors: dict[str, GgufTensor]


class _Cursor:
    """A position in the mapped header that never passes its end."""

    def __init__(self, file: MappedFile) -> None:
        self.path = file.path
        self.buffer = file.buffer
        self.position = 0
        self.end = min(file.size, MAX_HEADER_BYTES)
        self.num_arrays = 0

    def fail(self, message: str) -> NoReturn:
        raise ModelFileError(f"{self.path}: {message}")

    def need(self, nbytes: int, what: str) -> None:
        left = self.end - self.position
        if nbytes > left:
            limit = " of a header's 64 MiB" if self.end == MAX_HEADER_BYTES else ""
            self.fail(
                f"{what} at byte {self.position} needs {nbytes} bytes; {left}{limit} are left"
            )

    def integer(self, layout: struct.Struct, what: str) -> int:
        self.need(layout.size, what)
        (value,) = layout.unpack_from(self.buffer, self.position)
        self.position += layout.size
        return int(value)

    def count(self, what: str, maximum: int, min_bytes: int) -> int:
        count = self.integer(_U64, what)
        left = self.end - self.position
        if count > min(maximum, left // min_bytes):
            self.fail(
                f"{what} is {count}; allowed: 0 … {maximum}, and the {left} bytes left "
                f"hold at most {left // min_bytes}"
            )
        return count

    def string(self, what: str, max_bytes: int = MAX_HEADER_BYTES) -> str:
        length = self.integer(_U64, f"the length of {what}")
        if length > max_bytes:
            self.fail(f"{what} is {length} bytes long; allowed: at most {max_bytes}")
        self.need(length, what)
        start, self.position = self.position, self.position + length
        try:
            return self.buffer[start : self.position].decode()
        except UnicodeDecodeError as error:
            self.fail(f"{what} at byte {start} is not UTF-8: {error.reason}")

    def name(self, what: str) -> str:
        name = self.string(what, MAX_NAME_BYTES)
        if not name or not name.isprintable():
            self.fail(f"{what} is {name[:100]!r}; allowed: one or more printable characters")
        return name

    def value(self, key: str) -> object:
        type_id = self.integer(_U32, f"the type of {key}")
        if type_id == _STRING:
            return self.string(f"the value of {key}")
        if type_id == _ARRAY:
            return self.array(key, depth=1)
        return self.numbers(key, type_id, 1)[0].item()

    def array(self, key: str, depth: int) -> object:
        if depth > MAX_ARRAY_DEPTH:
            self.fail(f"{key} nests arrays deeper than {MAX_ARRAY_DEPTH}")
        self.num_arrays += 1
        if self.num_arrays > MAX_ARRAYS:
            self.fail(f"{key} brings the number of arrays above {MAX_ARRAYS}")
        type_id = self.integer(_U32, f"the element type of {key}")
        if type_id == _STRING:
            count = self.count(f"the length of {key}", MAX_HEADER_BYTES, 8)
            return self.strings(key, count)
        if type_id == _ARRAY:
            count = self.count(f"the length of {key}", MAX_HEADER_BYTES, 4 + 8)
            return [self.array(key, depth + 1) for _ in range(count)]
        itemsize = _DTYPES[type_id].itemsize if type_id in _DTYPES else 1
        count = self.count(f"the length of {key}", MAX_HEADER_BYTES, itemsize)
        return self.numbers(key, type_id, count)

    def numbers(self, key: str, type_id: int, count: int) -> np.ndarray[Any, Any]:
        if type_id not in _DTYPES:
            self.fail(f"{key} has value type {type_id}; allowed: 0 … 12")
        dtype = _DTYPES[type_id]
        self.need(count * dtype.itemsize, f"the value of {key}")
        start = self.position
        self.position += count * dtype.itemsize
        # A copy, so that metadata outlives the mapping.
        raw = self.buffer[start : self.position]
        if type_id == _BOOL and raw.strip(b"\0\1"):
            self.fail(f"{key} holds a boolean other than 0 and 1")
        return np.frombuffer(raw, dtype=dtype)

    def strings(self, key: str, count: int) -> list[str]:
        """A vocabulary, read in one tight loop.

        Tokens of byte-level vocabularies need not be UTF-8: an invalid byte becomes a lone
        surrogate, from which ``encode("utf-8", "surrogateescape")`` gives the byte back.
        """
        buffer, end, position = self.buffer, self.end, self.position
        unpack = _U64.unpack_from
        strings: list[str] = []
        for _ in range(count):
            stop = position + 8
            if stop <= end:
                (length,) = unpack(buffer, position)
                position, stop = stop, stop + length
            if stop > end:
                self.position = position
                self.need(stop - position, f"string {len(strings)} of {key}")
            strings.append(str(buffer[position:stop], "utf-8", "surrogateescape"))
            position = stop
        self.position = position
        return strings


def parse_header(file: MappedFile) -> GgufHeader:
    """Read and check everything before the tensor data.

    Raises
    ------
    ModelFileError
        Anything malformed: what, its value, what is allowed.
    UnsupportedModelError
        Version 1, a big-endian file, or one shard of a split file.
    """
    cursor = _Cursor(file)
    version = _read_version(cursor)
    num_tensors = cursor.count("the number of tensors", MAX_TENSORS, _MIN_TENSOR_BYTES)
    num_keys = cursor.count("the number of metadata keys", MAX_KEYS, _MIN_KEY_BYTES)

    metadata: dict[str, object] = {}
    for index in range(num_keys):
        key = cursor.name(f"metadata key {index}")
        if key in metadata:
            cursor.fail(f"metadata key {key} appears twice")
        metadata[key] = cursor.value(key)
    _check_not_split(cursor, metadata)
    alignment = _alignment(cursor, metadata)

    tensors: dict[str, GgufTensor] = {}
    for index in range(num_tensors):
        tensor = _read_tensor(cursor, index, alignment)
        if tensor.name in tensors:
            cursor.fail(f"tensor {tensor.name} appears twice")
        tensors[tensor.name] = tensor
    return GgufHeader(version, metadata, _place(cursor, tensors, alignment, file.size))


def _read_version(cursor: _Cursor) -> int:
    cursor.need(4, "the magic")
    magic = cursor.buffer[:4]
    if magic != b"GGUF":
        cursor.fail(f"not a GGUF file: it begins with {magic!r}, not b'GGUF'")
    cursor.position = 4
    version = cursor.integer(_U32, "the version")
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        shown = f"{swapped} in big-endian order" if swapped in (1, 2, 3) else str(version)
        raise UnsupportedModelError(
            f"{cursor.path}: GGUF version {shown}; supported: 2 and 3, little-endian"
        )
    return version


def _check_not_split(cursor: _Cursor, metadata: dict[str, object]) -> None:
    count = metadata.get("split.count", 0)
    if isinstance(count, int) and count > 1:
        raise UnsupportedModelError(
            f"{cursor.path}: one of {count} shards (split.count); supported: one file, "
            "as `llama-gguf-split --merge` makes it"
        )


def _alignment(cursor: _Cursor, metadata: dict[str, object]) -> int:
    alignment = metadata.get("general.alignment", 32)
    # A multiple of 8 keeps every element type aligned in memory.
    if (
        not isinstance(alignment, int)
        or not 8 <= alignment <= MAX_ALIGNMENT
        or alignment & (alignment - 1)
    ):
        cursor.fail(
            f"general.alignment is {alignment!r}; allowed: a power of two, 8 … {MAX_ALIGNMENT}"
        )
    return alignment


def _read_tensor(cursor: _Cursor, index: int, alignment: int) -> GgufTensor:
    """One row of the tensor table; its offset still counts from the start of the data."""
    name = cursor.name(f"the name of tensor {index}")
    num_dims = cursor.integer(_U32, f"the number of dimensions of {name}")
    if not 1 <= num_dims <= MAX_DIMS:
        cursor.fail(f"tensor {name} has {num_dims} dimensions; allowed: 1 … {MAX_DIMS}")
    dims = [cursor.integer(_U64, f"dimension {axis} of {name}") for axis in range(num_dims)]
    if 0 in dims:
        cursor.fail(f"tensor {name} has dimensions {dims}; allowed: 1 and more each")
    format = name_of_ggml(cursor.integer(_U32, f"the type of {name}"))
    offset = cursor.integer(_U64, f"the offset of {name}")
    if offset % alignment:
        cursor.fail(f"tensor {name} at offset {offset}; allowed: multiples of {alignment}")

    layout = FORMATS.get(format)
    if layout is None:
        return GgufTensor(name, format, tuple(reversed(dims)), offset, 0)
    if dims[0] % layout.block_len:
        cursor.fail(
            f"tensor {name} has rows of {dims[0]} {format} weights; "
            f"allowed: multiples of {layout.block_len}"
        )
    nbytes = prod(dims) // layout.block_len * layout.block_bytes
    return GgufTensor(name, format, tuple(reversed(dims)), offset, nbytes)


def _place(
    cursor: _Cursor, tensors: dict[str, GgufTensor], alignment: int, file_bytes: int
) -> dict[str, GgufTensor]:
    """The same table with offsets from the start of the file, proved inside it and disjoint."""
    data_start = -(-cursor.position // alignment) * alignment
    placed = {
        name: GgufTensor(
            name, tensor.format, tensor.shape, data_start + tensor.offset, tensor.nbytes
        )
        for name, tensor in tensors.items()
    }
    previous, previous_end = "the header", data_start
    for tensor in sorted(placed.values(), key=lambda tensor: tensor.offset):
        end = tensor.offset + tensor.nbytes
        if end > file_bytes or tensor.offset >= file_bytes:
            cursor.fail(
                f"tensor {tensor.name} {list(tensor.shape)} ({tensor.format}) takes bytes "
                f"{tensor.offset} … {end}; the file has {file_bytes}"
            )
        if tensor.offset < previous_end:
            cursor.fail(
                f"tensor {tensor.name} at byte {tensor.offset} overlaps {previous}, "
                f"which ends at byte {previous_end}"
            )
        previous, previous_end = tensor.name, end
    return placed
