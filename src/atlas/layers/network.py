"""The decoder: embedding, blocks, final norm and head, as one list of ops."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Protocol, cast

from atlas.layers.attention import Attention
from atlas.layers.gated_delta import GatedDelta
from atlas.layers.linear import Projection
from atlas.layers.mamba2 import Mamba2
from atlas.layers.mlp import Mlp
from atlas.layers.moe import Moe
from atlas.layers.step import Array, StepBuffers

if TYPE_CHECKING:
    from atlas.layers.mtp import MtpHead


class Block(Protocol):
    """A mixer, or a feed-forward, which takes each row for itself: adds to ``step.hidden``."""

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

    def forward(self, ops: Any, hidden: Array, out: Array) -> None:
        """Rows of the residual stream, as a step left it, to ``out``, both [L, D]."""
        ops.rmsnorm(hidden, self.weight, self.eps, out=out)


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
        """One sweep over the weights: ``step.token_ids`` to ``step.logits``."""
        self.embed(ops, step)
        for block in self.of_all_rows(step):
            block.forward(ops, step)
        self.finish(ops, step)

    def embed(self, ops: Any, step: StepBuffers) -> None:
        """``step.token_ids`` to ``step.hidden``."""
        ops.embedding(step.token_ids, self.embedding, self.embedding_scale, out=step.hidden)

    def of_all_rows(self, step: StepBuffers) -> tuple[Block, ...]:
        """The blocks that every row passes, as later rows of its sequence may read what it leaves:
        those up to the last mixer, or to ``last_attention``."""
        behind = len(self.behind_last_mixer) + (self.last_attention(step) is not None)
        return self.blocks[: len(self.blocks) - behind]

    def last_attention(self, step: StepBuffers) -> Attention | None:
        """The last mixer, where it is attention and the step has prompts: later rows of these read
        its keys and values, and what else it makes of a row without logits nobody does."""
        mixers = self.blocks[: len(self.blocks) - len(self.behind_last_mixer)]
        is_attention = bool(mixers) and isinstance(mixers[-1], Attention)
        return cast(Attention, mixers[-1]) if is_attention and step.has_prompts else None

    @property
    def behind_last_mixer(self) -> tuple[Block, ...]:
        """Feed-forwards at the end: what they make of a row without logits nobody reads."""
        blocks = reversed(self.blocks)
        behind = tuple(takewhile(lambda block: isinstance(block, Mlp | Moe), blocks))
        return behind[::-1]

    def finish(self, ops: Any, step: StepBuffers) -> None:
        """From ``of_all_rows`` to the logits, which only the rows in ``step.logits_rows`` reach.

        What the last block leaves of these is in the rows of ``step.hidden`` with
        ``step.all_logits``, else in ``step.last_hidden``.
        """
        attention = self.last_attention(step)
        if attention is not None:
            attention.attend(ops, step, step.prompt_first_rows)
        if not len(step.logits_rows):
            return
        if not step.all_logits:  # else each row would go where it is
            ops.gather_rows(step.hidden, step.logits_rows, out=step.last_hidden)
            if attention is not None:
                ops.gather_rows(step.attended, step.logits_rows, out=step.last_attended)
            step = step.of_logits()
        if attention is not None:
            attention.finish(ops, step)
        for block in self.behind_last_mixer:
            block.forward(ops, step)
        count, norm = len(step.logits_rows), self.final_norm
        rows, normed = step.hidden[:count], step.normed[:count]
        self.head.forward_normed(ops, rows, norm.weight, norm.eps, normed, step.logits)
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
