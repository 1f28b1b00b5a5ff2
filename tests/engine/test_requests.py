"""Requests and events: submit, step, poll, cancel, the owner thread, async generators."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from atlas import Engine, SamplingParams
from atlas.errors import (
    ClosedError,
    InvalidArgumentError,
    KvExhausted,
    ModelBusyError,
    PromptTooLongError,
    QueueFullError,
)
from atlas.event import Event
from tests.composition.harness import Recorder, assert_balanced

PROMPT = [5, 6, 7]
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)
SAMPLED = PARAMS.replace(temperature=0.9, seed=5)
_PATIENCE_S = 30


@pytest.fixture(scope="module")
def module_engine(folder: Path) -> Iterator[Engine]:
    with Engine(folder, threads=1, quiet=True, max_waiting=400, kv_tokens=1024) as engine:
        yield engine


@pytest.fixture
def engine(module_engine: Engine) -> Iterator[Engine]:
    """An engine of this module's own; every test leaves it idle, unowned and balanced."""
    yield module_engine
    module_engine.stop()
    assert module_engine.poll() == []
    assert_balanced(module_engine)


def drain(engine: Engine) -> list[Event]:
    """Step until nothing is left."""
    events: list[Event] = []
    while engine.has_unfinished():
        events += engine.step()
    return events + engine.step()


def wait_for(engine: Engine, count: int) -> list[Event]:
    """Poll until ``count`` requests have ended."""
    events: list[Event] = []
    deadline = time.monotonic() + _PATIENCE_S
    while sum(event.is_last for event in events) < count:
        assert time.monotonic() < deadline, f"{count} requests do not end"
        events += engine.poll(0.5)
    return events


def token_ids(events: list[Event], request_id: str, index: int = 0) -> tuple[int, ...]:
    """The ids that a sample's events carried, in order."""
    mine = [event for event in events if (event.request_id, event.index) == (request_id, index)]
    return tuple(token for event in mine for token in event.token_ids)


# -- events ---------------------------------------------------------------------------------------


def test_events_carry_what_generate_returns(engine: Engine) -> None:
    expected = engine.generate(PROMPT, SAMPLED.replace(logprobs=2))
    tag = object()
    name = engine.submit(PROMPT, SAMPLED.replace(logprobs=2), user=tag)
    events = drain(engine)
    assert {event.request_id for event in events} == {name}
    assert all(event.user is tag for event in events)
    assert token_ids(events, name) == expected.token_ids
    assert tuple(p for event in events for p in event.logprobs) == expected.logprobs
    assert all(len(event.logprobs) == len(event.token_ids) for event in events)
    *before, last = events
    assert len(events) == 8
    for event in before:
        assert (event.finish_reason, event.usage, event.completion) == (None, None, None)
        assert not event.is_last
    assert last.is_last
    assert (last.finish_reason, last.stop_reason, last.error) == ("length", None, None)
    assert last.completion is not None
    assert last.completion.request_id == name
    assert last.completion.token_ids == expected.token_ids
    assert last.usage == last.completion.usage
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (3, 8)


def test_usage_tells_cached_tokens(engine: Engine) -> None:
    prompt = [3 + i % 50 for i in range(70)]
    for cached in (0, 64):
        engine.submit(prompt, PARAMS)
        last = drain(engine)[-1]
        assert last.usage is not None
        assert last.usage.cached_tokens == cached


def test_finish_reasons(engine: Engine) -> None:
    written = engine.generate(PROMPT, PARAMS).token_ids
    stop = written[2]
    cases = {
        "length": PARAMS,
        "stop": PARAMS.replace(stop_token_ids=(stop,)),
        "one": PARAMS.replace(max_tokens=1),
    }
    for name, params in cases.items():
        engine.submit(PROMPT, params, request_id=name)
    ends = {event.request_id: event for event in drain(engine) if event.is_last}
    assert {name: event.finish_reason for name, event in ends.items()} == {
        "length": "length",
        "stop": "stop",
        "one": "length",
    }
    assert ends["stop"].stop_reason == stop


