"""Write small GGUF files, well-formed or deliberately wrong, byte by byte."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from atlas.ops.blocks import FORMATS

NUMBER_TYPES = {
    "u1": 0, "i1": 1, "u2": 2, "i2": 3, "u4": 4, "i4": 5, "f4": 6, "b1": 7,
    "u8": 10, "i8": 11, "f8": 12,
}  # fmt: skip
STRING, ARRAY = 8, 9


@dataclass(frozen=True)
class Raw:
    """A metadata value given as bytes: type number and content."""

    content: bytes


@dataclass(frozen=True)
class Tensor:
    """A tensor; `offset` (from the start of the data) is chosen by the writer if None."""

    name: str
    format: str
    shape: tuple[int, ...]
    data: bytes
    type_id: int | None = None
    offset: int | None = None


def tensor(name: str, values: np.ndarray[Any, Any], format: str, cols: int | None = None) -> Tensor:
    """A tensor from an array in the layout of ``HostMatrix.data``, or of any shape if a float."""
    shape = values.shape if cols is None else (*values.shape[:-1], cols)
    return Tensor(name, format, shape, values.tobytes())


def string(text: str | bytes) -> bytes:
    raw = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(content: object) -> bytes:
    """Type number and bytes of a metadata value; a Python int is a uint32, a float a float32."""
    match content:
        case Raw(raw):
            return raw
        case np.generic():  # before float: np.float64 is one
            return struct.pack("<I", NUMBER_TYPES[content.dtype.str[1:]]) + content.tobytes()
        case bool():
            return struct.pack("<I?", 7, content)
        case int():
            return struct.pack("<II", 4, content)
        case float():
            return struct.pack("<If", 6, content)
        case str() | bytes():
            return struct.pack("<I", STRING) + string(content)
    return struct.pack("<I", ARRAY) + array(content)


def array(content: object) -> bytes:
    """Element type, length and elements."""
    if isinstance(content, np.ndarray):
        type_id = NUMBER_TYPES[content.dtype.str[1:]]
        return struct.pack("<IQ", type_id, content.size) + content.tobytes()
    assert isinstance(content, list)
    if content and isinstance(content[0], str | bytes):
        items = b"".join(string(item) for item in content)
        return struct.pack("<IQ", STRING, len(content)) + items
    return struct.pack("<IQ", ARRAY, len(content)) + b"".join(array(item) for item in content)


def gguf_bytes(
    metadata: list[tuple[str, object]] | dict[str, object],
    tensors: list[Tensor],
    *,
    version: int = 3,
    alignment: int = 32,
    num_tensors: int | None = None,
    num_keys: int | None = None,
) -> bytes:
    """A whole file. Counts are those of the arguments unless given."""
    pairs = list(metadata.items()) if isinstance(metadata, dict) else metadata
    header = b"GGUF" + struct.pack(
        "<IQQ",
        version,
        len(tensors) if num_tensors is None else num_tensors,
        len(pairs) if num_keys is None else num_keys,
    )
    header += b"".join(string(key) + value(content) for key, content in pairs)
    data = b""
    for entry in tensors:
        data += bytes(-len(data) % alignment)
        type_id = FORMATS[entry.format].ggml_type if entry.type_id is None else entry.type_id
        offset = len(data) if entry.offset is None else entry.offset
        header += string(entry.name) + struct.pack("<I", len(entry.shape))
        header += b"".join(struct.pack("<Q", size) for size in reversed(entry.shape))
        header += struct.pack("<IQ", type_id, offset)
        data += entry.data
    return header + bytes(-len(header) % alignment) + data


def random_tensor(name: str, format: str, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Random bytes of the right number; quantised scales may be any float16."""
    layout = FORMATS[format]
    nbytes = prod(shape) // layout.block_len * layout.block_bytes
    return Tensor(name, format, shape, np.random.default_rng(seed).bytes(nbytes))
