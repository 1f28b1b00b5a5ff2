"""Prompts on hybrids compute what no snapshot of recurrent state saves, and give the same bits.

Blocks of KV alone do not continue a hybrid: a match ends where the deepest snapshot does. There
are snapshots at a prompt's tail boundary, where prompts part, and at a turn's last block boundary.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from atlas import Engine, SamplingParams
from atlas._native.plan import EntryKind
from tests.composition.harness import BLOCK_SIZE, Recorder, assert_balanced

PARAMS = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.8, seed=2, logprobs=2)
HISTORY = [3 + (11 * i) % 190 for i in range(70)]
QUESTION = [4 + (7 * i) % 180 for i in range(21)]


@pytest.fixture(params=[True, False], ids=["reuse", "no-reuse"])
def engine(request: pytest.FixtureRequest, hybrid_folder: Path) -> Iterator[Engine]:
    with Engine(hybrid_folder, threads=1, quiet=True, reuse_generated=request.param) as engine:
        yield engine
        assert_balanced(engine)


@pytest.fixture
def cold(hybrid_folder: Path) -> Iterator[Engine]:
    with Engine(hybrid_folder, threads=1, quiet=True, prefix_cache=False) as engine:
        yield engine


def run_both(engine: Engine, cold: Engine, prompt: list[int]) -> tuple[int, int]:
    """Tokens from the cache and prompt rows that ran; what comes out is what a cold run gives."""
    with Recorder(engine) as recorder:
        warm = engine.generate(prompt, PARAMS)
    expected = cold.generate(prompt, PARAMS)
    assert warm.token_ids == expected.token_ids
    assert warm.logprobs == expected.logprobs
    rows = recorder.num_rows(EntryKind.PROMPT)
    assert rows == len(prompt) - warm.usage.cached_tokens
    return warm.usage.cached_tokens, rows


def test_a_second_turn_starts_at_the_turns_end(engine: Engine, cold: Engine) -> None:
    first = engine.generate(HISTORY, PARAMS)
    turn = [*HISTORY, *first.token_ids, *QUESTION]
    # 99 tokens are absorbed: the snapshot at 96 was decoded, the one at 64 is the prompt's tail.
    reused = 96 if engine.scheduling.reuse_generated else 64
    assert run_both(engine, cold, turn)[0] == reused


def test_turn_after_turn(engine: Engine, cold: Engine) -> None:
    turn = HISTORY
    for number in range(4):
        answer = engine.generate(turn, PARAMS)
        assert answer.token_ids == cold.generate(turn, PARAMS).token_ids
        if number:
            added = len(QUESTION) if engine.scheduling.reuse_generated else 30 + len(QUESTION)
            assert len(turn) - answer.usage.cached_tokens <= added + BLOCK_SIZE
        turn = [*turn, *answer.token_ids, *QUESTION]


def test_the_same_prompt_again_computes_its_tail(engine: Engine, cold: Engine) -> None:
    """An exact hit: the state after all but the last token is needed, not the one after all."""
    prompt = HISTORY[: 4 * BLOCK_SIZE]
    engine.generate(prompt, PARAMS)
    assert run_both(engine, cold, prompt) == (3 * BLOCK_SIZE, BLOCK_SIZE)
    engine.generate(HISTORY, PARAMS)
    assert run_both(engine, cold, HISTORY) == (64, 6)


def test_prompts_that_part_get_a_snapshot_there(engine: Engine, cold: Engine) -> None:
    """The second prompt finds the blocks that they share but no state there; the third both."""
    system, metrics = HISTORY[:50], engine.metrics
    found = [run_both(engine, cold, [*system, *QUESTION[i:]])[0] for i in range(3)]
    assert found == [0, 0, 48]
    assert metrics().prefix_misses["snapshot"] == 1
    assert metrics().prefix_misses["cold"] == 1
    assert metrics().prefix_misses["diverged"] == 1


def test_prompts_of_the_same_step_share_nothing_but_stay_right(
    engine: Engine, cold: Engine
) -> None:
    expected = cold.generate(HISTORY, PARAMS).token_ids
    assert [c.token_ids for c in engine.generate([HISTORY] * 4, PARAMS)] == [expected] * 4


def test_without_snapshots_every_prompt_runs_whole(hybrid_folder: Path, cold: Engine) -> None:
    with Engine(hybrid_folder, threads=1, quiet=True, state_snapshots=0) as engine:
        engine.generate(HISTORY, PARAMS)
        assert run_both(engine, cold, [*HISTORY, 5]) == (0, len(HISTORY) + 1)
        assert engine.metrics().prefix_misses["snapshot"] == 1
        assert engine.metrics().snapshots_total == 0


def test_occupancy_is_visible(engine: Engine) -> None:
    assert (engine.metrics().snapshots_used, engine.metrics().snapshots_total) == (0, 16)
    engine.submit(HISTORY, PARAMS)
    while engine.metrics().generated_tokens < 12:
        engine.step()
    metrics = engine.metrics()
    # The tail at 64, for other prompts and for a way back, and the boundary at 80.
    assert (metrics.state_slots_used, metrics.snapshots_used) == (1, 3)
    while engine.has_unfinished():
        engine.step()
    metrics = engine.metrics()
    left = 2 if engine.scheduling.reuse_generated else 1
    assert (metrics.state_slots_used, metrics.snapshots_used) == (0, left)
    model = engine.model
    assert model.ssm is not None
    assert model.ssm.snapshot_occupancy == (left, 16)
    assert f"{left} of 16 snapshots" in engine.describe()["recurrent"]
    assert f'atlas_state_snapshots{{state="used"}} {left}' in engine.openmetrics()
