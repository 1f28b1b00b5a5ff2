"""What an engine holds, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from html import escape

from atlas.config import ModelConfig
from atlas.model.lifetime import Lifetime
from atlas.model.load import LoadedModel


def describe(loaded: LoadedModel, path: str, format_name: str, reason: str) -> dict[str, str]:
    """Short texts by name: model, file, weights, memory, sequence, device, sampling, state.

    And ``recurrent`` where layers have a state: what is there for it and in use.
    """
    core, plan = loaded.core, loaded.plan
    formats = Counter(loaded.formats.values())
    recurrent = _recurrent(loaded)
    return {
        "model": f"{core.config.architecture}, {_layers(core.config)} layers × "
        f"{core.config.hidden_size}",
        "file": f"{path} ({format_name})",
        "weights": ", ".join(f"{count} × {name}" for name, count in sorted(formats.items())),
        "memory": f"{plan.weights / 2**20:.0f} MiB weights, "
        f"{plan.kv_pool / 2**20:.0f} MiB KV ({loaded.kv_dtype})",
        **({"recurrent": recurrent} if recurrent else {}),
        "sequence": f"up to {core.limits.max_seq_len} positions",
        "device": f"{core.runtime.words} ({reason})",
        "sampling": "on the device, but for parameters that metrics() counts as host_sampled"
        if core.runtime.samples
        else "on the host",
        "state": _state(core.lifetime),
    }


def _recurrent(loaded: LoadedModel) -> str:
    states = loaded.core.states
    if states is None:
        return ""
    counts, snapshots = states.pools.counts, states.snapshots
    return (
        f"{loaded.plan.recurrent / 2**20:.0f} MiB; in use: "
        f"{counts.running - states.running.num_free} of {counts.running} slots, "
        f"{snapshots.num_used} of {snapshots.num_total} snapshots"
    )


def _layers(config: ModelConfig) -> str:
    if config.encoder is None:
        return str(config.num_layers)
    return f"{config.encoder.num_layers} + {config.num_layers}"


def _state(lifetime: Lifetime) -> str:
    if not lifetime.in_own_process:
        return "of the parent process"
    return "closed" if lifetime.closed else "open"


def html_table(caption: str, rows: Mapping[str, str]) -> str:
    """A two-column table for notebooks."""
    cells = "".join(
        f"<tr><th>{escape(key)}</th><td>{escape(value)}</td></tr>" for key, value in rows.items()
    )
    return f"<table><caption>{escape(caption)}</caption>{cells}</table>"
