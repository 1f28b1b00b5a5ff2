"""Compile C and C++ programs against the installed package and run them in an empty environment."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from atlas.capi.config_command import package_folder, values
from tests.conftest import ON_CUDA

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "c"
STRICT = ["-O1", "-g", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]
POSIX = "-D_POSIX_C_SOURCE=200809L"


def library() -> Path:
    """The installed library."""
    return package_folder() / "lib" / "libatlas_llm.so.0"


def compiler(name: str) -> str:
    """A compiler's path; skips the test where there is none."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"needs a compiler called {name}")
    return found


def build(source: Path, program: Path, *options: str, linked: bool = True) -> Path:
    """Compile one file with every warning an error."""
    flags = values(package_folder())
    is_cpp = source.suffix == ".cpp"
    command = [compiler("c++"), "-std=c++17"] if is_cpp else [compiler("cc"), "-std=c11", POSIX]
    libs = shlex.split(flags["libs"]) if linked else ["-ldl"]
    cflags = shlex.split(flags["cflags"])
    done = subprocess.run(
        [*command, *STRICT, *cflags, str(source), *options, "-o", str(program), "-pthread", *libs],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return program


_GPU_VARIABLES = ("ATLAS_DEVICE", "LD_LIBRARY_PATH")


def run(
    *command: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None, text: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a program with nothing but ``env`` in its environment, and on a GPU what finds it."""
    found = {name: os.environ[name] for name in _GPU_VARIABLES if name in os.environ}
    return subprocess.run(
        [str(part) for part in command],
        env=(found if ON_CUDA else {}) | (env or {}),
        cwd=cwd,
        input=text,
        capture_output=True,
        text=True,
        timeout=120,
    )


def token_lines(output: str) -> list[list[int]]:
    """The ids of the lines ``tokens: 1 2 3``, or ``0: 1 2 3``."""
    lines = [line.partition(":") for line in output.splitlines()]
    return [
        [int(part) for part in rest.split()]
        for head, colon, rest in lines
        if colon and (head == "tokens" or head.isdecimal())
    ]
