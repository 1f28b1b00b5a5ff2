"""Health, readiness, draining, warming up and the memory limit: what a serving stack asks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from atlas import Engine, SamplingParams
from atlas.backends.cpu import compiler, runtime
from atlas.errors import InvalidArgumentError, OutOfMemoryError, QueueFullError
from atlas.layers.step import StepShape
from tests.engine.conftest import num_taken
from tests.engine.test_fork_and_rewind import GREEDY, PROMPT, advance, run_out

pytestmark = pytest.mark.cpu


@pytest.fixture
def own(folder: Path) -> Iterator[Engine]:
    with Engine(folder, threads=1, quiet=True) as engine:
        yield engine


def eventually(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 20
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()


# -- health -----------------------------------------------------------------------------------


def test_an_idle_engine_is_ok_however_long(own: Engine) -> None:
    own.generate(PROMPT, GREEDY)
    time.sleep(0.03)
    health = own.health(stalled_after_s=0.01)
    assert (health.state, health.idle_s, health.num_live) == ("ok", 0.0, 0)
    assert health.num_steps == own.metrics().steps > 0
    assert health.failure is None


def test_work_that_nobody_steps_is_stalled_until_somebody_does(own: Engine) -> None:
    own.generate(PROMPT, GREEDY)
    time.sleep(0.05)
    before = time.perf_counter()
    own.submit(PROMPT, GREEDY)
    idle_s = own.health().idle_s
    assert idle_s <= time.perf_counter() - before  # not since the last step
    time.sleep(0.05)
    health = own.health(stalled_after_s=0.04)
    assert health.state == "stalled"
    assert health.idle_s >= 0.05
    assert health.num_live == 1
    assert own.health().state == "ok"
    before = time.perf_counter()
    advance(own, 1)
    idle_s = own.health().idle_s
    assert idle_s <= time.perf_counter() - before  # the request is old, the step is not
    run_out(own)
    assert own.health(stalled_after_s=1e-9).state == "ok"


def test_a_step_that_hangs_is_seen_from_outside(own: Engine) -> None:
    release, inside = threading.Event(), threading.Event()

    def hang(prompt: Any, output: Any, row: Any) -> None:
        inside.set()
        release.wait(20)

    own.start()
    name = own.submit(PROMPT, GREEDY.replace(max_tokens=1, logits_processor=hang))
    assert inside.wait(20)
    assert eventually(lambda: own.health(stalled_after_s=0.02).state == "stalled")
    assert own.ready()
    release.set()
    assert run_out(own)[name].finish_reason == "length"
    assert own.health(stalled_after_s=0.02).state == "ok"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_owner_thread_is_reported(own: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> bool:
        raise RuntimeError("boom")

    own.start()
    monkeypatch.setattr(own._loop, "step", broken)
    own.submit(PROMPT, GREEDY)
    assert eventually(lambda: own.health().state == "failed")
    assert own.health().failure == "RuntimeError('boom')"
    assert not own.ready()
    monkeypatch.undo()
    assert eventually(lambda: not own.has_unfinished())
    own.stop()
    own.start()
    assert own.health().state == "ok"
    assert own.ready()


def test_a_closed_engine_says_so(folder: Path) -> None:
    engine = Engine(folder, threads=1, quiet=True)
    assert (engine.health().state, engine.ready()) == ("ok", True)
    engine.close()
    assert (engine.health().state, engine.ready()) == ("closed", False)


@pytest.mark.parametrize("value", [0, -1.0, float("nan")])
def test_stalled_after_is_positive(own: Engine, value: float) -> None:
    with pytest.raises(InvalidArgumentError, match="stalled_after_s is"):
        own.health(value)


def test_ready_says_when_the_queue_is_full(folder: Path) -> None:
    with Engine(folder, threads=1, max_waiting=2, quiet=True) as engine:
        engine.submit(PROMPT, GREEDY)
        assert engine.ready()
        engine.submit(PROMPT, GREEDY)
        assert not engine.ready()
        advance(engine, 2)
        assert engine.ready()
        run_out(engine)


# -- drain ------------------------------------------------------------------------------------


@pytest.mark.parametrize("owner", [False, True])
def test_drain_finishes_what_runs_and_refuses_the_rest(
    own: Engine, tmp_path: Path, owner: bool
) -> None:
    plain = own.generate(PROMPT, GREEDY)
    running = own.submit(PROMPT, GREEDY)
    advance(own, 3)
    own.save(running, tmp_path / "session")
    names = [running, *(own.submit(PROMPT, GREEDY) for _ in range(3))]
    if owner:
        own.start()
    assert own.drain(timeout=20) is True
    assert not own.ready()
    assert own.health().draining
    done = {event.request_id: event.completion for event in own.poll() if event.is_last}
    assert set(done) == set(names)
    assert all(c is not None and c.token_ids == plain.token_ids for c in done.values())
    for attempt in (
        lambda: own.submit(PROMPT, GREEDY),
        lambda: own.generate(PROMPT),
        lambda: own.restore(tmp_path / "session"),
    ):
        with pytest.raises(QueueFullError, match="the engine drains"):
            attempt()
    assert own.drain(0) is True


def test_drain_gives_up_when_time_is_out(own: Engine) -> None:
    release, inside = threading.Event(), threading.Event()

    def hang(prompt: Any, output: Any, row: Any) -> None:
        inside.set()
        release.wait(20)

    own.start()
    name = own.submit(PROMPT, GREEDY.replace(max_tokens=2, logits_processor=hang))
    assert inside.wait(20)
    started = time.monotonic()
    assert own.drain(0.05) is False
    assert time.monotonic() - started < 5
    release.set()
    assert own.drain(20) is True
    assert run_out(own) == {}
    last = own.poll(0)
    assert [event.request_id for event in last if event.is_last] == [name]


# -- warming up -------------------------------------------------------------------------------


def test_warmup_prepares_and_leaves_nothing(folder: Path) -> None:
    with Engine(folder, threads=1, quiet=True, max_running=6) as engine:
        before = engine.metrics()
        engine.warmup()
        assert engine.metrics() == before
        assert num_taken(engine) == 0
        recorded = dict(engine._loaded.core.runtime._recorded)
        assert all(StepShape.decode(n) in recorded for n in range(1, 7))
        compiled = dict(compiler._ADDRESSES)
        params = SamplingParams(max_tokens=4, temperature=1.0, seed=1, top_p=0.9, top_k=30)
        engine.generate([[3 + i] * 128 for i in range(6)], params)
        assert compiled == compiler._ADDRESSES
        now = engine._loaded.core.runtime._recorded
        assert all(now[StepShape.decode(n)] is recorded[StepShape.decode(n)] for n in range(1, 7))


def test_warmup_in_the_midst_of_work(folder: Path) -> None:
    with Engine(folder, threads=1, quiet=True, kv_tokens=64) as engine:
        plain = engine.generate(PROMPT, GREEDY)
        engine.warmup()
        name = engine.submit(PROMPT, GREEDY)
        while engine.has_unfinished():
            for event in engine.step():
                completion = event.completion
            engine.warmup()
        assert completion is not None
        assert (completion.request_id, completion.samples) == (name, plain.samples)
        engine.start()
        engine.warmup()


# -- memory_limit -----------------------------------------------------------------------------


def planned(folder: Path, **options: Any) -> tuple[int, int]:
    """Bytes in all, and of the KV cache."""
    with Engine(folder, threads=1, quiet=True, **options) as engine:
        plan = engine._loaded.plan
        return plan.weights + plan.kv_pool + plan.buffers, plan.kv_pool


def test_the_kv_cache_shrinks_to_the_limit(folder: Path) -> None:
    total, kv_bytes = planned(folder)
    assert planned(folder, memory_limit=total) == (total, kv_bytes)
    assert planned(folder, memory_limit=10 * total) == (total, kv_bytes)
    block = kv_bytes // 32  # 512 positions
    for limit, num_blocks in [
        (total - 1, 31),
        (total - kv_bytes // 2, 16),
        (total - 31 * block, 1),
    ]:
        assert planned(folder, memory_limit=limit) == (
            total - (32 - num_blocks) * block,
            num_blocks * block,
        )
    with Engine(folder, threads=1, quiet=True, memory_limit=total - kv_bytes // 2) as engine:
        assert engine.generate(PROMPT, GREEDY).finish_reason == "length"


def test_what_does_not_fit_is_refused_with_the_numbers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    total, kv_bytes = planned(folder)
    explicit, _ = planned(folder, kv_tokens=512)
    assert explicit == total
    monkeypatch.setattr(runtime, "allocate_pools", None)  # nothing is allocated
    for options in (
        {"memory_limit": total - 1, "kv_tokens": 512},
        {"memory_limit": total - kv_bytes},
        {"memory_limit": 1},
    ):
        with pytest.raises(OutOfMemoryError) as refusal:
            Engine(folder, quiet=True, **options)
        message = str(refusal.value)
        assert f"{total} bytes" in message
        assert f"memory_limit is {options['memory_limit']};" in message
        assert "weights need" in message


@pytest.mark.parametrize("value", [0, -1, True, 1e9, "1G"])
def test_the_limit_is_a_positive_integer(folder: Path, value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"memory_limit is .*; allowed: an integer"):
        Engine(folder, quiet=True, memory_limit=value)
