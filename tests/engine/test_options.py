"""Sizes asked of an engine: honoured, or refused with the numbers before anything is allocated."""

from __future__ import annotations

import re
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atlas import Engine, SamplingParams
from atlas.backends.cpu import runtime
from atlas.errors import InvalidArgumentError, OutOfMemoryError
from atlas.model import memory
from atlas.model.load import MAX_THREADS
from tests.engine.folders import write_model

pytestmark = pytest.mark.cpu

SIZES = ("threads", "max_seq_len", "kv_tokens")


@pytest.mark.parametrize(
    ("name", "near"), [("thread", "threads"), ("kv_token", "kv_tokens"), ("max_run", "max_running")]
)
def test_an_unknown_option_is_refused_with_the_nearest_of_all(name: str, near: str) -> None:
    options: dict[str, Any] = {name: 1}
    found = f"unknown engine option '{name}'; did you mean '{near}'.*device, .*chunk_tokens"
    with pytest.raises(TypeError, match=found):
        Engine(**options)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [0, -1, True, 2.0, "8", float("nan"), float("inf")])
def test_sizes_are_positive_integers(folder: Path, name: str, value: Any) -> None:
    options: dict[str, Any] = {name: value}
    with pytest.raises(InvalidArgumentError, match=f"{name} is {re.escape(repr(value))}; allowed"):
        Engine(folder, **options)


@pytest.mark.parametrize("name", SIZES)
def test_sizes_may_be_numpy_integers(folder: Path, name: str) -> None:
    options: dict[str, Any] = {name: np.int64(32)} | ({} if name == "threads" else {"threads": 1})
    with Engine(folder, quiet=True, **options) as engine:
        assert len(engine.generate([5, 6], SamplingParams(max_tokens=2)).token_ids) == 2


@pytest.mark.parametrize("value", [513, 2**40, 2**80])
def test_max_seq_len_is_at_most_the_models(folder: Path, value: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"max_seq_len is {value}.*512"):
        Engine(folder, max_seq_len=value)


@pytest.mark.parametrize("value", [1025, 2**40])
def test_threads_are_bounded(folder: Path, value: int) -> None:
    allowed = f"threads is {value}; allowed: 1 … {MAX_THREADS}"
    with pytest.raises(InvalidArgumentError, match=allowed):
        Engine(folder, threads=value)


@pytest.mark.parametrize("value", [2**34, 2**40, 2**62, 2**80])
def test_a_cache_that_does_not_fit_is_refused_with_the_plan(folder: Path, value: int) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(OutOfMemoryError) as refusal:
        Engine(folder, kv_tokens=value)
    message = str(refusal.value)
    # 2 layers × K and V × 2 heads × 16 × 4 bytes a token
    assert f"KV cache {value * 512 / 2**20:.0f} MiB" in message
    assert "weights need" in message
    assert "are free" in message
    assert "kv_tokens" in message
    assert isinstance(refusal.value, MemoryError)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 8 << 10  # KiB


def test_the_limit_is_what_is_free_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path)  # whose weights no other engine holds
    with Engine(folder, threads=1, quiet=True) as engine:
        needed = engine._loaded.plan.total
    monkeypatch.setattr(memory, "available_memory", lambda: needed)
    Engine(folder, threads=1, quiet=True).close()
    monkeypatch.setattr(memory, "available_memory", lambda: needed - 1)
    with pytest.raises(OutOfMemoryError, match="weights need"):
        Engine(folder, threads=1, quiet=True)


def test_memory_that_runs_out_while_loading_is_a_typed_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*sizes: object) -> None:
        raise MemoryError("cannot allocate")

    monkeypatch.setattr(runtime, "allocate_pools", exhausted)
    with pytest.raises(OutOfMemoryError, match=r"weights need .* KV cache"):
        Engine(folder, threads=1, quiet=True)


def test_kv_tokens_are_rounded_up_to_blocks(folder: Path) -> None:
    with Engine(folder, threads=1, kv_tokens=17, quiet=True) as engine:
        assert engine.model.lifecycle.num_total_blocks == 2
    with Engine(folder, threads=1, max_seq_len=33, quiet=True) as engine:
        assert engine.max_seq_len == 33
        assert engine.model.lifecycle.num_total_blocks == 3


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"dtype": "float16"}, "'auto', 'float32'"),
        ({"kv_dtype": "int8"}, "'auto', 'float32', 'float16'"),
        ({"quantize": "q2_k"}, "None, 'q8_0', 'q4_0'"),
        ({"quantize": "q8_0", "dtype": "float32"}, "contradict"),
        ({"kv_tokens": None, "max_seq_len": "all"}, "max_seq_len"),
    ],
)
def test_other_options_are_refused_by_name(
    folder: Path, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=named):
        Engine(folder, **options)


def test_an_unknown_option_is_refused_by_name(folder: Path) -> None:
    options: dict[str, Any] = {"unknown": 1}
    with pytest.raises((TypeError, InvalidArgumentError), match="unknown"):
        Engine(folder, **options)


def test_scheduling_options_take_numpys_integers(folder: Path) -> None:
    with Engine(folder, threads=1, quiet=True, max_running=np.int64(3)) as engine:
        assert type(engine.scheduling.max_running) is int
        assert engine.scheduling.max_running == 3
    for bad in (True, 2.0, 0, 1025, "4"):
        with pytest.raises(InvalidArgumentError, match="max_running is"):
            Engine(folder, max_running=bad)
