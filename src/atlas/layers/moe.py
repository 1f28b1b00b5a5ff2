"""Mixture of experts in place of a dense MLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from atlas.config import Activation, MoeConfig
from atlas.layers.linear import Projection
from atlas.layers.mlp import inner_rows
from atlas.layers.step import Array, StepBuffers


@dataclass(frozen=True, slots=True, eq=False)
class SharedExpert:
    """An expert that sees every row; ``router`` gives a number whose sigmoid multiplies it.

    With ``joins`` it is one more expert among a row's choices, and its number the first behind the
    others' scores in ``Moe.router``.
    """

    gate_up: Projection
    down: Projection
    router: Projection | None
    joins: bool = False

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

    ``router`` is one matrix. ``gate_up`` holds [gate; up] of each expert in turn (up alone with
    ReLU²), ``down`` each expert's down projection: packed matrices with one group per expert.
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
        if self.latent is None:
            scratch, out = self._scratch(step), step.hidden
            ops.moe_block(
                *self._router(step), *self._experts(), **self._routed(step), **scratch, out=out
            )
        else:
            ops.moe_router(*self._router(step), **self._routed(step))
            self.latent.inward.forward(ops, step.normed, step.latent)
            ops.zero(out=step.latent_sum)
            gate_up, down, *others = self._experts()
            ops.moe_experts(
                step.latent, gate_up, down, step.expert_ids, step.expert_weights, *others,
                **self._scratch(step), out=step.latent_sum,
            )  # fmt: skip
            self.latent.outward.add_to(ops, step.latent_sum, step.hidden)
        if self.shared is not None and not self.shared.joins:
            self.shared.add_to(ops, self.activation, step)

    def _router(self, step: StepBuffers) -> tuple[Any, ...]:
        """What ``moe_router`` reads."""
        sizes = self.sizes
        return (
            step.hidden,
            self.norm,
            self.norm_eps,
            self.router.matrices[0],
            sizes.num_experts,
            sizes.normalize_top_k,
            sizes.scoring,
            self.router_bias,
            sizes.scale,
            sizes.num_groups,
            sizes.top_groups,
            step.slots,  # rows of padding read no experts
        )

    def _routed(self, step: StepBuffers) -> dict[str, Array]:
        """What it writes."""
        return {
            "normed": step.normed,
            "scores": step.router,
            "ids": step.expert_ids,
            "weights": step.expert_weights,
        }

    def _experts(self) -> tuple[Any, ...]:
        """The experts' matrices and their activation, as ``moe_block`` has them."""
        shared = self.shared if self.shared is not None and self.shared.joins else None
        return (
            self.gate_up,
            self.down,
            self.activation,
            None if shared is None else shared.gate_up.matrices[0],
            None if shared is None else shared.down.matrices[0],
        )

    def _scratch(self, step: StepBuffers) -> dict[str, Array]:
        return {
            "expert_gate_up": step.expert_gate_up,
            "expert_activated": step.expert_activated,
            "expert_out": step.expert_out,
        }
