"""An engine's model driven by hand: both sides read and fill one prefix cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from atlas import Engine, SamplingParams

PROMPT = [(7 * i + 3) % 90 for i in range(60)]


@pytest.mark.parametrize("reuse_generated", [True, False])
def test_a_hand_driven_prompt_starts_where_a_request_ended(
    folder: Path, reuse_generated: bool
) -> None:
    with Engine(folder, threads=1, quiet=True, reuse_generated=reuse_generated) as engine:
        model = engine.model
        cold = model.lifecycle.alloc_sequence()
        view = model.forward.prefill(PROMPT, cold)
        assert view is not None
        expected = view.numpy().tobytes()
        model.lifecycle.free_sequence(cold)
        output = engine.generate(PROMPT[:20], SamplingParams(max_tokens=30, temperature=0.0))
        seq = model.lifecycle.alloc_sequence()
        model.forward.prefill([*PROMPT[:20], *output.token_ids], seq)
        assert seq.matched_tokens == (48 if reuse_generated else 16)
        warm = model.lifecycle.alloc_sequence()
        view = model.forward.prefill(PROMPT, warm)
        assert view is not None
        assert view.numpy().tobytes() == expected
        assert warm.matched_tokens == 16


def test_a_request_starts_where_a_hand_driven_sequence_ended(folder: Path) -> None:
    with Engine(folder, threads=1, quiet=True) as engine:
        expected = engine.generate(PROMPT, SamplingParams(max_tokens=5, temperature=0.0))
    with Engine(folder, threads=1, quiet=True) as engine:
        lifecycle = engine.model.lifecycle
        seq = lifecycle.alloc_sequence()
        engine.model.forward.prefill(PROMPT, seq)
        lifecycle.cache_sequence(seq)
        lifecycle.free_sequence(seq)
        completion = engine.generate(PROMPT, SamplingParams(max_tokens=5, temperature=0.0))
        assert completion.usage.cached_tokens == 48
        assert completion.token_ids == expected.token_ids
