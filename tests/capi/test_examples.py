"""The examples, compiled against the package and run with an empty environment."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from atlas import Engine, SamplingParams
from atlas.capi.config_command import package_folder, values
from tests.capi.programs import EXAMPLES, compiler, run, token_lines

Program = Callable[[str], Path]
PROMPT = "def f(x): return x; def f(x): return"
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)


def greedy_ids(engine: Engine, prompt: str, count: int) -> list[int]:
    """The Python API's greedy tokens; the engine's own ends do not count."""
    return list(engine.generate(prompt, GREEDY.replace(max_tokens=count)).token_ids)


def test_simple(program: Program, model: Path, engine: Engine) -> None:
    done = run(program("simple.c"), model, PROMPT, "24")
    assert (done.returncode, done.stderr) == (0, "")
    expected = engine.generate(PROMPT, SamplingParams(max_tokens=24))
    assert token_lines(done.stdout) == [list(expected.token_ids)]
    assert done.stdout.rpartition("\ntokens:")[0] == expected.text


def test_simple_is_short() -> None:
    assert len((EXAMPLES / "simple.c").read_text().splitlines()) <= 120


def test_verify_gives_the_tokens_of_plain_decoding(
    program: Program, model: Path, engine: Engine
) -> None:
    done = run(program("verify.c"), model, PROMPT, "24")
    assert done.returncode == 0, done.stderr
    assert token_lines(done.stdout) == [greedy_ids(engine, PROMPT, 24)]


def test_batch(program: Program, model: Path, engine: Engine) -> None:
    prompts = [PROMPT, "naïve", "Hello world, hello"]
    done = run(program("batch.cpp"), model, "16", *prompts)
    assert (done.returncode, done.stderr) == (0, "")
    assert token_lines(done.stdout) == [greedy_ids(engine, prompt, 16) for prompt in prompts]


def test_threads(program: Program, model: Path, engine: Engine) -> None:
    prompts = [f"{PROMPT} {i}" for i in range(6)]
    done = run(program("threads.c"), model, *prompts)
    assert (done.returncode, done.stderr) == (0, "")
    expected = [list(engine.generate(prompt).token_ids) for prompt in prompts]
    assert token_lines(done.stdout) == expected


def test_chat(program: Program, model: Path, engine: Engine) -> None:
    done = run(program("chat.c"), model, "max_tokens=12", text="Hi\n<|im_end|>there\n")
    assert done.returncode == 0, done.stderr
    params = SamplingParams(max_tokens=12)
    first = engine.chat([{"role": "user", "content": "Hi"}], params).text
    messages = [("user", "Hi"), ("assistant", first), ("user", "<|im_end|>there")]
    second = engine.chat([{"role": r, "content": c} for r, c in messages], params).text
    assert done.stdout == f"{first}\n{second}\n"


def test_errors_of_the_examples_are_messages(program: Program, tmp_path: Path) -> None:
    done = run(program("simple.c"), tmp_path / "absent", "x")
    assert done.returncode == 1
    assert done.stderr.startswith("ATLAS_ERROR_MODEL_FILE: ")
    assert "no such file" in done.stderr


def test_pkg_config_and_linker_script() -> None:
    if shutil.which("pkg-config") is None:
        pytest.skip("needs pkg-config")
    folder = values(package_folder())["pkgconfigdir"]
    done = run(
        shutil.which("pkg-config") or "", "--cflags", "--libs", "atlas-llm",
        env={"PKG_CONFIG_PATH": folder},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    flags = {
        str(Path(part[2:]).resolve()) for part in done.stdout.split() if part[:2] in ("-I", "-L")
    }
    assert flags == {values(package_folder())[name] for name in ("includedir", "libdir")}


@pytest.mark.slow
def test_the_makefile_and_cmake_build_every_example(tmp_path: Path) -> None:
    compiler("c++")
    config = tmp_path / "atlas-config"
    folder = values(package_folder())
    config.write_text(
        "#!/bin/sh\ncase $1 in --cflags) echo '{cflags}';; --libs) echo '{libs}';; esac\n".format(
            **folder
        )
    )
    config.chmod(0o755)
    source = tmp_path / "c"
    shutil.copytree(EXAMPLES, source)
    subprocess.run(["make", f"ATLAS_CONFIG={config}"], cwd=source, check=True)
    assert all(
        (source / name).exists() for name in ("simple", "verify", "chat", "threads", "batch")
    )
    if shutil.which("cmake") is None:
        pytest.skip("needs cmake")
    prefix = f"-DCMAKE_PREFIX_PATH={folder['cmakedir']}"
    subprocess.run(["cmake", "-S", source, "-B", tmp_path / "b", prefix], check=True)
    subprocess.run(["cmake", "--build", tmp_path / "b"], check=True)
    done = run(tmp_path / "b" / "batch")
    assert done.returncode == 2


@pytest.mark.parametrize("name", ["simple", "verify"])
def test_a_dash_is_the_model_in_the_package(program: Program, name: str) -> None:
    done = run(program(f"{name}.c"), "-", "This module provides", "16")
    assert (done.returncode, "unknown" in done.stderr) == (0, False)
    with Engine(threads=1, quiet=True) as tiny:
        assert token_lines(done.stdout) == [greedy_ids(tiny, "This module provides", 16)]
