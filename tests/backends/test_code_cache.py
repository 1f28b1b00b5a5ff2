"""The disk cache of compiled bodies: what its key covers, and every way an entry can be bad."""

from __future__ import annotations

import ast
import logging
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import atlas
from atlas.backends.cpu import code_cache, compiler
from atlas.backends.cpu.compiler import BodyCompiler, compile_body
from atlas.backends.cpu.target import cpu_target
from atlas.errors import KernelError
from tests.engine.folders import script_environment

BODY = "argmax.argmax"
PACKAGE = Path(atlas.__file__).parent


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a process that has loaded nothing yet."""
    monkeypatch.setenv("ATLAS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "_ADDRESSES", {})
    monkeypatch.setattr(code_cache, "_UNWRITABLE", set())
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def code() -> bytes:
    return compile_body(BODY)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, code: bytes) -> list[str]:
    """Compiling takes no time here; the names of what was compiled."""
    names: list[str] = []

    def compiled(name: str) -> bytes:
        names.append(name)
        return code

    monkeypatch.setattr(compiler, "compile_body", compiled)
    return names


def run(script: str, *arguments: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env=script_environment(**variables),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# -- where ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"ATLAS_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/a"),
        ({"ATLAS_CACHE_DIR": "~/a", "HOME": "/h"}, "/h/a"),
        ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/atlas"),
        ({"ATLAS_CACHE_DIR": "", "XDG_CACHE_HOME": "", "HOME": "/h"}, "/h/.cache/atlas"),
        ({"HOME": "/h"}, "/h/.cache/atlas"),
    ],
)
def test_folder(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str) -> None:
    for name in ("ATLAS_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert code_cache.cache_folder() == Path(expected)


# -- the key ----------------------------------------------------------------------------------


def imported_files(source: Path) -> Iterator[Path]:
    """Files of the package that a source imports."""
    for node in ast.walk(ast.parse(source.read_text())):
        modules = []
        if isinstance(node, ast.ImportFrom) and node.module:
            modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        for module in modules:
            if module.startswith("atlas."):
                file = PACKAGE.joinpath(*module.split(".")[1:]).with_suffix(".py")
                if file.exists():
                    yield file


def test_the_key_covers_everything_that_bodies_import() -> None:
    covered = set(code_cache.source_files())
    bodies = [path for path in covered if path.parent.name == "bodies"]
    assert len(bodies) > 10
    for body in bodies:
        missing = set(imported_files(body)) - covered
        assert not missing, f"{body.name} imports {missing}, which the key does not cover"


def test_a_change_in_any_source_changes_the_key(tmp_path: Path) -> None:
    sources = [Path(shutil.copy(path, tmp_path)) for path in code_cache.source_files()]
    assert len({path.name for path in sources}) >= len(sources) - 1  # attention.py: ops and bodies
    target = cpu_target()
    key = code_cache.key_of(sources, target)
    assert code_cache.key_of(sources, target) == key
    for source in sources:
        text = source.read_text()
        source.write_text(text + "# changed\n")
        assert code_cache.key_of(sources, target) != key
        source.write_text(text)
    assert code_cache.key_of(sources, target) == key


def test_versions_and_target_change_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    target = cpu_target()
    others = [
        replace(target, cpu="other"),
        replace(target, features=target.features + ",+other"),
        replace(target, level="plain" if target.level != "plain" else "avx2"),
    ]
    keys = {code_cache.key_of([], one) for one in [target, *others]}
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.0")
    keys.add(code_cache.key_of([], target))
    monkeypatch.setattr("platform.python_version", lambda: "9.9.9")
    keys.add(code_cache.key_of([], target))
    assert len(keys) == 6


_COMPILE = """
import sys
from atlas.backends.cpu.compiler import BodyCompiler
compiler = BodyCompiler()
for name in sys.argv[1:]:
    assert compiler.address(name)
