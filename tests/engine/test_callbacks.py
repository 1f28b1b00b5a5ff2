"""Callbacks that raise, call back or interrupt; and owner threads that die of it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import atlas.step_loop
from atlas import Engine
from atlas.errors import (
    AtlasError,
    CallbackError,
    ModelBusyError,
)
from atlas.event import Event
from atlas.generation import Generation
from atlas.live_request import LiveRequest
from atlas.step_loop import Flight, StepLoop
from tests.composition.harness import assert_balanced
from tests.engine.faults import PARAMS, PROMPTS, STEPS, drain, ids_of, raising


@pytest.fixture(scope="module")
def module_engine(folder: Path) -> Iterator[Engine]:
    with Engine(
        folder, threads=1, quiet=True, max_running=4, kv_tokens=400, max_seq_len=400
    ) as engine:
        yield engine


@pytest.fixture
def engine(module_engine: Engine) -> Iterator[Engine]:
    """Four requests at a time; every test leaves it idle, unowned and balanced."""
    yield module_engine
    module_engine.stop()
    assert module_engine.poll() == []
    assert_balanced(module_engine)
    assert len(module_engine.generate(PROMPTS["a"], PARAMS).token_ids) == 12


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("at", [0, 1, 7])
def test_a_callback_that_raises_ends_its_request(engine: Engine, at: int, n: int) -> None:
    expected = {name: engine.generate(ids, PARAMS).token_ids for name, ids in PROMPTS.items()}
    cause = ValueError("mine")
    for name, ids in PROMPTS.items():
        bad = PARAMS.replace(logits_processor=raising(at, cause), n=n)
        engine.submit(ids, bad if name in "be" else PARAMS, request_id=name)
    events = drain(engine)
    for name, mine in events.items():
        written = ids_of(mine)
        if name in "be":
            ends = [event for event in mine if event.finish_reason]
            assert sorted(event.index for event in ends) == list(range(n))
            assert all(isinstance(event.error, CallbackError) for event in ends)
            assert ends[0].error is not None
            assert ends[0].error.__cause__ is cause
            assert written == expected[name][:at]
        else:
            assert written == expected[name]


def test_a_callback_may_submit_and_cancel_but_not_step(engine: Engine) -> None:
    raised: list[BaseException] = []

    def processor(prompt: Any, output: Any, row: Any) -> None:
        if len(output) == 2:
            engine.submit(PROMPTS["b"], PARAMS, request_id="b")
            for call in (engine.step, lambda: engine.generate(PROMPTS["c"], PARAMS), engine.close):
                with pytest.raises(ModelBusyError) as caught:
                    call()
                raised.append(caught.value)
            engine.cancel("a")

    engine.submit(PROMPTS["a"], PARAMS.replace(logits_processor=processor), request_id="a")
    engine.submit(PROMPTS["c"], PARAMS, request_id="c")
    events = drain(engine)
    assert len(raised) == 3
    assert events["a"][-1].finish_reason == "cancelled"
    assert len(ids_of(events["a"])) == 3
    for name in "bc":
        assert ids_of(events[name]) == engine.generate(PROMPTS[name], PARAMS).token_ids


def test_a_callback_may_cancel_what_its_own_step_runs(engine: Engine) -> None:
    """A call that it may not make, or a stream it leaves, takes nothing from the step."""
    stream = engine.stream(PROMPTS["c"], PARAMS)
    next(stream)

    def processor(prompt: Any, output: Any, row: Any) -> None:
        if len(output) == 2:
            engine.cancel("c")
            with pytest.raises(ModelBusyError):
                engine.generate(PROMPTS["b"], PARAMS)
            stream.close()  # type: ignore[attr-defined]

    expected = engine.generate(PROMPTS["b"], PARAMS).token_ids
    engine.submit(PROMPTS["a"], PARAMS.replace(logits_processor=processor), request_id="a")
    for name in "bc":
        engine.submit(PROMPTS[name], PARAMS, request_id=name)
    events = drain(engine)
    assert events["c"][-1].finish_reason == "cancelled"
    assert len(ids_of(events["c"])) == 3  # that of the step under way too
    assert ids_of(events["b"]) == expected
    assert events["a"][-1].error is None


def test_a_callback_does_not_drive_the_model(engine: Engine) -> None:
    """Its rows would stand in the place of those that others still choose from."""
    sampled = PARAMS.replace(temperature=1.0, seed=5, logits_processor=lambda *_: None)
    expected = engine.generate(PROMPTS["b"], sampled).token_ids

    def processor(prompt: Any, output: Any, row: Any) -> None:
        with engine.paused() as model, pytest.raises(ModelBusyError, match="callback of a step"):
            model.lifecycle.alloc_sequence()
        with pytest.raises(ModelBusyError, match="callback of a step"):
            engine.model.lifecycle.alloc_sequence()

    engine.submit(PROMPTS["a"], PARAMS.replace(logits_processor=processor), request_id="a")
    engine.submit(PROMPTS["b"], sampled, request_id="b")
    events = drain(engine)
    assert events["a"][-1].error is None
    assert ids_of(events["b"]) == expected


def test_a_callback_of_the_owner_thread_does_not_wait_for_it(engine: Engine) -> None:
    raised: list[BaseException] = []

    def processor(prompt: Any, output: Any, row: Any) -> None:
        with pytest.raises(ModelBusyError) as caught:
            list(iter(lambda: engine.poll(0.1), []))  # those that there were already
        raised.append(caught.value)

    params = PARAMS.replace(logits_processor=processor, max_tokens=3)
    engine.start()
    engine.submit(PROMPTS["a"], params, request_id="a")
    events: list[Event] = []
    while not (events and events[-1].is_last):
        events += engine.poll(0.2)
    assert events[-1].error is None
    assert len(raised) == 3


def test_whoever_pauses_the_owner_thread_takes_the_steps(engine: Engine) -> None:
    engine.start()
    with engine.paused():
        engine.submit(PROMPTS["a"], PARAMS, request_id="a")
        events = engine.poll(0.2)
        assert events
        while not events[-1].is_last:
            events += engine.poll(0.2)
        assert engine.poll() == []
        assert ids_of(events) == engine.generate(PROMPTS["a"], PARAMS).token_ids


@pytest.mark.parametrize("how", ["callback", "pause"])
def test_an_owner_thread_that_waits_for_a_step_is_stopped_by_it(folder: Path, how: str) -> None:
    """Whoever holds the model does not wait for the thread that waits for the model."""
    engine = Engine(folder, threads=1, quiet=True)

    def start_and_stop(*_: Any) -> None:
        engine.start()
        time.sleep(0.05)  # it wants to step
        engine.stop()
        assert not engine._driver.owned

    def run() -> None:
        if how == "callback":
            params = PARAMS.replace(max_tokens=2, logits_processor=start_and_stop)
            results.append(engine.generate(PROMPTS["a"], params).token_ids)
        else:
            engine.submit(PROMPTS["a"], PARAMS)
            with engine._driver._step_lock:  # as a pause that began a moment ago
                start_and_stop()
        results.append(engine.generate(PROMPTS["a"], PARAMS).token_ids)
        engine.close()

    results: list[Any] = []
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    assert len(results[-1]) == 12


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_owner_thread_that_dies_tells_everybody(engine: Engine) -> None:
    bad = PARAMS.replace(logits_processor=raising(3, SystemExit(3)))
    for name, ids in PROMPTS.items():
        engine.submit(ids, bad if name == "b" else PARAMS, request_id=name)
    engine.start()
    ends: dict[str, Event] = {}
    deadline = time.monotonic() + 30
    while len(ends) < len(PROMPTS):
        assert time.monotonic() < deadline
        ends.update({e.request_id: e for e in engine.poll(0.2) if e.is_last})
    assert {type(event.error) for event in ends.values()} == {AtlasError}
    assert all("SystemExit" in str(event.error) for event in ends.values())
    assert_balanced(engine)
    engine.start()  # a new owner goes on
    assert len(engine.generate(PROMPTS["a"], PARAMS).token_ids) == 12


def test_an_interrupt_while_a_step_is_planned_undoes_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = {name: engine.generate(ids, PARAMS).token_ids for name, ids in PROMPTS.items()}
    planned: list[Any] = []

    def interrupted(plan: Any) -> Flight:
        planned.append(plan)
        if len(planned) in (2, 5):
            os.kill(os.getpid(), signal.SIGINT)
        return Flight(plan)

    monkeypatch.setattr(atlas.step_loop, "Flight", interrupted)
    for name, ids in PROMPTS.items():
        engine.submit(ids, PARAMS, request_id=name)
    interrupts = 0
    events: list[Event] = []
    for _ in range(STEPS):
        try:
            events += engine.step()
        except KeyboardInterrupt:
            interrupts += 1
        if not engine.has_unfinished():
            break
    events += engine.step()
    assert interrupts == 2
    for name in PROMPTS:
        assert ids_of([e for e in events if e.request_id == name]) == expected[name]


@pytest.mark.parametrize("feed", [False, True])
def test_an_interrupt_between_launch_and_settling_leaves_the_step_to_be_settled(
    folder: Path, monkeypatch: pytest.MonkeyPatch, feed: bool
) -> None:
    settle = StepLoop._settle_oldest
    settled: list[StepLoop] = []

    def interrupted(loop: StepLoop) -> None:
        settled.append(loop)
        if len(settled) in (3, 8):
            os.kill(os.getpid(), signal.SIGINT)
        settle(loop)

    with Engine(folder, threads=1, quiet=True, feed=feed) as engine:
        expected = engine.generate(PROMPTS["a"], PARAMS).token_ids
        monkeypatch.setattr(StepLoop, "_settle_oldest", interrupted)
        engine.submit(PROMPTS["a"], PARAMS)
        interrupts = 0
        events: list[Event] = []
        for _ in range(STEPS):
            try:
                events += engine.step()
            except KeyboardInterrupt:
                interrupts += 1
            if not engine.has_unfinished():
                break
        assert interrupts == 2
        assert ids_of(events) == expected


def test_an_interrupt_waits_until_tokens_are_kept_and_sent(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = {name: engine.generate(ids, PARAMS).token_ids for name, ids in PROMPTS.items()}
    for name, ids in PROMPTS.items():
        engine.submit(ids, PARAMS.replace(n=2), request_id=name)
    pushed: list[Generation] = []
    sent: list[LiveRequest] = []
    push, report = Generation.push, LiveRequest.report

    def interrupted_push(self: Generation, sampled: Any) -> Any:
        pushed.append(self)
        if len(pushed) in (3, 20):
            os.kill(os.getpid(), signal.SIGINT)
        return push(self, sampled)

    def interrupted_report(self: LiveRequest, index: int, delta: Any) -> None:
        if len(pushed) > 25 and not sent:
            sent.append(self)
            os.kill(os.getpid(), signal.SIGINT)
        report(self, index, delta)

    monkeypatch.setattr(Generation, "push", interrupted_push)
    monkeypatch.setattr(LiveRequest, "report", interrupted_report)
    interrupts = 0
    events: list[Event] = []
    for _ in range(STEPS):
        try:
            events += engine.step()
        except KeyboardInterrupt:
            interrupts += 1
        if not engine.has_unfinished():
            break
    events += engine.step()
    assert interrupts == 3
    for name in PROMPTS:
        mine = [event for event in events if event.request_id == name]
        assert ids_of(mine) == expected[name]
        assert len(ids_of(mine, 1)) == 12
        assert sum(event.is_last for event in mine) == 1


def test_an_error_while_tokens_are_kept_ends_the_step_not_the_engine(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, ids in PROMPTS.items():
        engine.submit(ids, PARAMS, request_id=name)
    push = Generation.push

    def broken(self: Generation, sampled: Any) -> Any:
        if self.num_tokens == 3:
            raise RuntimeError("a bug")
        return push(self, sampled)

    monkeypatch.setattr(Generation, "push", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        drain(engine)
    monkeypatch.undo()
    events = drain(engine)
    assert events.keys() == PROMPTS.keys()
    ends = [mine[-1].finish_reason for mine in events.values()]
    assert ends.count("error") == 4  # those that ran beside it
    assert ends.count("length") == 2
