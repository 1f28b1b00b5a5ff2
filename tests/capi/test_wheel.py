"""The wheel in an environment and in a prefix of its own: build against it, run, compare."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import atlas
from atlas import Engine
from tests.capi.programs import EXAMPLES, ROOT, run, token_lines
from tests.capi.test_examples import GREEDY, PROMPT

pytestmark = pytest.mark.slow
VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"


def pip(*arguments: str | Path) -> None:
    """Run this Python's pip."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, "-m", "pip", "--quiet", *map(str, arguments)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignore = shutil.ignore_patterns(".*", "*.so*", "*.egg-info", "build", "__pycache__", "lib")
    shutil.copytree(ROOT, source, ignore=ignore)
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dependencies come from the environment that runs the tests."""
    home = tmp_path_factory.mktemp("environment") / "venv"
    venv.create(home, with_pip=False)
    pip("--python", home / "bin" / "python", "install", "--no-deps", wheel)
    pth = home / "lib" / VERSION / "site-packages" / "dependencies.pth"
    pth.write_text(sysconfig.get_path("purelib") + "\n")
    return home


def test_what_the_wheel_holds(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        links = [i.filename for i in archive.infolist() if i.external_attr >> 28 == 0xA]
        script = archive.read("atlas/lib/libatlas_llm.so").decode()
        tiny = {i.filename: i.file_size for i in archive.infolist() if "/atlas-tiny/" in i.filename}
        metadata = archive.read(next(n for n in names if n.endswith("/METADATA"))).decode()
    assert links == []
    assert "INPUT(libatlas_llm.so.0)" in script
    assert {
        "atlas/lib/libatlas_llm.so.0", "atlas/lib/pkgconfig/atlas-llm.pc",
        "atlas/lib/cmake/Atlas/AtlasConfig.cmake", "atlas/include/atlas.h",
        "atlas/include/atlas.hpp",
    } <= names  # fmt: skip
    assert [name for name in names if name.startswith("atlas/capi/_binding.") and ".so" in name]
    folder = "atlas/data/atlas-tiny/"
    assert {"config.json", "tokenizer.json", "README.md", "LICENSE-PSF"} <= {
        name.removeprefix(folder) for name in tiny
    }
    assert tiny[folder + "model.safetensors"] <= 12_000_000
    assert "License-Expression: Apache-2.0 AND PSF-2.0" in metadata
    assert [name for name in names if name.endswith("licenses/src/" + folder + "LICENSE-PSF")]


OFFLINE = """
import socket, sys
def refuse(*_): raise OSError("this test has no network")
socket.socket.connect = socket.getaddrinfo = refuse
from atlas.cli import main
main(sys.argv[1:])
"""


def test_an_environment_generates_without_a_model_or_a_network(environment: Path) -> None:
    """What a user has after `pip install`: the package and its dependencies, no cache of models."""
    python = environment / "bin" / "python"
    empty = {"HOME": str(environment / "nobody"), "PATH": "/usr/bin"}
    prompt = "This module provides"
    done = run(python, "-c", OFFLINE, "generate", prompt, "-n", "24", env=empty, cwd=environment)
    assert (done.returncode, done.stderr.count("\n")) == (0, 1), done.stderr
    with Engine(quiet=True) as engine:
        expected = engine.generate(prompt, GREEDY.replace(max_tokens=24)).text
    assert done.stdout == expected + "\n"
    done = run(python, "-c", OFFLINE, "info", env=empty, cwd=environment)
    assert f"{environment}/lib/{VERSION}/site-packages/atlas/data/atlas-tiny" in done.stdout


def check_programs(config: list[str], model: Path, engine: Engine, folder: Path) -> str:
    """Build by the examples' own Makefile and run; returns how Python was found."""
    source = folder / "c"
    shutil.copytree(EXAMPLES, source)
    command = folder / "atlas-config"
    command.write_text('#!/bin/sh\nunset PYTHONPATH\nexec {} "$@"\n'.format(" ".join(config)))
    command.chmod(0o755)
    subprocess.run(["make", "-s", f"ATLAS_CONFIG={command}"], cwd=source, check=True)
    expected = list(engine.generate(PROMPT, GREEDY.replace(max_tokens=10)).token_ids)
    for name in ("simple", "verify"):
        done = run(source / name, model, PROMPT, "10", cwd=folder)
        assert done.returncode == 0, done.stderr
        assert token_lines(done.stdout) == [expected]
    done = run(source / "batch", model, "10", PROMPT)
    assert token_lines(done.stdout) == [expected]
    probe = folder / "probe.c"
    shutil.copy(Path(__file__).parent / "probe.c", probe)
    flags = subprocess.run([command, "--cflags"], capture_output=True, text=True).stdout.split()
    subprocess.run(["cc", *flags, probe, "-o", folder / "probe", "-ldl"], check=True)
    libs = subprocess.run([command, "--libdir"], capture_output=True, text=True).stdout.strip()
    return run(
        folder / "probe", f"{libs}/libatlas_llm.so.0", "has", "device.cpu", "describe"
    ).stdout


