"""Compile and run capi.c on a model, beside the same step of the Python API.

python benchmarks/capi.py MODEL
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from atlas import Engine
from atlas.capi.config_command import package_folder, values

ROUNDS, STEPS = 15, 100


def python_step_us(model: str) -> float:
    """Microseconds of ``forward.decode`` in the quickest round."""
    rounds = []
    with Engine(model, threads=1, quiet=True) as engine:
        for _ in range(ROUNDS):
            seq = engine.model.lifecycle.alloc_sequence()
            engine.model.forward.prefill([3, 4, 5, 6], seq)
            begin = time.perf_counter()
            for _ in range(STEPS):
                engine.model.forward.decode(7, seq)
            rounds.append(1e6 * (time.perf_counter() - begin) / STEPS)
            engine.model.lifecycle.free_sequence(seq)
    return min(rounds)


def main(model: str) -> None:
    flags = values(package_folder())
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "capi"
        source = Path(__file__).with_suffix(".c")
        compile_it = ["cc", "-O2", "-std=c11", "-D_POSIX_C_SOURCE=200809L", str(source)]
        subprocess.run(
            [*compile_it, "-o", str(program), *flags["cflags"].split(), *flags["libs"].split()],
            check=True,
        )
        step = python_step_us(model)
        print(f"python_step_us  {step:8.2f}")
        sys.stdout.flush()
        subprocess.run([str(program), model, str(step)], check=True, env={})


if __name__ == "__main__":
    main(sys.argv[1])
