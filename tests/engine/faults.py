"""Faults to inject, and requests to inject them into."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from atlas import Engine, SamplingParams
from atlas.errors import KernelError
from atlas.event import Event

PROMPTS = {name: [5 + i, 6, 7 + i, 30] for i, name in enumerate("abcdef")}
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.9, seed=3)
STEPS = 5000  # of a test at most: what hangs, fails


def drain(engine: Engine) -> dict[str, list[Event]]:
    """Step until nothing is left; events by request."""
    events: dict[str, list[Event]] = {}
    for _ in range(STEPS):
        if not engine.has_unfinished():
            break
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
    assert not engine.has_unfinished(), "requests hang"
    return events


def ids_of(events: list[Event], index: int = 0) -> tuple[int, ...]:
    return tuple(t for event in events if event.index == index for t in event.token_ids)


@contextmanager
def kernels_fail(engine: Engine, at: set[int]) -> Iterator[None]:
    """The sweeps with these numbers, counted from 0, raise KernelError after half their work."""
    runtime = engine._loop.core.runtime
    run = runtime.run
    count = iter(range(STEPS))

    def failing(network: Any, buffers: Any, shape: Any) -> None:
        run(network, buffers, shape)
        if next(count) in at:
            buffers.logits[:] = np.nan
            raise KernelError("injected")

    runtime.run = failing
    try:
        yield
    finally:
        del runtime.run


def raising(at: int, error: BaseException) -> Callable[[Any, Any, Any], None]:
    """A logits processor that raises once ``at`` tokens are written."""

    def processor(prompt: Any, output: Any, row: Any) -> None:
        if len(output) == at:
            raise error

    return processor
