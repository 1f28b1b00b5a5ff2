"""A norm and a product: one after the other."""

from __future__ import annotations

from atlas.backends.cpu.device import Array, Queue
from atlas.backends.cpu.linear import linear, linear_gated
from atlas.backends.cpu.norm import rmsnorm
from atlas.backends.cpu.pack import PackedMatrix


def rmsnorm_linear(
    queue: Queue,
    x: Array,
    norm: Array,
    eps: float,
    weight: PackedMatrix,
    bias: Array | None = None,
    *,
    normed: Array,
    out: Array,
) -> None:
    rmsnorm(queue, x, norm, eps, out=normed)
    linear(queue, normed, weight, bias, out=out)


def rmsnorm_linear_gated(
    queue: Queue,
    x: Array,
    norm: Array,
    eps: float,
    weight: PackedMatrix,
    bias: Array | None,
    activation: str,
    *,
    normed: Array,
    gate_up: Array,
    out: Array,
) -> None:
    rmsnorm(queue, x, norm, eps, out=normed)
    linear_gated(queue, normed, weight, bias, activation, gate_up=gate_up, out=out)
