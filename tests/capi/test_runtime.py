"""The library finds its Python, whatever surrounds it, and says so when it cannot."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

import atlas
from tests.capi import abi
from tests.capi.programs import compiler, library, run

Program = Callable[..., Path]
NAMES = [f.name for f in abi.cffi_declarations.read(abi.HEADER).dispatched if f.name in {
    g.name for g in abi.cffi_declarations.read(abi.HEADER).functions
}]  # fmt: skip


@pytest.fixture(scope="session")
def probe(program: Program) -> Path:
    return program("probe.c", "-Wno-pedantic", linked=False)


@pytest.fixture(scope="session")
def empty_venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that has Python and none of the packages."""
    folder = tmp_path_factory.mktemp("environment") / "empty"
    venv.create(folder, with_pip=False)
    return folder


def lines_of(done: subprocess.CompletedProcess[str]) -> list[str]:
    """What a probe printed; it must have lived to its end and kept quiet."""
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "end"
    return lines[:-1]


def test_an_empty_environment_in_another_folder(probe: Path, tmp_path: Path) -> None:
    lines = lines_of(run(probe, library(), "has", "device.cpu", "describe", cwd=tmp_path))
    assert lines[0].rstrip() == "has 1"
    assert lines[1].startswith("describe ATLAS_OK")
    text = "\n".join(lines)
    assert "chosen" in text
    assert f"atlas {atlas.__version__} in {Path(atlas.__file__).parent}" in text


def test_path_and_other_variables_have_no_say(
    probe: Path, empty_venv: Path, tmp_path: Path
) -> None:
    env = {
        "PATH": f"{empty_venv}/bin:/usr/bin",
        "VIRTUAL_ENV": str(empty_venv),
        "PYTHONHOME": str(tmp_path),
        "PYTHONPATH": str(tmp_path),
        "PYTHONSTARTUP": str(tmp_path / "absent"),
    }
    (tmp_path / "atlas").mkdir()
    (tmp_path / "atlas" / "__init__.py").write_text("raise SystemExit('the wrong atlas')")
    assert lines_of(run(probe, library(), "has", "device.cpu", env=env))[0].rstrip() == "has 1"


