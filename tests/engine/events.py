"""Collecting the events of an engine, with an end to patience."""

from __future__ import annotations

import time

from atlas import Engine
from atlas.event import Event

PATIENCE_S = 30.0


def drain(engine: Engine) -> list[Event]:
    """Step until nothing is left."""
    events: list[Event] = []
    while engine.has_unfinished():
        events += engine.step()
    return events + engine.step()


def wait_for(engine: Engine, count: int) -> list[Event]:
    """Poll until ``count`` requests have ended."""
    events: list[Event] = []
    deadline = time.monotonic() + PATIENCE_S
    while sum(event.is_last for event in events) < count:
        assert time.monotonic() < deadline, f"{count} requests do not end"
        events += engine.poll(0.5)
    return events


def token_ids(events: list[Event], request_id: str, index: int = 0) -> tuple[int, ...]:
    """The ids that a sample's events carried, in order."""
    mine = [event for event in events if (event.request_id, event.index) == (request_id, index)]
    return tuple(token for event in mine for token in event.token_ids)


def wait_until_idle(engine: Engine) -> None:
    """Wait until the owner thread has ended every request."""
    deadline = time.monotonic() + PATIENCE_S
    while engine.has_unfinished():
        assert time.monotonic() < deadline, "requests hang"
        time.sleep(0.001)
