"""The contract holds at each instruction set, and the sets agree with each other closely.

The level is chosen when the process starts, so each one runs in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from llvmlite import binding as llvm
from numpy.typing import NDArray

from tests.exactness.serial import Case, rows, text

ROOT = Path(__file__).resolve().parents[2]
LEVELS = ["plain", "avx2"]
COMPARED = [
    Case("dense", "f32", "float32"),
    Case("gemma", "f32", "float32"),
    Case("moe", "f32", "float32"),
    Case("dense_wide", "q8_0", "float32"),
    Case("dense_wide", "q4_1", "float32"),
    Case("gemma_wide", "q6_k", "float32"),
    Case("moe_wide", "q4_k", "float32"),
    Case("dense_wide", "bf16", "float32"),
]
NUM_ROWS = 30
_PARITY = (
    "linear or moe_experts or rmsnorm or (attention and (K64 or K20)) or embedding or kv_store "
    "or layernorm or relu or add_positions or top_candidates"
)


def environment(level: str) -> dict[str, str]:
    if level == "avx2" and not llvm.get_host_cpu_features().get("avx2"):
        pytest.skip("this CPU has no AVX2")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"ATLAS_CPU_TARGET": level, "PYTHONPATH": path}


def run(level: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment(level),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-2000:]}"


@pytest.mark.parametrize("level", LEVELS)
def test_rows_are_exact_at_every_level(level: str) -> None:
    rows_test = "tests/exactness/test_rows.py::test_every_position_of_a_step_is_its_solo_row"
    verify_test = "tests/exactness/test_verify.py::test_speculation_equals_serial_greedy"
    selected = "gemma-f32 or moe-f32 or dense_wide-q8_0 or moe_wide-q4_k"
    run(
        level,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-x",
        "-k",
        selected,
        rows_test,
        verify_test,
    )


@pytest.mark.parametrize("level", LEVELS)
def test_ops_agree_with_their_definitions_at_every_level(level: str) -> None:
    selected = ["-p", "no:cacheprovider", "-x", "-k", _PARITY, "tests/ops/test_parity.py"]
    run(level, "-m", "pytest", *selected)


Logits = NDArray[np.float32]


@pytest.fixture(scope="module")
def logits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Logits]]:
    """Logits of ``COMPARED`` at each level of this machine, and at the process's own."""
    folder = tmp_path_factory.mktemp("levels")
    found = {}
    for level in ("plain", "avx2", "native"):
        if level == "avx2" and not llvm.get_host_cpu_features().get("avx2"):
            continue
        run(level, "-m", "tests.exactness.test_levels", str(folder / f"{level}.npz"))
        with np.load(folder / f"{level}.npz") as file:
            found[level] = dict(file)
    return found


@pytest.mark.parametrize("case", COMPARED, ids=str)
def test_plain_agrees_with_the_others(case: Case, logits: dict[str, dict[str, Logits]]) -> None:
    """Close, not equal: without fused multiply-add sums round differently, and a quantised
    activation may then round to the other side."""
    tolerance = 1e-4 if case.format in ("f32", "bf16") else 5e-2
    plain = logits["plain"][str(case)]
    for level, by_case in logits.items():
        error = np.abs(by_case[str(case)] - plain).max(axis=-1) / np.abs(plain).max(axis=-1)
        assert error.max() <= tolerance, f"{level} and plain differ by {error.max():.3g}"


@pytest.mark.parametrize("case", COMPARED, ids=str)
def test_avx2_and_the_widest_vectors_agree_bitwise(
    case: Case, logits: dict[str, dict[str, Logits]]
) -> None:
    """Not promised, but so: 16 lanes are two registers of 8 or one of 16, in the same order."""
    if "avx2" not in logits:
        pytest.skip("this CPU has no AVX2")
    assert logits["avx2"][str(case)].tobytes() == logits["native"][str(case)].tobytes()


def main(path: str) -> None:
    """Write the serial logits of every case to ``path``."""
    assert len(text(0)) >= NUM_ROWS
    arrays = {
        str(case): np.stack([np.frombuffer(row, np.float32) for row in rows(case, 0, NUM_ROWS)])
        for case in COMPARED
    }
    np.savez(path, **arrays)


if __name__ == "__main__":
    main(sys.argv[1])
