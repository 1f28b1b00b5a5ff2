"""Self-attention over a paged cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from atlas.layers.linear import Projection
from atlas.layers.step import Array, StepBuffers


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """q, k, v projections, optional per-head norms, RoPE, paged attention, output projection.

    ``post_norm`` (Gemma) normalises the block's output before it joins the residual stream.
    ``window`` counts the token itself. With ``is_gated``, ``qkv`` also gives H·K gates, whose
    sigmoid multiplies what was attended.
    """

    norm: Array
    qkv: Projection
    output: Projection
    rope_table: Array
    k_pool: Array
    v_pool: Array
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    norm_eps: float
    window: int | None = None
    softcap: float | None = None
    q_norm: Array | None = None
    k_norm: Array | None = None
    post_norm: Array | None = None
    is_gated: bool = False

    def forward(self, ops: Any, step: StepBuffers) -> None:
        """Add the block's output to ``step.hidden`` and store the rows' K and V."""
        self.attend(ops, step)
        self.finish(ops, step)

    def attend(self, ops: Any, step: StepBuffers, first_rows: Array | None = None) -> None:
        """Store the rows' K and V, and leave what they attend to in ``step.attended``.

        ``first_rows``, counted like ``step.prompt_cu_rows``: rows of a prompt before its own are
        only stored.
        """
        self.qkv.forward_normed(ops, step.hidden, self.norm, self.norm_eps, step.normed, step.qkv)
        q, k, v = self._heads(step.qkv)
        attended = step.attended.reshape(len(q), self.num_heads, self.head_dim)
        if step.step_rows:
            self._attend_step(ops, step, q, k, v, attended)
        if step.step_rows < len(q):
            self._attend_prompt(ops, step, q, k, v, attended, first_rows)
            if self.is_gated:
                rows = slice(step.step_rows, None)
                flat = step.attended[rows]
                ops.sigmoid_gate(flat, self._gates(step.qkv[rows]), out=flat)

    def finish(self, ops: Any, step: StepBuffers) -> None:
        """Add the output product of ``step.attended`` to ``step.hidden``, row by row."""
        if self.post_norm is None:
            self.output.add_to(ops, step.attended, step.hidden)
            return
        self.output.forward(ops, step.attended, step.projected)
        ops.rmsnorm(step.projected, self.post_norm, self.norm_eps, out=step.projected)
        ops.add(step.hidden, step.projected, out=step.hidden)

    def _attend_step(
        self, ops: Any, step: StepBuffers, q: Array, k: Array, v: Array, out: Array
    ) -> None:
        rows, seqs = slice(0, step.step_rows), slice(0, step.step_seqs)
        attend, gates = ops.attention_step, []
        if self.is_gated:
            attend, gates = ops.attention_step_gated, [self._gates(step.qkv[rows])]
        attend(
            q[rows],
            k[rows],
            v[rows],
            *gates,
            self.q_norm,
            self.k_norm,
            self.norm_eps,
            self.rope_table,
            step.slots[rows],
            step.block_tables[seqs],
            step.cu_rows[: step.step_seqs + 1],
            step.max_step_rows,
            step.positions[rows],
            self.scale,
            self.window,
            self.softcap,
            k_pool=self.k_pool,
            v_pool=self.v_pool,
            out=out[rows],
        )

    def _attend_prompt(
        self,
        ops: Any,
        step: StepBuffers,
        q: Array,
        k: Array,
        v: Array,
        out: Array,
        first_rows: Array | None,
    ) -> None:
        rows, seqs = slice(step.step_rows, None), slice(step.step_seqs, None)
        ops.prepare_heads(
            q[rows],
            k[rows],
            v[rows],
            self.q_norm,
            self.k_norm,
            self.norm_eps,
            step.positions[rows],
            self.rope_table,
            step.slots[rows],
            k_pool=self.k_pool,
            v_pool=self.v_pool,
        )
        ops.attention_prefill(
            q[rows],
            self.k_pool,
            self.v_pool,
            step.block_tables[seqs],
            step.prompt_cu_rows,
            step.positions[rows],
            self.scale,
            self.window,
            self.softcap,
            out=out[rows],
            **({} if first_rows is None else {"first_rows": first_rows}),
        )

    def _gates(self, qkv: Array) -> Array:
        """[T, H·K], behind the heads."""
        return qkv[:, -self.num_heads * self.head_dim :]

    def _heads(self, qkv: Array) -> tuple[Array, Array, Array]:
        """[T, H, K], [T, HK, K], [T, HK, K] views of the fused projection."""
        split = self.num_heads * self.head_dim
        size = self.num_kv_heads * self.head_dim
        qkv = qkv[:, : split + 2 * size]
        rows = len(qkv)
        return (
            qkv[:, :split].reshape(rows, self.num_heads, self.head_dim, copy=False),
            qkv[:, split : split + size].reshape(
                rows, self.num_kv_heads, self.head_dim, copy=False
            ),
            qkv[:, split + size :].reshape(rows, self.num_kv_heads, self.head_dim, copy=False),
        )
