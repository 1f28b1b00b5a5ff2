"""The engine's own thread: it takes the steps while there is something to do."""

from __future__ import annotations

import atexit
import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atlas.driver import Driver


class OwnerThread:
    """Steps a driver until it is stopped or the driver is gone.

    Idle, it holds the driver weakly, so that an engine nobody holds any more is freed, and its
    thread ends with it.

    Parameters
    ----------
    driver : Driver
    state : threading.Condition
        The driver's; notified when there may be work.
    """

    def __init__(self, driver: Driver, state: threading.Condition) -> None:
        self._driver = weakref.ref(driver, lambda _: _wake(state))
        self._state = state
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="atlas-owner", daemon=True)
        self._thread.start()
        atexit.register(_stop_at_exit, weakref.ref(self))

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def is_current(self) -> bool:
        """Whether the caller is the thread itself."""
        return threading.current_thread() is self._thread

    def stop(self, *, wait: bool = True) -> None:
        """End the thread after its present step, and wait for that unless it waits for us."""
        with self._state:
            self._stopping = True
            self._state.notify_all()
        if wait:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._state:
                driver = self._driver()
                if driver is None or self._stopping:
                    return
                if not driver.wants_step:
                    del driver
                    # This may have been the last reference: then nobody is left to notify.
                    if self._driver() is not None:
                        self._state.wait()
                    continue
            if not driver.step_as_owner():
                return
            del driver


def _wake(state: threading.Condition) -> None:
    with state:
        state.notify_all()


def _stop_at_exit(reference: weakref.ref[OwnerThread]) -> None:
    owner = reference()
    if owner is not None and owner.is_alive:
        owner.stop()
