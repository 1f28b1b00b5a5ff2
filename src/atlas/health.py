"""Whether an engine's steps advance."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from atlas.driver import Driver
    from atlas.loop import Loop
    from atlas.model.lifetime import Lifetime

HealthState = Literal["ok", "stalled", "failed", "closed"]


@dataclass(frozen=True, slots=True)
class Health:
    """An engine's state at one moment, judged by its steps.

    Attributes
    ----------
    state : {"ok", "stalled", "failed", "closed"}
        ``stalled``: there is work, and no step has ended for longer than was allowed, be it
        that a step hangs or that nobody steps. ``failed``: the owner thread ended with
        ``failure``. ``closed``: closed, or of a parent process.
    idle_s : float
        Seconds since the last step, or since the oldest request came if that is later; 0 without
        work.
    num_live : int
        Requests that wait or run.
    num_steps : int
        Steps so far.
    draining : bool
        No new requests are taken.
    failure : str, optional
        What ended the owner thread.
    """

    state: HealthState
    idle_s: float
    num_live: int
    num_steps: int
    draining: bool
    failure: str | None = None


def check_health(lifetime: Lifetime, driver: Driver, loop: Loop, stalled_after_s: float) -> Health:
    """Look at an engine from any thread; never waits for a step."""
    failure = driver.failure
    if lifetime.closed or not lifetime.in_own_process:
        state: HealthState = "closed"
        return Health(state, 0.0, 0, loop.num_steps, driver.draining, _words(failure))
    num_live, oldest_s = driver.load()
    idle_s = 0.0
    if num_live:
        idle_s = max(0.0, time.perf_counter() - max(oldest_s, loop.last_step_end_s))
    state = "stalled" if idle_s > stalled_after_s else "ok"
    failure = failure or lifetime.fault()
    if failure is not None:
        state = "failed"
    return Health(state, idle_s, num_live, loop.num_steps, driver.draining, _words(failure))


def _words(failure: BaseException | None) -> str | None:
    return None if failure is None else repr(failure)
