"""Faults end the requests they belong to: no other loses a token, no block leaks, nothing hangs."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from atlas import Engine, SamplingParams
from atlas.errors import (
    AtlasError,
    CallbackError,
    KernelError,
    KvExhausted,
    ModelBusyError,
    NonFiniteLogitsError,
    OutOfMemoryError,
)
from atlas.event import Event
from atlas.generation import Generation
from atlas.live_request import LiveRequest
from tests.composition.harness import Recorder, assert_balanced
from tests.engine.folders import VOCAB_SIZE, script_environment, weights, write_model

PROMPTS = {name: [5 + i, 6, 7 + i, 30] for i, name in enumerate("abcdef")}
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.9, seed=3)
_STEPS = 5000  # of a test at most: what hangs, fails
_NAN = 201  # an id that no prompt uses


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


def drain(engine: Engine) -> dict[str, list[Event]]:
    """Step until nothing is left; events by request."""
    events: dict[str, list[Event]] = {}
    for _ in range(_STEPS):
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
    count = iter(range(_STEPS))

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


# -- kernels --------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [{0}, {3}, {0, 1}, {5, 9, 13}])
def test_a_kernel_error_ends_the_requests_of_its_step(engine: Engine, at: set[int]) -> None:
    expected = {name: engine.generate(ids, PARAMS).token_ids for name, ids in PROMPTS.items()}
    with Recorder(engine) as recorder, kernels_fail(engine, at):
        for name, ids in PROMPTS.items():
            engine.submit(ids, PARAMS, request_id=name)
        events = drain(engine)
    steps = [step for step in recorder.steps if step.entries]
    hit = {name for number in at if number < len(steps) for name, _, _ in steps[number].entries}
    assert hit
    for name, mine in events.items():
        last = mine[-1]
        written = ids_of(mine)
        assert last.completion is not None
        assert last.completion.token_ids == written == expected[name][: len(written)]
        if name in hit:
            assert (last.finish_reason, type(last.error)) == ("error", KernelError)
        else:
            assert (last.finish_reason, len(written)) == ("length", 12)
    assert events.keys() == PROMPTS.keys()


def test_a_kernel_error_with_samples(engine: Engine) -> None:
    params = PARAMS.replace(n=3)
    for at in (0, 2):
        with kernels_fail(engine, {at}):
            engine.submit(PROMPTS["a"], params, request_id="a")
            mine = drain(engine)["a"]
        assert sorted(e.index for e in mine if e.finish_reason == "error") == [0, 1, 2]
        assert sum(event.is_last for event in mine) == 1
        assert_balanced(engine)


def test_a_failed_steps_blocks_are_not_reused_as_a_prefix(engine: Engine) -> None:
    prompt = [3 + i % 60 for i in range(64)]
    with kernels_fail(engine, {0}), pytest.raises(KernelError):
        engine.generate(prompt, PARAMS)
    completion = engine.generate(prompt, PARAMS)
    assert completion.usage.cached_tokens == 0


# -- the pool -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel_fails", [False, True])
def test_a_pool_held_from_outside_refuses_and_goes_on(engine: Engine, kernel_fails: bool) -> None:
    lifecycle = engine.model.lifecycle
    seq = lifecycle.alloc_sequence()
    engine._loop.cache.clear()  # type: ignore[union-attr]
    lifecycle.reserve(seq, 16 * (lifecycle.num_free_blocks - 2))
    engine.submit([3 + i for i in range(40)], PARAMS, request_id="large")  # needs four
    engine.submit(PROMPTS["a"], PARAMS, request_id="small")
    with kernels_fail(engine, {0} if kernel_fails else set()):
        events = drain(engine)
    assert isinstance(events["large"][-1].error, KvExhausted)
    if kernel_fails:
        assert isinstance(events["small"][-1].error, KernelError)
    else:
        assert len(ids_of(events["small"])) == 12
    lifecycle.free_sequence(seq)


def test_more_samples_than_may_run(engine: Engine) -> None:
    params = PARAMS.replace(n=9)
    wide = [sample.token_ids for sample in engine.generate(PROMPTS["a"], params).samples]
    assert len(set(wide)) > 1
    assert wide[0] == engine.generate(PROMPTS["a"], PARAMS).token_ids
    assert wide[:3] == [
        s.token_ids for s in engine.generate(PROMPTS["a"], PARAMS.replace(n=3)).samples
    ]


@pytest.mark.parametrize("mode", ["spill", "requeue"])
def test_host_memory_that_fails_ends_only_what_it_held(
    folder: Path, mode: Literal["spill", "requeue"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A preempted request whose blocks cannot be kept ends; the others never notice."""
    with Engine(
        folder, threads=1, quiet=True, kv_tokens=288, max_seq_len=288, preemption=mode
    ) as engine:
        params = PARAMS.replace(max_tokens=270)  # beyond what admission reserves
        alone = engine.generate(PROMPTS["a"], params).token_ids
        cases: list[tuple[str, Exception | None]] = [("kept", None), ("lost", MemoryError("full"))]
        for case, error in cases:
            engine.submit(PROMPTS["a"], params, request_id="a", priority=0)
            events = {"a": [], "b": []}  # type: dict[str, list[Event]]
            while len(ids_of(events["a"])) < 30:
                for event in engine.step():
                    events[event.request_id].append(event)
            # Admission would make it wait; a fork of the pool's spare blocks does not.
            engine._loop.scheduler.set_spill(mode == "spill")
            engine.fork("a", new_id="b")
            if error is not None:

                def fail(blocks: Any, error: Exception = error) -> Any:
                    raise error

                monkeypatch.setattr(engine._loop.store, "read", fail)
            for name, mine in drain(engine).items():
                events[name] += mine
            monkeypatch.undo()
            assert engine._loop.scheduler.num_preemptions > 0
            assert ids_of(events["a"]) == alone, case
            last = events["b"][-1]
            if mode == "spill" and error is not None:
                assert isinstance(last.error, OutOfMemoryError)
            else:
                assert last.completion is not None
                assert last.completion.token_ids == alone
            assert_balanced(engine)