print(compiler.num_compiled, "numba" in sys.modules)
"""


def test_a_changed_callee_in_another_file_is_compiled_anew(tmp_path: Path) -> None:
    """The package is copied, used, changed and used again; nothing is written into it."""
    cache = str(tmp_path / "cache")
    copy = shutil.copytree(
        PACKAGE, tmp_path / "site" / "atlas", ignore=shutil.ignore_patterns("__pycache__")
    )
    variables = {
        "ATLAS_CACHE_DIR": cache,
        "PYTHONPATH": str(copy.parent),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    before = sorted(copy.rglob("*"))
    assert run(_COMPILE, BODY, **variables) == "1 True"
    assert run(_COMPILE, BODY, **variables) == "0 False"
    assert sorted(copy.rglob("*")) == before
    callee = copy / "backends" / "cpu" / "bodies" / "simd.py"
    callee.write_text(callee.read_text() + "\n# changed\n")
    assert run(_COMPILE, BODY, **variables) == "1 True"
    assert len(list((tmp_path / "cache" / "cpu").iterdir())) == 2


# -- entries ----------------------------------------------------------------------------------


def test_an_entry_is_written_once_and_read_afterwards(folder: Path, quick: list[str]) -> None:
    first = BodyCompiler()
    address = first.address(BODY)
    assert first.address(BODY) == address
    assert (quick, first.num_compiled) == ([BODY], 1)
    assert [path.name for path in folder.rglob("*") if path.is_file()] == [f"{BODY}.o"]
    compiler._ADDRESSES.clear()
    second = BodyCompiler()
    second.address(BODY)
    assert (quick, second.num_compiled) == ([BODY], 0)


def test_compiling_is_announced(folder: Path, quick: list[str]) -> None:
    announced: list[str] = []
    BodyCompiler(announced.append).address(BODY)
    compiler._ADDRESSES.clear()
    BodyCompiler(announced.append).address(BODY)
    assert announced == [BODY]


def _truncated(entry: bytes) -> Iterator[bytes]:
    yield from (entry[:size] for size in (0, 1, 31, 32, 33, len(entry) // 2, len(entry) - 1))


def _altered(entry: bytes) -> Iterator[bytes]:
    for at in (0, 31, 32, len(entry) // 2, len(entry) - 1):
        yield entry[:at] + bytes([entry[at] ^ 1]) + entry[at + 1 :]
    yield entry + b"\0"
    yield b"\0" * len(entry)


@pytest.mark.parametrize("damage", [_truncated, _altered])
def test_a_damaged_entry_is_recompiled(folder: Path, quick: list[str], damage: object) -> None:
    assert callable(damage)
    BodyCompiler().address(BODY)
    path = code_cache.entry_path(BODY)
    entry = path.read_bytes()
    for bad in damage(entry):
        quick.clear()
        compiler._ADDRESSES.clear()
        path.write_bytes(bad)
        BodyCompiler().address(BODY)
        assert quick == [BODY]
        assert path.read_bytes() == entry


def test_an_entry_of_another_body_or_target_is_not_used(
    folder: Path, quick: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    BodyCompiler().address(BODY)
    path = code_cache.entry_path(BODY)
    shutil.copy(path, code_cache.entry_path("norm.rmsnorm"))
    assert code_cache.read_entry(BODY) is not None
    assert code_cache.read_entry("norm.rmsnorm") is None
    # A cache shared by two machines, whose folders somebody has mixed up.
    other = code_cache.key_of(code_cache.source_files(), replace(cpu_target(), cpu="other"))
    monkeypatch.setattr(code_cache, "cache_key", lambda: other)
    assert code_cache.read_entry(BODY) is None
    shutil.copytree(path.parent, code_cache.entry_path(BODY).parent)
    assert code_cache.read_entry(BODY) is None
    compiler._ADDRESSES.clear()
    BodyCompiler().address(BODY)
    assert quick == [BODY, BODY]


def test_an_entry_that_cannot_be_read_is_absent(
    folder: Path, quick: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    code_cache.entry_path(BODY).mkdir(parents=True)
    BodyCompiler().address(BODY)
    assert quick == [BODY]
    # Nor can it be replaced: no temporary file may be left beside it.
    assert [path.name for path in folder.rglob("*") if not path.is_dir()] == []
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_read_only_folder_is_reported_once_and_done_without(
    folder: Path, quick: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    folder.write_text("a file where the folder should be")  # read-only even for root
    with caplog.at_level(logging.INFO, logger="atlas"):
        for _ in range(3):
            compiler._ADDRESSES.clear()
            assert BodyCompiler().address(BODY)
    assert quick == [BODY] * 3
    assert len(caplog.records) == 1
    assert "not cached" in caplog.text
    assert str(folder) in caplog.text


def test_a_failed_write_leaves_no_temporary_file(
    folder: Path,
    quick: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(source: str, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    assert BodyCompiler().address(BODY)
    assert [path for path in folder.rglob("*") if path.is_file()] == []
    assert "No space left" in caplog.text


def test_processes_that_start_at_once_on_an_empty_cache(tmp_path: Path) -> None:
    names = [BODY, "norm.rmsnorm"]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _COMPILE, *order],
            env=script_environment(ATLAS_CACHE_DIR=str(tmp_path)),
            stdout=subprocess.PIPE,
            text=True,
        )
        for order in (names, names[::-1])
    ]
    for process in processes:
        process.communicate(timeout=120)
        assert process.returncode == 0
    files = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    assert files == [f"{name}.o" for name in names]
    assert run(_COMPILE, *names, ATLAS_CACHE_DIR=str(tmp_path)) == "0 False"


# -- bodies -----------------------------------------------------------------------------------


def test_an_unknown_body_is_named() -> None:
    with pytest.raises(KernelError, match=r"argmax.nothing; there are .*argmax.argmax"):
        compile_body("argmax.nothing")


def test_a_body_that_does_not_compile_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from atlas.backends.cpu.bodies import BODIES

    def wrong(thread: int, num_threads: int, args: object) -> None:
        object().nothing  # type: ignore[attr-defined]  # noqa: B018

    monkeypatch.setitem(BODIES, BODY, wrong)
    with pytest.raises(KernelError, match=f"{BODY} does not compile"):
        compile_body(BODY)
