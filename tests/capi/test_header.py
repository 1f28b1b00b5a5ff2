"""The header and the library: languages, constants, comments, and the checked-in ABI."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

import atlas
from atlas import errors
from atlas.capi import calls, load_functions
from tests.capi import abi
from tests.capi.programs import ROOT, STRICT, compiler

INCLUDE = ROOT / "include"
DECLARED = abi.cffi_declarations.read(abi.HEADER)


@pytest.mark.parametrize(
    ("header", "language"),
    [
        ("atlas.h", ["cc", "-std=c99", "-xc"]),
        ("atlas.h", ["cc", "-std=c11", "-xc"]),
        ("atlas.h", ["c++", "-std=c++17", "-xc++"]),
        ("atlas.hpp", ["c++", "-std=c++17", "-xc++"]),
        ("atlas.hpp", ["c++", "-std=c++20", "-xc++"]),
    ],
)
def test_compiles_without_a_warning(header: str, language: list[str]) -> None:
    """Twice, as two files of a program might."""
    source = (
        f"#include <{header}>\n#include <{header}>\nint use(void);\nint use(void) {{ return 0; }}\n"
    )
    command = [compiler(language[0]), *language[1:], *STRICT, "-fsyntax-only", f"-I{INCLUDE}", "-"]
    done = subprocess.run(command, input=source, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_status_is_the_code_of_an_error() -> None:
    header = abi.HEADER.read_text()
    statuses = dict(re.findall(r"^\s*ATLAS_(ERROR\w*) = (\d+)", header, re.MULTILINE))
    codes = {}
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and issubclass(kind, errors.AtlasError):
            words = re.sub(r"(?<!^)([A-Z])", r"_\1", name.removesuffix("Error")).upper()
            codes["ERROR" if name == "AtlasError" else f"ERROR_{words}"] = str(kind.code)
    assert {name: code for name, code in statuses.items() if int(code) < 100} == codes


def test_every_function_has_a_comment() -> None:
    """One before it, or before the group of declarations that it stands in."""
    text = abi.HEADER.read_text()
    blocks = re.split(r"\n\n", text)
    for function in DECLARED.functions:
        (block,) = [part for part in blocks if re.search(rf"\b{function.name}\(", _code(part))]
        before = blocks[blocks.index(block) - 1]
        assert "/*" in block.partition("ATLAS_API")[0] or "/*" in before, function.name


def _code(text: str) -> str:
    return re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)


def test_every_function_is_exported_and_implemented() -> None:
    names = sorted(function.name for function in DECLARED.functions)
    assert [name for name in abi.exported_symbols() if name != "ATLAS_LLM_0"] == names
    load_functions()
    calls.require_complete()
    assert {f.field for f in DECLARED.dispatched} == set(calls.FUNCTIONS)


def test_the_abi_is_the_checked_in_one() -> None:
    assert abi.describe() == abi.LIST.read_text(), (
        "the ABI has changed; if that is meant, run: python -m tests.capi.abi"
    )


def test_no_symbol_of_python_is_needed() -> None:
    command = ["nm", "--dynamic", "--undefined-only", str(abi.library())]
    undefined = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "Py" not in undefined
    needed = subprocess.run(
        ["readelf", "-d", str(abi.library())], check=True, capture_output=True, text=True
    ).stdout
    assert "python" not in needed
    assert "[libatlas_llm.so.0]" in needed


def test_the_fingerprint_follows_the_declarations(tmp_path: Path) -> None:
    text = abi.HEADER.read_text()
    other = text.replace("size_t budget_tokens,", "uint32_t budget_tokens,")
    assert other != text
    path = tmp_path / "atlas.h"
    path.write_text("/* only a comment */\n" + text)
    assert abi.cffi_declarations.read(path).fingerprint == DECLARED.fingerprint
    path.write_text(other)
    assert abi.cffi_declarations.read(path).fingerprint != DECLARED.fingerprint


def test_the_version_is_the_packages() -> None:
    assert f'#define ATLAS_VERSION "{atlas.__version__}"' in abi.HEADER.read_text()