# -- callbacks ------------------------------------------------------------------------------------


def raising(at: int, error: BaseException) -> Callable[[Any, Any, Any], None]:
    """A logits processor that raises once ``at`` tokens are written."""

    def processor(prompt: Any, output: Any, row: Any) -> None:
        if len(output) == at:
            raise error

    return processor


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
    for _ in range(_STEPS):
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


# -- numbers --------------------------------------------------------------------------------------


def test_a_row_of_nans_is_its_requests_own(tmp_path: Path) -> None:
    embedding = weights(VOCAB_SIZE)["model.embed_tokens.weight"]
    embedding[_NAN] = np.nan
    folder = write_model(tmp_path / "nan", replaced={"model.embed_tokens.weight": embedding})
    with Engine(folder, threads=1, quiet=True, kv_tokens=256, max_seq_len=256) as engine:
        params = PARAMS.replace(logit_bias={_NAN: -99.0})
        expected = {name: engine.generate(ids, params).token_ids for name, ids in PROMPTS.items()}
        for round_number in range(3):  # blocks that held NaN are used again
            for name, ids in PROMPTS.items():
                poisoned = [*ids, _NAN, 5] if name in "bd" else ids
                engine.submit(poisoned, params, request_id=name)
            events = drain(engine)
            for name, mine in events.items():
                if name in "bd":
                    assert isinstance(mine[-1].error, NonFiniteLogitsError), round_number
                    assert ids_of(mine) == ()
                else:
                    assert ids_of(mine) == expected[name]
            assert_balanced(engine)


# -- processes ------------------------------------------------------------------------------------

_EXIT = """
import asyncio, sys, threading, time
from atlas import Engine, SamplingParams

engine = Engine(sys.argv[1], threads=2, quiet=True, kv_tokens=8192)
long = SamplingParams(max_tokens=400, ignore_eos=True)
how = sys.argv[2]
if how != "unowned":
    engine.start()
for i in range(3 if how == "event loop" else 200):
    engine.submit([3 + i % 190] * 20, long.replace(n=4))
if how == "daemon threads":
    for _ in range(4):
        work = lambda: engine.generate([5, 6], long.replace(n=64))
        threading.Thread(target=work, daemon=True).start()
    time.sleep(0.05)
if how == "event loop":
    async def program():
        stream = engine.agenerate([5, 6], long)
        async for event in stream:
            return
    asyncio.run(program())
if how == "exception":
    raise SystemExit(0)
if how == "paused":
    pause = engine.paused()
    pause.__enter__()
if how == "unowned":
    engine.step()
print("leaving", time.time())
"""


