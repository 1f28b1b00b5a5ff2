"""``atlas bench serve``, and the load test behind it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atlas import Engine
from atlas.cli.bench import measure
from atlas.errors import InvalidArgumentError, KvExhausted
from atlas.load_test import Lengths, Load, LoadTest, Spread, arrivals
from tests.cli.outcome import Command
from tests.engine.folders import write_model

FEW = Lengths("uniform", 2, 9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("load"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with Engine(folder, threads=1, kv_tokens=512, quiet=True) as engine:
        yield engine


@given(st.integers(1, 500), st.integers(0, 500), st.floats(0.1, 1e9), st.floats(0, 20))
def test_lengths_stay_within_their_bounds(low: int, more: int, median: float, sigma: float) -> None:
    rng = np.random.default_rng(low)
    for lengths in (
        Lengths("uniform", low, low + more),
        Lengths("constant", low, low),
        Lengths("lognormal", 1, low + more, median, sigma),
    ):
        drawn = [lengths.draw(rng) for _ in range(8)]
        assert all(lengths.low <= length <= lengths.high for length in drawn)


def test_lengths_have_their_distribution() -> None:
    rng = np.random.default_rng(0)
    uniform = [Lengths.parse("uniform:3:7").draw(rng) for _ in range(2000)]
    assert set(uniform) == {3, 4, 5, 6, 7}
    assert np.mean(uniform) == pytest.approx(5, abs=0.2)
    lognormal = [Lengths.parse("lognormal:100:0.5:100000").draw(rng) for _ in range(4000)]
    assert np.median(lognormal) == pytest.approx(100, rel=0.05)
    assert np.std(np.log(lognormal)) == pytest.approx(0.5, rel=0.05)
    assert {Lengths.parse(text).draw(rng) for text in ("6", "constant:6")} == {6}


@pytest.mark.parametrize(
    "text",
    [
        "", "x", "0", "-3", "1.5", "uniform:5", "uniform:5:4", "uniform:0:4", "gauss:1:2",
        "constant:1:2", "lognormal:10:1", "lognormal:0:1:9", "lognormal:nan:1:9",
        "lognormal:9:-1:9", "lognormal:9:inf:9", "lognormal:9:1:0",
    ],
)  # fmt: skip
def test_other_lengths_are_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="allowed"):
        Lengths.parse(text)


def test_the_seed_decides_every_request() -> None:
    def first(seed: int) -> list[Any]:
        load = Load(FEW, FEW, rate=100.0, duration_s=1.0, seed=seed)
        return list(islice(arrivals(load, 50), 20))

    assert first(1) == first(1)
    assert first(1) != first(2)


def test_an_open_loop_is_a_poisson_process() -> None:
    load = Load(FEW, FEW, rate=50.0, num_requests=4000)
    due = [arrival.due_s for arrival in arrivals(load, 50)]
    gaps = np.array([after - before for before, after in pairwise(due)])
    assert due[0] == 0
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.06)
    assert gaps.std() == pytest.approx(1 / 50, rel=0.1)  # of an exponential: its mean


@pytest.mark.parametrize(
    "wrong",
    [
        {"concurrency": 1, "rate": 1.0, "num_requests": 1},
        {"num_requests": 1},
        {"concurrency": 1},
        {"concurrency": 0, "num_requests": 1},
        {"rate": 0.0, "num_requests": 1},
        {"rate": math.nan, "num_requests": 1},
        {"rate": 1.0, "num_requests": 0},
        {"rate": 1.0, "duration_s": math.inf},
        {"rate": 1.0, "num_requests": 1, "seed": -1},
    ],
)
def test_a_contradictory_load_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError):
        Load(FEW, FEW, **wrong)


def test_spread_is_in_milliseconds() -> None:
    spread = Spread.of([i / 1000 for i in range(101)])
    assert (spread.p50, spread.p90, spread.p99, spread.max) == pytest.approx((50, 90, 99, 100))
    assert spread.mean == pytest.approx(50)
    assert math.isnan(Spread.of([]).p50)


@pytest.mark.parametrize("owned", [False, True])
@pytest.mark.parametrize("how", [{"concurrency": 3}, {"rate": 500.0}])
def test_every_request_is_served(engine: Engine, how: dict[str, Any], owned: bool) -> None:
    load = Load(FEW, FEW, **how, num_requests=20, seed=3)
    asked = list(arrivals(load, engine.model.config.vocab_size))
    if owned:
        engine.start()
    try:
        report = LoadTest(engine, load).run()
    finally:
        engine.stop()
    assert (report.num_finished, report.num_failed, report.num_refused) == (20, 0, 0)
    assert report.prompt_tokens == sum(len(arrival.prompt_ids) for arrival in asked)
    assert report.completion_tokens == sum(arrival.max_tokens for arrival in asked)
    assert 0 < report.ttft.p50 <= report.latency.p50 <= report.latency.max
    assert report.latency.max <= report.elapsed_s * 1e3
    assert report.completion_tok_s == pytest.approx(report.completion_tokens / report.elapsed_s)
    assert not engine.has_unfinished()


def test_a_closed_loop_keeps_its_number_in_flight(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    poll, live = engine.poll, []

    def watched(timeout: float | None = None) -> Any:
        live.append(engine._driver.num_live)
        return poll(timeout)

    monkeypatch.setattr(engine, "poll", watched)
    LoadTest(engine, Load(FEW, FEW, concurrency=4, num_requests=30)).run()
    assert max(live) == 4
    assert live[: len(live) // 2] == [4] * (len(live) // 2)


def test_a_duration_ends_the_submissions(engine: Engine) -> None:
    report = LoadTest(engine, Load(FEW, FEW, rate=200.0, duration_s=0.2)).run()
    assert 0 < report.num_finished < 200
    report = LoadTest(engine, Load(FEW, FEW, concurrency=2, duration_s=0.1)).run()
    assert report.num_finished > 0
    assert not engine.has_unfinished()


@pytest.mark.parametrize("how", [{"concurrency": 6}, {"rate": 1e6}])
def test_refusals_are_counted(folder: Path, how: dict[str, Any]) -> None:
    load = Load(FEW, FEW, **how, num_requests=40)
    with Engine(folder, threads=1, max_waiting=2, max_running=1, quiet=True) as engine:
        report = LoadTest(engine, load).run()
    assert report.num_refused > 0
    assert report.num_finished > 0
    assert report.num_finished + report.num_refused == 40


def test_what_cannot_fit_is_refused_and_leaves_nothing(engine: Engine, folder: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="max_seq_len 512"):
        LoadTest(engine, Load(Lengths.parse("510"), FEW, concurrency=1, num_requests=1))
    with Engine(folder, threads=1, kv_tokens=64, quiet=True) as small:
        load = Load(Lengths.parse("uniform:8:200"), FEW, concurrency=4, num_requests=50)
        with pytest.raises(KvExhausted):
            LoadTest(small, load).run()
        small.poll()
        assert not small.has_unfinished()


def test_the_command_prints_tables(atlas_command: Command, folder: Path) -> None:
    done = atlas_command(
        "bench", "serve", str(folder), "--requests", "5", "--concurrency", "2", "--threads", "1",
        "--prompt-len", "uniform:2:9", "--output-len", "lognormal:4:0.5:8", "--quiet",
    )  # fmt: skip
    assert (done.status, done.err) == (0, "")
    assert "5 in " in done.out
    for text in ("time to first token", "between tokens", "p50", "p90", "p99", "lognormal:4:0.5:8"):
        assert text in done.out


def test_the_command_prints_json(atlas_command: Command, folder: Path) -> None:
    done = atlas_command(
        "bench", "serve", str(folder), "--rate", "300", "--requests", "5", "--threads", "1",
        "--prompt-len", "4", "--output-len", "1", "--kv-tokens", "256", "--json", "--quiet",
    )  # fmt: skip
    assert (done.status, done.err) == (0, "")
    report = json.loads(done.out)
    assert (report["num_finished"], report["completion_tokens"]) == (5, 5)
    assert (report["rate"], report["concurrency"], report["kv_tokens"]) == (300, None, 256)
    assert report["ttft_ms"]["p99"] >= report["ttft_ms"]["p50"] > 0
    assert report["inter_token_ms"]["p50"] is None  # one token each
    assert report["file"] == str(folder)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--rate", "1", "--concurrency", "2"], "either concurrency"),
        (["--requests", "0"], "num_requests is 0"),
        (["--output-len", "many"], "'many'"),
    ],
)
def test_the_command_refuses_by_name(
    atlas_command: Command, arguments: list[str], named: str
) -> None:
    done = atlas_command("bench", "serve", *arguments)
    assert done.status == InvalidArgumentError.code
    assert done.err.count("\n") == 1
    assert named in done.err


def test_bench_itself_is_as_before(atlas_command: Command, folder: Path) -> None:
    done = atlas_command(
        "bench", "--prompt-tokens", "8", "--gen-tokens", "4", "--repeats", "1", "--json",
        "--threads", "1", "--quiet", str(folder),
    )  # fmt: skip
    assert done.status == 0
    assert json.loads(done.out)["decode_tok_s"] > 0
    assert "bench serve" in atlas_command("bench", "--help").out
    assert "atlas bench serve" in atlas_command("bench", "serve", "--help").out


def test_bench_measures_prompts_that_no_cache_holds(engine: Engine) -> None:
    before = engine.metrics().cached_tokens
    measure(engine, 64, 2, 3)
    assert engine.metrics().cached_tokens == before
