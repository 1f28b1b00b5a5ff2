"""Whether a model may still be used."""

from __future__ import annotations

import os

from atlas.errors import ClosedError, StaleHandleError


class Lifetime:
    """Shared by a model and the handles it gave out: until it is closed, in its own process."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.closed = False

    @property
    def in_own_process(self) -> bool:
        """False in a forked child."""
        return os.getpid() == self.pid

    def require(self) -> None:
        """Raise when the model was closed or belongs to a parent process."""
        if self.closed:
            raise ClosedError("this model was closed")
        if not self.in_own_process:
            raise StaleHandleError(
                "this model belongs to the parent process; make a new engine after a fork"
            )
