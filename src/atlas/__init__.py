"""Atlas: an embeddable LLM inference engine.

>>> import atlas
>>> engine = atlas.Engine()  # doctest: +SKIP
>>> engine.generate("This module provides").text  # doctest: +SKIP
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from atlas.engine import Engine as Engine
    from atlas.errors import AtlasError as AtlasError
    from atlas.request import Completion as Completion
    from atlas.request import Delta as Delta
    from atlas.sampling import SamplingParams as SamplingParams
    from atlas.translation import BeamParams as BeamParams
    from atlas.translation import Translation as Translation

# Imported on first use, so that `import atlas` is fast and touches nothing.
_LAZY = {
    "AtlasError": "atlas.errors",
    "BeamParams": "atlas.translation",
    "Completion": "atlas.request",
    "Delta": "atlas.request",
    "Engine": "atlas.engine",
    "SamplingParams": "atlas.sampling",
    "Translation": "atlas.translation",
}

__all__ = [
    "AtlasError",
    "BeamParams",
    "Completion",
    "Delta",
    "Engine",
    "SamplingParams",
    "Translation",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'atlas' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
