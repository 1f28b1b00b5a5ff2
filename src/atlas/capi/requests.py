"""Requests: submit, step, poll, cancel; and one request from beginning to end."""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from atlas.capi._binding import ffi
from atlas.capi.calls import exported
from atlas.capi.engine import LoadedEngine, engine_of, loaded_of
from atlas.capi.events import EventSlot, EventTarget, News, SubmittedRequest, event_pointer
from atlas.capi.handles import HANDLES
from atlas.capi.memory import (
    MAX_PROMPT_IDS,
    number,
    read_ids,
    read_struct,
    read_text,
    require,
)
from atlas.capi.samplers import sampling_of
from atlas.capi.translations import asks_for_translation, translation_request
from atlas.errors import AtlasError, InvalidArgumentError, PromptTooLongError, StaleHandleError

if TYPE_CHECKING:
    from collections.abc import Callable

    from atlas.driver import Driver
    from atlas.engine import Engine
    from atlas.event import Event
    from atlas.live_request import LiveRequest, Sink
    from atlas.request import Completion

_LOOK_UP_S = 0.05  # how soon a waiting poll notices that the engine was freed or its thread ended


def _read_params(engine: Engine, params: Any) -> Any:
    """The caller's struct."""
    given = read_struct(params, "atlas_request_params", "params", "user")
    engine._require_open()
    return given


def _new_request(engine: Engine, given: Any, sink: Sink) -> LiveRequest:
    """The request that a struct asks for: checked, not yet submitted."""
    if engine.translates or asks_for_translation(given):
        return translation_request(engine, given, sink)
    sampling = engine._intake.params(sampling_of(given.sampling))
    if (given.text == ffi.NULL) == (given.tokens == ffi.NULL):
        raise InvalidArgumentError("text and tokens: both or neither is set; allowed: one of them")
    if given.text != ffi.NULL:
        text = read_text(given.text, given.text_len, "text")
        ids = engine._intake.prompt_ids(text, sampling)
        return engine._intake.request(ids, sampling, sink, priority=given.priority)
    if sampling.truncate_prompt is None and given.num_tokens > engine.max_seq_len:
        raise PromptTooLongError(
            f"the prompt has {given.num_tokens} tokens; allowed: up to {engine.max_seq_len - 1}"
        )
    tokens = read_ids(given.tokens, given.num_tokens, MAX_PROMPT_IDS, "tokens").tolist()
    ids = engine._intake.prompt_ids(tokens, sampling)
    return engine._intake.request(ids, sampling, sink, priority=given.priority)


# -- many requests ----------------------------------------------------------------------------


@exported
def request_submit(handle: Any, params: Any, out: Any) -> None:
    """Queue a request."""
    loaded = loaded_of(handle)
    engine = loaded.engine
    require(out, "request")
    given = _read_params(engine, params)
    submitted = SubmittedRequest(engine, given.user)

    def put(event: Event) -> None:
        loaded.events.put(News.of(event, submitted.user, submitted))

    request = _new_request(engine, given, put)
    submitted.request_id = request.request_id
    submitted.token = HANDLES.add(submitted)  # before the first event may come
    try:
        engine._driver.submit(request, public=False)
    except BaseException:
        HANDLES.remove(submitted.token, SubmittedRequest)
        raise
    out[0] = ffi.cast("atlas_request *", submitted.token)


@exported
def request_cancel(handle: Any) -> None:
    """Ask for a request's end."""
    found = HANDLES.get(number(handle), SubmittedRequest)
    found.engine.cancel(found.request_id)


@exported
def request_free(handle: Any) -> None:
    """Free a request's handle; the request goes on."""
    HANDLES.remove(number(handle), SubmittedRequest).token = 0


@exported
def engine_step(handle: Any, num_unfinished: Any) -> None:
    """Run one step."""
    engine = engine_of(handle)
    require(num_unfinished, "num_unfinished")
    engine.step()  # C's requests have their own way for events
    num_unfinished[0] = engine._driver.num_live


