"""The library and the programs under AddressSanitizer and UBSan.

Leaks are not looked for: Python keeps its interned objects and arenas until the process ends, and
the library never ends it. Nothing else of Python is suppressed.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from atlas import Engine, SamplingParams
from atlas.capi.config_command import package_folder
from tests.capi import abi
from tests.capi.programs import EXAMPLES, POSIX, ROOT, compiler, run, token_lines
from tests.capi.test_examples import GREEDY, PROMPT
from tests.capi.test_runtime import NAMES

pytestmark = pytest.mark.slow

FLAGS = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
ENV = {"ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:exitcode=99"}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An instrumented library inside a package that is otherwise the installed one."""
    sys.path.insert(0, str(ROOT / "tools"))
    import build_library

    folder = tmp_path_factory.mktemp("site")
    generated = folder / "generated"
    abi.cffi_declarations.write(generated)
    package = folder / "atlas"
    package.mkdir()
    for entry in package_folder().iterdir():
        if entry.name != "lib":
            (package / entry.name).symlink_to(entry)
    (package / "lib").mkdir()
    built = package / "lib" / "libatlas_llm.so.0"
    macros = [f"-D{name}={value}" for name, value in build_library.macros()]
    includes = [
        f"-I{path}" for path in (ROOT / "include", generated, sysconfig.get_path("include"))
    ]
    command = [
        compiler("cc"), "-std=c11", "-shared", "-fPIC", *FLAGS, *macros, *includes,
        *sorted(build_library.SOURCES.glob("*.c")), "-o", built, "-Wl,-soname,libatlas_llm.so.0",
        f"-Wl,--version-script={generated / 'atlas.map'}", "-Wl,-z,nodelete", "-pthread", "-ldl",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if "cannot find" in done.stderr:
        pytest.skip("needs the sanitizers' libraries")
    assert done.returncode == 0, done.stderr
    (package / "lib" / "libatlas_llm.so").symlink_to(built.name)
    return built


@pytest.fixture(scope="module")
def instrumented(library: Path) -> Callable[[Path], Path]:
    def build(source: Path) -> Path:
        program = library.parent / source.stem
        subprocess.run(
            [compiler("cc"), "-std=c11", POSIX, *FLAGS, f"-I{ROOT / 'include'}", source, "-o",
             program, "-pthread", f"-L{library.parent}", "-latlas_llm",
             f"-Wl,-rpath,{library.parent}", "-ldl"],
            check=True,
        )  # fmt: skip
        return program

    return build


def test_examples(instrumented: Callable[[Path], Path], model: Path, engine: Engine) -> None:
    for name in ("simple.c", "verify.c"):
        done = run(instrumented(EXAMPLES / name), model, PROMPT, "16", env=ENV)
        assert "ERROR: AddressSanitizer" not in done.stderr
        assert done.returncode == 0, done.stderr
    expected = list(engine.generate(PROMPT, GREEDY.replace(max_tokens=16)).token_ids)
    assert token_lines(done.stdout) == [expected]
    done = run(instrumented(EXAMPLES / "threads.c"), model, PROMPT, "naïve", env=ENV)
    assert done.returncode == 0, done.stderr
    done = run(instrumented(EXAMPLES / "chat.c"), model, "max_tokens=5", text="Hi\n", env=ENV)
    assert done.returncode == 0, done.stderr
    answer = engine.chat([{"role": "user", "content": "Hi"}], SamplingParams(max_tokens=5)).text
    assert done.stdout == f"{answer}\n"


def test_translations(
    instrumented: Callable[[Path], Path], nllb_model: Path, translator: Engine
) -> None:
    """Arrays of texts in, arrays of handles out."""
    texts, languages = ["Hello world", "naïve café"], ("eng_Latn", "deu_Latn")
    done = run(instrumented(EXAMPLES / "translate.c"), nllb_model, *languages, *texts, env=ENV)
    assert "ERROR: AddressSanitizer" not in done.stderr
    assert done.returncode == 0, done.stderr
    found = translator.translate(texts, source=languages[0], target=languages[1])
    assert done.stdout.splitlines()[:2] == [translation.text for translation in found]


def test_bad_arguments_and_fork(
    instrumented: Callable[[Path], Path], library: Path, model: Path, tmp_path: Path
) -> None:
    here = Path(__file__).parent
    probe = instrumented(here / "probe.c")
    done = run(probe, library, "init", tmp_path, "all", *NAMES, env=ENV)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("end\n")
    done = run(instrumented(here / "fork.c"), model, env=ENV)
    assert done.returncode == 0, done.stderr
    assert "parent free ATLAS_OK" in done.stdout
