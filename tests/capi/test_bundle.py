"""A bundle in a root folder of its own: nothing but glibc, a program, a model and the bundle."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from atlas import Engine, bundle
from atlas.cli import atlas as atlas_command
from atlas.errors import InvalidArgumentError
from tests.capi.programs import EXAMPLES, STRICT, compiler, run, token_lines
from tests.capi.test_examples import PROMPT, SamplingParams

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root folder with the bundle at /opt/atlas, moved there from where it was made."""
    made = bundle.bundle(tmp_path_factory.mktemp("made") / "bundle")
    root = tmp_path_factory.mktemp("root")
    (root / "opt").mkdir()
    shutil.move(made, root / "opt" / "atlas")
    loader = subprocess.run(["ldd", compiler("cc")], capture_output=True, text=True).stdout
    names = [line.split()[0] for line in loader.splitlines() if "ld-linux" in line]
    libc = [line.split()[2] for line in loader.splitlines() if "libc.so" in line]
    if not names or not libc:
        pytest.skip("needs glibc")
    folder = Path(libc[0]).parent
    parts = ("c.so.6", "m.so.6", "dl.so.2", "pthread.so.0", "rt.so.1", "util.so.1")
    for path in [Path(names[0]), *(folder / f"lib{part}" for part in parts)]:
        (root / path.parent.relative_to("/")).mkdir(parents=True, exist_ok=True)
        shutil.copy(path, root / path.relative_to("/"))
    return root


@pytest.fixture(scope="module")
def inside(root: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a program in the root folder; skips where that is not permitted."""
    enter = shutil.which("chroot")
    if enter is None or os.geteuid() != 0:
        pytest.skip("needs chroot and the right to use it")
    return lambda *command: run(enter, root, *command)


def test_a_program_in_an_empty_root(
    root: Path,
    inside: Callable[..., subprocess.CompletedProcess[str]],
    model: Path,
    engine: Engine,
) -> None:
    shutil.copytree(model, root / "model")
    package = root / "opt/atlas"
    command = [
        compiler("cc"), "-std=c11", *STRICT, EXAMPLES / "simple.c", f"-I{package}/include",
        f"-L{package}/lib", "-latlas_llm", "-Wl,-rpath,/opt/atlas/lib", "-o", root / "simple",
    ]  # fmt: skip
    subprocess.run(command, check=True)
    done = inside("/simple", "/model", PROMPT, "12")
    assert (done.returncode, done.stderr) == (0, "")
    expected = engine.generate(PROMPT, SamplingParams(max_tokens=12))
    assert token_lines(done.stdout) == [list(expected.token_ids)]
    written = [path for path in root.rglob("*.o") if "share/atlas/kernels" not in str(path)]
    assert written == []  # the bundle's kernels served


def test_the_model_in_the_package_is_left_out(
    root: Path, inside: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    assert list(root.glob("opt/atlas/lib/python*/site-packages/atlas/data")) == []
    done = inside("/simple", "-", PROMPT, "12")
    assert done.returncode == 1
    assert done.stderr.startswith("ATLAS_ERROR_MODEL_FILE: atlas-tiny: ")
    assert "--with-model" in done.stderr


def test_the_model_in_the_package_is_there_if_asked_for(tmp_path: Path) -> None:
    done = CliRunner().invoke(atlas_command, ["bundle", "--with-model", "--out", f"{tmp_path}/b"])
    assert done.exit_code == 0, done.output
    (folder,) = tmp_path.glob("b/lib/python*/site-packages/atlas/data/atlas-tiny")
    assert (folder / "model.safetensors").is_file()
    assert (folder / "LICENSE-PSF").is_file()


def test_pkg_config_of_the_bundle(root: Path) -> None:
    if shutil.which("pkg-config") is None:
        pytest.skip("needs pkg-config")
    env = {"PKG_CONFIG_PATH": str(root / "opt/atlas/lib/pkgconfig")}
    done = run(shutil.which("pkg-config") or "", "--variable=libdir", "atlas-llm", env=env)
    assert Path(done.stdout.strip()).resolve() == root / "opt/atlas/lib"


def test_a_folder_that_holds_something_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidArgumentError, match="no empty folder"):
        bundle.bundle(tmp_path)
