"""Requests whose tokens nobody follows end as those that report each one."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from atlas import Engine, SamplingParams
from atlas.request import Completion
from tests.engine.events import drain

LONG = SamplingParams(max_tokens=90, ignore_eos=True)
PARAMS = {
    "greedy": LONG,
    "eos": SamplingParams(max_tokens=90),
    "end ids": LONG.replace(stop_token_ids=[*range(0, 200, 7)]),
    "end id kept": LONG.replace(stop_token_ids=[*range(0, 200, 7)], include_stop=True),
    "full": SamplingParams(max_tokens=None, ignore_eos=True),
    "one": LONG.replace(max_tokens=1),
    "two": LONG.replace(max_tokens=2),
    "samples": LONG.replace(n=3, temperature=1.2, seed=3),
    "stop": LONG.replace(stop=["e", "the"]),
    "least": LONG.replace(min_tokens=20, stop_token_ids=[*range(0, 200, 3)]),
    "scored": LONG.replace(logprobs=2, prompt_logprobs=1),
}
PROMPTS = [[5, 6, 7], [9] * 40, [11, 3], [4, 8, 15, 16, 23, 42]]


def parts(done: Completion) -> Any:
    return (
        [
            (s.token_ids, s.text, s.finish_reason, s.stop_reason, s.logprobs, s.index)
            for s in done.samples
        ],
        (done.usage.prompt_tokens, done.usage.completion_tokens),
        done.prompt_logprobs,
        done.seed,
    )


def followed(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> list[Any]:
    names = [engine.submit(prompt, params) for prompt in prompts]
    ends = {e.request_id: e.completion for e in drain(engine) if e.completion is not None}
    return [parts(ends[name]) for name in names]


@pytest.mark.parametrize("feed", [False, True])
def test_completions_are_those_of_followed_requests(text_folder: Path, feed: bool) -> None:
    options: dict[str, Any] = {"threads": 1, "quiet": True, "max_seq_len": 128, "feed": feed}
    with Engine(text_folder, prefix_cache=False, **options) as engine:
        for name, params in PARAMS.items():
            alone = [parts(engine.generate(prompt, params)) for prompt in PROMPTS]
            together = [parts(done) for done in engine.generate(PROMPTS, params)]
            assert together == alone == followed(engine, PROMPTS, params), name
            assert engine._loop._log.num_open == 0  # type: ignore[union-attr]
        counted = engine.metrics()
        tokens, ends = counted.generated_tokens, sum(counted.finished.values())
        first = counted.time_to_first_token_s.num_observed
        assert counted.inter_token_s.num_observed == tokens - ends
        assert first == 3 * len(PARAMS) * len(PROMPTS)


@pytest.mark.parametrize("mode", ["requeue", "spill"])
def test_preempted_requests_keep_their_tokens(folder: Path, mode: str) -> None:
    params = LONG.replace(max_tokens=400)  # more than admission keeps room for
    with Engine(folder, threads=1, kv_tokens=640, quiet=True, preemption=mode) as engine:
        alone = [parts(engine.generate(prompt, params)) for prompt in PROMPTS[:2]]
        together = [parts(done) for done in engine.generate(PROMPTS[:2], params)]
        assert engine.metrics().preemptions > 0
        assert together == alone


def test_a_cancelled_one_has_its_tokens_so_far(folder: Path) -> None:
    params = LONG.replace(max_tokens=200)
    with Engine(folder, threads=1, quiet=True, max_seq_len=256) as engine:
        whole = engine.generate(PROMPTS[0], params).token_ids
        seen: list[Completion] = []
        request = engine._intake.request(
            PROMPTS[0], params, lambda event: seen.append(event.completion), is_followed=False
        )
        engine._driver.submit(request, public=False)
        for _ in range(30):
            engine._driver.advance()
        assert request.num_tokens < 3  # the others are in the log
        before = engine.metrics().generated_tokens - len(whole)
        engine.cancel(request.request_id)
        engine._driver.advance()
        assert before == 30
        assert len(seen) == 1  # no event came but the last one
        assert seen[0].finish_reason == "cancelled"
        assert seen[0].token_ids == whole[:30]
        assert seen[0].usage.completion_tokens == 30


def test_between_steps_all_tokens_are_known(folder: Path) -> None:
    with Engine(folder, threads=1, quiet=True, max_seq_len=256) as engine:
        want = engine.generate(PROMPTS[1], LONG).token_ids
        done: list[Completion] = []
        worker = threading.Thread(target=lambda: done.append(engine.generate(PROMPTS[1], LONG)))
        worker.start()
        while not engine.has_unfinished() and not done:
            pass
        known = []
        while not done:
            with engine.paused():
                known += [live.num_tokens for live in engine._driver._live.values()]
        worker.join()
        assert known == sorted(known)
        assert done[0].token_ids == want


def test_one_is_forked_and_rewound_where_it_stands(folder: Path, tmp_path: Path) -> None:
    with Engine(folder, threads=1, quiet=True, max_seq_len=256) as engine:
        want = engine.generate(PROMPTS[3], LONG).token_ids
        seen: list[Completion] = []
        request = engine._intake.request(
            PROMPTS[3], LONG, lambda event: seen.append(event.completion), is_followed=False
        )
        engine._driver.submit(request, public=False)
        for _ in range(20):
            engine.step()
        twin = engine.fork(request.request_id)
        engine.save(request.request_id, tmp_path / "session")
        restored = engine.restore(tmp_path / "session")
        for _ in range(10):
            engine.step()
        kept = engine.rewind(request.request_id, len(PROMPTS[3]) + 5)
        assert kept.token_ids == want[:5]
        ends = {e.request_id: e.completion for e in drain(engine) if e.completion is not None}
        assert ends[twin].token_ids == ends[str(restored)].token_ids == want
        assert [done.token_ids for done in seen] == [want]
