"""Faults on a hybrid end what they hit and nothing else: the same tests again, and interrupts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atlas import Engine, SamplingParams
from tests.composition.harness import assert_balanced
from tests.engine import test_faults
from tests.engine.faults import PARAMS, PROMPTS
from tests.engine.folders import write_hybrid
from tests.engine.test_fork_and_rewind import run_out

# It replaces weights of a dense model.
DENSE_ONLY = {"test_a_row_of_nans_is_its_requests_own"}

globals().update(
    (name, test)
    for name, test in vars(test_faults).items()
    if name.startswith("test_") and name not in DENSE_ONLY
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hybrid(tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="module")
def hybrid(folder: Path) -> Iterator[Engine]:
    with Engine(
        folder, threads=1, quiet=True, max_running=4, kv_tokens=400, max_seq_len=400
    ) as engine:
        yield engine


@pytest.fixture
def engine(hybrid: Engine) -> Iterator[Engine]:
    """Four requests at a time; every test leaves it idle, unowned and balanced."""
    yield hybrid
    hybrid.stop()
    assert hybrid.poll() == []
    assert_balanced(hybrid)
    assert len(hybrid.generate(PROMPTS["a"], PARAMS).token_ids) == 12


LONG = [3 + (11 * i) % 190 for i in range(70)]


@pytest.mark.parametrize("at", [0, 1, 2, 3, 9, 25, 36])
@pytest.mark.parametrize("cached", [False, True], ids=["cold", "warm"])
def test_an_interrupted_step_is_run_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, at: int, cached: bool
) -> None:
    """Its rows have overwritten the state: it goes back to a snapshot, or to nothing."""
    params = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=2)
    assert engine._loop.cache is not None
    expected = {name: engine.generate(ids, params) for name, ids in (("a", LONG), ("b", LONG[3:]))}
    if not cached:
        engine._loop.cache.clear()
    run, calls = engine._loop.core.launch_plan, []

    def interrupted(plan: Any, **options: Any) -> Any:
        result = run(plan, **options)
        calls.append(plan.step_id)
        if len(calls) == at + 1:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(engine._loop.core, "launch_plan", interrupted)
    for name, ids in (("a", LONG), ("b", LONG[3:])):
        engine.submit(ids, params, request_id=name)
    with pytest.raises(KeyboardInterrupt):
        run_out(engine)
    done = run_out(engine)
    for name in ("a", "b"):
        assert done[name].token_ids == expected[name].token_ids
        assert done[name].logprobs == expected[name].logprobs
