"""The buffers of one step: metadata that kernels read, activations, and the logits arena.

Everything is allocated once. A step of T rows, N sequences and L logit rows uses the front of
each buffer, so that a recorded launch list for (T, N, L) stays valid for every later step of that
shape: only the contents change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atlas import pages
from atlas.config import ModelConfig

Array = NDArray[Any]
SHARED_SCORES = 8
"""Columns of the router's scores for a shared expert that joins the others: its own comes first,
and the rest fill a vector, so that every kind of matrix product takes the router."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """T rows of N sequences, of which L have logits, written from arena row ``first_logits``.

    The first ``step_rows`` rows are step tokens (generated or drafted) of the first ``step_seqs``
    sequences, none of which has more than ``max_step_rows``; the other rows are prompt tokens of
    the other sequences.

    ``all_logits``: all rows are step rows and have logits, so that logits row i is row i's. A step
    that is padded to as many logits rows as it has rows is not of this kind.
    """

    rows: int
    seqs: int
    logits: int
    first_logits: int = 0
    step_rows: int = 0
    step_seqs: int = 0
    max_step_rows: int = 0
    keeps_inputs: bool = False  # of recurrent layers, for a rollback
    all_logits: bool = False

    @classmethod
    def of(
        cls,
        rows: int,
        seqs: int,
        logits: int,
        first_logits: int,
        steps: NDArray[np.int32],
        *,
        keeps_inputs: bool = False,
    ) -> StepShape:
        """A step whose first sequences have ``steps[i]`` step rows each."""
        step_rows, most = int(steps.sum()), int(steps.max(initial=0))
        return cls(
            rows,
            seqs,
            logits,
            first_logits,
            step_rows,
            len(steps),
            most,
            keeps_inputs,
            all_logits=rows == step_rows == logits,
        )

    @classmethod
    def prompt(cls, rows: int, logits: int = 1) -> StepShape:
        """A chunk of one prompt."""
        return cls(rows, 1, logits)

    @classmethod
    def decode(cls, seqs: int) -> StepShape:
        """One step token of each of ``seqs`` sequences, all with logits."""
        return cls(seqs, seqs, seqs, 0, seqs, seqs, 1, all_logits=True)


@dataclass(frozen=True, slots=True, eq=False)
class StepBuffers:
    """Views for one step, or (as ``whole``) the buffers themselves.

    Attributes
    ----------
    token_ids, positions, slots : int32 [T]
    cu_rows : int32 [N + 1]
        Rows cu_rows[n] … cu_rows[n + 1] − 1 are sequence n's.
    prompt_cu_rows : int32 [prompt sequences + 1]
        The same of the prompt rows alone, counted from the first of them.
    prompt_first_rows : int32 [prompt sequences]
        The first row of each prompt that has logits, counted in the same way; its end where none
        has.
    block_tables : int32 [N, M]
    state_slots : int32 [N]
        Each sequence's slot of the recurrent pools.
    kept_rows : int32 [step rows]
        Where recurrent layers keep each step row's inputs for a rollback; −1: nowhere. Empty in a
        step that keeps none.
    logits_rows : int32 [L]
        Rows of the step whose logits are wanted; 0, 1, 2, … with ``all_logits``.
    hidden, normed, projected : float32 [T, D]
        The residual stream, a layer's normalised input, and a block's output before its norm.
    qkv : float32 [T, (H + 2·HK)·K]
        With H·K more columns where attention has an output gate.
    attended : float32 [T, H·K]
    mixed, convolved, recurred, gated : float32 [T, M], [T, C], [T, V], [T, V]
        A recurrent layer's projected inputs, its convolution's output, its own, and that after the
        gated norm.
    gate_up, activated : float32 [T, 2F], [T, F]
        As wide as the widest dense MLP or shared expert.
    router, expert_weights : float32 [T, E], [T, X]
    expert_ids : int32 [T, X]
    expert_gate_up, expert_activated, expert_out : float32 [T, X, 2F], [T, X, F], [T, X, D]
        Empty without experts; ``expert_out`` is as wide as ``latent`` where there is one.
    shared_gate : float32 [T, 1]
    latent, latent_sum : float32 [T, Z]
        What experts of a latent space read, and their weighted sum.
    last_hidden, last_attended : float32 [L, D], [L, H·K]
        The residual stream of the rows that have logits, from the last mixer on, and what its
        attention gave; not written with ``all_logits``.
    logits : float32 [L, C]
    step_rows, step_seqs, max_step_rows : int
        As in ``StepShape``; 0 in the whole buffers.
    all_logits : bool
        As in ``StepShape``; False in the whole buffers.
    """

    token_ids: Array
    positions: Array
    slots: Array
    cu_rows: Array
    prompt_cu_rows: Array
    prompt_first_rows: Array
    block_tables: Array
    state_slots: Array
    kept_rows: Array
    logits_rows: Array
    hidden: Array
    normed: Array
    projected: Array
    qkv: Array
    attended: Array
    mixed: Array
    convolved: Array
    recurred: Array
    gated: Array
    gate_up: Array
    activated: Array
    router: Array
    expert_weights: Array
    expert_ids: Array
    expert_gate_up: Array
    expert_activated: Array
    expert_out: Array
    shared_gate: Array
    latent: Array
    latent_sum: Array
    last_hidden: Array
    last_attended: Array
    logits: Array
    step_rows: int = 0
    step_seqs: int = 0
    max_step_rows: int = 0
    all_logits: bool = False

    @property
    def has_prompts(self) -> bool:
        """Whether any rows are prompts'."""
        return self.step_rows < len(self.token_ids)

    def view(self, shape: StepShape) -> StepBuffers:
        """The front of every buffer for a step of this shape."""
        rows, logits = slice(0, shape.rows), slice(0, shape.logits)
        first = shape.first_logits
        by_name: dict[str, slice] = {
            "cu_rows": slice(0, shape.seqs + 1),
            "prompt_cu_rows": slice(0, shape.seqs - shape.step_seqs + 1),
            "prompt_first_rows": slice(0, shape.seqs - shape.step_seqs),
            "block_tables": slice(0, shape.seqs),
            "state_slots": slice(0, shape.seqs),
            "kept_rows": slice(0, shape.step_rows if shape.keeps_inputs else 0),
            "logits_rows": logits,
            "last_hidden": slice(first, first + shape.logits),
            "last_attended": logits,
            "logits": slice(first, first + shape.logits),
        }
        arrays: dict[str, Any] = {
            name: getattr(self, name)[by_name.get(name, rows)]
            for name in self.__slots__
            if name not in _OF_SHAPE
        }
        numbers = {name: getattr(shape, name) for name in _OF_SHAPE}
        return replace(self, **arrays, **numbers)

    def of_logits(self) -> StepBuffers:
        """The rows that have logits, as they were gathered, as a step for what takes each row
        for itself."""
        logits = self.view(StepShape.decode(len(self.logits_rows)))
        return replace(
            logits,
            hidden=self.last_hidden,
            attended=self.last_attended,
            # Slots tell rows of padding, of which there are none: those numbers are not negative.
            slots=self.logits_rows,
        )


