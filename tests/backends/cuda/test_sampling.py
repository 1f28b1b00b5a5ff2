"""Tokens that the device draws: the host's own, also when steps are launched ahead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atlas import Engine, SamplingParams
from atlas.sampling_table import MAX_EDITS, host_reason
from tests.backends.cuda.host_gpu import HostGpu
from tests.backends.cuda.test_engine import PROMPTS, ids_of, note, open_engine

SEEDED = SamplingParams(max_tokens=14, ignore_eos=True, temperature=1.1, seed=2**63 + 5)
PENALTIES = {"repetition_penalty": 1.4, "presence_penalty": 0.6, "frequency_penalty": 0.3}
KINDS: dict[str, dict[str, Any]] = {
    "temperature": {},
    "filters": {"top_k": 30, "top_p": 0.9, "min_p": 0.02},
    "penalties": {**PENALTIES, "top_p": 0.95},
    "greedy with penalties": {**PENALTIES, "temperature": 0.0, "seed": None},
    "bias and bans": {
        "logit_bias": {5: 3.0, 101: -4.0},
        "min_tokens": 9,
        "bad_words": ((7,), (150,)),
        "stop_token_ids": (9, 10),
        "top_k": 60,
        "frequency_penalty": 1.5,
    },
}


def drawn_by_host(engine: Engine, prompt: list[int], params: SamplingParams) -> tuple[int, ...]:
    """Tokens of a request that the host samples: asking for log-probabilities makes it."""
    return engine.generate(prompt, params.replace(logprobs=0)).token_ids


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("feed", [True, False])
def test_the_device_draws_what_the_host_would(
    cuda: str, folder: Path, kind: str, feed: bool
) -> None:
    params = SEEDED.replace(**KINDS[kind])
    with open_engine(folder, feed=feed, chunk_tokens=3) as engine:
        want = [drawn_by_host(engine, prompt, params) for prompt in PROMPTS]
        assert [done.token_ids for done in engine.generate(PROMPTS, params)] == want
        assert len({*want}) == len(want)


def test_samples_of_one_prompt_and_forks(cuda: str, folder: Path) -> None:
    """The first tokens come from one row, and the host draws them; then each runs ahead."""
    params = SEEDED.replace(n=3, **PENALTIES)
    with open_engine(folder, feed=True) as engine:
        want = engine.generate(PROMPTS[3], params.replace(logprobs=0)).samples
        got = engine.generate(PROMPTS[3], params).samples
        assert [s.token_ids for s in got] == [s.token_ids for s in want]
        name = engine.submit(PROMPTS[3], params.replace(n=1))
        events: dict[str, list[Any]] = {name: []}
        while len(ids_of(events[name])) < 5:
            note(events, engine.step())
        twin = engine.fork(name)
        while engine.has_unfinished():
            note(events, engine.step())
        for each in (name, twin):
            assert events[each][-1].completion.token_ids == want[0].token_ids


def test_preempted_requests_draw_the_same(cuda: str, folder: Path) -> None:
    params = SEEDED.replace(max_tokens=100, **PENALTIES)
    with open_engine(folder) as engine:
        want = drawn_by_host(engine, PROMPTS[0], params)
    for mode in ("spill", "requeue"):
        with open_engine(folder, kv_tokens=160, preemption=mode) as engine:
            engine._loop.scheduler.set_spill(mode == "spill")
            first = engine.submit(PROMPTS[0], params)
            events: dict[str, list[Any]] = {first: []}
            while len(ids_of(events[first])) < 30:
                note(events, engine.step())
            names = [first, engine.fork(first), engine.fork(first)]
            while engine.has_unfinished():
                note(events, engine.step())
            assert engine._loop.scheduler.num_preemptions > 0, mode
            for name in names:
                assert events[name][-1].completion.token_ids == want, mode


def test_drawing_steps_run_ahead(gpu: HostGpu, folder: Path) -> None:
    with open_engine(folder, feed=True) as engine:
        engine.submit(PROMPTS[2], SEEDED.replace(**PENALTIES))
        for _ in range(4):
            engine.step()
        gpu.log.clear()
        for _ in range(3):
            engine.step()
        assert gpu.log.count("sample") == 3
        assert gpu.log.count("feed") == 3
        assert "synchronize" not in gpu.log
        assert not engine.metrics().host_sampled


def test_greedy_steps_launch_no_sampling(gpu: HostGpu, folder: Path) -> None:
    with open_engine(folder, feed=True) as engine:
        engine.generate(PROMPTS[2], SamplingParams(max_tokens=5))
        assert "sample" not in gpu.log


def test_what_the_host_draws_is_counted_by_its_reason(gpu: HostGpu, folder: Path) -> None:
    with open_engine(folder, feed=True) as engine:
        params = SEEDED.replace(max_tokens=3)
        engine.generate(PROMPTS[0], params.replace(typical_p=0.9, top_n_sigma=2.0))
        engine.generate(PROMPTS[0], params.replace(logprobs=2, n=2))
        assert "sample" not in gpu.log
        reasons = {"top_n_sigma, typical_p": 1, "logprobs": 2}
        assert engine.metrics().host_sampled == reasons
        others = params.replace(xtc_probability=0.5)
        names = [engine.submit(PROMPTS[0], params), engine.submit(PROMPTS[1], others)]
        events: dict[str, list[Any]] = {}
        while engine.has_unfinished():
            note(events, engine.step())
        assert "sample" in gpu.log
        got = [events[name][-1].completion.token_ids for name in names]
        assert got[0] == drawn_by_host(engine, PROMPTS[0], params)
        assert got[1] == engine.generate(PROMPTS[1], others).token_ids


def test_which_parameters_the_device_serves() -> None:
    base = SamplingParams(temperature=0.7, seed=1)

    def reason(num_ids: int = 100, **changes: Any) -> str | None:
        return host_reason(base.replace(**changes), num_ids, 50_000)

    assert reason(top_k=5, top_p=0.3, min_p=0.1, min_tokens=4) is None
    assert reason(logit_bias={3: 1.0}, bad_words=((4,),), **PENALTIES) is None
    assert reason(num_ids=10**6) is None
    assert (
        reason(num_ids=MAX_EDITS, **PENALTIES)
        == f"bias and penalties over more than {MAX_EDITS} ids"
    )
    assert reason(bad_words=((4, 5),)) == "bad_words of several tokens"
    assert reason(logits_processor=lambda prompt, output, row: None) == "logits_processor"
    assert reason(dry_multiplier=1.0, dry_sequence_breakers=()) == "dry_multiplier"
    assert reason(top_p=float(np.nextafter(1.0, 0.0))) == "top_p just below 1"
    assert host_reason(base, 10, 1 << 21) == f"a vocabulary of more than {1 << 20} ids"
