"""The contract page is current, every delivered row has a test, and that test can fail."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("contract_tool", ROOT / "tools" / "contract.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


contract = load_tool()
FOUNDATION = sorted({row.key for row in contract.read_rows() if row.first_issue == "foundation"})


def declared_files(key: str) -> list[str]:
    return sorted(
        {d.path for d in contract.read_declarations() if d.key == key and d.backend == "cpu"}
    )


def test_page_is_current() -> None:
    page = contract.render(contract.read_rows(), contract.read_declarations())
    assert contract.PAGE.read_text(encoding="utf-8") == page, "run: python tools/contract.py"


@pytest.mark.parametrize("key", FOUNDATION)
def test_foundation_row_has_a_test(key: str) -> None:
    assert declared_files(key), f'no test is marked @pytest.mark.contract("{key}")'


@pytest.mark.slow
@pytest.mark.parametrize("key", FOUNDATION)
def test_declared_tests_notice_a_noop(key: str) -> None:
    files = declared_files(key)
    assert files, f'no test is marked @pytest.mark.contract("{key}")'
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=line"]
    done = subprocess.run(
        [*command, "-m", "not gpu", "--noop", key, *files],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-1000:]}"


SOURCE = """
import pytest
pytestmark = [pytest.mark.contract("logits.argmax")]

@pytest.mark.gpu
def test_on_gpu(): ...

@pytest.mark.contract("forward.decode", "ssm")
class TestDecode:
    @pytest.mark.parametrize("n", [1])
    @pytest.mark.contract("lifecycle.reserve")
    def test_one(self, n): ...

    def helper(self): ...
"""


def test_markers_are_read_without_importing(tmp_path: Path) -> None:
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test_x.py").write_text(SOURCE, encoding="utf-8")
    found = {(d.key, d.backend, d.path, d.test) for d in contract.read_declarations(tests)}
    assert found == {
        ("logits.argmax", "cuda", "tests/test_x.py", "test_on_gpu"),
        ("logits.argmax", "cpu", "tests/test_x.py", "TestDecode::test_one"),
        ("forward.decode", "cpu", "tests/test_x.py", "TestDecode::test_one"),
        ("ssm", "cpu", "tests/test_x.py", "TestDecode::test_one"),
        ("lifecycle.reserve", "cpu", "tests/test_x.py", "TestDecode::test_one"),
    }


@pytest.mark.parametrize(
    "marker", ["pytest.mark.contract", "pytest.mark.contract()", "pytest.mark.contract(NAME)"]
)
def test_marker_without_a_literal_row_is_refused(marker: str, tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text(f"@{marker}\ndef test_a(): ...\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"test_x\.py:1"):
        contract.read_declarations(tmp_path)


def test_unknown_row_is_refused_by_name() -> None:
    stray = contract.Declaration("forward.teleport", "cpu", "tests/test_x.py", "test_a")
    with pytest.raises(ValueError, match=r"forward\.teleport.*test_x\.py::test_a"):
        contract.render(contract.read_rows(), [stray])


def test_page_shows_tests_per_backend() -> None:
    rows = contract.read_rows()
    marks = [
        contract.Declaration("streams.default", "cpu", "tests/test_x.py", "test_a"),
        contract.Declaration("streams.default", "cuda", "tests/test_y.py", "test_b"),
    ]
    page = contract.render(rows, marks)
    assert (
        "| default | default_stream | foundation "
        "| [test_a](../tests/test_x.py) | [test_b](../tests/test_y.py) |" in page
    )
    assert page.count("\n| ") == len(rows) + 2 * len({row.group for row in rows})
