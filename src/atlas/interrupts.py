"""Ctrl-C at a moment when it would lose tokens waits for the moment to pass."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """SIGINT's Python handler runs after the block instead of inside it.

    Only in the main thread, the one that runs handlers; elsewhere, and where SIGINT has no Python
    handler, this does nothing.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    received: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: received.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if received:  # also when the block raised: its error is then this one's context
            handler(*received[0])
