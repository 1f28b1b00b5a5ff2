"""How requests share an engine: options of the scheduler."""

from __future__ import annotations

import dataclasses
import difflib
import numbers
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from atlas.errors import InvalidArgumentError, shown


@dataclass(frozen=True, slots=True)
class SchedulingOptions:
    """How requests share the engine.

    Attributes
    ----------
    max_running : int
        Sequences that hold KV blocks at a time.
    chunk_tokens : int
        Prompt tokens of one request in a step at most: more are faster as a whole, and keep
        running sequences waiting longer. On a GPU the default is 2,048.
    max_prefills : int
        Prompts in a step at most; on a GPU the default is 16.
    preemption : {"requeue", "spill"}
        What happens to a sequence when the KV cache is full: its tokens run again later, or its
        blocks wait in host memory.
    prefix_cache : bool
        Keep finished prompts' blocks for prompts that begin alike.
    reuse_generated : bool
        Whether blocks made by generated tokens may serve later prompts.
    state_snapshots : int
        Of a model with recurrent layers: states kept for prompts that begin alike and for rewinds;
        each takes as much memory as a running sequence's. 0: every prompt runs whole, as do short
        ones on a GPU, where a state of fewer than 256 tokens saves no time.
    token_deadline_s : float
        Above 0: no prompt runs while a running sequence's last token is older than 80 % of it.
    aging_s : float
        A request that has waited longer comes before others' priority; 0 = never.
    feed : bool, optional
        Launch a step before the host has seen the tokens of the step before, so that the device
        never waits for the host. Default: where the backend gains by it (not on the CPU). A
        request whose tokens the host chooses does without. Tokens are the same either way; an
        event comes one ``step()`` later.
    """

    max_running: int = 32
    chunk_tokens: int = 128
    max_prefills: int = 4
    preemption: str = "requeue"
    prefix_cache: bool = True
    reuse_generated: bool = True
    state_snapshots: int = 16
    token_deadline_s: float = 0.0
    aging_s: float = 0.0
    feed: bool | None = None

    def __post_init__(self) -> None:
        ranges = {
            "max_running": (1, 1024),
            "chunk_tokens": (1, 65536),
            "max_prefills": (1, 1024),
            "state_snapshots": (0, 1024),
        }
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
            if not whole or not low <= value <= high:
                raise InvalidArgumentError(
                    f"{name} is {shown(value)}; allowed: an integer, {low} … {high}"
                )
            object.__setattr__(self, name, int(value))  # NumPy's integers too
        for name in ("token_deadline_s", "aging_s"):
            value = getattr(self, name)
            number = isinstance(value, numbers.Real) and not isinstance(value, bool)
            if not number or not 0 <= value < 1e9:
                raise InvalidArgumentError(f"{name} is {shown(value)}; allowed: seconds, 0 or more")
            object.__setattr__(self, name, float(value))
        if not isinstance(self.preemption, str) or self.preemption not in ("requeue", "spill"):
            raise InvalidArgumentError(
                f"preemption is {self.preemption!r}; allowed: 'requeue', 'spill'"
            )
        for name in ("prefix_cache", "reuse_generated"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidArgumentError(
                    f"{name} is {getattr(self, name)!r}; allowed: True, False"
                )
        if self.feed is not None and not isinstance(self.feed, bool):
            raise InvalidArgumentError(f"feed is {self.feed!r}; allowed: True, False, None")

    @classmethod
    def from_mapping(
        cls, mapping: Mapping[str, Any], *, beside: Iterable[str] = ()
    ) -> SchedulingOptions:
        """Options by name; an unknown name is a TypeError, as for any keyword, with the nearest.

        ``beside`` names what the caller takes besides: a misspelt one arrives here as well.
        """
        fields = [field.name for field in dataclasses.fields(cls)]
        names = [*beside, *fields]
        for key in mapping:
            if key not in fields:
                near = difflib.get_close_matches(key, names, n=1, cutoff=0.0)
                raise TypeError(
                    f"unknown engine option {key!r}; did you mean {near[0]!r}? "
                    f"allowed: {', '.join(names)}"
                )
        return cls(**mapping)
