"""Mixture of experts in place of a dense MLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from atlas.config import Activation
from atlas.layers.linear import Projection
from atlas.layers.step import Array, StepBuffers


@dataclass(frozen=True, slots=True, eq=False)
class Moe:
    """Route each row to its experts; add their weighted outputs in top-k order.

    ``gate_up`` holds [gate; up] of each expert in turn, ``down`` each expert's down projection:
    packed matrices with one group per expert.
    """

    norm: Array
    router: Projection
    gate_up: Any
    down: Any
    activation: Activation
    normalize_top_k: bool
    norm_eps: float

    def forward(self, ops: Any, step: StepBuffers) -> None:
        """Add the block's output to ``step.hidden``."""
        ops.rmsnorm(step.hidden, self.norm, self.norm_eps, out=step.normed)
        self.router.forward(ops, step.normed, step.router)
        ids, weights = step.expert_ids, step.expert_weights
        ops.moe_route(step.router, self.normalize_top_k, ids=ids, weights=weights)
        ops.moe_experts(
            step.normed,
            self.gate_up,
            self.down,
            ids,
            weights,
            self.activation,
            expert_gate_up=step.expert_gate_up,
            expert_activated=step.expert_activated,
            expert_out=step.expert_out,
            out=step.hidden,
        )
