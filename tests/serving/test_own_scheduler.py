"""A host's own scheduler gives the engine's tokens, whatever its steps mix."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest

from atlas import Engine, SamplingParams


@pytest.mark.parametrize("window", [1, 4, 64])
def test_it_gives_what_generate_gives(
    engine: Engine,
    example: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    window: int,
) -> None:
    module = example("python/own_scheduler.py")
    monkeypatch.setattr(module, "WINDOW", window)
    rng = np.random.default_rng(window)
    vocab_size = engine.model.config.vocab_size
    prompts = [rng.integers(0, vocab_size, length).tolist() for length in (9, 1, 33, 17, 5)]
    free = engine.model.lifecycle.num_free_blocks
    outputs = module.serve(engine.model, prompts, 20, engine.eos_token_ids)
    assert engine.model.lifecycle.num_free_blocks == free
    expected = engine.generate(prompts, SamplingParams(max_tokens=20))
    assert [tuple(ids) for ids in outputs] == [completion.token_ids for completion in expected]
    assert len({tuple(ids) for ids in outputs}) == len(prompts)


def test_steps_mix_decoding_and_prompts(
    engine: Engine, example: Callable[[str], ModuleType]
) -> None:
    module = example("python/own_scheduler.py")
    scheduler = module.Scheduler(engine.model, 8)
    first = scheduler.add([5, 6])
    scheduler.step()
    second = scheduler.add(list(range(1, 11)))
    scheduler.step()
    assert (len(first.output), len(second.output)) == (2, 0)
    assert (scheduler.decoding, list(scheduler.prefilling)) == ([first], [second])
    assert second.seq.seq_len == module.WINDOW
    while scheduler.prefilling or scheduler.decoding:
        scheduler.step()
    assert (len(first.output), len(second.output)) == (8, 8)