def first_rows_with_logits(logits_rows: Array, cu_rows: Array, *, out: Array) -> None:
    """``prompt_first_rows`` of int32 [N]: the first of each sequence's rows that is in
    ``logits_rows``, which ascend; cu_rows[n + 1] where none is."""
    begins, ends = cu_rows[: len(out)], cu_rows[1 : len(out) + 1]
    at = np.searchsorted(logits_rows, begins)
    out[:] = ends
    some = at < len(logits_rows)
    out[some] = np.minimum(logits_rows[at[some]], ends[some])


_OF_SHAPE = ("step_rows", "step_seqs", "max_step_rows", "all_logits")
INPUTS = (
    "token_ids",
    "positions",
    "slots",
    "cu_rows",
    "prompt_cu_rows",
    "prompt_first_rows",
    "block_tables",
    "state_slots",
    "kept_rows",
    "logits_rows",
)
"""Integers that the host writes for every step; a device has a copy of them."""
_INTEGERS = (*INPUTS, "expert_ids")


def buffer_shapes(
    config: ModelConfig,
    max_rows: int,
    max_seqs: int,
    max_blocks: int,
    logits_rows: int,
    *,
    joins_shared: bool = False,
) -> dict[str, tuple[int, ...]]:
    """The shape of each buffer for steps of up to ``max_rows`` rows; every element is 4 bytes.

    ``joins_shared``: the shared expert is one more choice of every row.
    """
    heads = config.num_heads * config.head_dim
    gate = heads if config.attention_gate else 0
    mixers = [config.recurrent(i) for i in config.recurrent_layers]
    moe = config.moe
    experts, top_k, inner, latent = (
        (moe.num_experts, moe.top_k, moe.intermediate_size, moe.latent_size) if moe else (0,) * 4
    )
    choices, scores = top_k + joins_shared, experts + SHARED_SCORES * joins_shared
    dense = max(config.intermediate_size, moe.shared_size if moe else 0)
    gated = 2 if config.has_mlp_gate else 0
    return {
        "token_ids": (max_rows,),
        "positions": (max_rows,),
        "slots": (max_rows,),
        "cu_rows": (max_seqs + 1,),
        "prompt_cu_rows": (max_seqs + 1,),
        "prompt_first_rows": (max_seqs,),
        "block_tables": (max_seqs, max_blocks),
        "state_slots": (max_seqs,),
        "kept_rows": (max_rows,),
        "logits_rows": (logits_rows,),
        "hidden": (max_rows, config.hidden_size),
        "normed": (max_rows, config.hidden_size),
        "projected": (max_rows, config.hidden_size),
        "qkv": (max_rows, heads + 2 * config.num_kv_heads * config.head_dim + gate),
        "attended": (max_rows, heads),
        "mixed": (max_rows, max((sizes.input_size for sizes in mixers), default=0)),
        "convolved": (max_rows, max((sizes.conv_size for sizes in mixers), default=0)),
        "recurred": (max_rows, max((sizes.output_size for sizes in mixers), default=0)),
        "gated": (max_rows, max((sizes.output_size for sizes in mixers), default=0)),
        "gate_up": (max_rows, gated * dense),
        "activated": (max_rows, dense),
        "router": (max_rows, scores),
        "expert_weights": (max_rows, choices),
        "expert_ids": (max_rows, choices),
        "expert_gate_up": (max_rows, choices, gated * inner),
        "expert_activated": (max_rows, choices, inner),
        "expert_out": (max_rows, choices, latent or config.hidden_size),
        "shared_gate": (max_rows, 1 if moe and moe.shared_gate else 0),
        "latent": (max_rows, latent),
        "latent_sum": (max_rows, latent),
        "last_hidden": (logits_rows, config.hidden_size),
        "last_attended": (logits_rows, heads),
        "logits": (logits_rows, config.vocab_size),
    }


def allocate(shapes: Mapping[str, tuple[int, ...]]) -> StepBuffers:
    """Zeroed buffers of these shapes; untouched pages cost no memory."""
    arrays: dict[str, Any] = {
        name: pages.zeros(shape, np.int32 if name in _INTEGERS else np.float32)
        for name, shape in shapes.items()
    }
    return StepBuffers(**arrays)
