"""What is installed, and that it can be built and installed elsewhere."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import os
import re
import shutil
import subprocess
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import atlas

ROOT = Path(__file__).resolve().parents[2]
NATIVE = sorted(path.stem for path in (ROOT / "src/atlas/_native").glob("*.pyx"))


def header() -> Path:
    return Path(str(importlib.resources.files("atlas.include") / "atlas.h"))


def test_one_version_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = header().read_text()
    parts = [
        re.search(rf"#define ATLAS_VERSION_{part} (\d+)", text)[1]  # type: ignore[index]
        for part in ("MAJOR", "MINOR", "PATCH")
    ]
    assert project["version"] == atlas.__version__ == ".".join(parts)
    assert f'#define ATLAS_VERSION "{atlas.__version__}"' in text
    assert importlib.metadata.version("atlas-llm") == atlas.__version__
    assert f"## {atlas.__version__}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("language", [["cc", "-std=c99", "-xc"], ["c++", "-std=c++11", "-xc++"]])
def test_the_header_is_c_and_cpp(language: list[str]) -> None:
    if shutil.which(language[0]) is None:
        pytest.skip(f"needs a compiler called {language[0]}")
    flags = ["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only"]
    source = "#include <atlas.h>\nconst char *version = ATLAS_VERSION;\n"
    command = [*language, *flags, f"-I{header().parent}", "-"]
    done = subprocess.run(command, input=source, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_kernels_package_is_the_folder_kernels() -> None:
    import atlas_kernels

    assert atlas_kernels.__file__ is not None
    installed = Path(atlas_kernels.__file__).read_bytes()
    assert installed == (ROOT / "kernels/__init__.py").read_bytes()


def test_the_command_and_the_type_marker_are_installed() -> None:
    scripts = importlib.metadata.entry_points(group="console_scripts", name="atlas")
    assert [script.value for script in scripts] == ["atlas.cli:main"]
    assert (importlib.resources.files("atlas") / "py.typed").is_file()


def test_every_folder_of_modules_is_a_package() -> None:
    """A folder without __init__.py works from the source tree and is missing in a wheel."""
    folders = {path.parent for path in (ROOT / "src").rglob("*.py")}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


def test_ci_runs_make_check() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make check" in script.read_text()
    for target in ("demo", "test", "check", "bench", "contract", "clean"):
        done = subprocess.run(
            ["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (0, "")


CHECK = """
import importlib.resources, pathlib, sys
import atlas, atlas_kernels
native = importlib.resources.files("atlas._native")
print(sorted(f.name.partition(".")[0] for f in native.iterdir() if f.name.endswith(".so")))
print((importlib.resources.files("atlas.include") / "atlas.h").is_file())
print(all(pathlib.Path(sys.prefix) in pathlib.Path(m.__file__).parents
          for m in (atlas, atlas_kernels)))
"""


@pytest.mark.slow
def test_sdist_and_wheel_install_elsewhere(tmp_path: Path) -> None:
    """The sdist holds all that a build needs; what comes out holds all that a program needs."""
    source = tmp_path / "source"
    ignore = shutil.ignore_patterns(".*", "*.so*", "lib", "*.egg-info", "build", "__pycache__")
    shutil.copytree(ROOT, source, ignore=ignore)
    venv.create(tmp_path / "venv", with_pip=True)
    python = str(tmp_path / "venv/bin/python")

    def run(*command: str, folder: Path = tmp_path) -> str:
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(python, "-m", "pip", "install", "setuptools>=77", "cython>=3.1", "cffi>=1.17")
    build = "import setuptools.build_meta as b; b.build_sdist('../dist')"
    run(python, "-c", build, folder=source)
    (sdist,) = (tmp_path / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "include/atlas.h", "kernels/__init__.py"} <= names
    generated = [name for name in names if name.endswith((".so", ".c"))]
    assert [name for name in generated if "/_native/library/" not in name] == []

    run(python, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", "dist", str(sdist))
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"atlas/include/atlas.h", "atlas/py.typed", "atlas_kernels/__init__.py"} <= names
    assert not [name for name in names if name.endswith((".c", ".pyx"))]
    tiny = ROOT / "src/atlas/data/atlas-tiny"
    assert {f"atlas/data/atlas-tiny/{path.name}" for path in tiny.iterdir()} <= names
    modules = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*.py")}
    assert modules <= names

    run(python, "-m", "pip", "install", "--no-deps", str(wheel))
    assert run(python, "-c", CHECK).splitlines() == [str(NATIVE), "True", "True"]
    assert atlas.__version__ in run(python, "-m", "pip", "show", "atlas-llm")
