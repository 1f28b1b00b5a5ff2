"""The op vocabulary: ``@op`` marks a NumPy function as the definition of an op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Definition = TypeVar("Definition", bound=Callable[..., Any])

OPS: dict[str, Callable[..., Any]] = {}
"""Every op by name; filled when ``atlas.ops`` is imported."""


def op(definition: Definition) -> Definition:
    """Register a NumPy function: its signature, docstring and result are the specification."""
    name = definition.__name__
    if name in OPS:
        raise ValueError(f"op {name} is defined twice")
    OPS[name] = definition
    return definition
