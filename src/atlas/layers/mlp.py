"""Feed-forward blocks, gated or with ReLU²."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from atlas.config import Activation
from atlas.layers.linear import Projection
from atlas.layers.step import Array, StepBuffers


def activate(ops: Any, activation: Activation, gate_up: Array, out: Array) -> None:
    """out = activation(gate) · up, float32 [T, 2F] → [T, F]."""
    if activation == "silu":
        ops.silu_and_mul(gate_up, out=out)
    else:
        ops.gelu_tanh_and_mul(gate_up, out=out)


def inner_rows(
    ops: Any, activation: Activation, projection: Projection, x: Array, step: StepBuffers
) -> Array:
    """What a dense feed-forward's last projection reads: [T, F], in ``step.activated``.

    ``projection`` gives gate and up, or up alone with ReLU².
    """
    if activation == "relu_squared":
        out = step.activated[:, : projection.rows]
        projection.forward(ops, x, out)
        ops.relu_squared(out, out=out)
        return out
    gate_up, out = step.gate_up[:, : projection.rows], step.activated[:, : projection.rows // 2]
    if len(projection.matrices) == 1:
        (matrix,), bias = projection.matrices, projection.bias
        ops.linear_gated(x, matrix, bias, activation, gate_up=gate_up, out=out)
    else:
        projection.forward(ops, x, gate_up)
        activate(ops, activation, gate_up, out)
    return out


@dataclass(frozen=True, slots=True, eq=False)
class Mlp:
    """down(activation(gate(x)) · up(x)), or down(relu(up(x))²), added to the residual stream.

    ``gate_up`` stacks the two projections; with ReLU² it is ``up`` alone.
    """

    norm: Array
    gate_up: Projection
    down: Projection
    activation: Activation
    norm_eps: float
    post_norm: Array | None = None

    def forward(self, ops: Any, step: StepBuffers) -> None:
        """Add the block's output to ``step.hidden``."""
        activated = self._inner_rows(ops, step)
        if self.post_norm is None:
            self.down.add_to(ops, activated, step.hidden)
            return
        self.down.forward(ops, activated, step.projected)
        ops.rmsnorm(step.projected, self.post_norm, self.norm_eps, out=step.projected)
        ops.add(step.hidden, step.projected, out=step.hidden)

    def _inner_rows(self, ops: Any, step: StepBuffers) -> Array:
        """``inner_rows`` of the normalised residual stream, with the norm in the product's op."""
        of_norm, rows = (step.hidden, self.norm, self.norm_eps), self.gate_up.rows
        if self.activation == "relu_squared" or len(self.gate_up.matrices) > 1:
            ops.rmsnorm(*of_norm, out=step.normed)
            return inner_rows(ops, self.activation, self.gate_up, step.normed, step)
        (matrix,), bias = self.gate_up.matrices, self.gate_up.bias
        gate_up, out = step.gate_up[:, :rows], step.activated[:, : rows // 2]
        ops.rmsnorm_linear_gated(
            *of_norm,
            matrix,
            bias,
            self.activation,
            normed=step.normed,
            gate_up=gate_up,
            out=out,
        )
        return out