def test_text_is_complete_utf8_and_adds_up(text_folder: Path) -> None:
    texts = ["Hé", "🙂🙂", "x", "日本"]
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=1.5, seed=1)
    with Engine(text_folder, threads=1, quiet=True) as engine:
        expected = [engine.generate(text, params) for text in texts]
        names = [engine.submit(text, params) for text in texts]
        events = drain(engine)
        for name, completion in zip(names, expected, strict=True):
            mine = [event for event in events if event.request_id == name]
            assert "".join(event.text for event in mine) == completion.text
            assert token_ids(events, name) == completion.token_ids
            for event in mine:
                event.text.encode("utf-8")  # no lone surrogates
                assert event.text or event.token_ids or event.finish_reason
        assert_balanced(engine)


def test_samples_share_the_prompts_blocks(engine: Engine) -> None:
    prompt = [3 + i % 70 for i in range(80)]  # exactly five blocks
    alone = [engine.generate(prompt, SAMPLED.replace(max_tokens=6)).token_ids]
    name = engine.submit(prompt, SAMPLED.replace(n=4, max_tokens=6))
    most = 0
    tables: list[list[int]] = []
    scheduler = engine._loop.scheduler
    events: list[Event] = []
    while engine.has_unfinished():
        events += engine.step()
        running = [scheduler.sequence(h).block_table.tolist() for h in scheduler.running_handles]
        used = {block for table in running for block in table}
        if len(running) == 4 and len(used) >= most:
            most, tables = len(used), running
    assert most == 5 + 4
    assert len({tuple(table[:5]) for table in tables}) == 1
    samples = [token_ids(events, name, index) for index in range(4)]
    assert samples[0] == alone[0]
    assert len(set(samples)) > 1
    [last] = [event for event in events if event.is_last]
    assert last.usage is not None
    assert last.usage.completion_tokens == 24
    reasons = [event.index for event in events if event.finish_reason]
    assert sorted(reasons) == [0, 1, 2, 3]


def test_a_shared_block_is_copied_when_written(engine: Engine) -> None:
    prompt = [3 + i % 70 for i in range(75)]  # the fifth block is partly filled
    params = SAMPLED.replace(n=3, max_tokens=6)
    with Recorder(engine) as recorder:
        completion = engine.generate(prompt, params)
    copies = [kind for step in recorder.steps for _, kind in step.actions]
    assert [kind.name for kind in copies] == ["COPY_BLOCK"] * 2
    again = engine.generate([prompt, prompt], params)
    for other in again:
        assert [s.token_ids for s in other.samples] == [s.token_ids for s in completion.samples]


# -- ids, priorities, refusals --------------------------------------------------------------------


def test_ids_are_unique_while_live(engine: Engine) -> None:
    assert engine.submit(PROMPT, PARAMS, request_id="mine") == "mine"
    with pytest.raises(InvalidArgumentError, match="'mine' is in use"):
        engine.submit(PROMPT, PARAMS, request_id="mine")
    first = drain(engine)
    engine.submit(PROMPT, PARAMS, request_id="mine")
    assert token_ids(drain(engine), "mine") == token_ids(first, "mine")
    for bad in ("", 3, b"x"):
        with pytest.raises(InvalidArgumentError, match="request_id is"):
            engine.submit(PROMPT, PARAMS, request_id=bad)  # type: ignore[arg-type]


def test_cancel_of_the_unknown_and_the_finished(engine: Engine) -> None:
    name = engine.submit(PROMPT, PARAMS)
    assert not engine.cancel("unknown")
    drain(engine)
    assert not engine.cancel(name)


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_cancel_ends_with_what_was_written(engine: Engine, steps: int) -> None:
    expected = engine.generate(PROMPT, PARAMS).token_ids
    name = engine.submit(PROMPT, PARAMS)
    events = [event for _ in range(steps) for event in engine.step()]
    assert engine.cancel(name)
    assert engine.cancel(name)  # live until the next step
    rest = engine.step()
    assert [event.finish_reason for event in rest] == ["cancelled"]
    assert rest[0].completion is not None
    assert rest[0].completion.token_ids == token_ids(events, name) == expected[:steps]
    assert not engine.has_unfinished()


