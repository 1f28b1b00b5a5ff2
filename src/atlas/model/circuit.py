"""Circuit: which forward decode runs, and what it promises."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

ForwardKind: TypeAlias = Literal["eager", "graphed", "persistent"]


@dataclass(frozen=True, slots=True)
class ForwardSelection:
    """A choice of forward for decode.

    Attributes
    ----------
    kind
        "eager" launches op by op, "graphed" replays a captured graph per batch rung and K,
        "persistent" keeps one resident kernel per step.
    ops
        The user's own kernels in place of ops, by op name, each with its op's signature.
    """

    kind: ForwardKind = "eager"
    ops: Mapping[str, Callable[..., Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ForwardDisclosure:
    """What decode runs now.

    Attributes
    ----------
    kind
        The forward in use.
    replaced_ops
        Names of ops that run a user's kernel, sorted.
    promises
        The clauses of the exactness contract that hold, in words.
    reason
        Why this forward runs: the default, a selection, or what forced it.
    fingerprint
        Identifies the numerics: backend, instruction set or device, kernels, precision. Sessions
        with equal fingerprints produce equal bits.
    """

    kind: ForwardKind
    replaced_ops: tuple[str, ...]
    promises: tuple[str, ...]
    reason: str
    fingerprint: str


class ModelCircuit(Protocol):
    """Choose and disclose the forward that decode runs."""

    def set_forward(self, selection: ForwardSelection) -> None:
        """Run ``selection`` from the next step on and drop captured graphs.

        Raises
        ------
        CapabilityError
            If this backend has no such forward; the present one stays.
        InvalidArgumentError
            If an op's name is unknown or a replacement's signature differs from the op's.
        """
        ...

    def disclosure(self) -> ForwardDisclosure:
        """Say which forward runs now, what it promises, and why.

        A replaced op voids the promises that its kernel would have to keep, and says so.
        """
        ...
