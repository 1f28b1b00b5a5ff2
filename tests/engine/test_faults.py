"""Faults end the requests they belong to: no other loses a token, no block leaks, nothing hangs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from atlas import Engine
from atlas.errors import (
    KernelError,
    KvExhausted,
    NonFiniteLogitsError,
    OutOfMemoryError,
)
from atlas.event import Event
from tests.composition.harness import Recorder, assert_balanced
from tests.engine.faults import PARAMS, PROMPTS, drain, ids_of, kernels_fail, raising
from tests.engine.folders import VOCAB_SIZE, weights, write_model

pytestmark = pytest.mark.cpu

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
