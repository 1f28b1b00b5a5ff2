"""Capabilities by name, answered by what the classes of the model's groups implement."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

from atlas.capi.calls import exported
from atlas.capi.engine import engine_of
from atlas.capi.memory import read_name, require
from atlas.capi.options import require_key

# Name in atlas_has -> the model's group and method that it stands for.
GROUP_METHODS = {
    "sequence.fork": ("lifecycle", "fork"),
    "sequence.save": ("lifecycle", "save_sequence_state"),
    "sequence.prefix_cache": ("lifecycle", "cache_sequence"),
    "forward.mixed": ("forward", "mixed_forward_batch"),
    "forward.beam": ("forward", "generate_beam_batch"),
    "speculative.verify": ("verify", "decode_verify"),
    "speculative.batched": ("verify", "batched"),
    "speculative.mtp": ("draft", "propose"),
    "recurrent": ("ssm", "normalize"),
    "adapters": ("adapters", "acquire_slot"),
    "experts.parallel": ("experts", "worker_step"),
    "vision": ("vision", "prepare"),
}
# Name -> the module that exists exactly where it is offered.
MODULES = {"device.cpu": "atlas.backends.cpu.runtime", "device.cuda": "atlas.backends.cuda.runtime"}
ENGINE_METHODS = {
    "request.generate": "stream",
    "request.submit": "submit",
    "request.translate": "translate",
}
NAMES = (*MODULES, *GROUP_METHODS, *ENGINE_METHODS)


@exported
def find_capability(capability: Any, has: Any) -> None:
    """Whether this installation offers a capability, for some model."""
    name = read_name(capability, "capability")
    require_key(name, NAMES, "capability")
    has[0] = _anywhere(name)


@exported
def engine_has(handle: Any, capability: Any, has: Any) -> None:
    """Whether an engine's model offers a capability."""
    engine = engine_of(handle)
    name = read_name(capability, "capability")
    require(has, "has")
    require_key(name, NAMES, "capability")
    engine._require_open()
    if name in GROUP_METHODS:
        group, method = GROUP_METHODS[name]
        implementation = getattr(engine._loaded.model, group)
        has[0] = implementation is not None and _implements(type(implementation), method)
    elif name == "request.translate":
        has[0] = engine.translates
    elif name in MODULES:
        has[0] = name == f"device.{engine.options.device}"
    else:
        has[0] = _anywhere(name)


def _anywhere(name: str) -> bool:
    if name in MODULES:
        package = MODULES[name].rpartition(".")[0]
        offered = find_spec(package) is not None and find_spec(MODULES[name]) is not None
        return offered and (name != "device.cuda" or _has_cuda_libraries())
    if name in ENGINE_METHODS:
        from atlas.engine import Engine

        return hasattr(Engine, ENGINE_METHODS[name])
    from atlas.model import GROUPS

    group, method = GROUP_METHODS[name]
    importlib.import_module("atlas.model.load")  # with every group that models are built from
    return any(_implements(kind, method) for kind in _descendants(GROUPS[group]))


def _descendants(kind: type) -> list[type]:
    found: list[type] = []
    children: list[type] = kind.__subclasses__()
    for child in children:
        found += [child, *_descendants(child)]
    return found


def _implements(kind: type, method: str) -> bool:
    """Whether a class has the method, neither as its protocol's outline nor as unavailable."""
    from atlas.model import GROUPS, Unavailable

    member = getattr(kind, method)
    outlines = [vars(protocol).get(method) for protocol in GROUPS.values()]
    return not isinstance(member, Unavailable) and member not in outlines


def _has_cuda_libraries() -> bool:
    """Whether the extra ``cuda`` is installed; loads nothing of it."""
    return all(find_spec(package) is not None for package in ("cuda", "numba_cuda"))
