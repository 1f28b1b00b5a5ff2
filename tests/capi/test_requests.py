"""Request level: submit, events, step, poll, wait, cancel."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atlas import Engine, SamplingParams
from tests.capi.interface import CallError, call, ffi, ids, info, lib, make, struct

PROMPT = [5, 6, 7, 8]


@pytest.fixture
def loaded(model: Path) -> Iterator[Any]:
    handle = make("engine", "engine_load", str(model).encode(), ffi.NULL)
    yield handle
    try:
        call("engine_free", handle)
    except CallError:
        return  # the test has freed it


class Submitted:
    """A request and what its events brought."""

    def __init__(self, engine: Any, prompt: list[int], **params: str | int) -> None:
        self.sampling = make("sampling", "sampling_create")
        for key, value in {"ignore_eos": "true", "max_tokens": 8, **params}.items():
            call("sampling_set", self.sampling, key.encode(), str(value).encode())
        self.user = ffi.new_handle(self)
        self.tokens: dict[int, list[int]] = {}
        self.text: dict[int, str] = {}
        self.reasons: dict[int, int] = {}
        self.last: Any = None
        request = struct(
            "request_params", tokens=(kept := ids(prompt)), num_tokens=len(prompt),
            sampling=self.sampling, user=self.user,
        )  # fmt: skip
        self.handle = make("request", "request_submit", engine, request)
        assert kept is not None
        call("sampling_free", self.sampling)

    def take(self, told: Any) -> None:
        assert self.last is None, "an event after the last one"
        self.tokens.setdefault(told.sample, []).extend(told.tokens[0 : told.num_tokens])
        self.text[told.sample] = self.text.get(told.sample, "") + ffi.string(told.text).decode()
        if told.finish_reason:
            self.reasons[told.sample] = told.finish_reason
        if told.is_last:
            self.last = (told.prompt_tokens, told.completion_tokens)


def drain(engine: Any, timeout_us: int = 10_000_000) -> int:
    """Poll until there is nothing more; returns the number of events."""
    event, count = ffi.new("atlas_event **"), 0
    while True:
        call("engine_poll", engine, timeout_us, event)
        if event[0] == ffi.NULL:
            return count
        told = struct("event_info")
        if lib.atlas_event_get_info(event[0], told):  # the reused handle names none
            call("event_free", event[0])
            return count
        ffi.from_handle(told.user).take(told)
        count += 1


def test_polling_runs_the_steps(loaded: Any, engine: Engine) -> None:
    prompts = [PROMPT, [9, 9, 3], [30, 31]]
    submitted = [Submitted(loaded, prompt) for prompt in prompts]
    assert drain(loaded) >= 3
    for request, prompt in zip(submitted, prompts, strict=True):
        whole = engine.generate(prompt, SamplingParams(max_tokens=8, ignore_eos=True))
        assert request.tokens == {0: list(whole.token_ids)}
        assert request.text == {0: whole.text}
        assert request.reasons == {0: 2}
        assert request.last == (len(prompt), 8)
        call("request_cancel", request.handle)  # after its end: nothing
        call("request_free", request.handle)
    assert drain(loaded) == 0


def test_samples_and_seeds(loaded: Any, engine: Engine) -> None:
    request = Submitted(loaded, PROMPT, n=3, temperature=1, seed=11, top_k=20)
    drain(loaded)
    params = SamplingParams(n=3, temperature=1.0, seed=11, top_k=20, max_tokens=8, ignore_eos=True)
    whole = engine.generate(PROMPT, params)
    assert request.tokens == {s.index: list(s.token_ids) for s in whole.samples}
    assert request.last == (len(PROMPT), 24)
    call("request_free", request.handle)


def test_stepping_by_hand(loaded: Any) -> None:
    request = Submitted(loaded, PROMPT)
    left, steps = ffi.new("size_t *"), 0
    while True:
        call("engine_step", loaded, left)
        steps += 1
        if not left[0]:
            break
    assert steps >= 8
    drain(loaded, 0)
    assert len(request.tokens[0]) == 8


def test_an_owner_thread_and_the_descriptor(loaded: Any, engine: Engine) -> None:
    fd, event = ffi.new("int32_t *"), ffi.new("atlas_event **")
    call("engine_get_wait_fd", loaded, fd)
    assert select.select([fd[0]], [], [], 0) == ([], [], [])
    call("engine_start", loaded)
    with pytest.raises(CallError, match="MODEL_BUSY"):
        call("engine_step", loaded, ffi.new("size_t *"))
    begin = time.monotonic()
    call("engine_poll", loaded, 50_000, event)
    assert event[0] == ffi.NULL
    assert time.monotonic() - begin >= 0.05
    requests = [Submitted(loaded, PROMPT) for _ in range(3)]
    sequence = make("sequence", "sequence_create", loaded, 0)  # both levels at once
    call("sequence_prefill", sequence, ids(PROMPT), len(PROMPT), 2, ffi.NULL)
    call("sequence_free", sequence)
    while any(request.last is None for request in requests):
        assert select.select([fd[0]], [], [], 30)[0]
        drain(loaded, 0)
    assert select.select([fd[0]], [], [], 0) == ([], [], [])
    whole = engine.generate(PROMPT, SamplingParams(max_tokens=8, ignore_eos=True))
    assert all(request.tokens == {0: list(whole.token_ids)} for request in requests)
    call("engine_stop", loaded)
    call("engine_stop", loaded)
    left = ffi.new("size_t *")
    call("engine_step", loaded, left)
    assert left[0] == 0


def in_another_thread(name: str, handle: Any) -> None:
    """Make a call there and wait for it."""
    thread = threading.Thread(target=call, args=(name, handle))
    thread.start()
    thread.join()


def test_cancel_from_another_thread(loaded: Any) -> None:
    """In the middle of a request: what it has stays, and the others go on."""
    request = Submitted(loaded, PROMPT, max_tokens=400)
    other = Submitted(loaded, PROMPT)
    left = ffi.new("size_t *")
    for _ in range(4):
        call("engine_step", loaded, left)
    in_another_thread("request_cancel", request.handle)
    drain(loaded)
    assert request.reasons == {0: 3}
    assert 0 < len(request.tokens[0]) <= 4
    assert other.reasons == {0: 2}


def test_cancel_before_the_first_step(loaded: Any) -> None:
    request, other = Submitted(loaded, PROMPT), Submitted(loaded, PROMPT)
    in_another_thread("request_cancel", request.handle)
    call("engine_start", loaded)
    while request.last is None or other.last is None:
        drain(loaded, 1_000)
    assert request.reasons == {0: 3}
    assert other.reasons == {0: 2}


def test_what_a_submission_is_refused_for(loaded: Any, model: Path) -> None:
    out = ffi.new("atlas_request **")
    long = struct("request_params", tokens=(kept := ids([3] * 600)), num_tokens=600)
    assert kept is not None
    with pytest.raises(CallError, match="PROMPT_TOO_LONG"):
        call("request_submit", loaded, long, out)
    sampling = make("sampling", "sampling_create")
    call("sampling_set", sampling, b"logit_bias", b'{"99999": 1}')
    bad = struct("request_params", tokens=kept, num_tokens=3, sampling=sampling)
    with pytest.raises(CallError, match="logit_bias"):
        call("request_submit", loaded, bad, out)
    assert out[0] == ffi.NULL
    call("sampling_free", sampling)
    options = make("load_options", "load_options_create")
    call("load_options_set_integer", options, b"max_waiting", 1)
    call("load_options_set", options, b"prefix_cache", b"false")
    call("load_options_set_number", options, b"aging_s", 0.5)
    params = struct("load_params", options=options)
    small = make("engine", "engine_load", str(model).encode(), params)
    first = Submitted(small, PROMPT)
    with pytest.raises(CallError, match="QUEUE_FULL"):
        Submitted(small, PROMPT)
    drain(small)
    assert first.last is not None
    call("engine_free", small)
    call("load_options_free", options)


@pytest.mark.parametrize("owned", [False, True])
def test_freeing_the_engine_ends_a_wait(loaded: Any, owned: bool) -> None:
    """And a request that runs, whose handle is then of no more use."""
    if owned:
        call("engine_start", loaded)
    request = Submitted(loaded, PROMPT, max_tokens=400)
    ends: list[str] = []

    def wait() -> None:
        event = ffi.new("atlas_event **")
        try:
            while True:
                call("engine_poll", loaded, -1, event)
        except CallError as error:
            ends.append(str(error))

    threads = [threading.Thread(target=wait) for _ in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    call("engine_free", loaded)
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert all("CLOSED" in end or "STALE_HANDLE" in end for end in ends)
    assert len(ends) == 2
    with pytest.raises(CallError, match="CLOSED"):
        call("request_cancel", request.handle)
    call("request_free", request.handle)


def test_events_outlive_their_request_handle(loaded: Any) -> None:
    request = Submitted(loaded, PROMPT)
    call("request_free", request.handle)
    event = ffi.new("atlas_event **")
    call("engine_poll", loaded, -1, event)
    told = info("event", event[0])
    assert told.request == ffi.NULL
    assert ffi.from_handle(told.user) is request
    with pytest.raises(CallError, match="STALE_HANDLE"):
        call("request_cancel", request.handle)
    call("event_free", event[0])
    drain(loaded)
