"""Mamba-2: a recurrent mixer with one decay per head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from atlas.config import Mamba2Config
from atlas.layers.linear import Projection
from atlas.layers.recurrence import Rows, prompt_rows, step_rows
from atlas.layers.step import Array, StepBuffers


@dataclass(frozen=True, slots=True, eq=False)
class Mamba2:
    """Projection, causal convolution, state space recurrence, gated norm, output projection.

    ``inputs`` gives the gate, x, b and c (which the convolution mixes over time) and dt.
    ``states`` [S, H, P, N] and ``tails`` [S, W − 1, C] are the layer's recurrent pools;
    ``kept_inputs`` [·, M] holds what a rollback runs again.

    Source: Dao and Gu, "Transformers are SSMs" (2024), arXiv 2405.21060.
    """

    norm: Array
    inputs: Projection
    conv_weight: Array
    conv_bias: Array | None
    decay_log: Array
    d: Array
    dt_bias: Array
    gated_norm: Array
    output: Projection
    states: Array
    tails: Array
    kept_inputs: Array
    sizes: Mamba2Config
    norm_eps: float

    def forward(self, ops: Any, step: StepBuffers) -> None:
        """Add the block's output to ``step.hidden`` and advance the sequences' states."""
        self.project(ops, step)
        self.recur(ops, step)
        self.finish(ops, step)

    def project(self, ops: Any, step: StepBuffers) -> None:
        """Inputs of the recurrence, from ``step.hidden``."""
        mixed = step.mixed[:, : self.sizes.input_size]
        self.inputs.forward_normed(ops, step.hidden, self.norm, self.norm_eps, step.normed, mixed)
        if len(step.kept_rows):
            ops.scatter_rows(mixed[: step.step_rows], step.kept_rows, out=self.kept_inputs)

    def recur(self, ops: Any, step: StepBuffers) -> None:
        """Advance the sequences' states over the inputs."""
        mixed = step.mixed[:, : self.sizes.input_size]
        if (rows := step_rows(step)) is not None:
            self._recur(ops.causal_conv_step, ops.mamba2_step, rows, step, mixed)
        if (rows := prompt_rows(step)) is not None:
            self._recur(ops.causal_conv_prefill, ops.mamba2_prefill, rows, step, mixed)

    def finish(self, ops: Any, step: StepBuffers) -> None:
        """Add what was read from the states to ``step.hidden``."""
        sizes = self.sizes
        recurred = step.recurred[:, : sizes.inner_size]
        gate = step.mixed[:, : sizes.inner_size]
        group = sizes.inner_size // sizes.num_groups
        gated = step.gated[:, : sizes.inner_size]
        ops.gated_rmsnorm(recurred, gate, self.gated_norm, self.norm_eps, group, False, out=gated)
        self.output.add_to(ops, gated, step.hidden)

    def replay(self, ops: Any, step: StepBuffers) -> None:
        """Advance the states of ``step.state_slots`` over the inputs in ``step.kept_rows``."""
        mixed = step.mixed[:, : self.sizes.input_size]
        ops.gather_rows(self.kept_inputs, step.kept_rows, out=mixed)
        self.recur(ops, step)

    def _recur(
        self,
        conv: Callable[..., None],
        recur: Callable[..., None],
        rows: Rows,
        step: StepBuffers,
        mixed: Array,
    ) -> None:
        sizes = self.sizes
        of_sequences = (rows.slots, rows.cu_rows, rows.positions)
        mixed = mixed[rows.rows]
        xbc = step.convolved[rows.rows, : sizes.conv_size]
        conv(
            mixed[:, sizes.inner_size : sizes.inner_size + sizes.conv_size],
            self.conv_weight,
            self.conv_bias,
            *of_sequences,
            tails=self.tails,
            out=xbc,
        )
        x, b, c = self._parts(xbc)
        recurred = step.recurred[rows.rows, : sizes.inner_size]
        recur(
            x,
            b,
            c,
            mixed[:, -sizes.num_heads :],
            self.decay_log,
            self.d,
            self.dt_bias,
            sizes.dt_min,
            sizes.dt_max,
            *of_sequences,
            states=self.states,
            out=recurred.reshape(x.shape, copy=False),
        )

    def _parts(self, xbc: Array) -> tuple[Array, Array, Array]:
        """[T, H, P], [T, G, N] and [T, G, N] views of the convolution's output."""
        sizes, rows = self.sizes, len(xbc)
        split = sizes.num_groups * sizes.state_size
        x, b = xbc[:, : sizes.inner_size], xbc[:, sizes.inner_size :]
        groups = (rows, sizes.num_groups, sizes.state_size)
        return (
            x.reshape(rows, sizes.num_heads, sizes.head_dim, copy=False),
            b[:, :split].reshape(groups, copy=False),
            b[:, split:].reshape(groups, copy=False),
        )
