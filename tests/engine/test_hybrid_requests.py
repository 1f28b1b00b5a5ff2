"""What requests, forks, rewinds and sessions promise holds for a hybrid: the same tests again."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from atlas import Engine, SamplingParams
from atlas._native.plan import EntryKind
from atlas.errors import SequenceStateError
from tests.composition.harness import Recorder
from tests.engine import test_fork_and_rewind, test_requests, test_sessions
from tests.engine.conftest import num_taken
from tests.engine.folders import write_hybrid
from tests.engine.test_fork_and_rewind import advance, run_out

# They count a dense model's actions, or write the bytes of its files.
DENSE_ONLY = {
    "test_a_shared_block_is_copied_when_written",
    "test_another_models_session_is_refused",
    "test_hostile_sections_are_refused",
}

for _module in (test_fork_and_rewind, test_requests, test_sessions):
    globals().update(
        (name, test)
        for name, test in vars(_module).items()
        if name.startswith("test_") and name not in DENSE_ONLY
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with recurrent layers around one of attention."""
    return write_hybrid(tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="module")
def hybrid(folder: Path) -> Iterator[Engine]:
    with Engine(folder, threads=1, quiet=True) as engine:
        yield engine


@pytest.fixture
def engine(hybrid: Engine) -> Iterator[Engine]:
    """Every test must leave it usable, with its blocks and slots free."""
    yield hybrid
    assert num_taken(hybrid) == 0
    assert hybrid.metrics().state_slots_used == 0
    assert len(hybrid.generate([5, 6]).token_ids) > 0


other, saved = test_sessions.other, test_sessions.saved


LONG = [3 + (11 * i) % 190 for i in range(70)]
PARAMS = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0.9, seed=4, logprobs=1)


@pytest.mark.parametrize("position", [70, 71, 80, 81, 95, 100, 111, 112, 113, 114])
def test_a_rewound_request_goes_on_as_one_run_to_there(engine: Engine, position: int) -> None:
    """From the prompt's tail on, or from a block boundary of the answer."""
    plain = engine.generate(LONG, PARAMS)
    name = engine.submit(LONG, PARAMS)
    advance(engine, 44)
    standing = engine.rewind(name, position)
    assert standing.token_ids == plain.token_ids[: position - 70]
    done = run_out(engine)[name]
    assert done.samples == plain.samples


def test_a_restored_request_runs_nothing_again(engine: Engine, tmp_path: Path) -> None:
    plain = engine.generate(LONG, PARAMS)
    name = engine.submit(LONG, PARAMS)
    advance(engine, 30)
    engine.save(name, tmp_path / "session")
    engine.cancel(name)
    run_out(engine)
    with Recorder(engine) as recorder:
        name = engine.restore(tmp_path / "session")
        done = run_out(engine)[name]
    assert done.samples == plain.samples
    assert done.usage.restored_tokens == 70 + 29
    assert recorder.num_rows(EntryKind.PROMPT) == 0
    assert recorder.num_rows(EntryKind.STEP) == 60 - 30


def test_a_rewind_without_a_snapshot_is_refused(folder: Path) -> None:
    with Engine(folder, threads=1, quiet=True, state_snapshots=0) as engine:
        plain = engine.generate(LONG, PARAMS)
        name = engine.submit(LONG, PARAMS)
        advance(engine, 20)
        for position in (70, 80, 88):
            with pytest.raises(SequenceStateError, match="kept are those after no tokens"):
                engine.rewind(name, position)
        assert run_out(engine)[name].samples == plain.samples
        assert engine.metrics().snapshots_used == 0


def test_snapshots_of_a_way_back_go_when_others_need_them(folder: Path) -> None:
    """One slot: the tail's is taken by the block boundary, which the answer's end will need."""
    with Engine(folder, threads=1, quiet=True, state_snapshots=1, prefix_cache=False) as engine:
        name = engine.submit(LONG, PARAMS)
        advance(engine, 5)
        engine.rewind(name, 71)
        advance(engine, 20)
        with pytest.raises(SequenceStateError, match="kept are those after 80 tokens"):
            engine.rewind(name, 75)
        engine.rewind(name, 82)
        run_out(engine)
        assert engine.metrics().snapshots_used == 0


def test_close_lets_go_of_the_states(folder: Path) -> None:
    engine = Engine(folder, threads=1, quiet=True)
    engine.generate(LONG, PARAMS)
    with engine.paused() as model:
        seq = model.lifecycle.alloc_sequence()
        model.forward.prefill(LONG, seq)
    states = engine._loaded.core.states
    assert states is not None
    arrays = [weakref.ref(array) for array in (*states.pools.states, *states.pools.tails)]
    del states, model
    engine.close()
    gc.collect()
    assert [array() for array in arrays] == [None] * 4
    assert seq.slot is not None
    del seq
