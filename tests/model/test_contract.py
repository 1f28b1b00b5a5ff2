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
DECLARATIONS = contract.read_declarations()
ISSUES = ("foundation", "hybrid")
DELIVERED = sorted({row.key for row in contract.read_rows() if row.first_issue in ISSUES})


def declared_files(key: str) -> list[str]:
    return sorted({d.path for d in DECLARATIONS if d.key == key and d.backend == "cpu"})


def run_pytest(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_page_is_current() -> None:
    page = contract.render(contract.read_rows(), DECLARATIONS)
    assert contract.PAGE.read_text(encoding="utf-8") == page, "run: python tools/contract.py"


def test_every_delivered_row_has_a_test() -> None:
    missing = [key for key in DELIVERED if not declared_files(key)]
    assert not missing, "no test carries @pytest.mark.contract(...) for these rows"


@pytest.mark.slow
@pytest.mark.parametrize("key", [key for key in DELIVERED if "." in key])
def test_declared_tests_notice_a_noop(key: str) -> None:
    files = declared_files(key)
    assert files, f'no test is marked @pytest.mark.contract("{key}")'
    done = run_pytest("-m", "not gpu", "--tb=line", "--noop", key, *files)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-1000:]}"


FAKE = """
from atlas.model import ModelStreams

class FakeStreams(ModelStreams):
    __module__ = "atlas.model.fake"

    @property
    def default(self):
        return 7

    def create_stream(self):
        return 8
"""

FAKE_TESTS = """
import pytest
from conftest import FakeStreams

@pytest.mark.contract("streams.default")
@pytest.mark.parametrize("value", [7, None])
def test_notices_default(value):
    assert value is None or FakeStreams().default == value

@pytest.mark.contract("streams.create_stream")
def test_notices_create():
    assert FakeStreams().create_stream() == 8

@pytest.mark.contract("streams.create_stream")
def test_notices_nothing():
    FakeStreams().create_stream()
"""


@pytest.mark.parametrize(
    ("row", "status", "verdict"),
    [
        ("streams.default", 0, "every declared test noticed"),
        ("streams.create_stream", 1, "test_fake.py::test_notices_nothing"),
        ("streams.teleport", 4, "no such method"),
    ],
)
def test_noop_run_reports_tests_that_notice_nothing(
    row: str, status: int, verdict: str, tmp_path: Path
) -> None:
    conftest = (ROOT / "tests" / "conftest.py").read_text(encoding="utf-8")
    (tmp_path / "conftest.py").write_text(conftest + FAKE, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    tests = tmp_path / "test_fake.py"
    tests.write_text(FAKE_TESTS, encoding="utf-8")
    done = run_pytest("-c", str(tmp_path / "pytest.ini"), "--noop", row, str(tests))
    assert done.returncode == status, done.stdout + done.stderr
    assert verdict in done.stdout + done.stderr


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
