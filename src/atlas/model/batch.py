"""One step's work: which rows run, for whom, and which of them get logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from atlas.model.sequence import SequenceState

RowKind = Literal["prompt", "step"]
Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The argument of ``run``: T rows, sequence after sequence.

    Attributes
    ----------
    token_ids : int32 [T]
    positions : int32 [axes, T]
        One axis, or three for multi-axis RoPE. Ascending within a sequence.
    seqs : sequence of SequenceState
    rows : int32 [N]
        Rows of each sequence, 1 … K for step rows.
    kinds : tuple of {"prompt", "step"}
        What each sequence's rows are; a batch may mix them, step rows first.
    logits_rows : int32 [L]
        Rows of the step that get logits, in the order of the arena.
    first_logits : int
        Arena row of the first of them.
    adapter_index : int32 [T], optional
        Adapter pool slot of each row; −1 = none.
    embedding_override : float32 [T, D], optional
        Rows that replace the embedding (vision); NaN rows are not overridden.
    token_sources : sequence, optional
        For each row a host id or the device cell that holds it (``FeedSource``).
    row_masks : int32 [L, ⌈C/32⌉], optional
        Allowed ids of each logits row, bit set = allowed.
    """

    token_ids: Ints
    positions: Ints
    seqs: Sequence[SequenceState]
    rows: Ints
    kinds: tuple[RowKind, ...]
    logits_rows: Ints
    first_logits: int = 0
    adapter_index: Ints | None = None
    embedding_override: NDArray[np.float32] | None = None
    token_sources: Sequence[Any] | None = None
    row_masks: Ints | None = None

    @property
    def num_rows(self) -> int:
        """T."""
        return len(self.token_ids)

    @property
    def num_step_seqs(self) -> int:
        """Sequences with step rows; they come first."""
        return self.kinds.count("step")


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """Rows of one sequence: its next ``token_ids``; the last ``num_logits`` of them get logits."""

    seq: SequenceState
    token_ids: Ints
    kind: RowKind
    num_logits: int


def build(windows: Sequence[Window], first_logits: int = 0) -> Batch:
    """Concatenate windows, those of step rows first; each starts at its committed length."""
    kinds = tuple(window.kind for window in windows)
    assert kinds == tuple(sorted(kinds, reverse=True)), "step rows come before prompt rows"
    rows = np.array([len(window.token_ids) for window in windows], np.int32)
    wanted = np.array([window.num_logits for window in windows], np.int32)
    starts = np.array([window.seq.seq_len for window in windows], np.int32)
    ends = np.cumsum(rows, dtype=np.int32)
    return Batch(
        token_ids=np.concatenate([window.token_ids for window in windows]),
        positions=_runs(starts, rows)[None],
        seqs=[window.seq for window in windows],
        rows=rows,
        kinds=kinds,
        logits_rows=_runs(ends - wanted, wanted),
        first_logits=first_logits,
    )


def _runs(starts: Ints, counts: Ints) -> Ints:
    """starts[0], starts[0] + 1, …: ``counts[i]`` numbers from each start on."""
    before = np.cumsum(counts, dtype=np.int32) - counts
    found: Ints = np.arange(counts.sum(), dtype=np.int32) + np.repeat(starts - before, counts)
    return found
