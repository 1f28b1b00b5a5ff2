"""Starting: what a warm start imports, and that kernels are compiled when a model is loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from atlas import Engine, SamplingParams
from atlas.backends.cpu import compiler
from tests.engine.folders import script_environment

pytestmark = pytest.mark.cpu

_WARM = """
import logging, sys, threading
import atlas
assert "numpy" not in sys.modules and "atlas.engine" not in sys.modules
engine = atlas.Engine(sys.argv[1], threads=2)
params = atlas.SamplingParams(max_tokens=4, temperature=0.8, top_p=0.9, logprobs=2)
assert len(engine.generate([5, 6, 7], params).token_ids) == 4
assert len(engine.generate(list(range(3, 200))).token_ids) > 0
assert not logging.getLogger().handlers and not logging.getLogger("atlas").handlers
assert threading.active_count() == 1, threading.enumerate()
unwanted = ("numba", "torch", "transformers", "gguf", "rich", "cuda", "atlas.backends.cpu.bodies")
print(*(name for name in unwanted if name in sys.modules))
"""


def test_a_warm_start_imports_no_compiler(folder: Path, warm_cache: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in warm_cache.rglob("*")}
    done = subprocess.run(
        [sys.executable, "-c", _WARM, str(folder)],
        env=script_environment(ATLAS_CACHE_DIR=str(warm_cache)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "\n", "")
    assert {path: path.stat().st_mtime_ns for path in warm_cache.rglob("*")} == before


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_every_kernel_is_there_when_the_engine_is(
    folder: Path, threads: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No request waits for the compiler."""
    monkeypatch.setattr(compiler, "_ADDRESSES", {})
    with Engine(folder, threads=threads, quiet=True) as engine:
        loaded = set(compiler._ADDRESSES)
        assert {"argmax.argmax", "linear.f32", "sampling.weights"} <= loaded
        params = SamplingParams(
            max_tokens=20, temperature=temperature, min_p=0.01, logprobs=1, prompt_logprobs=1
        )
        for length in (1, 2, 7, 200):
            engine.generate(list(range(3, 3 + length)), params)
        list(engine.stream([5, 6], params.replace(prompt_logprobs=None)))
        assert set(compiler._ADDRESSES) == loaded
