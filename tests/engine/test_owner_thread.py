"""The owner thread and those who share the engine with it: threads, pauses, async generators."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from atlas import Engine, SamplingParams
from atlas.errors import InvalidArgumentError, ModelBusyError
from atlas.event import Event
from tests.composition.harness import assert_balanced
from tests.engine.events import PATIENCE_S, drain, token_ids, wait_for, wait_until_idle

PROMPT = [5, 6, 7]
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)
SAMPLED = PARAMS.replace(temperature=0.9, seed=5)


@pytest.fixture(scope="module")
def module_engine(folder: Path) -> Iterator[Engine]:
    with Engine(folder, threads=1, quiet=True, kv_tokens=1024) as engine:
        yield engine


@pytest.fixture
def engine(module_engine: Engine) -> Iterator[Engine]:
    """An engine of this module's own; every test leaves it idle, unowned and balanced."""
    yield module_engine
    module_engine.stop()
    assert module_engine.poll() == []
    assert_balanced(module_engine)


# -- the owner thread -----------------------------------------------------------------------------


def test_the_owner_thread_steps(engine: Engine) -> None:
    expected = engine.generate(PROMPT, SAMPLED).token_ids
    engine.start()
    engine.start()
    with pytest.raises(ModelBusyError, match="paused"):
        _ = engine.model
    with pytest.raises(ModelBusyError, match="owner thread runs"):
        engine.step()
    names = [engine.submit(PROMPT, SAMPLED) for _ in range(3)]
    events = wait_for(engine, 3)
    assert [token_ids(events, name) for name in names] == [expected] * 3
    assert engine.generate(PROMPT, SAMPLED).token_ids == expected
    streamed = [token for delta in engine.stream(PROMPT, SAMPLED) for token in delta.token_ids]
    assert tuple(streamed) == expected
    assert engine.poll(0.01) == []
    engine.stop()
    engine.stop()
    assert engine.model is not None


def test_stopping_keeps_requests(engine: Engine) -> None:
    expected = engine.generate(PROMPT, SAMPLED.replace(max_tokens=200)).token_ids
    engine.start()
    name = engine.submit(PROMPT, SAMPLED.replace(max_tokens=200))
    events = engine.poll()
    engine.stop()
    assert engine.has_unfinished()
    events += drain(engine)
    assert token_ids(events, name) == expected


def test_the_model_by_hand_while_the_owner_is_paused(engine: Engine) -> None:
    long = PARAMS.replace(max_tokens=200)
    expected = engine.generate(PROMPT, long).token_ids
    engine.start()
    name = engine.submit(PROMPT, long)
    events = engine.poll()
    with engine.paused() as model:
        assert engine.model is model  # the pause is this thread's
        seq = model.lifecycle.alloc_sequence()
        view = model.forward.prefill(PROMPT, seq)
        assert view is not None
        mine = [model.logits.argmax(view)]
        steps = engine._loop.num_steps
        while len(mine) < 5:
            view = model.forward.decode(mine[-1], seq)
            assert view is not None
            mine.append(model.logits.argmax(view))
        assert engine._loop.num_steps == steps
        model.lifecycle.free_sequence(seq)
        with ThreadPoolExecutor(1) as other:
            refused = other.submit(lambda: engine.model).exception(PATIENCE_S)
        assert isinstance(refused, ModelBusyError)
    assert tuple(mine) == expected[:5]
    events += wait_for(engine, 1)
    assert token_ids(events, name) == expected


def test_many_threads_submit_and_cancel(engine: Engine) -> None:
    expected = {i: engine.generate([i, 9], SAMPLED).token_ids for i in range(3, 9)}
    engine.start()

    def client(i: int) -> list[str]:
        names = [engine.submit([i, 9], SAMPLED, user=i) for _ in range(10)]
        engine.cancel(engine.submit([i], PARAMS.replace(max_tokens=300), user="cancelled"))
        return names

    with ThreadPoolExecutor(6) as executor:
        names = [name for batch in executor.map(client, expected) for name in batch]
    events = wait_for(engine, 66)
    for event in events:
        if event.is_last and event.user != "cancelled":
            assert token_ids(events, event.request_id) == expected[event.user]  # type: ignore[index]
    ends = {event.request_id: event.finish_reason for event in events if event.is_last}
    assert [ends.pop(name) for name in names] == ["length"] * 60
    assert set(ends.values()) == {"cancelled"}


