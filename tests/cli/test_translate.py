"""``atlas translate``: texts, files and standard input; options, n-best, errors."""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from atlas import Engine, SamplingParams
from atlas.errors import (
    CapabilityError,
    InvalidArgumentError,
    KvExhausted,
    ModelFileError,
    PromptTooLongError,
)
from tests.cli.outcome import Command, Outcome
from tests.engine.folders import script_environment, write_model
from tests.helpers import nllb

LANGUAGES = {"source": "eng_Latn", "target": "deu_Latn"}
LINES = ["Hello world", "", "naïve café", "  ", "x = [1, 2]"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nllb.build(tmp_path_factory.mktemp("nllb")).directory


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with Engine(model, threads=1, quiet=True) as engine:
        yield engine


@pytest.fixture
def translate(atlas_command: Command, model: Path) -> Command:
    """The command with a model, languages, and short outputs."""

    def command(*arguments: str, **replaced: str) -> Outcome:
        options = {"model": str(model), **LANGUAGES} | replaced
        spelled = [part for name, value in options.items() for part in (f"--{name}", value)]
        return atlas_command("translate", *spelled, "--threads", "1", "-n", "6", *arguments)

    return command


def expected(engine: Engine, lines: list[str]) -> list[str]:
    """A translation for each line, blank for blank."""
    return [
        engine.translate(line, max_tokens=6, **LANGUAGES).text if line.strip() else ""
        for line in lines
    ]


# -- where text comes from and goes -----------------------------------------------------------


def test_texts(translate: Command, engine: Engine) -> None:
    done = translate("Hello world", "naïve café")
    assert (done.status, done.err) == (0, "")
    assert done.out.splitlines() == expected(engine, ["Hello world", "naïve café"])


def test_standard_input(
    translate: Command, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments in ((), ("--input", "-")):
        monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(LINES) + "\n"))
        done = translate(*arguments)
        assert (done.status, done.err) == (0, "")
        assert done.out.splitlines() == expected(engine, LINES)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert translate() == Outcome(0, "", "")


def test_files(translate: Command, engine: Engine, tmp_path: Path) -> None:
    """Two in, one out; a carriage return ends a line, and none is needed at the end."""
    first, second, out = tmp_path / "a", tmp_path / "b", tmp_path / "out"
    first.write_bytes("\r\n".join(LINES).encode() + b"\r\n")
    second.write_text("last line without an end")
    out.write_text("what was there before, longer than what comes\n" * 9)
    done = translate("-i", str(first), "-i", str(second), "-o", str(out))
    assert done == Outcome(0, "", "")
    assert out.read_text().splitlines() == expected(engine, [*LINES, second.read_text()])


def test_a_pipe_is_read_once(translate: Command, engine: Engine, tmp_path: Path) -> None:
    """Nobody counts the lines of what can be read only once."""
    pipe, out = tmp_path / "pipe", tmp_path / "out"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=("\n".join(LINES),))
    writer.start()
    done = translate("-i", str(pipe), "-o", str(out))
    writer.join()
    assert done == Outcome(0, "", "")
    assert out.read_text().splitlines() == expected(engine, LINES)


