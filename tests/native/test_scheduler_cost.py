"""What a step may cost: microseconds, and no Python objects in its loops."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "src" / "atlas" / "_native"
# Functions of every step. One that walks requests may touch Python objects only to hand the
# exhausted pool to the prefix cache, or when a request starts or ends.
FUNCTIONS = {
    "planner": [
        "phase_of", "is_late", "survey", "lay_steps", "lay_step", "lay_prompts", "lay_prompt",
        "add_entry", "chunk_end", "tail_split", "finish_rows", "comes_before",
    ],
    "outcome": ["first_invalid", "is_live", "make_space", "settle_entries", "settle"],
    "running_set": ["growth", "victim", "reserve"],
    "batch_writer": ["most_blocks", "fill"],
}  # fmt: skip
# What Cython marks and no loop repeats: signatures with an error value, aliases of attributes.
ALLOWED = re.compile(r"\bself\.running$|= <Sequence>|^cdef .*\(|\) except|^cdef bint .*:$")


@pytest.fixture(scope="module")
def benchmark_module() -> ModuleType:
    path = ROOT / "benchmarks" / "scheduler.py"
    spec = importlib.util.spec_from_file_location("scheduler_benchmark", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_a_step_of_128_sequences_costs_microseconds(benchmark_module: ModuleType) -> None:
    empty, queued = benchmark_module.compare(128, rounds=6)
    assert empty.best_us[False] <= benchmark_module.BOUND_US
    # The benchmark holds 1.10; a loaded test machine gets some more.
    assert queued.best_us[False] <= 1.5 * empty.best_us[False]


def test_a_million_block_operations_a_second(benchmark_module: ModuleType) -> None:
    assert benchmark_module.single_operations_per_s(50_000) >= 1e6


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_loops_of_a_step_hold_no_python_objects(name: str, tmp_path: Path) -> None:
    target = tmp_path / f"{name}.c"
    directives = ("boundscheck=False", "wraparound=False", "cdivision=True")
    command = [sys.executable, "-m", "cython", "-3", "-a", "-I", str(ROOT / "src")]
    for directive in (*directives, "initializedcheck=False"):
        command += ["-X", directive]
    subprocess.run([*command, "-o", str(target), str(NATIVE / f"{name}.pyx")], check=True, cwd=ROOT)
    scores = {
        int(number): int(score)
        for score, number in re.findall(
            r'<pre class="cython line score-(\d+)"[^>]*>\+?(?:<[^>]*>)*\+?(\d+)',
            target.with_suffix(".html").read_text(),
        )
    }
    marked: dict[str, list[str]] = {function: [] for function in FUNCTIONS[name]}
    inside, lines = "", 0
    for number, code in enumerate((NATIVE / f"{name}.pyx").read_text().splitlines(), 1):
        if start := re.match(r" *(?:cdef|def) [^=]*?(\w+)\(", code):
            inside = start[1]
        if inside in marked:
            lines += number in scores
            if scores.get(number, 0) and not ALLOWED.search(code.strip()):
                marked[inside].append(code.strip())
    assert lines > 10 * len(marked)
    assert not any(marked.values()), marked
