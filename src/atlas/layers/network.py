"""The decoder: embedding, blocks, final norm and head, as one list of ops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from atlas.layers.gated_delta import GatedDelta
from atlas.layers.linear import Projection
from atlas.layers.mamba2 import Mamba2
from atlas.layers.step import Array, StepBuffers

if TYPE_CHECKING:
    from atlas.layers.mtp import MtpHead


class Block(Protocol):
    """A mixer or a feed-forward: reads and adds to ``step.hidden``."""

    def forward(self, ops: Any, step: StepBuffers) -> None: ...


class RecurrentBlock(Block, Protocol):
    """A block with a state that every row overwrites: ``forward`` is its three parts in order."""

    def project(self, ops: Any, step: StepBuffers) -> None:
        """Inputs of the recurrence, from ``step.hidden``."""
        ...

    def recur(self, ops: Any, step: StepBuffers) -> None:
        """Advance the sequences' states over the inputs."""
        ...

    def finish(self, ops: Any, step: StepBuffers) -> None:
        """Add what was read from the states to ``step.hidden``."""
        ...

    def replay(self, ops: Any, step: StepBuffers) -> None:
        """Advance the states of ``step.state_slots`` over the inputs in ``step.kept_rows``."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class FinalNorm:
    """The norm between the last block and the head.

    A step need not keep its output: ``forward``, run alone behind it, computes that of its rows.
    """

    weight: Array
    eps: float

    def forward(self, ops: Any, step: StepBuffers) -> None:
        """``step.hidden``, as the step before left it, to ``step.normed``."""
        ops.rmsnorm(step.hidden, self.weight, self.eps, out=step.normed)


@dataclass(frozen=True, slots=True, eq=False)
class Network:
    """A decoder of attention, recurrent and feed-forward blocks.

    ``weights`` owns the arrays of all layers; while it lives, other models may share them.
    """

    weights: object
    embedding: Any
    embedding_scale: float
    blocks: tuple[Block, ...]
    final_norm: FinalNorm
    head: Projection
    final_softcap: float | None = None
    mtp: MtpHead | None = None

    def forward(self, ops: Any, step: StepBuffers) -> None:
        """One sweep over the weights: ``step.token_ids`` to ``step.logits``.

        Final norm and head run on the rows in ``step.logits_rows`` only. ``step.hidden`` stays as
        the last block left it.
        """
        self.embed(ops, step)
        for block in self.blocks:
            block.forward(ops, step)
        self.finish(ops, step)

    def embed(self, ops: Any, step: StepBuffers) -> None:
        """``step.token_ids`` to ``step.hidden``."""
        ops.embedding(step.token_ids, self.embedding, self.embedding_scale, out=step.hidden)

    def finish(self, ops: Any, step: StepBuffers) -> None:
        """``step.hidden`` to the logits of the rows that have some."""
        if not len(step.logits_rows):
            return
        if step.all_logits:  # nothing to gather: each row would go where it is
            rows = step.hidden[: len(step.logits_rows)]
        else:
            rows = step.last_hidden
            ops.gather_rows(step.hidden, step.logits_rows, out=rows)
        norm = self.final_norm
        self.head.forward_normed(ops, rows, norm.weight, norm.eps, step.last_hidden, step.logits)
        if self.final_softcap is not None:
            ops.softcap(step.logits, self.final_softcap, out=step.logits)

    def recurrence(self) -> Replay | None:
        """The recurrent blocks alone; None where there are none."""
        blocks = tuple(block for block in self.blocks if isinstance(block, GatedDelta | Mamba2))
        return Replay(blocks) if blocks else None


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """What a rollback runs: recurrent layers over inputs that a step kept, and nothing else."""

    blocks: tuple[RecurrentBlock, ...]

    def forward(self, ops: Any, step: StepBuffers) -> None:
        """States of the step's sequences, bit for bit as those rows left them."""
        for block in self.blocks:
            block.replay(ops, step)
