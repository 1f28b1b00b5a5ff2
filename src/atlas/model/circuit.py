"""Circuit: which forward decode runs, and what it promises."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from atlas.errors import CapabilityError, InvalidArgumentError
from atlas.ops import OPS

if TYPE_CHECKING:
    from atlas.model.core import ModelCore

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
        The user's own functions in place of ops, by op name, each with its op's signature, or with
        ``queue`` in front of it. One with a queue says what to launch, once for each shape of a
        step: ``queue.launch("my_rmsnorm", grid, args)`` runs a kernel that
        ``atlas_kernels.registry.register`` declared. One without is called at every step: on the
        CPU with NumPy arrays; on a GPU with ``DeviceArray`` views, and with the handle of the
        stream as ``stream`` if it takes that, on which it must put its work without waiting.
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


_PROMISES = (
    "a row's bits do not depend on the rows that share its step",
    "a prompt in any chunks gives the bits of one pass",
    "K verified rows have the bits of K single steps, and a rollback leaves no trace",
    "a sequence that was preempted, or saved and restored, goes on bitwise",
)


class DenseCircuit(ModelCircuit):
    """What the backend's runtime offers: lists, on a GPU also graphs, and replaced ops."""

    def __init__(self, core: ModelCore) -> None:
        self._core = core
        self._reason = "the default"

    def set_forward(self, selection: ForwardSelection) -> None:
        core = self._core
        core.enter()
        kinds = core.runtime.kinds
        if selection.kind not in kinds:
            raise CapabilityError(
                f"forward {selection.kind!r} is not offered; this backend has: {', '.join(kinds)}"
            )
        for name, function in selection.ops.items():
            _check_signature(name, function)
        core.runtime.select(selection.kind, selection.ops)
        self._reason = "selected"

    def disclosure(self) -> ForwardDisclosure:
        runtime = self._core.runtime
        self._core.require_alive()
        replaced = tuple(sorted(runtime.replaced))
        promises = (*_PROMISES, *runtime.promises)
        reason = self._reason
        if replaced:
            promises = ()
            reason += f"; what {', '.join(replaced)} would have to keep is not promised"
        fingerprint = runtime.fingerprint
        if replaced:
            fingerprint += "-replaced-" + "-".join(replaced)
        return ForwardDisclosure(runtime.kind, replaced, promises, reason, fingerprint)


def _check_signature(name: str, function: Callable[..., Any]) -> None:
    if name not in OPS:
        raise InvalidArgumentError(f"op {name!r} is unknown; allowed: {', '.join(sorted(OPS))}")
    parameters, own = (inspect.signature(each).parameters for each in (OPS[name], function))
    expected, given = list(parameters), [each for each in own if each != "stream"]
    if given not in (expected, ["queue", *expected]):
        raise InvalidArgumentError(
            f"{name}'s replacement takes ({', '.join(given)}); "
            f"allowed: ({', '.join(expected)}), or queue in front of these"
        )
    for key, parameter in parameters.items():  # a step leaves out what has a default
        if parameter.default is not parameter.empty and own[key].default is parameter.empty:
            raise InvalidArgumentError(
                f"{name}'s replacement takes {key} without a default; "
                f"allowed: {key}={parameter.default!r}"
            )
