"""What the engine's driver, metrics and health ask of the loop that takes the steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from atlas.errors import AtlasError
    from atlas.live_request import LiveRequest
    from atlas.metrics import Recorder


@dataclass(frozen=True, slots=True)
class Gauges:
    """What a loop holds at one moment; ``atlas.metrics.Metrics`` says what each means."""

    waiting: int
    running: int
    cached_blocks: int = 0
    spilled_bytes: int = 0
    prefix_hits: int = 0
    prefix_misses: Mapping[str, int] = field(default_factory=dict)
    preemptions: int = 0


class Loop(Protocol):
    """Requests on one model, a step at a time. Not thread-safe: the driver holds its lock.

    Attributes
    ----------
    recorder : Recorder
    num_steps : int
    last_step_end_s : float
        When the last step ended, of the process's clock.
    """

    recorder: Recorder
    num_steps: int
    last_step_end_s: float

    def require_pool(self, request: LiveRequest) -> None:
        """Raise KvExhausted for a request that the pool could not hold even alone."""
        ...

    def add(self, request: LiveRequest) -> None:
        """Queue a request."""
        ...

    def cancel(self, request: LiveRequest, error: AtlasError | None = None) -> None:
        """End a request's samples wherever they are; their blocks go back."""
        ...

    @property
    def has_unfinished(self) -> bool:
        """Whether a request waits or runs."""
        ...

    def step(self) -> bool:
        """Take one step; False when there was nothing to do."""
        ...

    def settle(self) -> None:
        """See to it that no step is under way."""
        ...

    def gauges(self) -> Gauges:
        """What it holds now."""
        ...

    def close(self, error: AtlasError) -> None:
        """End every request with ``error`` and give back blocks."""
        ...
