"""What a command leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """Exit status and what was written."""

    status: int
    out: str
    err: str


Command = Callable[..., Outcome]
