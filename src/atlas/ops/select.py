"""Bind the op vocabulary to a backend, after proving that the backend is complete."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

from atlas.errors import CapabilityError
from atlas.ops import OPS
from atlas.ops.norm_linear import PRODUCTS


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


def taken_apart(
    functions: dict[str, Callable[..., Any]], replaced: Iterable[str]
) -> dict[str, Callable[..., Any]]:
    """Fused ops of which a user replaced a part, made of ``functions``: one after the other."""
    names = set(replaced)
    return {
        fused: partial(_norm_then, functions, product)
        for fused, product in PRODUCTS.items()
        if fused not in names and names & {"rmsnorm", product}
    }


def _norm_then(
    functions: dict[str, Callable[..., Any]],
    product: str,
    queue: object,
    x: Any,
    norm: Any,
    eps: float,
    *others: Any,
    normed: Any,
    **outs: Any,
) -> None:
    functions["rmsnorm"](queue, x, norm, eps, out=normed)
    functions[product](queue, normed, *others, **outs)


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
