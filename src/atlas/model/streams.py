"""Streams and events: the order of work that is queued and not yet done."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Protocol

from atlas.errors import StaleHandleError
from atlas.model.records import Event, Stream

if TYPE_CHECKING:
    from atlas.model.core import ModelCore

_HANDLES = count(1)  # unique in the process, so that another model's handles are known as such


class ModelStreams(Protocol):
    """Queue work on streams and order streams by events.

    Work on one stream runs in order. Across streams nothing is ordered but what an event orders:
    record it after the work, wait for it before the use. On the CPU calls return when their work
    is done, so all of this exists and is trivially ordered.

    Raises
    ------
    StaleHandleError
        Any method: a handle that this model did not make, or of a parent process.
    KernelError
        The device reports a fault of earlier work.
    """

    @property
    def default(self) -> Stream:
        """The stream that ``stream=None`` means in every call."""
        ...

    def handle(self, stream: Stream) -> int:
        """The backend's own handle of ``stream`` (a ``CUstream`` on a GPU, 0 on the CPU).

        What another library needs to put work of its own behind, or in front of, the model's.
        """
        ...

    def create_stream(self) -> Stream:
        """Return a new stream, not ordered with the default one; it lives as long as the model."""
        ...

    def create_event(self) -> Event:
        """Return a new event, which counts as done until it is recorded."""
        ...

    def record_event(self, event: Event, stream: Stream) -> None:
        """Let ``event`` stand for all work queued on ``stream`` so far; the host does not wait."""
        ...

    def wait_event(self, stream: Stream, event: Event) -> None:
        """Hold later work of ``stream`` until ``event``'s is done; the host does not wait."""
        ...

    def synchronize(self, stream: Stream) -> None:
        """Block the calling thread until all work queued on ``stream`` is done."""
        ...


class DenseStreams(ModelStreams):
    """Streams of a backend that runs all work in the order of the calls.

    A model's steps share its buffers, so on a GPU too they run on one stream, the model's own or
    the one its engine was given. Other handles are names for it: what they promise holds.
    """

    def __init__(self, core: ModelCore) -> None:
        self._core = core
        self._events: set[int] = set()

    @property
    def default(self) -> Stream:
        return Stream(0)

    def handle(self, stream: Stream) -> int:
        self._check(stream)
        native: int = self._core.runtime.stream_handle
        return native

    def create_stream(self) -> Stream:
        self._core.enter()
        stream = Stream(next(_HANDLES))
        self._core.streams.add(stream)
        return stream

    def create_event(self) -> Event:
        self._core.enter()
        event = Event(next(_HANDLES))
        self._events.add(event)
        return event

    def record_event(self, event: Event, stream: Stream) -> None:
        self._check(stream, event)

    def wait_event(self, stream: Stream, event: Event) -> None:
        self._check(stream, event)

    def synchronize(self, stream: Stream) -> None:
        self._check(stream)
        self._core.runtime.synchronize()

    def _check(self, stream: Stream, event: Event | None = None) -> None:
        self._core.enter()
        self._core.check_stream(stream)
        if event is not None and event not in self._events:
            raise StaleHandleError(f"event {event} was not made by this model")