def test_a_bad_home_is_a_message_and_may_be_corrected(probe: Path, tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    lines = lines_of(
        run(probe, library(), "init", tmp_path / "absent", "init", tmp_path, "init", "",
            "has", "device.cpu", "init", tmp_path)
    )  # fmt: skip
    assert lines[0].startswith("init ATLAS_ERROR_RUNTIME no Python")
    assert "absent: no such folder" in "\n".join(lines)
    assert f"{tmp_path}: no Python 3." in "\n".join(lines)
    assert "init ATLAS_ERROR_INVALID_ARGUMENT home is empty; allowed: NULL or a folder" in lines
    assert [line.split()[:2] for line in lines if line.startswith("has")] == [["has", "1"]]
    assert lines[-1].startswith("init ATLAS_ERROR_INVALID_ARGUMENT the runtime was started")


def test_the_variable_is_an_order_not_a_hint(probe: Path, tmp_path: Path) -> None:
    lines = lines_of(run(probe, library(), "has", "device.cpu", env={"ATLAS_HOME": str(tmp_path)}))
    text = "\n".join(lines)
    assert lines[0].startswith("has 0 no Python")
    assert f"tried $ATLAS_HOME: {tmp_path}" in text
    env = {"ATLAS_HOME": sys.prefix}
    lines = lines_of(run(probe, library(), "has", "device.cpu", "describe", env=env))
    assert lines[0].rstrip() == "has 1"
    assert "$ATLAS_HOME" in "\n".join(lines)


def test_a_home_of_another_version(probe: Path, tmp_path: Path) -> None:
    (tmp_path / "lib/python3.7").mkdir(parents=True)
    (tmp_path / "lib/python3.7/os.py").touch()
    lines = lines_of(run(probe, library(), "init", tmp_path))
    assert "no Python 3.11" in lines[0] or f"no Python {sys.version_info[0]}." in lines[0]


def test_a_home_whose_standard_library_is_broken(probe: Path, tmp_path: Path) -> None:
    """Python itself fails to start: the host lives and hears why; a second try is not made."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    (tmp_path / "lib" / version).mkdir(parents=True)
    (tmp_path / "lib" / version / "os.py").touch()
    shared = sysconfig.get_config_var("INSTSONAME") or ""
    where = Path(sysconfig.get_config_var("LIBDIR")) / shared
    if ".so" not in shared or not where.exists():
        pytest.skip("needs a Python with a shared library")
    (tmp_path / "lib" / shared).symlink_to(where)
    done = run(probe, library(), "init", tmp_path, "has", "device.cpu")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0].startswith("init ATLAS_ERROR_RUNTIME Python in")
    assert "did not start" in lines[0]
    assert lines[1].startswith("has 0 Python in")


def test_without_packages_every_function_fails_and_names_the_cause(
    probe: Path, empty_venv: Path
) -> None:
    env = {"ATLAS_HOME": str(empty_venv)}
    lines = lines_of(run(probe, library(), "all", *NAMES, env=env))
    assert [line.split()[0] for line in lines] == NAMES
    for line in lines:
        assert line.split()[1] == "ATLAS_ERROR_RUNTIME", line
        assert "missing Python packages" in line
        assert "numba" in line


def test_a_deleted_package_is_named(probe: Path, empty_venv: Path, tmp_path: Path) -> None:
    """Every package but one is there; given the folder of the rest, the same process recovers."""
    home, rest = tmp_path / "home", tmp_path / "rest"
    shutil.copytree(empty_venv, home, symlinks=True)
    (site,) = home.glob("lib/python*/site-packages")
    rest.mkdir()
    for folder in map(Path, sys.path):
        if folder.name != "site-packages":
            continue
        for entry in folder.iterdir():
            name = entry.name.partition("-")[0].lower()
            target = rest if name == "llvmlite" else site
            if not (target / entry.name).exists() and not entry.name.endswith(".pth"):
                (target / entry.name).symlink_to(entry)
    env = {"ATLAS_HOME": str(home)}
    lines = lines_of(run(probe, library(), "has", "device.cpu", "path", rest, "has", "device.cpu",
                         env=env))  # fmt: skip
    assert "missing Python packages: llvmlite " in lines[0]
    assert lines[1].rstrip() == "path ATLAS_OK"
    assert lines[2].split()[:2] == ["has", "1"]


def test_a_package_of_another_build(probe: Path, tmp_path: Path) -> None:
    """The library meets a Python side that was built from another header."""
    package = tmp_path / "atlas"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "capi.py").write_text(
        "def attach(table, size, fingerprint, owned):\n"
        "    raise ImportError(f'the library has ABI {fingerprint}')\n"
    )
    lines = lines_of(run(probe, library(), "path", tmp_path))
    assert lines[0].startswith("path ATLAS_ERROR_RUNTIME ImportError: the library has ABI ")


def test_zeros_are_refused_by_every_function(probe: Path) -> None:
    """All but the few that take no handle and no place: NULL everywhere is an error, no crash."""
    lines = lines_of(run(probe, library(), "all", *NAMES))
    by_name = {line.split()[0]: line.split()[1] for line in lines}
    assert by_name.pop("atlas_log_set_callback") == "ATLAS_OK"
    assert set(by_name.values()) == {"ATLAS_ERROR_INVALID_ARGUMENT"}
    assert all(len(line.split()) > 3 for line in lines if "log_set" not in line)


def test_fork(program: Program, model: Path) -> None:
    done = run(program("fork.c"), model)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    child = [line for line in lines if line.startswith("child ") and not line[6].isdigit()]
    assert len(child) == 6
    for line in child:
        assert "ATLAS_ERROR_STALE_HANDLE this is a forked child" in line
    assert "child 0" in lines
    assert lines[-2].rstrip() == "parent prefill ATLAS_OK"
    assert lines[-1].rstrip() == "parent free ATLAS_OK"


# -- in a process that runs Python already ----------------------------------------------------


def in_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script in this Python, with the library's path as its first argument."""
    script = "import ctypes, sys\nPATH = sys.argv[1]\n" + textwrap.dedent(code)
    return subprocess.run(
        [sys.executable, "-c", script, str(library()), *arguments],
        env={key: value for key, value in os.environ.items() if key != "ATLAS_HOME"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("kind", ["CDLL", "PyDLL"])
def test_a_running_python_is_used(kind: str, model: Path) -> None:
    """Whether or not the caller holds the GIL; threads may start it at once."""
    done = in_python(
        f"""
        import threading
        lib = ctypes.{kind}(PATH)
        lib.atlas_error_message.restype = ctypes.c_char_p
        found = []
        def start():
            engine = ctypes.c_void_p()
            status = lib.atlas_engine_load(sys.argv[2].encode(), None, ctypes.byref(engine))
            found.append(status or lib.atlas_engine_free(engine))
        threads = [threading.Thread(target=start) for _ in range(4)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        text = ctypes.create_string_buffer(1 << 16)
        length = ctypes.c_size_t()
        lib.atlas_runtime_describe(text, ctypes.c_size_t(1 << 16), ctypes.byref(length))
        print(found, text.value.decode().splitlines()[0])
        """,
        str(model),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[0, 0, 0, 0] Python runs in this process already\n"


def test_a_subinterpreter_is_refused() -> None:
    done = in_python(
        """
        try:
            import _xxsubinterpreters as interpreters
        except ImportError:
            print("refused: this is a sub-interpreter")
            sys.exit()
        INIT = "lib.atlas_runtime_init(None, None, ctypes.c_size_t(0))"
        code = '''
        import ctypes
        lib = ctypes.PyDLL({PATH})
        lib.atlas_error_message.restype = ctypes.c_char_p
        for _ in range(2):
            print({CALL}, lib.atlas_error_message().decode())
        '''.replace("\\n        ", "\\n").replace("{PATH}", repr(PATH))
        sys.stdout.flush()
        interpreters.run_string(interpreters.create(), code.replace("{CALL}", INIT))
        lib = ctypes.PyDLL(PATH)
        print(lib.atlas_runtime_init(None, None, ctypes.c_size_t(0)), flush=True)
        code = code.replace("{CALL}", "lib.atlas_has(b'device.cpu')")
        interpreters.run_string(interpreters.create(), code)
        """
    )
    if done.stdout.startswith("refused"):
        pytest.skip("this Python has no module to make sub-interpreters with")
    if "does not support loading in subinterpreters" in done.stderr:
        pytest.skip("this Python's ctypes cannot be loaded in a sub-interpreter")
    assert done.returncode == 0, done.stderr
    message = "this is a sub-interpreter; Atlas runs in the main interpreter only"
    assert done.stdout.splitlines() == [f"100 {message}"] * 2 + ["0"] + [f"0 {message}"] * 2


def test_another_python_in_the_process_is_refused(
    probe: Path, tmp_path: Path, program: Program
) -> None:
    """A host that has started some other version, here a stand-in for one."""
    source = tmp_path / "other.c"
    source.write_text(
        "int Py_IsInitialized(void); const char *Py_GetVersion(void);\n"
        "int Py_IsInitialized(void) { return 1; }\n"
        'const char *Py_GetVersion(void) { return "3.99.1 (main)"; }\n'
    )
    other = tmp_path / "libpython3.99.so.1.0"
    subprocess.run([compiler("cc"), "-shared", "-fPIC", source, "-o", other], check=True)
    done = run(probe, library(), "has", "device.cpu", env={"LD_PRELOAD": str(other)})
    assert done.stdout.startswith("has 0 this process has Python 3.99.1; this library needs 3.")
