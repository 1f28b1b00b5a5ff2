"""The C ABI called from Python through declarations taken from the header."""

from __future__ import annotations

from typing import Any

import cffi
import pytest

from tests.capi import abi
from tests.capi.programs import library

DECLARED = abi.cffi_declarations.read(abi.HEADER)

ffi: Any = cffi.FFI()
ffi.cdef(
    DECLARED.types + "".join(f"{f.result} {f.name}({f.parameters});\n" for f in DECLARED.functions)
)
lib: Any = ffi.dlopen(str(library()))


class CallError(Exception):
    """A call that returned a status other than 0."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{name_of(status)}: {message}")
        self.status, self.message = status, message


def name_of(status: int) -> str:
    """A status without its prefix."""
    return ffi.string(lib.atlas_status_name(status)).decode().removeprefix("ATLAS_")


def call(name: str, *arguments: Any) -> None:
    """Call a function and raise what it reports."""
    status = getattr(lib, f"atlas_{name}")(*arguments)
    if status:
        raise CallError(status, ffi.string(lib.atlas_error_message()).decode())


def make(kind: str, function: str, *arguments: Any) -> Any:
    """A new handle: the last parameter of ``function``."""
    out = ffi.new(f"atlas_{kind} **")
    call(function, *arguments, out)
    return out[0]


def ids(values: Any) -> Any:
    """A C array of ids."""
    return ffi.new("int32_t[]", list(values))


def read_ids(function: str, *arguments: Any) -> list[int]:
    """What a function with (buffer, capacity, &count) at its end gives, by two calls."""
    count = ffi.new("size_t *")
    call(function, *arguments, ffi.NULL, 0, count)
    out = ffi.new("int32_t[]", count[0] + 1)
    call(function, *arguments, out, count[0], count)
    return list(out[0 : count[0]])


def read_text(function: str, *arguments: Any) -> str:
    """The same for text."""
    count = ffi.new("size_t *")
    call(function, *arguments, ffi.NULL, 0, count)
    out = ffi.new("char[]", count[0] + 1)
    call(function, *arguments, out, count[0] + 1, count)
    return ffi.string(out).decode()


def struct(kind: str, **members: Any) -> Any:
    """A parameter struct, as its initialiser leaves it, with some members set."""
    made = ffi.new(f"atlas_{kind} *")
    made.struct_size = ffi.sizeof(f"atlas_{kind}")
    if kind == "request_params":
        made.text_len = ffi.cast("size_t", -1)
    for name, value in members.items():
        setattr(made, name, value)
    return made


def info(kind: str, handle: Any) -> Any:
    """What a get_info function fills."""
    made = struct(f"{kind}_info")
    call(f"{kind}_get_info", handle, made)
    return made


def is_recurrent(engine: Any) -> bool:
    """Whether an engine's model has a state that dropping positions does not undo."""
    has = ffi.new("int32_t *")
    call("engine_has", engine, b"recurrent", has)
    return bool(has[0])


def mark(engine: Any, sequence: Any) -> None:
    """Let :func:`rewind` come back to where a sequence stands."""
    if is_recurrent(engine):
        call("sequence_save_snapshot", sequence, 2)


def rewind(engine: Any, sequence: Any, length: int) -> None:
    """Back to where ``mark`` was called."""
    if is_recurrent(engine):
        with pytest.raises(CallError, match=r"SEQUENCE_STATE: .* restore a snapshot first"):
            call("sequence_rewind", sequence, length)
        call("sequence_restore_snapshot", sequence, 2)
    call("sequence_rewind", sequence, length)