@pytest.mark.parametrize(
    "how", ["owned", "unowned", "daemon threads", "event loop", "exception", "paused"]
)
def test_the_interpreter_may_exit_with_work_in_flight(folder: Path, how: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _EXIT, str(folder), how],
        env=script_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    if how != "exception":
        word, left_at = done.stdout.split()
        assert word == "leaving"
        assert time.time() - float(left_at) < 10


_FORK_WHILE_OWNED = """
import os, signal, sys, time
from atlas import Engine, SamplingParams
from atlas.errors import StaleHandleError

engine = Engine(sys.argv[1], threads=2, quiet=True, kv_tokens=4096)
params = SamplingParams(max_tokens=40, ignore_eos=True)
expected = engine.generate([5, 6, 7], params).token_ids
engine.start()
for round_number in range(6):
    names = [engine.submit([5, 6, 7], params) for _ in range(8)]
    time.sleep(0.001 * round_number)
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)  # kills the child where it hangs
        status = 1
        try:
            for call in (
                lambda: engine.submit([5], params),
                lambda: engine.generate([5], params),
                engine.step,
                engine.poll,
                lambda: engine.cancel(names[0]),
                engine.has_unfinished,
                engine.start,
                lambda: engine.paused().__enter__(),
            ):
                try:
                    call()
                except StaleHandleError as error:
                    assert "parent process" in str(error)
                else:
                    raise AssertionError("not refused")
            engine.stop()
            engine.close()
            with Engine(sys.argv[1], threads=1, quiet=True) as own:
                own.start()
                assert own.generate([5, 6, 7], params).token_ids == expected
            status = 0
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, os.waitstatus_to_exitcode(status)
    written = {name: [] for name in names}
    while any(len(ids) < 40 for ids in written.values()):
        for event in engine.poll(5):
            written[event.request_id] += event.token_ids
    assert all(tuple(ids) == expected for ids in written.values())
engine.close()
print("done")
"""


def test_fork_while_the_owner_thread_runs(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", _FORK_WHILE_OWNED, str(folder)],
        env=script_environment(),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("done\n", "", 0)


# -- everything at once ---------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["spill", "requeue"])
@pytest.mark.parametrize("seed", range(4))
def test_any_sequence_of_faults(folder: Path, mode: Literal["spill", "requeue"], seed: int) -> None:
    """Random requests, cancels, kernel errors and raising callbacks in a tiny pool."""
    rng = random.Random(seed)
    with Engine(
        folder, threads=1, quiet=True, kv_tokens=320, max_seq_len=320, preemption=mode,
        max_running=6, chunk_tokens=24,
    ) as engine:  # fmt: skip
        prompts = [[rng.randrange(3, 203) for _ in range(rng.randrange(1, 90))] for _ in range(5)]
        params = PARAMS.replace(max_tokens=60)
        expected = [engine.generate(prompt, params).token_ids for prompt in prompts]
        which: dict[str, int] = {}
        events: dict[str, list[Event]] = {}
        with kernels_fail(engine, {rng.randrange(400) for _ in range(6)}):
            for step in range(500):
                if step < 300 and rng.random() < 0.2:
                    i = rng.randrange(len(prompts))
                    own = params.replace(
                        max_tokens=rng.randrange(1, 60),
                        n=rng.choice([1, 1, 1, 4]),
                        logits_processor=rng.choice([None, None, raising(5, ValueError())]),
                    )
                    which[engine.submit(prompts[i], own, priority=rng.randrange(3))] = i
                if which and rng.random() < 0.05:
                    engine.cancel(rng.choice(list(which)))
                for event in engine.step():
                    events.setdefault(event.request_id, []).append(event)
                assert engine._loop.cache is not None
                engine._loop.cache.check()
            for name, mine in drain(engine).items():
                events.setdefault(name, []).extend(mine)
        assert_balanced(engine)
        assert events.keys() == which.keys()
        reasons = set()
        for name, mine in events.items():
            assert sum(event.is_last for event in mine) == 1
            assert mine[-1].is_last
            written = ids_of(mine)
            assert written == expected[which[name]][: len(written)]
            reasons |= {event.finish_reason for event in mine}
        assert reasons == {None, "length", "cancelled", "error"}
