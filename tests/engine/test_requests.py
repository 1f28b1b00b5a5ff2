"""Requests and events: submit, step, cancel, priorities, samples and refusals."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from atlas import Engine, SamplingParams
from atlas.errors import (
    ClosedError,
    InvalidArgumentError,
    KvExhausted,
    PromptTooLongError,
    QueueFullError,
)
from atlas.event import Event
from tests.composition.harness import Recorder, assert_balanced
from tests.engine.events import PATIENCE_S, drain, token_ids

PROMPT = [5, 6, 7]
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)
SAMPLED = PARAMS.replace(temperature=0.9, seed=5)


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
        for name, priority in (("c", 5), ("a", -1), ("d", np.int64(5)), ("b", 0)):
            engine.submit(PROMPT, PARAMS, request_id=name, priority=priority)
        ends = [event.request_id for event in drain(engine) if event.is_last]
        assert ends == ["a", "b", "c", "d"]
        for bad in (True, 1.0, 2**31, np.int32(-(2**31)), None):
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
        assert isinstance(running.exception(PATIENCE_S), ClosedError)
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
