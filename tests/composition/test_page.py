"""docs/composition.md is what the test ids say, and no pair is missing."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

from tests.composition.features import FEATURES
from tests.composition.test_composition import ALL_PAIRS

ROOT = Path(__file__).parents[2]


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tool", ROOT / "tools" / "composition.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


def test_the_page_is_current() -> None:
    tool = load_tool()
    page = tool.render(tool.collect(), {feature.name: feature.meaning for feature in FEATURES})
    assert tool.PAGE.read_text(encoding="utf-8") == page, "run: python tools/composition.py"
    rows = [line for line in page.splitlines() if line.startswith("| **")]
    assert len(rows) == len(FEATURES)
    assert not any("|  |" in row for row in rows), "a pair has no test"


def test_every_pair_is_there() -> None:
    assert len(ALL_PAIRS) == len(FEATURES) * (len(FEATURES) - 1) // 2
