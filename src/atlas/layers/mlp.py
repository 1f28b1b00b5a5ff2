"""Gated feed-forward blocks, dense and sparse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from atlas.config import Activation
from atlas.layers.linear import Projection
from atlas.layers.step import Array, StepBuffers


def gate(ops: Any, activation: Activation, gate_up: Array, out: Array) -> None:
    """out = activation(gate) · up."""
    if activation == "silu":
        ops.silu_and_mul(gate_up, out=out)
    else:
        ops.gelu_tanh_and_mul(gate_up, out=out)


@dataclass(frozen=True, slots=True, eq=False)
class Mlp:
    """down(activation(gate(x)) · up(x)), added to the residual stream."""

    norm: Array
    gate_up: Projection
    down: Projection
    activation: Activation
    norm_eps: float
    post_norm: Array | None = None

    def forward(self, ops: Any, step: StepBuffers) -> None:
        """Add the block's output to ``step.hidden``."""
        ops.rmsnorm(step.hidden, self.norm, self.norm_eps, out=step.normed)
        if len(self.gate_up.matrices) == 1:
            (matrix,), bias = self.gate_up.matrices, self.gate_up.bias
            ops.linear_gated(
                step.normed, matrix, bias, self.activation, gate_up=step.gate_up, out=step.activated
            )
        else:
            self.gate_up.forward(ops, step.normed, step.gate_up)
            gate(ops, self.activation, step.gate_up, step.activated)
        if self.post_norm is None:
            self.down.add_to(ops, step.activated, step.hidden)
            return
        self.down.forward(ops, step.activated, step.projected)
        ops.rmsnorm(step.projected, self.post_norm, self.norm_eps, out=step.projected)
        ops.add(step.hidden, step.projected, out=step.hidden)
