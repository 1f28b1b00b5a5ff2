"""The way of a call from C: find the function, run it, and say how it went."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from atlas.capi._binding import ffi, lib
from atlas.errors import AtlasError, Cancelled, OutOfMemoryError

_log = logging.getLogger("atlas")
_PREFIX = "python_"

Function = TypeVar("Function", bound=Callable[..., None])

FUNCTIONS: dict[str, Callable[..., None]] = {}
"""What C's calls run, by the name in ``atlas.h`` without ``atlas_``."""


class BufferTooSmallError(AtlasError):
    """The caller's buffer is too small; the count was set, nothing else changed."""

    code = lib.ATLAS_ERROR_BUFFER_TOO_SMALL


def exported(function: Function) -> Function:
    """Make a function the implementation of the function of ``atlas.h`` with its name.

    It takes the C arguments as cffi gives them, returns nothing, and raises.
    """
    name = function.__name__
    FUNCTIONS[name] = function
    functions = FUNCTIONS

    def entry(call: Any, *arguments: Any) -> None:
        try:
            functions[name](*arguments)
            call.status = 0
        except BaseException as error:
            # The last frame before C: whatever happened becomes this call's status.
            _report(call, error)

    ffi.def_extern(name=_PREFIX + name, onerror=_ignore)(entry)
    return function


def require_complete() -> None:
    """Raise unless every function of the header has an implementation."""
    names = {name.removeprefix(_PREFIX) for name in dir(lib) if name.startswith(_PREFIX)}
    missing = sorted(names - FUNCTIONS.keys())
    if missing or not names:
        raise ImportError(f"not implemented: {', '.join(missing) or 'anything'}")


def status_of(error: BaseException) -> tuple[int, str]:
    """The status and message of an exception."""
    if isinstance(error, AtlasError):
        return error.code, str(error) or type(error).__name__
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, ImportError):
        return lib.ATLAS_ERROR_RUNTIME, text
    if isinstance(error, MemoryError):
        return OutOfMemoryError.code, text
    if isinstance(error, KeyboardInterrupt):
        return Cancelled.code, "interrupted"
    return lib.ATLAS_ERROR_INTERNAL, text


def _report(call: Any, error: BaseException) -> None:
    status, message = status_of(error)
    if status == lib.ATLAS_ERROR_INTERNAL:
        _log.error("unexpected exception in a call from C", exc_info=error)
    write_message(call, message)
    call.status = status


def write_message(call: Any, message: str) -> None:
    """Put a message into the call's buffer, cut between characters where it is too long."""
    data = message.encode("utf-8", "replace")
    room = call.capacity - 1
    if len(data) > room:
        data = data[:room].decode("utf-8", "ignore").encode()
    ffi.memmove(call.message, data + b"\0", len(data) + 1)
    call.length = max(len(data), 1)


def _ignore(kind: object, error: object, traceback: object) -> None:
    """cffi would print what escapes from ``entry``; the status is a failure already."""
