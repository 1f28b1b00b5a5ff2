"""Whether a model may still be used."""

from __future__ import annotations

import os
from collections.abc import Callable

from atlas.errors import AtlasError, ClosedError, StaleHandleError


class Lifetime:
    """Shared by a model and the handles it gave out: until it is closed, in its own process.

    ``fault`` returns what broke the device for good, or None.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.closed = False
        self.fault: Callable[[], AtlasError | None] = _none

    @property
    def in_own_process(self) -> bool:
        """False in a forked child."""
        return os.getpid() == self.pid

    def require(self) -> None:
        """Raise when the model was closed, belongs to a parent process, or its device failed."""
        if self.closed:
            raise ClosedError("this model was closed")
        if not self.in_own_process:
            raise StaleHandleError(
                "this model belongs to the parent process; make a new engine after a fork"
            )
        fault = self.fault()
        if fault is not None:
            raise fault


def _none() -> None:
    return None
