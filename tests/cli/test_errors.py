"""One line and an exit code for every error; a traceback only on request."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from atlas import __version__
from atlas.errors import InvalidArgumentError, ModelFileError
from tests.cli.outcome import Command


def test_version(atlas_command: Command) -> None:
    done = atlas_command("--version")
    assert (done.status, done.err) == (0, "")
    assert __version__ in done.out


@pytest.mark.parametrize(
    "command", ["", "generate", "chat", "translate", "info", "bench", "doctor"]
)
def test_help(atlas_command: Command, command: str) -> None:
    done = atlas_command(*command.split(), "--help")
    assert (done.status, done.err) == (0, "")
    assert "Usage: atlas" in done.out
    assert atlas_command() == atlas_command("-h")


def test_a_group_alone_shows_its_help(atlas_command: Command) -> None:
    assert atlas_command("kernels") == atlas_command("kernels", "--help")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["nonsense"], "'nonsense'"),
        (["generate"], "PROMPT"),
        (["generate", "--nope", "x"], "--nope"),
        (["generate", "-n", "many", "x"], "'many' is neither an integer nor 'none'"),
        (["generate", "--truncate-prompt", "right", "x"], "'right'"),
        (["generate", "--logit-bias", "5", "x"], "ID=BIAS"),
        (["generate", "--dtype", "int3", "x"], "'int3'"),
        (["bench", "--gen-tokens", "1"], "1 is not in the range"),
    ],
)
def test_a_usage_error_is_one_line_and_status_2(
    atlas_command: Command, arguments: list[str], named: str
) -> None:
    done = atlas_command(*arguments)
    assert done.status == 2
    assert done.out == ""
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    assert named in done.err


@pytest.mark.parametrize(
    ("arguments", "error", "named"),
    [
        (["generate", "--temperature", "-1", "x"], InvalidArgumentError, "temperature is -1"),
        (["generate", "--top-p", "nan", "x"], InvalidArgumentError, "top_p is nan"),
        (["generate", "--threads", "0", "x"], InvalidArgumentError, "threads is 0"),
        (["generate", "--model", "/no/such", "x"], ModelFileError, "/no/such"),
        (["info", "no-org/no-model"], ModelFileError, "hf download no-org/no-model"),
    ],
)
def test_an_atlas_error_is_one_line_and_its_code(
    atlas_command: Command,
    arguments: list[str],
    error: type[InvalidArgumentError | ModelFileError],
    named: str,
) -> None:
    done = atlas_command(*arguments)
    assert done.status == error.code
    assert done.out == ""
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    assert named in done.err


def test_a_damaged_file_is_one_line(atlas_command: Command, tmp_path: Path) -> None:
    file = tmp_path / "short.gguf"
    file.write_bytes(b"GGUF\3\0\0\0" + bytes(29))
    done = atlas_command("info", str(file))
    assert done.status == ModelFileError.code
    assert done.err.count("\n") == 1
    assert "short.gguf" in done.err


@pytest.mark.parametrize("arguments", [["--debug", "info"], ["info", "--debug"]])
def test_debug_adds_the_traceback(atlas_command: Command, arguments: list[str]) -> None:
    done = atlas_command(*arguments, "/no/such")
    assert done.status == ModelFileError.code
    assert done.err.startswith("Traceback (most recent call last)")
    assert done.err.splitlines()[-1].startswith("error: /no/such")


def test_a_bug_is_one_line_too(
    atlas_command: Command, monkeypatch: pytest.MonkeyPatch, mixed_gguf: Path
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("in two\nlines")

    # The package's attribute of that name is the command.
    monkeypatch.setattr(importlib.import_module("atlas.cli.info"), "architecture_rows", broken)
    done = atlas_command("info", str(mixed_gguf))
    assert (done.status, done.err) == (1, "error: ZeroDivisionError: in two lines\n")


def test_a_closed_pipe_ends_quietly(mixed_gguf: Path) -> None:
    command = [sys.executable, "-c", "from atlas.cli import main; main()", "info", str(mixed_gguf)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.close()
    _, err = child.communicate()
    assert (child.returncode, err) == (1, b"")


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ("info FILE >&-", 1, "error: standard output is closed"),
        ("generate --quiet - <&-", InvalidArgumentError.code, "error: the prompt is empty"),
        ("chat --quiet <&-", 0, ""),
    ],
)
def test_closed_standard_streams(
    mixed_gguf: Path, arguments: str, status: int, message: str
) -> None:
    command = arguments.replace("FILE", str(mixed_gguf))
    python = f"{sys.executable} -c 'from atlas.cli import main; main()' {command}"
    done = subprocess.run(["sh", "-c", python], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == bool(message)