def test_an_environment(environment: Path, model: Path, engine: Engine, tmp_path: Path) -> None:
    config = [str(environment / "bin" / "atlas-config")]
    found = check_programs(config, model, engine, tmp_path)
    assert f"tried around the library: {environment}: chosen" in found
    assert f"atlas {atlas.__version__} in {environment}" in found


def test_a_prefix(wheel: Path, model: Path, engine: Engine, tmp_path: Path) -> None:
    """A folder with packages alone: Python is the one that built the library."""
    prefix = tmp_path / "prefix"
    # Without --ignore-installed pip would first uninstall the package from this environment.
    pip("install", "--no-deps", "--ignore-installed", "--prefix", prefix, wheel)
    (site,) = prefix.glob("lib/python*/*-packages")
    config = ["env", f"PYTHONPATH={site}", sys.executable, str(prefix / "bin" / "atlas-config")]
    found = check_programs(config, model, engine, tmp_path)
    assert "chosen" in found
    assert f"in {site}/atlas" in found


@pytest.mark.skipif(shutil.which("pkg-config") is None, reason="needs pkg-config")
def test_pkg_config(environment: Path) -> None:
    config = environment / "bin" / "atlas-config"
    folder = run(config, "--pkgconfigdir").stdout.strip()
    done = run(shutil.which("pkg-config") or "", "--variable=includedir", "atlas-llm",
               env={"PKG_CONFIG_PATH": folder})  # fmt: skip
    assert (Path(done.stdout.strip()) / "atlas.h").is_file()


def test_the_name_does_not_clash_with_the_atlas_blas(
    environment: Path, model: Path, tmp_path: Path, engine: Engine
) -> None:
    """A program that links a library called libatlas.so.3 as well, with symbols of its kind."""
    blas = tmp_path / "libatlas.so.3"
    (tmp_path / "blas.c").write_text(
        "int ATL_buildinfo(void); int cblas_errprn(void);\n"
        "int ATL_buildinfo(void) { return 3; } int cblas_errprn(void) { return 4; }\n"
    )
    command = [
        "cc",
        "-shared",
        "-fPIC",
        "-Wl,-soname,libatlas.so.3",
        tmp_path / "blas.c",
        "-o",
        blas,
    ]
    subprocess.run(command, check=True)
    (tmp_path / "libatlas.so").symlink_to(blas)
    package = environment / "lib" / VERSION / "site-packages" / "atlas"
    subprocess.run(
        ["cc", "-std=c11", EXAMPLES / "simple.c", f"-I{package}/include", f"-L{tmp_path}",
         f"-L{package}/lib", "-Wl,--no-as-needed", "-latlas", "-latlas_llm",
         f"-Wl,-rpath,{package}/lib:{tmp_path}", "-o", tmp_path / "both"],
        check=True,
    )  # fmt: skip
    done = run(tmp_path / "both", model, PROMPT, "5")
    assert done.returncode == 0, done.stderr
    expected = engine.generate(PROMPT, GREEDY.replace(max_tokens=5))
    assert token_lines(done.stdout) == [list(expected.token_ids)]
