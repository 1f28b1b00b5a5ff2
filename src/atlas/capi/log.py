"""Log messages to a C callback, and nothing to stderr."""

from __future__ import annotations

import logging
import sys
import threading
from typing import Any

from atlas.capi._binding import ffi
from atlas.capi.calls import exported

_LOGGER = logging.getLogger("atlas")


class CallbackHandler(logging.Handler):
    """Sends records to a C function."""

    def __init__(self, callback: Any, user: Any, level: int) -> None:
        super().__init__(level)
        self._callback, self._user = callback, user
        self.setFormatter(logging.Formatter("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record).replace("\0", "\N{REPLACEMENT CHARACTER}")
        message = ffi.new("char[]", text.encode("utf-8", "replace"))
        self._callback(self._user, record.levelno, message)


_current: CallbackHandler | None = None


@exported
def log_set_callback(callback: Any, user: Any, level: int) -> None:
    """Replace the callback."""
    global _current
    if _current is not None:
        _LOGGER.removeHandler(_current)
        _current = None
    if callback != ffi.NULL:
        _current = CallbackHandler(callback, user, level)
        _LOGGER.addHandler(_current)
        _LOGGER.setLevel(level)


def keep_off_stderr() -> None:
    """In an interpreter of our own: warnings and stray exceptions go to the log."""
    logging.getLogger().addHandler(logging.NullHandler())
    logging.captureWarnings(True)
    sys.unraisablehook = _log_unraisable
    threading.excepthook = _log_thread


def _log_unraisable(args: Any) -> None:
    _LOGGER.error("exception ignored in %r", args.object, exc_info=args.exc_value)


def _log_thread(args: Any) -> None:
    _LOGGER.error("exception in thread %r", args.thread, exc_info=args.exc_value)
