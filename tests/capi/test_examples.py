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


def test_batch_takes_the_model_in_the_package(program: Program) -> None:
    done = run(program("batch.cpp"), "-", "4", "This module", "To open a file,")
    assert (done.returncode, done.stderr) == (0, "")
    assert [len(ids) for ids in token_lines(done.stdout)] == [4, 4]


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


def test_translate(program: Program, nllb_model: Path, translator: Engine) -> None:
    texts, languages = ["Hello world", "naïve café"], {"source": "eng_Latn", "target": "deu_Latn"}
    done = run(program("translate.c"), nllb_model, *languages.values(), *texts)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[:2] == [found.text for found in translator.translate(texts, **languages)]
    options = {"num_beams": 5, "num_return": 2, "max_tokens": 64, "length_penalty": 1.2}
    expected = [
        f'{i + 1} of "{text}", score {hypothesis.score:.4f}: {hypothesis.text}'
        for text in texts
        for i, hypothesis in enumerate(
            translator.translate(text, **languages, **options).hypotheses
        )
    ]
    assert sorted(lines[2:]) == sorted(expected)


def test_translate_file(program: Program, nllb_model: Path, translator: Engine) -> None:
    lines = ["Hello world", "", "naïve café", " \t", *(f"line {i}" for i in range(70))]
    done = run(
        program("translate_file.cpp"), nllb_model, "eng_Latn", "fra_Latn", "1",
        text="\n".join(lines),
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    texts = [line for line in lines if line.strip()]
    found = translator.translate(texts, source="eng_Latn", target="fra_Latn", num_beams=1)
    expected = iter(found)
    assert done.stdout.splitlines() == [
        next(expected).text if line.strip() else "" for line in lines
    ]
    wrong = run(program("translate_file.cpp"), nllb_model, "eng", "fra_Latn", text="a")
    assert wrong.returncode == 1
    assert "nearest: eng_Latn" in wrong.stderr


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
        (source / name).exists()
        for name in (
            "simple", "verify", "chat", "threads", "translate", "batch", "translate_file",
        )
    )  # fmt: skip
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