def test_two_threads_may_step(engine: Engine) -> None:
    params = SAMPLED.replace(max_tokens=40)
    expected = engine.generate(PROMPT, params).token_ids
    names = [engine.submit(PROMPT, params) for _ in range(4)]
    start = threading.Barrier(2)

    def stepping() -> list[tuple[float, Event]]:
        start.wait()
        seen: list[tuple[float, Event]] = []
        while engine.has_unfinished():
            seen += [(time.perf_counter(), event) for event in engine.step()]
        return seen

    with ThreadPoolExecutor(2) as executor:
        parts = [executor.submit(stepping) for _ in range(2)]
        both = [item for part in parts for item in part.result(PATIENCE_S)]
    for name in names:
        mine = [event for _, event in both if event.request_id == name]
        assert sorted(token for event in mine for token in event.token_ids) == sorted(expected)
        assert sum(event.is_last for event in mine) == 1


# -- asyncio --------------------------------------------------------------------------------------


def test_agenerate(engine: Engine) -> None:
    params = SAMPLED.replace(n=2)
    expected = engine.generate(PROMPT, params)

    async def one(tag: int) -> list[Event]:
        return [event async for event in engine.agenerate(PROMPT, params, user=tag)]

    async def program() -> list[list[Event]]:
        return await asyncio.gather(*(one(tag) for tag in range(5)))

    for tag, events in enumerate(asyncio.run(program())):
        assert {event.user for event in events} == {tag}
        name = events[0].request_id
        for sample in expected.samples:
            assert token_ids(events, name, sample.index) == sample.token_ids
        assert events[-1].completion is not None
    assert engine.poll(0) == []  # private events are nobody else's


def test_leaving_agenerate_cancels_within_a_chunk(folder: Path) -> None:
    prompt = [3 + i % 190 for i in range(480)]
    with Engine(folder, threads=1, quiet=True, chunk_tokens=8, kv_tokens=2048) as engine:
        at_cancel: list[int] = []

        async def reader(index: int) -> None:
            async for _ in engine.agenerate(prompt, PARAMS.replace(max_tokens=20)):
                raise AssertionError("the prompt should not be done")

        async def writer() -> None:
            stream = engine.agenerate(PROMPT, PARAMS.replace(max_tokens=400))
            async for event in stream:
                if event.token_ids:
                    break
            await stream.aclose()  # type: ignore[attr-defined]
            at_cancel.append(engine._loop.num_steps)

        async def program() -> None:
            readers = [asyncio.create_task(reader(i)) for i in range(3)]
            await writer()
            for task in readers:
                task.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
            at_cancel.append(engine._loop.num_steps)
            while engine.has_unfinished():
                await asyncio.sleep(0.001)
            at_cancel.append(engine._loop.num_steps)

        asyncio.run(program())
        assert at_cancel[2] - at_cancel[1] <= 2  # the one under way, and the next
        assert at_cancel[2] < len(prompt) // 8
        engine.stop()
        assert_balanced(engine)


def test_an_event_loop_that_ends_early_harms_nobody(engine: Engine) -> None:
    async def program() -> Any:
        stream = engine.agenerate(PROMPT, PARAMS.replace(max_tokens=300, n=3))
        return await anext(stream)

    for _ in range(5):
        assert isinstance(asyncio.run(program()), Event)
    assert len(engine.generate(PROMPT, PARAMS).token_ids) == 8
    wait_until_idle(engine)
    assert engine._driver.owned


def test_an_event_loop_closed_under_a_generator(engine: Engine) -> None:
    loop = asyncio.new_event_loop()
    stream = engine.agenerate(PROMPT, PARAMS.replace(max_tokens=500, n=30), request_id="left")
    assert isinstance(loop.run_until_complete(anext(stream)), Event)
    with engine.paused():  # the loop closes while much is still to be sent
        loop.close()
    wait_until_idle(engine)
    assert engine._driver.failure is None
    assert engine._driver.owned
    assert len(engine.generate(PROMPT, PARAMS).token_ids) == 8


def test_an_engine_that_is_dropped_takes_its_owner_along(folder: Path) -> None:
    """Running a notebook cell again must not keep the old model."""
    before = threading.active_count()
    engine = Engine(folder, threads=1, quiet=True)
    engine.start()
    core = weakref.ref(engine._loaded.core)
    del engine
    gc.collect()
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert core() is None
    assert threading.active_count() == before


@pytest.mark.parametrize("value", [0, -1, 1.5, "a", True])
def test_max_waiting_is_a_count(folder: Path, value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="max_waiting is"):
        Engine(folder, threads=1, quiet=True, max_waiting=value)


def test_many_sequences_may_run_at_a_time(folder: Path) -> None:
    with Engine(folder, threads=1, quiet=True, max_running=600) as engine:
        assert len(engine.generate([5, 6], SamplingParams(max_tokens=2)).token_ids) == 2
