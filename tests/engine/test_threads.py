"""Threads, event loops and interrupts: requests take turns, and none leaves anything behind."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atlas import Engine, SamplingParams
from atlas.errors import ModelBusyError, WrongThreadError
from tests.engine.conftest import num_taken
from tests.engine.folders import script_environment

pytestmark = pytest.mark.cpu

PROMPT = [5, 6, 7]
LONG = SamplingParams(max_tokens=24, ignore_eos=True)


def run_in_thread(call: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(call).result(timeout=30)


def test_threads_get_the_results_of_one(folder: Path) -> None:
    prompts = [[i, i + 1, 3 + i % 5] for i in range(3, 15)]
    params = LONG.replace(temperature=0.8, seed=3)
    with Engine(folder, threads=2, quiet=True) as engine:
        alone = [engine.generate(prompt, params).token_ids for prompt in prompts]
        with ThreadPoolExecutor(6) as executor:
            together = list(executor.map(lambda p: engine.generate(p, params), prompts))
            streamed = list(executor.map(lambda p: list(engine.stream(p, params)), prompts))
        assert [completion.token_ids for completion in together] == alone
        assert [tuple(i for d in deltas for i in d.token_ids) for deltas in streamed] == alone
        assert num_taken(engine) == 0


def test_a_stream_may_move_between_threads(engine: Engine) -> None:
    stream = engine.stream(PROMPT, LONG)
    first = next(stream).token_ids
    rest = run_in_thread(lambda: [i for delta in stream for i in delta.token_ids])
    assert (*first, *rest) == engine.generate(PROMPT, LONG).token_ids


def test_an_engine_may_be_made_used_and_closed_in_different_threads(folder: Path) -> None:
    engine = run_in_thread(lambda: Engine(folder, threads=2, quiet=True))
    completion = engine.generate(PROMPT, LONG)
    assert run_in_thread(lambda: engine.generate(PROMPT, LONG)).token_ids == completion.token_ids
    run_in_thread(engine.close)


def test_hand_driving_from_a_wrong_thread_raises(engine: Engine) -> None:
    model = engine.model
    with pytest.raises(WrongThreadError, match="bind_to_thread"):
        run_in_thread(model.lifecycle.alloc_sequence)
    seq = model.lifecycle.alloc_sequence()
    for call in (
        lambda: model.forward.prefill(PROMPT, seq),
        lambda: model.lifecycle.reserve(seq, 5),
        lambda: model.lifecycle.free_sequence(seq),
    ):
        with pytest.raises(WrongThreadError):
            run_in_thread(call)
    # A thread's generate lends it the model for its steps only.
    run_in_thread(lambda: engine.generate(PROMPT, LONG))
    model.forward.prefill(PROMPT, seq)
    model.lifecycle.free_sequence(seq)

    def drive() -> int:
        model.lifecycle.bind_to_thread()
        moved = model.lifecycle.alloc_sequence()
        view = model.forward.prefill(PROMPT, moved)
        assert view is not None
        token = model.logits.argmax(view)
        model.lifecycle.free_sequence(moved)
        return token

    assert run_in_thread(drive) == engine.generate(PROMPT, LONG).token_ids[0]
    with pytest.raises(WrongThreadError):
        model.lifecycle.alloc_sequence()
    model.lifecycle.bind_to_thread()


def test_the_model_cannot_be_taken_from_a_running_step(engine: Engine) -> None:
    model = engine.model
    refused: list[BaseException | None] = []

    def processor(prompt: Any, output: Any, row: Any) -> None:
        with ThreadPoolExecutor(1) as executor:
            refused.append(executor.submit(model.lifecycle.bind_to_thread).exception(30))

    engine.generate(PROMPT, SamplingParams(max_tokens=1, logits_processor=processor))
    assert [type(error) for error in refused] == [ModelBusyError]


def test_an_engine_works_inside_a_running_event_loop(engine: Engine) -> None:
    async def cell() -> tuple[int, ...]:
        inside = engine.generate(PROMPT, LONG).token_ids
        assert inside == tuple(i for d in engine.stream(PROMPT, LONG) for i in d.token_ids)
        beside = await asyncio.gather(
            *(asyncio.to_thread(engine.generate, PROMPT, LONG) for _ in range(3))
        )
        assert all(completion.token_ids == inside for completion in beside)
        return inside

    assert asyncio.run(cell()) == engine.generate(PROMPT, LONG).token_ids


@pytest.mark.parametrize("at_step", [0, 3])
@pytest.mark.parametrize("form", ["generate", "batch", "stream"])
def test_an_interrupt_cancels_at_once(engine: Engine, form: str, at_step: int) -> None:
    steps: list[int] = []

    def processor(prompt: Any, output: Any, row: Any) -> None:
        steps.append(len(output))
        if len(output) == at_step:
            raise KeyboardInterrupt

    params = LONG.replace(logits_processor=processor)
    forms: dict[str, Callable[[], object]] = {
        "generate": lambda: engine.generate(PROMPT, params),
        "batch": lambda: engine.generate([PROMPT, [9]], params),
        "stream": lambda: list(engine.stream(PROMPT, params)),
    }
    with pytest.raises(KeyboardInterrupt):
        forms[form]()
    # In a batch the second prompt is chosen for in the same steps, until the first interrupts.
    rows = [step for step in range(at_step) for _ in range(2 if form == "batch" else 1)]
    assert steps == [*rows, at_step]
    assert num_taken(engine) == 0
    assert len(engine.generate(PROMPT, LONG).token_ids) == 24


_SIGNAL_SCRIPT = """
import os, signal, sys, threading, time
from atlas import Engine, SamplingParams

engine = Engine(sys.argv[1], threads=2, quiet=True)
params = SamplingParams(max_tokens=None, ignore_eos=True, n=1024)
expected = engine.generate([5, 6], SamplingParams(max_tokens=8)).token_ids
lifecycle = engine.model.lifecycle
for prompt in ([5, 6, 7], list(range(3, 200))):
    sent = []
    def interrupt():
        sent.append(time.perf_counter())
        os.kill(os.getpid(), signal.SIGINT)
    threading.Timer(0.15, interrupt).start()
    try:
        engine.generate(prompt, params)
    except KeyboardInterrupt:
        waited = time.perf_counter() - sent[0]
    else:
        raise SystemExit("not interrupted")
    assert waited < 1.0, waited
    held = lifecycle.num_total_blocks - lifecycle.num_free_blocks
    assert held == engine._loop.cache.num_blocks
    assert engine.generate([5, 6], SamplingParams(max_tokens=8)).token_ids == expected
print("usable")
"""


def test_a_signal_interrupts_within_a_step(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SIGNAL_SCRIPT, str(folder)],
        env=script_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("usable\n", 0), done.stderr


def test_closing_waits_for_the_step_of_another_thread(folder: Path) -> None:
    engine = Engine(folder, threads=1, quiet=True)
    started = threading.Event()

    def processor(prompt: Any, output: Any, row: Any) -> None:
        started.set()

    params = SamplingParams(max_tokens=None, n=1024, ignore_eos=True, logits_processor=processor)
    with ThreadPoolExecutor(1) as executor:
        running = executor.submit(engine.generate, PROMPT, params)
        assert started.wait(30)
        engine.close()
        completed = running.exception(30)
    assert completed is not None
    assert type(completed).__name__ == "ClosedError"
    assert np.isfinite(engine.load_s)
