"""A prompt that resends what the engine has seen computes only what is new."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from atlas import Engine, SamplingParams
from atlas._native.plan import EntryKind
from tests.composition.harness import BLOCK_SIZE, Recorder, assert_balanced
from tests.conftest import ON_CUDA

PARAMS = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.8, seed=2)
HISTORY = [3 + (11 * i) % 190 for i in range(70)]
QUESTION = [4 + (7 * i) % 180 for i in range(21)]


@pytest.fixture(params=[True, False], ids=["reuse", "no-reuse"])
def engine(request: pytest.FixtureRequest, folder: Path) -> Iterator[Engine]:
    if request.param and ON_CUDA:
        pytest.skip("on a GPU keys of generated tokens differ from a prompt's in their last bits")
    with Engine(folder, threads=1, quiet=True, reuse_generated=request.param) as engine:
        yield engine
        assert_balanced(engine)


@pytest.fixture
def cold(folder: Path) -> Iterator[Engine]:
    with Engine(folder, threads=1, quiet=True, prefix_cache=False) as engine:
        yield engine


def whole_blocks(num_tokens: int) -> int:
    """Tokens of the blocks that ``num_tokens`` fill."""
    return num_tokens // BLOCK_SIZE * BLOCK_SIZE


def test_a_second_turn_computes_only_what_is_new(engine: Engine, cold: Engine) -> None:
    first = engine.generate(HISTORY, PARAMS)
    turn = [*HISTORY, *first.token_ids, *QUESTION]
    with Recorder(engine) as recorder:
        second = engine.generate(turn, PARAMS)
    # The last token written has no KV: nothing came after it.
    held = len(HISTORY) + len(first.token_ids) - 1
    reused = whole_blocks(held if engine.scheduling.reuse_generated else len(HISTORY))
    assert reused == (96 if engine.scheduling.reuse_generated else 64)
    assert second.usage.cached_tokens == reused
    assert recorder.num_rows(EntryKind.PROMPT) == len(turn) - reused
    assert recorder.num_rows(EntryKind.STEP) == len(second.token_ids) - 1
    assert second.token_ids == cold.generate(turn, PARAMS).token_ids
    assert second.usage.cached_tokens > cold.generate(turn, PARAMS).usage.cached_tokens == 0


def test_turn_after_turn(engine: Engine, cold: Engine) -> None:
    turn = HISTORY
    for number in range(4):
        with Recorder(engine) as recorder:
            answer = engine.generate(turn, PARAMS)
        assert answer.token_ids == cold.generate(turn, PARAMS).token_ids
        new = recorder.num_rows(EntryKind.PROMPT)
        assert new == len(turn) - answer.usage.cached_tokens
        if number:
            added = len(QUESTION) if engine.scheduling.reuse_generated else 30 + len(QUESTION)
            assert new <= added + BLOCK_SIZE
        turn = [*turn, *answer.token_ids, *QUESTION]


def test_a_prompt_that_is_cached_whole_computes_its_last_block(engine: Engine) -> None:
    prompt = HISTORY[: 4 * BLOCK_SIZE]
    first = engine.generate(prompt, PARAMS)
    with Recorder(engine) as recorder:
        again = engine.generate(prompt, PARAMS)
    assert again.token_ids == first.token_ids
    assert again.usage.cached_tokens == 3 * BLOCK_SIZE  # its last row's logits are needed
    assert recorder.num_rows(EntryKind.PROMPT) == BLOCK_SIZE


def test_a_prompt_that_diverges_reuses_what_is_common(engine: Engine, cold: Engine) -> None:
    engine.generate(HISTORY, PARAMS)
    other = [*HISTORY[:40], *reversed(HISTORY[40:])]
    with Recorder(engine) as recorder:
        completion = engine.generate(other, PARAMS)
    assert completion.usage.cached_tokens == 32
    assert recorder.num_rows(EntryKind.PROMPT) == len(other) - 32
    assert completion.token_ids == cold.generate(other, PARAMS).token_ids


def test_generated_blocks_become_prompt_blocks_once_resent(engine: Engine) -> None:
    """Without ``reuse_generated`` the second turn makes these blocks anew, from prompt tokens."""
    first = engine.generate(HISTORY, PARAMS)
    turn = [*HISTORY, *first.token_ids, *QUESTION]
    engine.generate(turn, PARAMS)
    third = engine.generate([*turn, 5], PARAMS)
    assert third.usage.cached_tokens == whole_blocks(len(turn))


def test_prompts_of_the_same_step_share_nothing_but_stay_right(
    engine: Engine, cold: Engine
) -> None:
    expected = cold.generate(HISTORY, PARAMS).token_ids
    assert [c.token_ids for c in engine.generate([HISTORY] * 4, PARAMS)] == [expected] * 4
