"""Ctrl-C at a moment when it would lose tokens waits for the moment to pass."""

from __future__ import annotations

import inspect
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# Each call of the functions around these first looks a Python handler up among the names of the
# default ones, and fails, which takes longer than the rest: 10 microseconds.
_set_handler, _handler_of = inspect.unwrap(signal.signal), inspect.unwrap(signal.getsignal)


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """SIGINT's Python handler runs after the block instead of inside it.

    Only in the main thread, the one that runs handlers; elsewhere, and where SIGINT has no Python
    handler, this does nothing.
    """
    handler = _handler_of(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    received: list[tuple[int, FrameType | None]] = []
    _set_handler(signal.SIGINT, lambda number, frame: received.append((number, frame)))
    try:
        yield
    finally:
        _set_handler(signal.SIGINT, handler)
        if received:  # also when the block raised: its error is then this one's context
            handler(*received[0])