def test_lower_priority_values_run_first(folder: Path) -> None:
    with Engine(folder, threads=1, quiet=True, max_running=1) as engine:
        for name, priority in (("c", 5), ("a", -1), ("d", 5), ("b", 0)):
            engine.submit(PROMPT, PARAMS, request_id=name, priority=priority)
        ends = [event.request_id for event in drain(engine) if event.is_last]
        assert ends == ["a", "b", "c", "d"]
        for bad in (True, 1.0, 2**31, None):
            with pytest.raises(InvalidArgumentError, match="priority is"):
                engine.submit(PROMPT, PARAMS, priority=bad)  # type: ignore[arg-type]


def test_back_pressure(folder: Path) -> None:
    with Engine(folder, threads=1, quiet=True, max_waiting=2, max_running=1) as engine:
        engine.submit(PROMPT, PARAMS, request_id="a")
        engine.step()  # it has its first token now, and waits no more
        engine.submit(PROMPT, PARAMS, request_id="b")
        engine.submit(PROMPT, PARAMS, request_id="c")
        with pytest.raises(QueueFullError, match="max_waiting 2"):
            engine.submit(PROMPT, PARAMS)
        engine.cancel("b")
        engine.step()
        engine.submit(PROMPT, PARAMS, request_id="d")
        ends = [event.request_id for event in drain(engine) if event.is_last]
        assert sorted(ends) == ["a", "c", "d"]
        assert_balanced(engine)


def test_hundreds_wait_and_all_end(engine: Engine) -> None:
    prompts = [[3 + i % 190, 7, 3 + i % 11] for i in range(300)]
    params = PARAMS.replace(max_tokens=4)
    names = [engine.submit(prompt, params) for prompt in prompts]
    for name in names[::5]:
        engine.cancel(name)
    ends = {event.request_id: event for event in drain(engine) if event.is_last}
    assert ends.keys() == set(names)
    for i in (1, 117, 299):
        completion = ends[names[i]].completion
        assert completion is not None
        assert completion.token_ids == engine.generate(prompts[i], params).token_ids
    cancelled = [name for name in names if ends[name].finish_reason == "cancelled"]
    assert cancelled == names[::5]


def test_what_can_never_run_is_refused_with_the_numbers(folder: Path) -> None:
    with Engine(folder, threads=1, quiet=True, kv_tokens=64, max_seq_len=256) as engine:
        with pytest.raises(KvExhausted, match=r"60 prompt tokens and 20 new ones need 5 KV blocks"):
            engine.submit(list(range(3, 63)), PARAMS.replace(max_tokens=20))
        with pytest.raises(PromptTooLongError):
            engine.submit([5] * 256, PARAMS)
        with pytest.raises(InvalidArgumentError):
            engine.submit([], PARAMS)
        assert not engine.has_unfinished()
        engine.submit(list(range(3, 63)), PARAMS.replace(max_tokens=5))
        assert drain(engine)[-1].finish_reason == "length"
        assert_balanced(engine)


def test_a_closed_engine_refuses_and_its_requests_end(folder: Path) -> None:
    engine = Engine(folder, threads=1, quiet=True)
    engine.start()
    many = PARAMS.replace(max_tokens=None, n=1024)
    with ThreadPoolExecutor(1) as executor:
        running = executor.submit(engine.generate, PROMPT, many)
        while not engine.has_unfinished():
            time.sleep(0.001)
        engine.close()
        assert isinstance(running.exception(_PATIENCE_S), ClosedError)
    for call in (
        lambda: engine.submit(PROMPT, PARAMS),
        lambda: engine.cancel("x"),
        engine.step,
        engine.poll,
        engine.has_unfinished,
        engine.start,
        lambda: engine.paused().__enter__(),
    ):
        with pytest.raises(ClosedError):
            call()
    engine.stop()
    engine.close()


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
            refused = other.submit(lambda: engine.model).exception(_PATIENCE_S)
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
        both = [item for part in parts for item in part.result(_PATIENCE_S)]
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


def wait_until_idle(engine: Engine) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while engine.has_unfinished():
        assert time.monotonic() < deadline
        time.sleep(0.001)


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
