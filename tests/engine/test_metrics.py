"""Metrics count what requests report, and their text keeps to the OpenMetrics grammar."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atlas import Engine, SamplingParams
from atlas.errors import ClosedError
from atlas.metrics import LATENCY_BOUNDS_S, Histogram, LatencyCounts, Metrics, openmetrics
from tests.engine.test_fork_and_rewind import GREEDY, PROMPT, advance, run_out

TEN = SamplingParams(max_tokens=10, ignore_eos=True)


@pytest.fixture
def own(folder: Path) -> Iterator[Engine]:
    """An engine whose counters start at 0."""
    with Engine(folder, threads=1, kv_tokens=256, quiet=True) as engine:
        yield engine


def in_balance(engine: Engine, metrics: Metrics) -> bool:
    blocks = metrics.kv_blocks_free + metrics.kv_blocks_cached + metrics.kv_blocks_used
    return blocks == engine.model.lifecycle.num_total_blocks


# -- counters ---------------------------------------------------------------------------------


def test_a_new_engine_has_counted_nothing(own: Engine) -> None:
    metrics = own.metrics()
    assert in_balance(own, metrics)
    assert metrics.kv_blocks_free == 16
    assert metrics.finished == {"stop": 0, "length": 0, "error": 0, "cancelled": 0}
    numbers = [metrics.waiting, metrics.running, metrics.steps, metrics.generated_tokens]
    assert numbers == [0, 0, 0, 0]
    assert metrics.request_s.num_observed == 0
    with pytest.raises(FrozenInstanceError):
        metrics.steps = 3  # type: ignore[misc]


def test_tokens_ends_and_latencies_of_requests(own: Engine) -> None:
    usages = [own.generate(PROMPT, TEN).usage, own.generate([9] * 40, TEN.replace(n=3)).usage]
    usages.append(own.generate([9] * 40, TEN).usage)
    assert usages[-1].cached_tokens > 0
    metrics = own.metrics()
    assert metrics.prompt_tokens == sum(u.prompt_tokens for u in usages) == 87
    assert metrics.generated_tokens == sum(u.completion_tokens for u in usages) == 50
    assert metrics.cached_tokens == sum(u.cached_tokens for u in usages)
    assert metrics.finished == {"stop": 0, "length": 5, "error": 0, "cancelled": 0}
    assert metrics.time_to_first_token_s.num_observed == 3
    assert metrics.inter_token_s.num_observed == 5 * 9
    assert metrics.request_s.num_observed == 3
    assert metrics.request_s.total_s >= metrics.time_to_first_token_s.total_s > 0
    assert metrics.prefix_hits == 1
    assert metrics.prefix_misses["cold"] == 1
    assert sum(metrics.prefix_misses.values()) == 1  # the first prompt has no whole block
    assert metrics.kv_blocks_used == 0
    assert metrics.kv_blocks_cached > 0
    assert in_balance(own, metrics)


def test_what_waits_and_runs(folder: Path) -> None:
    with Engine(folder, threads=1, kv_tokens=256, max_running=2, quiet=True) as engine:
        names = [engine.submit([i, *PROMPT], GREEDY) for i in range(3, 8)]
        metrics = engine.metrics()
        assert (metrics.waiting, metrics.running) == (5, 0)
        advance(engine, 3)
        metrics = engine.metrics()
        assert (metrics.waiting, metrics.running) == (3, 2)
        assert metrics.kv_blocks_used >= 2
        assert in_balance(engine, metrics)
        engine.cancel(names[0])
        engine.cancel(names[4])
        run_out(engine)
        metrics = engine.metrics()
        assert (metrics.waiting, metrics.running) == (0, 0)
        assert metrics.finished["cancelled"] == 2
        assert metrics.finished["length"] == 3
        assert metrics.time_to_first_token_s.num_observed == 4  # one was cancelled while it waited


def test_faults_are_counted(own: Engine) -> None:
    def fail(prompt: Any, output: list[int], row: Any) -> None:
        if len(output) == 2:
            raise ValueError("no")

    completion = own.generate([PROMPT, PROMPT], TEN.replace(logits_processor=fail))[0]
    assert completion.finish_reason == "error"
    metrics = own.metrics()
    assert metrics.finished["error"] == 2
    assert metrics.generated_tokens == 4


@pytest.mark.parametrize("preemption", ["spill", "requeue"])
def test_preemptions_are_counted(folder: Path, preemption: str) -> None:
    params = GREEDY.replace(max_tokens=300)  # more than admission reserves
    with Engine(folder, threads=1, kv_tokens=560, quiet=True, preemption=preemption) as engine:
        names = [engine.submit([i, *PROMPT], params) for i in (3, 4)]
        spilled = 0
        while engine.has_unfinished():
            engine.step()
            metrics = engine.metrics()
            assert in_balance(engine, metrics)
            spilled = max(spilled, metrics.spilled_bytes)
        assert metrics.preemptions > 0
        assert (spilled > 0) == (preemption == "spill")
        # Tokens that ran again were not sampled again.
        assert metrics.generated_tokens == 300 * len(names)
        assert metrics.time_to_first_token_s.num_observed == len(names)


def test_forks_and_restored_sessions_have_no_first_token(own: Engine, tmp_path: Path) -> None:
    name = own.submit(PROMPT, GREEDY)
    advance(own, 10)
    own.fork(name)
    own.save(name, tmp_path / "session")
    own.restore(tmp_path / "session")
    run_out(own)
    metrics = own.metrics()
    assert metrics.time_to_first_token_s.num_observed == 1
    assert metrics.prompt_tokens == len(PROMPT)
    assert metrics.generated_tokens == 40 + 30 + 30
    assert metrics.request_s.num_observed == 3


def test_reading_beside_the_owner_thread(own: Engine) -> None:
    own.start()
    stop = threading.Event()
    wrong: list[object] = []

    def read() -> None:
        last = 0
        while not stop.is_set():
            metrics = own.metrics()
            if metrics.generated_tokens < last:
                wrong.append((metrics.generated_tokens, last))
            last = metrics.generated_tokens
            own.health()
            own.openmetrics()

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for _ in range(3):
        own.generate([PROMPT] * 4, GREEDY)
    stop.set()
    for reader in readers:
        reader.join(10)
    assert not wrong
    assert own.metrics().generated_tokens == 480


def test_after_close(folder: Path) -> None:
    engine = Engine(folder, threads=1, quiet=True)
    engine.close()
    with pytest.raises(ClosedError):
        engine.metrics()
    with pytest.raises(ClosedError):
        engine.openmetrics()


# -- histograms -------------------------------------------------------------------------------


@given(st.lists(st.one_of(st.floats(0, 1000), st.sampled_from(LATENCY_BOUNDS_S))))
def test_every_latency_is_in_the_bucket_of_its_bound(values: list[float]) -> None:
    counts = LatencyCounts()
    for value in values:
        counts.observe(value)
    histogram = counts.read()
    assert histogram.num_observed == len(values)
    assert histogram.total_s == pytest.approx(sum(values))
    for i, bound in enumerate(LATENCY_BOUNDS_S):
        assert sum(histogram.counts[: i + 1]) == sum(value <= bound for value in values)


# -- the text ---------------------------------------------------------------------------------

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_NUMBER = r"[+-]?(?:[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?|Inf)"
_SAMPLE = re.compile(
    rf'({_NAME})(?:\{{({_NAME}="[^"\\\n]*"(?:,{_NAME}="[^"\\\n]*")*)\}})? ({_NUMBER})'
)
_SUFFIXES = {"gauge": [""], "counter": ["_total"], "histogram": ["_bucket", "_count", "_sum"]}


def parse(text: str) -> dict[str, tuple[str, dict[str, float]]]:
    """Families by name: type, and values by what follows the name. Refuses what is not valid."""
    assert text.endswith("\n# EOF\n")
    families: dict[str, tuple[str, dict[str, float]]] = {}
    name = kind = ""
    seen: list[str] = []
    for line in text[: -len("# EOF\n")].splitlines():
        if line.startswith("# "):
            word, family, rest = line[2:].split(" ", 2)
            if word == "TYPE":
                name, kind, seen = family, rest, []
                assert name not in families, "a family twice"
                assert re.fullmatch(_NAME, name)
                assert not name.endswith(("_total", "_bucket", "_count", "_sum"))
                families[name] = (kind, {})
            assert family == name, "metadata belongs to its family"
            assert word in ("TYPE", "UNIT", "HELP")
            assert word not in seen
            assert not families[name][1], "metadata precedes samples"
            seen.append(word)
            assert word != "UNIT" or name.endswith(f"_{rest}")
            continue
        found = _SAMPLE.fullmatch(line)
        assert found, line
        suffix = found[1].removeprefix(name)
        assert found[1].startswith(name)
        assert suffix in _SUFFIXES[kind], line
        key = suffix + (f"{{{found[2]}}}" if found[2] else "")
        assert key not in families[name][1], "a sample twice"
        families[name][1][key] = float(found[3])
        assert "HELP" in seen
    return families


def test_the_text_is_valid_and_says_the_same(own: Engine) -> None:
    own.generate([PROMPT, [9] * 40], TEN)
    metrics, families = own.metrics(), parse(own.openmetrics())
    assert families["atlas_generated_tokens"] == ("counter", {"_total": 20})
    assert families["atlas_prompt_tokens"][1]["_total"] == 47
    assert families["atlas_samples_finished"][1]['_total{reason="length"}'] == 2
    assert families["atlas_kv_blocks"] == (
        "gauge",
        {
            '{state="free"}': metrics.kv_blocks_free,
            '{state="cached"}': metrics.kv_blocks_cached,
            '{state="used"}': metrics.kv_blocks_used,
        },
    )
    assert set(families["atlas_prefix_misses"][1]) == {
        f'_total{{reason="{reason}"}}' for reason in metrics.prefix_misses
    }
    assert families["atlas_steps"][1]["_total"] == metrics.steps
    for name in ("time_to_first_token", "inter_token", "request"):
        kind, values = families[f"atlas_{name}_seconds"]
        assert kind == "histogram"
        buckets = [value for key, value in values.items() if key.startswith("_bucket")]
        assert buckets == sorted(buckets)
        assert buckets[-1] == values['_bucket{le="+Inf"}'] == values["_count"]
    assert families["atlas_inter_token_seconds"][1]["_count"] == 18


@given(
    counts=st.lists(
        st.integers(0, 10**9),
        min_size=len(LATENCY_BOUNDS_S) + 1,
        max_size=len(LATENCY_BOUNDS_S) + 1,
    ),
    total_s=st.floats(0, 1e18),
    number=st.integers(0, 2**53),  # what a float of the text's reader can tell apart
)
def test_any_numbers_make_a_valid_text(counts: list[int], total_s: float, number: int) -> None:
    histogram = Histogram(tuple(counts), total_s)
    numbers: Any = [number] * 10
    metrics = Metrics(
        *numbers, number, {"cold": number}, number, number, number, number, number,
        {"stop": number}, {"top_n_sigma, logprobs": number}, histogram, histogram, histogram,
    )  # fmt: skip
    families = parse(openmetrics(metrics))
    assert families["atlas_request_seconds"][1]["_count"] == sum(counts)
    assert families["atlas_request_seconds"][1]["_sum"] == total_s
    on_host = families["atlas_samples_on_host"][1]
    assert on_host == {'_total{parameters="top_n_sigma, logprobs"}': number}
