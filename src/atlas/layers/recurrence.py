"""What recurrent layers share: the rows of a step by kind."""

from __future__ import annotations

from dataclasses import dataclass

from atlas.layers.step import Array, StepBuffers


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """A step's step rows or its prompt rows, with the metadata of recurrent ops.

    Attributes
    ----------
    rows : slice
        Of the step's buffers.
    slots : int32 [N]
        Place of each sequence's state.
    cu_rows : int32 [N + 1]
        Counted from the first of these rows.
    positions : int32 [T]
    """

    rows: slice
    slots: Array
    cu_rows: Array
    positions: Array


def step_rows(step: StepBuffers) -> Rows | None:
    """The rows of generated and drafted tokens, which come first; None where a step has none."""
    if not step.step_rows:
        return None
    rows, seqs = slice(0, step.step_rows), step.step_seqs
    return Rows(rows, step.state_slots[:seqs], step.cu_rows[: seqs + 1], step.positions[rows])


def prompt_rows(step: StepBuffers) -> Rows | None:
    """The rows of prompt tokens; None where a step has none."""
    if step.step_rows == len(step.positions):
        return None
    rows, seqs = slice(step.step_rows, None), slice(step.step_seqs, None)
    return Rows(rows, step.state_slots[seqs], step.prompt_cu_rows, step.positions[rows])
