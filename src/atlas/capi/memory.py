"""Reading and writing the memory that C passes in."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from atlas.capi._binding import ffi
from atlas.capi.calls import BufferTooSmallError
from atlas.errors import InvalidArgumentError, ShapeError

Ints = NDArray[np.int32]

NUL_TERMINATED = (1 << 64) - 1
MAX_TEXT_BYTES = 1 << 28
MAX_NAME_BYTES = 1 << 16
MAX_PROMPT_IDS = 1 << 26
MAX_STRUCT_BYTES = 1 << 12
NULL = ffi.NULL
_NUMBER = ffi.typeof("uintptr_t")
_cast = ffi.cast


def number(pointer: Any) -> int:
    """A pointer's value, which for a handle is its token."""
    return int(_cast(_NUMBER, pointer))


def require(pointer: Any, name: str) -> Any:
    """Raise when a pointer is NULL."""
    if pointer == NULL:
        raise InvalidArgumentError(f"{name} is NULL")
    return pointer


# -- in ---------------------------------------------------------------------------------------


def read_text(pointer: Any, length: int, name: str) -> str:
    """UTF-8 text of so many bytes, or up to its NUL."""
    if length == 0:
        return ""
    require(pointer, name)
    if length == NUL_TERMINATED:
        data = ffi.string(pointer, MAX_TEXT_BYTES + 1)
        length = len(data)
    elif length <= MAX_TEXT_BYTES:
        data = ffi.unpack(pointer, length)
    if length > MAX_TEXT_BYTES:
        raise InvalidArgumentError(f"{name} has {length} bytes; allowed: up to {MAX_TEXT_BYTES}")
    return _decoded(data, name)


def read_name(pointer: Any, name: str) -> str:
    """A short NUL-terminated text: a key, a path."""
    data = ffi.string(require(pointer, name), MAX_NAME_BYTES)
    if len(data) == MAX_NAME_BYTES:
        raise InvalidArgumentError(f"{name} has no NUL in its first {MAX_NAME_BYTES} bytes")
    return _decoded(data, name)


def _decoded(data: bytes, name: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(
            f"{name} is not UTF-8: byte 0x{data[error.start]:02X} at {error.start}"
        ) from None


def read_ids(pointer: Any, count: int, limit: int, name: str) -> Ints:
    """A copy of ``count`` ids; more than ``limit`` are refused before memory is touched."""
    if count > limit:
        raise ShapeError(f"{name} has {count} ids; allowed: up to {limit}")
    if count == 0:
        return np.empty(0, np.int32)
    return np.frombuffer(ffi.buffer(require(pointer, name), 4 * count), np.int32).copy()


def read_flags(flags: int, allowed: int, name: str = "flags") -> int:
    """Flags without bits that this function does not know."""
    if flags & ~allowed:
        raise InvalidArgumentError(f"{name} is 0x{flags:x}; allowed: bits of 0x{allowed:x}")
    return flags


def read_struct(pointer: Any, type_name: str, name: str, smallest: str) -> Any:
    """A copy of a parameter struct, whatever the size that the caller knows.

    Parameters
    ----------
    smallest : str
        Last member that every version of the struct has.
    """
    size = struct_size(pointer, type_name, name, smallest)
    known = ffi.sizeof(type_name)
    data = bytes(ffi.buffer(ffi.cast("char *", pointer), size))
    if any(data[known:]):
        raise InvalidArgumentError(
            f"{name} has members of a newer atlas.h set (struct_size {size}, known here: {known})"
        )
    copy = ffi.new(f"{type_name} *")
    ffi.memmove(copy, data, min(size, known))
    return copy


def struct_size(pointer: Any, type_name: str, name: str, smallest: str) -> int:
    """The caller's ``struct_size``, checked."""
    require(pointer, name)
    size = int(ffi.cast("size_t *", pointer)[0])
    kind = ffi.typeof(type_name)
    last = dict(kind.fields)[smallest]
    least = last.offset + ffi.sizeof(last.type)
    if not least <= size <= MAX_STRUCT_BYTES:
        raise InvalidArgumentError(
            f"{name}->struct_size is {size}; allowed: {least} … {MAX_STRUCT_BYTES} "
            f"(call {type_name}_init first)"
        )
    return size


# -- out --------------------------------------------------------------------------------------


def require_buffer(buffer: Any, capacity: int, count: Any) -> None:
    """Check the three parts of an output buffer before any work."""
    require(count, "the count's place")
    if buffer == NULL and capacity:
        raise InvalidArgumentError(f"buffer is NULL, capacity {capacity}; allowed: 0 with NULL")


def fits(needed: int, buffer: Any, capacity: int, count: Any, unit: str) -> bool:
    """Set the count; False when only the count was asked for."""
    if buffer == NULL:
        count[0] = needed
        return False
    room = capacity - 1 if unit == "bytes" else capacity
    count[0] = needed
    if needed > room:
        raise BufferTooSmallError(f"the buffer has room for {room} {unit}; needed: {needed}")
    return True


def write_text(text: str, buffer: Any, capacity: int, length: Any) -> bool:
    """Text and its NUL; True when it was written."""
    data = text.encode("utf-8", "surrogatepass")
    if not fits(len(data), buffer, capacity, length, "bytes"):
        return False
    ffi.memmove(buffer, data + b"\0", len(data) + 1)
    return True


def write_array(array: NDArray[Any], buffer: Any, capacity: int, count: Any, unit: str) -> bool:
    """A contiguous array; True when it was written."""
    if not fits(array.size, buffer, capacity, count, unit):
        return False
    if array.size:
        ffi.memmove(buffer, ffi.from_buffer(np.ascontiguousarray(array)), array.nbytes)
    return True


def write_struct(values: Any, pointer: Any, size: int) -> None:
    """Copy a filled struct into the caller's, as much as its size covers; zero what is beyond."""
    known = ffi.sizeof(ffi.typeof(values).item)
    values.struct_size = size
    ffi.memmove(pointer, values, min(size, known))
    if size > known:
        ffi.memmove(ffi.cast("char *", pointer) + known, bytes(size - known), size - known)
