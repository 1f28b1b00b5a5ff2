"""The decoder: embedding, blocks, final norm and head, as one list of ops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from atlas.layers.linear import Projection
from atlas.layers.step import Array, StepBuffers


class Block(Protocol):
    """Half a layer: reads and adds to ``step.hidden``."""

    def forward(self, ops: Any, step: StepBuffers) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Network:
    """A decoder-only transformer.

    ``weights`` owns the arrays of all layers; while it lives, other models may share them.
    """

    weights: object
    embedding: Any
    embedding_scale: float
    blocks: tuple[Block, ...]
    final_norm: Array
    norm_eps: float
    head: Projection
    final_softcap: float | None = None

    def forward(self, ops: Any, step: StepBuffers) -> None:
        """One sweep over the weights: ``step.token_ids`` to ``step.logits``.

        Final norm and head run on the rows in ``step.logits_rows`` only.
        """
        ops.embedding(step.token_ids, self.embedding, self.embedding_scale, out=step.hidden)
        for block in self.blocks:
            block.forward(ops, step)
        if not len(step.logits_rows):
            return
        ops.gather_rows(step.hidden, step.logits_rows, out=step.last_hidden)
        ops.rmsnorm(step.last_hidden, self.final_norm, self.norm_eps, out=step.last_hidden)
        self.head.forward(ops, step.last_hidden, step.logits)
        if self.final_softcap is not None:
            ops.softcap(step.logits, self.final_softcap, out=step.logits)
