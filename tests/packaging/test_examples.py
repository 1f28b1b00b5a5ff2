"""The examples run as they stand, and the notebook holds what running it gives."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import cast

import nbformat
import pytest
from nbclient import NotebookClient

from atlas import Engine
from tests.helpers import nllb
from tests.helpers.smollm2 import require_smollm2

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
README = EXAMPLES.parent / "README.md"
SCRIPTS = sorted((EXAMPLES / "python").glob("*.py"))
NOTEBOOKS = sorted((EXAMPLES / "notebooks").glob("*.ipynb"))
NEEDS_SMOLLM2 = {"chat"}
NLLB = "facebook/nllb-200-distilled-600M"
EXPECTED = {
    "generate": r" a [\s\S]*module[\s\S]*\[length, 24 tokens\]\n'.+'\n'.+'\n",
    "chat": r"> What is the capital of France\?\n.*Paris.*\n\n> What is it famous for\?\n.+\n",
    "own_scheduler": r"(.*\n){4}what the engine's own scheduler gives: True\n",
    "translate": r"7 languages\n.+\n.+\n(-\d\.\d{3} .+\n){3}(.*\|){9,}\n",
    "stream": r"[^.]+file[^.]*(\.[^.]*){2}\n[\s\S]+\n",
    "verify_by_hand": r"bitwise equal to serial: True\n.*\+ 3\nsame row after rollback: True\n",
}


@pytest.fixture(scope="module")
def nllb_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random translation model."""
    return nllb.build(tmp_path_factory.mktemp("nllb")).directory


def test_every_example_has_an_expectation() -> None:
    assert {script.stem for script in SCRIPTS} == set(EXPECTED)
    assert NOTEBOOKS


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_an_example_runs(
    script: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    if script.stem in NEEDS_SMOLLM2:
        require_smollm2()
    arguments = [str(request.getfixturevalue("nllb_folder"))] if script.stem == "translate" else []
    monkeypatch.setattr("sys.argv", [str(script), *arguments])
    runpy.run_path(str(script), run_name="__main__")
    out, err = capsys.readouterr()
    assert err == ""
    assert re.search(EXPECTED[script.stem], out), out


def test_the_code_in_the_readme_runs(capsys: pytest.CaptureFixture[str], nllb_folder: Path) -> None:
    """With a small translation model in place of the one that it names."""
    require_smollm2()
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) >= 5
    code = "\n".join(blocks)
    assert code.count(NLLB) == 1
    names: dict[str, object] = {}
    exec(code.replace(NLLB, str(nllb_folder)), names)
    # What a newcomer sees first is an answer, not the loop that a small model falls into elsewhere.
    question = next(line for line in code.splitlines() if line.startswith("assistant.chat"))
    assert "Berlin" in eval(question, names)
    out = capsys.readouterr().out  # what was streamed, and translations with scores
    assert len(re.findall(r"\[\(-\d.*, '.+'\), \(-\d.*, '.+'\)\]\n", out)) == 2
    for name in ("engine", "assistant", "translator"):
        cast("Engine", names[name]).close()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_executed_and_shows_no_paths(path: Path) -> None:
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            assert cell.execution_count is not None
            assert not [out for out in cell.outputs if out.output_type == "error"]
            assert not re.search(r"(?<![\w:<])/[a-z]\w*/\w", str(cell.outputs))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_again(path: Path) -> None:
    """Cells that print True, the exactness claims, do so on any machine."""
    stored = nbformat.read(path, as_version=4)
    fresh = nbformat.read(path, as_version=4)
    NotebookClient(fresh, timeout=120, kernel_name="python3").execute()
    claims = 0
    for before, after in zip(stored.cells, fresh.cells, strict=True):
        if "True" in str(before.get("outputs")):
            claims += 1
            assert "True" in str(after.outputs), after.source
    assert claims >= 3