def test_more_lines_than_are_in_flight(
    translate: Command, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In their order, although short searches end first."""
    monkeypatch.setattr(importlib.import_module("atlas.cli.translate"), "AHEAD", 3)
    lines = [LINES[i % 5] + f" {i}" * (i % 4) for i in range(23)]
    path = tmp_path / "in"
    path.write_text("\n".join(lines))
    done = translate("-i", str(path))
    assert done.out.splitlines() == expected(engine, lines)


# -- options ----------------------------------------------------------------------------------


def test_beam_options_reach_the_search(translate: Command, engine: Engine) -> None:
    done = translate(
        "--num-beams", "6", "--n-best", "3", "--length-penalty", "0.6", "--early-stopping", "never",
        "--no-repeat-ngram", "2", "--scores", "Hello world", "x",
    )  # fmt: skip
    assert (done.status, done.err) == (0, "")
    found = engine.translate(
        ["Hello world", "x"], num_beams=6, num_return=3, length_penalty=0.6,
        early_stopping="never", no_repeat_ngram=2, max_tokens=6, **LANGUAGES,
    )  # fmt: skip
    assert done.out.splitlines() == [
        f"{hypothesis.score:.6f}\t{hypothesis.text}"
        for one in found
        for hypothesis in one.hypotheses
    ]


def test_n_best_of_blank_lines_keeps_the_count(translate: Command, tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_text("Hello\n\nx\n")
    lines = translate("-i", str(path), "--n-best", "2", "--scores").out.split("\n")
    assert len(lines) == 2 * 3 + 1
    assert lines[2:4] == ["", ""]
    assert all(re.match(r"-?\d+\.\d{6}\t", lines[i]) for i in (0, 1, 4, 5))


def test_sampling_options_draw(translate: Command, engine: Engine) -> None:
    done = translate("--temperature", "1.2", "--top-k", "40", "--seed", "3", "Hello world")
    params = SamplingParams(temperature=1.2, top_k=40, seed=3, max_tokens=6)
    want = engine.translate("Hello world", params=params, **LANGUAGES).text
    assert (done.status, done.out) == (0, want + "\n")
    whole = translate("-n", "none", "--temperature", "0", "Hello world")
    params = SamplingParams(max_tokens=None)
    assert whole.out == engine.translate("Hello world", params=params, **LANGUAGES).text + "\n"


# -- refusals ---------------------------------------------------------------------------------


def one_line(done: Outcome, status: int, match: str) -> None:
    assert done.status == status
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    assert re.search(match, done.err), done.err


@pytest.mark.parametrize(
    ("arguments", "status", "match"),
    [
        (["", "--num-beams", "2"], InvalidArgumentError.code, "the source is empty"),
        (["a", ""], InvalidArgumentError.code, "text 2: the source is empty"),
        (["x " * 200], PromptTooLongError.code, "subwords; allowed: up to 126"),
        (["--num-beams", "0", "a"], InvalidArgumentError.code, "num_beams is 0"),
        (["--num-beams", "17", "a"], InvalidArgumentError.code, "num_beams is 17; allowed: 1 … 16"),
        (["--n-best", "5", "a"], InvalidArgumentError.code, "num_return is 5; allowed: 1 … num_"),
        (["--length-penalty", "nan", "a"], InvalidArgumentError.code, "length_penalty is nan"),
        (["--early-stopping", "soon", "a"], 2, "'soon'"),
        (["--temperature", "1", "--num-beams", "2", "a"], 2,
         "--temperature has no meaning in a beam search, which --num-beams asks for"),
        (["--top-k", "9", "--n-best", "2", "--scores", "a"], 2,
         "--top-k has no .* --n-best, --scores"),
        (["--truncate-prompt", "left", "a"], InvalidArgumentError.code, "truncate_prompt is 'lef"),
        (["--input", "f", "a"], 2, "TEXT and --input are both given"),
        (["--input", "/no/such/file"], 1, "/no/such/file"),
        (["--output", "/no/such/folder/file", "a"], 1, "/no/such/folder/file"),
    ],
)  # fmt: skip
def test_bad_arguments(translate: Command, arguments: list[str], status: int, match: str) -> None:
    one_line(translate(*arguments), status, match)


@pytest.mark.parametrize(
    ("replaced", "status", "match"),
    [
        ({"target": "eng_Latn"}, 2, "--source and --target are both eng_Latn"),
        ({"source": "eng"}, InvalidArgumentError.code, "'eng' is not one of .* nearest: eng_Latn"),
        ({"target": "klingon"}, InvalidArgumentError.code, "'klingon' is not one of the model's 7"),
        ({"model": "/no/such"}, ModelFileError.code, "/no/such"),
    ],
)
def test_bad_models_and_languages(
    translate: Command, replaced: dict[str, str], status: int, match: str
) -> None:
    one_line(translate("Hello", **replaced), status, match)


def test_languages_are_required(atlas_command: Command) -> None:
    one_line(atlas_command("translate", "--model", "x", "--source", "a", "text"), 2, "--target")


def test_a_decoder_only_model(translate: Command, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "llama")
    one_line(translate("a", model=str(folder)), CapabilityError.code, "needs a translation model")


def test_a_folder_that_contradicts_itself(translate: Command, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    listed = json.loads((folder / "tokenizer_config.json").read_text())["extra_special_tokens"]
    nllb.change_json(folder / "tokenizer_config.json", extra_special_tokens=[*listed, "spa_Latn"])
    one_line(translate("a", model=str(folder)), ModelFileError.code, "lists the language spa_Latn")


def test_a_bad_line_has_its_number_and_those_before_are_written(
    translate: Command, engine: Engine, tmp_path: Path
) -> None:
    path, out = tmp_path / "in", tmp_path / "out"
    path.write_text("\n".join([*LINES, "x " * 200, "never read"]))
    done = translate("-i", str(path), "-o", str(out))
    one_line(done, PromptTooLongError.code, rf"{path}, line 6: the source has \d+ subwords")
    assert out.read_text().splitlines() == expected(engine, LINES)


def test_a_file_that_is_not_utf_8(translate: Command, engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"Hello world\ncaf\xe9\n")
    one_line(translate("-i", str(path)), InvalidArgumentError.code, f"{path} is not UTF-8")


def test_a_file_is_not_written_while_it_is_read(translate: Command, tmp_path: Path) -> None:
    path, link = tmp_path / "in", tmp_path / "link"
    path.write_text("Hello\n")
    link.symlink_to(path)
    one_line(translate("-i", str(path), "-o", str(link)), 2, "is --input and --output")
    assert path.read_text() == "Hello\n"


def test_an_output_that_is_never_begun_is_left_alone(translate: Command, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_text("kept")
    one_line(translate("a", "-o", str(out), model="/no/such"), ModelFileError.code, "/no/such")
    assert out.read_text() == "kept"


def test_a_cache_that_is_too_small(
    translate: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fails while it runs names its line too."""
    module = importlib.import_module("atlas.cli.translate")
    load = module.load_engine
    monkeypatch.setattr(
        module, "load_engine", lambda model, loading, quiet: load(
            model, {**loading, "kv_tokens": 64}, quiet=quiet
        )
    )  # fmt: skip
    path = tmp_path / "in"
    path.write_text("\n\nHello\n")
    done = translate("-i", str(path), "--num-beams", "16", "-n", "none")
    one_line(done, KvExhausted.code, "line 3: .*kv_tokens")
    assert done.out == "\n\n"


def test_a_pipe_is_answered_line_by_line(model: Path, engine: Engine) -> None:
    """Before the next line, which may depend on it; then an interrupt, which is quiet."""
    code = "from atlas.cli import main; main()"
    options = ["--model", str(model), "--source", "eng_Latn", "--target", "deu_Latn"]
    child = subprocess.Popen(
        [sys.executable, "-c", code, "translate", *options, "--threads", "1", "-n", "6"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=script_environment(),
        text=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    for line, want in zip(LINES, expected(engine, LINES), strict=True):
        child.stdin.write(line + "\n")
        child.stdin.flush()
        assert child.stdout.readline() == want + "\n"
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert (child.returncode, err) == (130, "")


def test_a_bar_where_somebody_watches(
    translate: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atlas.display.is_interactive", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich draws
    path = tmp_path / "in"
    path.write_text("Hello\nworld\n")
    done = translate("-i", str(path), "-o", str(tmp_path / "out"))
    assert done.status == 0
    assert "translating" in done.err
    assert "2/2" in done.err
    assert translate("-i", str(path), "--quiet").err == ""