@exported
def engine_start(handle: Any) -> None:
    """Let a thread run the steps."""
    engine_of(handle).start()


@exported
def engine_stop(handle: Any) -> None:
    """End that thread."""
    engine = engine_of(handle)
    engine._require_open()
    engine.stop()


@exported
def engine_poll(handle: Any, timeout_us: int, out: Any) -> None:
    """Take an event."""
    loaded = loaded_of(handle)
    target = EventTarget(require(out, "event"))
    target.put(_next_news(loaded, timeout_us))


def _next_news(loaded: LoadedEngine, timeout_us: int) -> News | None:
    """The oldest event; waits for the steps, or runs them where nobody else does."""
    engine, driver, events = loaded.engine, loaded.engine._driver, loaded.events
    end = None if timeout_us < 0 else time.monotonic() + 1e-6 * timeout_us
    while True:
        engine._require_open()
        news = events.take()
        left = _LOOK_UP_S if end is None else min(_LOOK_UP_S, end - time.monotonic())
        if news is not None or left <= 0:
            return news
        if driver.owned:
            events.wait(left)
        elif not _has_unfinished(driver):
            return events.take()
        elif not driver.advance():
            events.wait(min(left, 1e-3))  # another thread has taken the last step


def _has_unfinished(driver: Driver) -> bool:
    """False only when every last event has been handed over, too."""
    with driver._state:
        return driver.has_unfinished


@exported
def engine_get_wait_fd(handle: Any, fd: Any) -> None:
    """The descriptor that is readable while events wait."""
    loaded = loaded_of(handle)
    require(fd, "fd")
    loaded.engine._require_open()
    fd[0] = loaded.events.fd


# -- one request ------------------------------------------------------------------------------


@exported
def engine_generate(handle: Any, params: Any, callback: Any, out: Any) -> None:
    """Run one request to its end."""
    engine = engine_of(handle)
    target = EventTarget(out)
    given = _read_params(engine, params)
    events: deque[Event] = deque()
    request = _new_request(engine, given, events.append)
    if len(request.generations) != 1 or request.params.prompt_logprobs is not None:
        raise InvalidArgumentError(
            "n, num_return or prompt_logprobs is set; allowed with generate: 1, 1 and null"
        )
    with CallbackSlot(callback, given.user) as show:
        completion = _generate(engine, request, events, show)
    target.put(News.whole(completion, given.user))
    if completion.error is not None:
        raise completion.error


def _generate(
    engine: Engine, request: LiveRequest, events: deque[Event], show: Callable[[Event], bool]
) -> Completion:
    """Run a request until its last event; ``show`` says of each whether to go on."""
    driver = engine._driver
    wanted = True
    driver.submit(request, public=False)
    try:
        while True:
            driver.advance_until(lambda: bool(events))
            event = events.popleft()
            if wanted and event.finish_reason == "cancelled":
                engine._require_open()  # its end has ended the request
            if wanted and not show(event):
                wanted = False
                driver.cancel(request.request_id)  # unless its last event is on the way already
            if event.completion is not None:
                break
    except BaseException:
        with suppress(AtlasError):
            engine._abandon([request])
        raise
    return event.completion


class CallbackSlot:
    """Shows events to a C function through one event handle."""

    def __init__(self, callback: Any, user: Any) -> None:
        self._callback, self._user = callback, user
        self._slot = EventSlot()
        self._pointer = event_pointer(0)

    def __enter__(self) -> CallbackSlot:
        if self._callback:
            self._pointer = event_pointer(HANDLES.add(self._slot))
        return self

    def __call__(self, event: Event) -> bool:
        """Whether the function wants more."""
        if not self._callback:
            return True
        self._slot.news = News.of(event, self._user)
        return not self._callback(self._user, self._pointer)

    def __exit__(self, *exception: object) -> None:
        if self._callback:
            with suppress(StaleHandleError):  # the function may have freed it
                HANDLES.remove(number(self._pointer), EventSlot)
