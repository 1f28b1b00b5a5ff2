"""The models of the composition tests."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

from tests.engine.folders import write_hybrid, write_model

HYBRIDS = ("qwen3_5", "bamba")


class TinyModel(NamedTuple):
    """A family, and how its weights are loaded."""

    family: str
    quantize: Literal["q8_0"] | None = None

    @property
    def is_hybrid(self) -> bool:
        """Whether it has recurrent layers."""
        return self.family in HYBRIDS


MODELS = {
    "float32": TinyModel("dense"),
    "q8_0": TinyModel("dense", "q8_0"),
    "qwen3.5": TinyModel("qwen3_5"),
    "bamba": TinyModel("bamba"),
}


def write(folder: Path, family: str) -> Path:
    """A folder of a family."""
    return write_model(folder) if family == "dense" else write_hybrid(folder, family)
