"""Gated delta network: a recurrent mixer in place of attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from atlas.config import GatedDeltaConfig
from atlas.layers.linear import Projection
from atlas.layers.recurrence import Rows, prompt_rows, step_rows
from atlas.layers.step import Array, StepBuffers


@dataclass(frozen=True, slots=True, eq=False)
class GatedDelta:
    """Projections, causal convolution, gated delta rule, gated norm per head, output projection.

    ``inputs`` stacks q, k and v (which the convolution mixes over time), the gate z, b and a.
    ``states`` [S, HV, K, V] and ``tails`` [S, W − 1, C] are the layer's recurrent pools;
    ``kept_inputs`` [·, M] holds what a rollback runs again.

    Source: Yang, Kautz and Hatamizadeh, "Gated Delta Networks" (2024), arXiv 2412.06464, in the
    arrangement of Qwen3-Next.
    """

    norm: Array
    inputs: Projection
    conv_weight: Array
    decay_log: Array
    dt_bias: Array
    gated_norm: Array
    output: Projection
    states: Array
    tails: Array
    kept_inputs: Array
    sizes: GatedDeltaConfig
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
            if self.sizes.tiled_values:
                self._recur(ops.causal_conv_step, ops.gated_delta_step, rows, step, mixed)
            else:
                self._mix(ops, rows, step, mixed)
        if (rows := prompt_rows(step)) is not None:
            self._recur(ops.causal_conv_prefill, ops.gated_delta_prefill, rows, step, mixed)

    def finish(self, ops: Any, step: StepBuffers) -> None:
        """Add what was read from the states to ``step.hidden``."""
        sizes = self.sizes
        gated = step.gated[:, : sizes.value_size]
        recurred, z = step.recurred[:, : sizes.value_size], self._gate(step.mixed)
        if sizes.tiled_values:
            self._norm_in_tiles(ops, recurred, z, gated)
        elif step.step_rows < len(gated):  # step rows are gated already
            x, gate, out = (array[step.step_rows :] for array in (recurred, z, gated))
            ops.gated_rmsnorm(
                x, gate, self.gated_norm, self.norm_eps, sizes.value_dim, True, out=out
            )
        self.output.add_to(ops, gated, step.hidden)

    def _gate(self, mixed: Array) -> Array:
        """z, which lies behind the convolution's inputs."""
        return mixed[:, self.sizes.conv_size : self.sizes.conv_size + self.sizes.value_size]

    def _norm_in_tiles(self, ops: Any, recurred: Array, z: Array, gated: Array) -> None:
        """The gated norm with value head j of every key head in turn, as ``output`` reads them."""
        sizes = self.sizes
        heads = (len(recurred), sizes.num_value_heads, sizes.value_dim)
        x, gate, out = (array.reshape(heads, copy=False) for array in (recurred, z, gated))
        per_key = sizes.num_value_heads // sizes.num_key_heads
        for j in range(per_key):
            tile = slice(j * sizes.num_key_heads, (j + 1) * sizes.num_key_heads)
            ops.gated_rmsnorm(
                x[:, j::per_key],
                gate[:, j::per_key],
                self.gated_norm,
                self.norm_eps,
                sizes.value_dim,
                True,
                out=out[:, tile],
            )

    def replay(self, ops: Any, step: StepBuffers) -> None:
        """Advance the states of ``step.state_slots`` over the inputs in ``step.kept_rows``."""
        mixed = step.mixed[:, : self.sizes.input_size]
        ops.gather_rows(self.kept_inputs, step.kept_rows, out=mixed)
        self.recur(ops, step)

    def _mix(self, ops: Any, rows: Rows, step: StepBuffers, mixed: Array) -> None:
        """All between the input and the output product."""
        sizes = self.sizes
        mixed = mixed[rows.rows]
        b, a = mixed[:, -2 * sizes.num_value_heads :], mixed[:, -sizes.num_value_heads :]
        ops.gated_delta_mixer_step(
            mixed[:, : sizes.conv_size],
            self._gate(mixed),
            a,
            b[:, : sizes.num_value_heads],
            self.conv_weight,
            self.gated_norm,
            self.norm_eps,
            self.decay_log,
            self.dt_bias,
            rows.slots,
            rows.cu_rows,
            rows.positions,
            states=self.states,
            tails=self.tails,
            convolved=step.convolved[rows.rows, : sizes.conv_size],
            recurred=step.recurred[rows.rows, : sizes.value_size],
            out=step.gated[rows.rows, : sizes.value_size],
        )

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
        qkv = step.convolved[rows.rows, : sizes.conv_size]
        conv(
            mixed[:, : sizes.conv_size],
            self.conv_weight,
            None,
            *of_sequences,
            tails=self.tails,
            out=qkv,
        )
        b, a = mixed[:, -2 * sizes.num_value_heads :], mixed[:, -sizes.num_value_heads :]
        recurred = step.recurred[rows.rows, : sizes.value_size]
        recur(
            qkv,
            a,
            b[:, : sizes.num_value_heads],
            self.decay_log,
            self.dt_bias,
            *of_sequences,
            states=self.states,
            out=recurred.reshape(len(qkv), sizes.num_value_heads, sizes.value_dim, copy=False),
        )
