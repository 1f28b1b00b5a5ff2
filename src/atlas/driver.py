"""Who steps the engine, and how requests and events cross threads.

Submitting and cancelling only fill an inbox, so that nobody waits for a step; whoever steps takes
it in first. Either callers step (``generate``, ``stream``, ``step``) or an owner thread does.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from atlas.errors import (
    AtlasError,
    ClosedError,
    InvalidArgumentError,
    ModelBusyError,
    QueueFullError,
    WrongThreadError,
)
from atlas.event import Event
from atlas.interrupts import interrupts_deferred
from atlas.live_request import LiveRequest
from atlas.loop import Loop
from atlas.model.core import ModelCore
from atlas.owner_thread import OwnerThread
from atlas.whole_number import whole_number

_POLL_S = 0.05  # how soon a waiting caller notices that the owner thread ended


class Driver:
    """Steps a loop from one thread at a time.

    Parameters
    ----------
    core : ModelCore
    loop : Loop
    max_waiting : int, optional
        Requests that may wait for their first token; more are refused.
    """

    def __init__(self, core: ModelCore, loop: Loop, max_waiting: int | None) -> None:
        self._core = core
        self._loop = loop
        if max_waiting is not None:
            max_waiting = whole_number("max_waiting", max_waiting, 1)
        self._max_waiting = max_waiting
        self._step_lock = threading.RLock()
        self._lock = threading.RLock()  # guards everything below
        self._state = threading.Condition(self._lock)
        self._live: dict[str, LiveRequest] = {}
        self._inbox: deque[LiveRequest] = deque()
        self._cancels: deque[str] = deque()
        self._events: deque[Event] = deque()
        self._owner: OwnerThread | None = None
        self._pauses = 0
        self._stepping = False  # guarded by the step lock
        self._has_news = False  # events of a step of which nobody who waits was told yet
        self.draining = False
        self.failure: BaseException | None = None  # what ended the owner thread

    # -- requests -----------------------------------------------------------------------------

    def submit(self, request: LiveRequest, *, public: bool) -> None:
        """Queue a request; its events go to ``poll`` (public) or to its own sink.

        Raises
        ------
        InvalidArgumentError
            A live request has the same id.
        QueueFullError
            ``max_waiting`` requests wait already, or the engine drains.
        KvExhausted
            The KV pool cannot hold the request even alone.
        """
        self._core.require_alive()
        self._loop.require_pool(request)
        with self._state:
            self.register(request, public=public)
            self._inbox.append(request)
            self._state.notify_all()

    def register(self, request: LiveRequest, *, public: bool) -> None:
        """Make a request live; the caller hands it to the loop, or gives it up."""
        sink = self._publish if public else request.sink
        with self._state:
            self._core.require_alive()
            if request.request_id in self._live:
                raise InvalidArgumentError(
                    f"request_id {request.request_id!r} is in use; allowed: a new one"
                )
            if self.draining:
                raise QueueFullError("the engine drains; allowed: no new requests")
            if self._max_waiting is not None and self.num_waiting >= self._max_waiting:
                raise QueueFullError(
                    f"{self.num_waiting} requests wait; allowed: max_waiting {self._max_waiting}"
                )
            since = request.submitted_s  # a request that refers to itself would outlive its engine
            request.sink = lambda event: self._hand_over(event, sink, since)
            self._live[request.request_id] = request

    def give_up(self, request: LiveRequest) -> None:
        """Forget a registered request that the loop did not take; nobody hears of it."""
        with self._state:
            del self._live[request.request_id]

    def cancel(self, request_id: str) -> bool:
        """Ask for a request to end; False when no such request is live."""
        with self._state:
            if request_id not in self._live:
                return False
            self._live[request_id].cancelled = True
            self._cancels.append(request_id)
            self._state.notify_all()
            return True

    def find(self, request_id: str) -> LiveRequest:
        """A live request by id."""
        with self._state:
            request = self._live.get(request_id)
        if request is None:
            raise InvalidArgumentError(f"request_id {request_id!r} is not live")
        return request

    @property
    def has_unfinished(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._live)

    @property
    def num_live(self) -> int:
        """Requests that wait or run."""
        return len(self._live)

    @property
    def num_waiting(self) -> int:
        """Requests without a token so far."""
        with self._state:
            return sum(not live.first_token_s for live in self._live.values())

    @property
    def num_in_inbox(self) -> int:
        """Requests that the next step takes in."""
        return len(self._inbox)

    @property
    def takes_requests(self) -> bool:
        """Whether ``submit`` would take one more."""
        full = self._max_waiting is not None and self.num_waiting >= self._max_waiting
        return not (self.draining or full)

    def load(self) -> tuple[int, float]:
        """Requests that wait or run, and when the oldest came (0 without one)."""
        with self._state:
            return len(self._live), min((r.submitted_s for r in self._live.values()), default=0.0)

    def _publish(self, event: Event) -> None:
        self._events.append(event)

    def _hand_over(self, event: Event, sink: Callable[[Event], None], since: float) -> None:
        if event.finish_reason is not None:
            whole_s = time.perf_counter() - since if event.is_last else None
            self._loop.recorder.end(event.finish_reason, whole_s)
        with self._lock:
            if event.is_last:
                self._live.pop(event.request_id, None)
            sink(event)
            if self._stepping:
                self._has_news = True  # once a step is enough
            else:
                self._state.notify_all()

    def take_events(self) -> list[Event]:
        """Public events since the last call."""
        with self._state:
            events = list(self._events)
            self._events.clear()
        return events

    def drop_events(self, request_id: str) -> None:
        """Forget public events of a request that nobody has taken."""
        with self._state:
            kept = [event for event in self._events if event.request_id != request_id]
            self._events = deque(kept)

    # -- steps --------------------------------------------------------------------------------

    def advance(self) -> bool:
        """Take in the inbox and run one step; False when there was nothing to do."""
        self._core.require_alive()  # before the lock, which a forked child may never get
        self._let_others()
        with self._step_lock, self._core.driven_here(step=True):
            if self._stepping:
                raise ModelBusyError("a callback of a step cannot step the same engine")
            self._stepping = True
            try:
                self.take_inbox()
                return self._loop.step()
            finally:
                self._stepping = False
                if self._has_news:
                    with self._state:
                        self._has_news = False
                        self._state.notify_all()

    def _let_others(self) -> None:
        """Wait for who asked for an exclusive turn: the lock alone would let a loop starve them."""
        with self._state:
            while self._pauses and not self._holds_step_lock():
                self._state.wait()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """The step lock, with whoever steps in a loop standing back."""
        with self._state:
            self._pauses += 1
        try:
            with self._step_lock:
                yield
        finally:
            with self._state:
                self._pauses -= 1
                self._state.notify_all()

    def take_inbox(self) -> None:
        """Carry out cancellations and hand new requests to the loop (the step lock is held)."""
        if not (self._inbox or self._cancels):
            return
        with interrupts_deferred():  # what has left the inbox is nowhere else yet
            while self._take_one():
                pass

    def _take_one(self) -> bool:
        with self._state:
            if self._cancels:
                request = self._live.get(self._cancels.popleft())
                if request is None:
                    return True
                if request in self._inbox:
                    self._inbox.remove(request)
                cancelled = True
            elif self._inbox:
                request, cancelled = self._inbox.popleft(), False
            else:
                return False
        if cancelled:
            self._loop.cancel(request)
            return True
        try:
            self._loop.add(request)
        except AtlasError as error:
            request.end_all(error)
        return True

    def advance_until(self, done: Callable[[], bool]) -> None:
        """Step, or wait for the owner thread's steps, until ``done()``.

        Raises
        ------
        ClosedError
            The engine was closed meanwhile.
        """
        while not done():
            if self._waits_for_owner:
                with self._state:
                    if not done():
                        self._state.wait(_POLL_S)
                self._core.require_alive()
                continue
            self._let_others()
            with self._step_lock:
                if not done() and not self.advance() and not done():
                    raise AtlasError("requests wait, but the scheduler has nothing to run")

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """The calling thread's turn on the model, with no step under way; the owner waits."""
        self._core.require_alive()
        with self._turn(), self._core.driven_here():
            if not self._stepping:
                self._loop.settle()
            yield

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """:meth:`exclusive`, with every submitted request handed to the loop.

        Raises
        ------
        ModelBusyError
            A callback of a step calls this.
        """
        with self.exclusive():
            if self._stepping:
                raise ModelBusyError("a callback of a step cannot change the engine's requests")
            self.take_inbox()
            yield

    def wait_events(self, timeout: float | None) -> list[Event]:
        """Public events; steps (or waits for the owner) until there are some or time is out."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            events = self.take_events()
            if events or (end is not None and time.monotonic() >= end):
                return events
            if self._waits_for_owner:
                with self._state:
                    if not self._events:
                        left = _POLL_S if end is None else min(_POLL_S, end - time.monotonic())
                        self._state.wait(max(0.0, left))
                self._core.require_alive()
            elif not self.has_unfinished or not self.advance():
                return self.take_events()

    def drain(self, timeout: float | None) -> bool:
        """Refuse new requests and see to it that the others end; False when time ran out."""
        end = None if timeout is None else time.monotonic() + timeout
        with self._state:
            self.draining = True
        while self.has_unfinished:
            left = _POLL_S if end is None else min(_POLL_S, end - time.monotonic())
            if left <= 0:
                return False
            if self._waits_for_owner:
                with self._state:
                    if self.has_unfinished:
                        self._state.wait(left)
                self._core.require_alive()
            else:
                self.advance()
        return True

    # -- the owner thread ---------------------------------------------------------------------

    @property
    def owned(self) -> bool:
        """Whether an owner thread steps."""
        owner = self._owner
        return owner is not None and owner.is_alive

    @property
    def _waits_for_owner(self) -> bool:
        """Whether another thread takes the caller's steps.

        Not those of whoever holds the step lock, in a pause or in a callback of a step: the owner
        waits for it.
        """
        return self.owned and not self._holds_step_lock()

    def require_not_owned(self, what: str) -> None:
        """Raise ModelBusyError while the owner thread runs and this is not its pause."""
        if self.owned and not self._holds_step_lock():
            raise ModelBusyError(f"{what}: the owner thread runs; use engine.paused()")

    def _holds_step_lock(self) -> bool:
        return self._step_lock._is_owned()  # type: ignore[attr-defined, no-any-return]

    def start(self) -> None:
        """Let a thread of the engine's own do the steps; idempotent."""
        with self._state:
            self._core.require_alive()
            if not self.owned:
                self.failure = None
                self._owner = OwnerThread(self, self._state)

    def stop(self) -> None:
        """End the owner thread after its present step; requests stay. Idempotent."""
        owner = self._owner
        if owner is None or not self._core.lifetime.in_own_process:
            return  # a forked child has no such thread, and may find the lock held
        if owner.is_current:
            raise WrongThreadError("the owner thread cannot stop itself")
        # In a pause, or in a callback of our own step, it may wait for the lock that we hold.
        owner.stop(wait=not self._holds_step_lock())
        with self._state:
            if self._owner is owner:  # else another thread has started a new one
                self._owner = None

    @property
    def wants_step(self) -> bool:
        """Whether there is work for the owner thread and nobody asked it to stand back."""
        work = self._inbox or self._cancels or self._loop.has_unfinished
        return bool(work) and not self._pauses

    def step_as_owner(self) -> bool:
        """One step of the owner thread; False when it must end."""
        try:
            self._let_others()
            with self._step_lock:
                owner = self._owner
                if owner is None or not owner.is_current:
                    return False  # stopped by whoever held the lock
                self.advance()
        except ClosedError:
            return False
        except BaseException as error:
            self.failure = error
            self._fail_all(error)
            if error is self._core.lifetime.fault():
                return False  # the device is lost: every request has been told
            raise
        return True

    def _fail_all(self, error: BaseException) -> None:
        """The owner thread cannot go on: nobody may wait for ever."""
        ended = AtlasError(f"the owner thread ended: {error!r}")
        with self._step_lock:
            with self._state:
                live = list(self._live.values())
                self._inbox.clear()
                self._cancels.clear()
            for request in live:
                self._loop.cancel(request, ended)

    def close(self) -> None:
        """End the owner thread, every request and the model; idempotent."""
        self.stop()
        with self._turn():
            if self._core.lifetime.closed:
                return
            if self._stepping:
                raise ModelBusyError("a callback of a step cannot close the engine")
            closed = ClosedError("the engine was closed")
            with self._state:
                waiting = list(self._inbox)
                self._inbox.clear()
            self._loop.close(closed)
            for request in waiting:
                request.end_all(closed)
            self._core.close()
