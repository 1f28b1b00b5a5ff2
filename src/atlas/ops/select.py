"""Bind the op vocabulary to a backend, after proving that the backend is complete."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Container
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

from atlas.errors import CapabilityError
from atlas.ops import OPS
from atlas.ops.attention import step_then_gate
from atlas.ops.moe import block_in_parts, router_in_parts
from atlas.ops.norm_linear import PRODUCTS, norm_then

_ROUTER_PARTS = ("rmsnorm", "linear", "moe_route")
_PARTS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "attention_step_gated": (step_then_gate, ("attention_step", "sigmoid_gate")),
    "moe_router": (router_in_parts, _ROUTER_PARTS),
    "moe_block": (block_in_parts, ("moe_router", "moe_experts", *_ROUTER_PARTS)),
    **{
        fused: (partial(norm_then, product), ("rmsnorm", product))
        for fused, product in PRODUCTS.items()
    },
}
"""Ops that stand for others: how they call those, and which, with what those stand for."""


def implementations(backend: str) -> dict[str, Callable[..., Any]]:
    """Every op's function in ``atlas.backends.<backend>``, by op name.

    A function has its definition's signature behind a first parameter, the queue. An op that the
    backend's package names in ``NOT_OFFERED`` is there too, and raises CapabilityError.

    Raises
    ------
    TypeError
        An op is missing or its parameters differ: the backend is incomplete.
    """
    found: dict[str, Callable[..., Any]] = {}
    not_offered = getattr(importlib.import_module(f"atlas.backends.{backend}"), "NOT_OFFERED", ())
    for name, definition in OPS.items():
        if name in not_offered:
            found[name] = partial(_refuse, backend, name)
            continue
        file = definition.__module__.rpartition(".")[2]
        module: ModuleType = importlib.import_module(f"atlas.backends.{backend}.{file}")
        function = getattr(module, name, None)
        if function is None:
            raise TypeError(f"backend {backend} lacks op {name} (expected in {file}.py)")
        expected = list(inspect.signature(definition).parameters)
        actual = list(inspect.signature(function).parameters)[1:]
        if actual != expected:
            raise TypeError(f"{backend} op {name} takes {actual}, its definition {expected}")
        found[name] = function
    return found


def _refuse(backend: str, name: str, *args: Any, **kwargs: Any) -> None:
    raise CapabilityError(f"op {name} is not offered on {backend}; the model needs another device")


def bind(functions: dict[str, Callable[..., Any]], queue: object) -> SimpleNamespace:
    """The vocabulary bound to a queue: ``ops.rmsnorm(x, weight, eps, out=out)``."""
    return SimpleNamespace(**{name: partial(call, queue) for name, call in functions.items()})


def in_parts(
    functions: dict[str, Callable[..., Any]], replaced: Container[str]
) -> dict[str, Callable[..., Any]]:
    """Ops that stand for one that the user has replaced: as calls of it and of the others.

    ``functions`` has the replacements; ``replaced`` names them. An op whose own place a function of
    the user's has taken is left alone.
    """
    return {
        name: partial(call, functions)
        for name, (call, parts) in _PARTS.items()
        if name not in replaced and any(part in replaced for part in parts)
    }


def takes_queue(function: Callable[..., Any]) -> bool:
    """Whether a user's replacement of an op puts launches on a queue."""
    return next(iter(inspect.signature(function).parameters), "") == "queue"


def with_queue(function: Callable[..., Any]) -> Callable[..., Any]:
    """A user's replacement of an op, as backends call it: with the queue first."""
    if takes_queue(function):
        return function

    def without(queue: object, *args: Any, **kwargs: Any) -> None:
        function(*args, **kwargs)

    return without
