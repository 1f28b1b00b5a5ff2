"""Mixture of experts in place of a dense MLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from atlas.config import Activation, MoeConfig
from atlas.layers.linear import Projection
from atlas.layers.mlp import activate, inner_rows
from atlas.layers.step import Array, StepBuffers


@dataclass(frozen=True, slots=True, eq=False)
class SharedExpert:
    """An expert that sees every row; ``router`` gives a number whose sigmoid multiplies it."""

    gate_up: Projection
    down: Projection
    router: Projection | None

    def add_to(self, ops: Any, activation: Activation, step: StepBuffers) -> None:
        """Add the expert's output for ``step.normed`` to ``step.hidden``."""
        activated = inner_rows(ops, activation, self.gate_up, step.normed, step)
        if self.router is not None:
            self.router.forward(ops, step.normed, step.shared_gate)
            # The gate commutes with the projection, which then adds to the residual stream.
            ops.sigmoid_gate(activated, step.shared_gate, out=activated)
        self.down.add_to(ops, activated, step.hidden)


@dataclass(frozen=True, slots=True, eq=False)
class Latent:
    """Projections between the residual stream and the narrower space of the routed experts."""

    inward: Projection
    outward: Projection


@dataclass(frozen=True, slots=True, eq=False)
class Moe:
    """Route each row to its experts; add their weighted outputs in top-k order.

    ``gate_up`` holds [gate; up] of each expert in turn (up alone with ReLU²), ``down`` each
    expert's down projection: packed matrices with one group per expert.
    """

    norm: Array
    router: Projection
    router_bias: Array | None
    gate_up: Any
    down: Any
    activation: Activation
    sizes: MoeConfig
    norm_eps: float
    shared: SharedExpert | None = None
    latent: Latent | None = None

    def forward(self, ops: Any, step: StepBuffers) -> None:
        """Add the block's output to ``step.hidden``."""
        ops.rmsnorm(step.hidden, self.norm, self.norm_eps, out=step.normed)
        self.router.forward(ops, step.normed, step.router)
        ids, weights, sizes = step.expert_ids, step.expert_weights, self.sizes
        ops.moe_route(
            step.router,
            sizes.normalize_top_k,
            sizes.scoring,
            self.router_bias,
            sizes.scale,
            sizes.num_groups,
            sizes.top_groups,
            ids=ids,
            weights=weights,
        )
        if self.latent is None:
            self._experts(ops, step, step.normed)
            ops.moe_combine(step.expert_out, weights, out=step.hidden)
        else:
            self.latent.inward.forward(ops, step.normed, step.latent)
            self._experts(ops, step, step.latent)
            ops.zero(out=step.latent_sum)
            ops.moe_combine(step.expert_out, weights, out=step.latent_sum)
            self.latent.outward.add_to(ops, step.latent_sum, step.hidden)
        if self.shared is not None:
            self.shared.add_to(ops, self.activation, step)

    def _experts(self, ops: Any, step: StepBuffers, x: Array) -> None:
        """Each row's experts, from x [T, Z] to ``step.expert_out`` [T, X, Z]."""
        ids, x = step.expert_ids, x[:, None, :]
        rows, top_k, inner = step.expert_activated.shape
        activated = step.expert_activated.reshape(rows * top_k, inner)
        if self.activation == "relu_squared":
            ops.moe_linear(x, self.gate_up, ids, out=step.expert_activated)
            ops.relu_squared(activated, out=activated)
        else:
            ops.moe_linear(x, self.gate_up, ids, out=step.expert_gate_up)
            gate_up = step.expert_gate_up.reshape(rows * top_k, 2 * inner)
            activate(ops, self.activation, gate_up, activated)
        ops.moe_linear(step.expert_activated, self.down, ids, out=step.expert_out)
