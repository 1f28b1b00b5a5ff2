"""Recurrent states around a step: where they are, where they must stand, and the way back."""

from __future__ import annotations

from itertools import pairwise
from math import lcm
from typing import TYPE_CHECKING

from atlas.errors import InvalidArgumentError, SequenceStateError
from atlas.layers.step import StepBuffers, StepShape

if TYPE_CHECKING:
    from atlas.model.batch import Batch
    from atlas.model.core import ModelCore
    from atlas.model.sequence import SequenceState


def require_state(seq: SequenceState) -> None:
    """Raise unless a sequence's recurrent state, if there is one, stands where it does."""
    held = seq.held
    if held is None:
        return
    if held.slot is None:
        raise SequenceStateError("this sequence gave up its recurrent slot; free it")
    if held.length != seq.seq_len and (seq.seq_len or seq.prefix is None):
        raise SequenceStateError(
            f"the recurrent state stands at {held.length}, the sequence at {seq.seq_len}; "
            "rewind it there first"
        )


def place(inputs: StepBuffers, batch: Batch) -> bool:
    """Write where the batch's states are; True when rows behind a checkpoint keep their inputs."""
    start, keeps = 0, False
    inputs.kept_rows[: batch.num_rows] = -1
    for i, (seq, count) in enumerate(zip(batch.seqs, batch.rows.tolist(), strict=True)):
        held = seq.held
        assert held is not None
        inputs.state_slots[i] = held.slot
        if batch.kinds[i] == "step":
            kept = held.rows_to_keep(seq.seq_len, count)
            inputs.kept_rows[start : start + len(kept)] = kept
            keeps |= len(kept) > 0
        held.length = -1  # until the step is over
        start += count
    return keeps


def roll_back(core: ModelCore, seq: SequenceState, rows_kept: int) -> None:
    """Make the state after ``rows_kept`` rows behind a sequence's checkpoint the live one.

    The recurrent layers run again over the inputs that those rows left, in the same order. A
    sequence for which this fails is marked failed.
    """
    held, inputs = seq.held, core.runtime.inputs(core.buffers)
    assert held is not None
    assert held.checkpoint is not None
    start, rows, most = held.checkpoint.length, held.kept_rows()[:rows_kept], core.limits.max_rows
    held.copy_from(held.checkpoint.slot, start)
    try:
        for at in range(0, rows_kept, most):
            part = rows[at : at + most]
            count = len(part)
            if at:
                inputs = core.runtime.inputs(core.buffers)
            inputs.state_slots[0] = held.slot
            inputs.cu_rows[:2] = (0, count)
            inputs.positions[:count] = range(start + at, start + at + count)
            inputs.kept_rows[:count] = part
            shape = StepShape(count, 1, 0, 0, count, 1, count, keeps_inputs=True)
            core.runtime.run(core.replay, core.buffers, shape)
    except BaseException:
        seq.native.fail()
        raise
    held.length = start + rows_kept


def require_split(core: ModelCore, end: int, num_tokens: int) -> None:
    """Raise when a window ends where a chunked recurrence could not go on with the same bits."""
    unit = core.chunk_unit
    if end % unit and end < num_tokens // unit * unit:
        raise InvalidArgumentError(
            f"the window ends at {end}; allowed: multiples of {unit}, the recurrence's chunk, and "
            f"anything from {num_tokens // unit * unit} on"
        )


def tail_unit(core: ModelCore) -> int:
    """Positions at whose multiples a prompt's snapshots are: ends of blocks and of chunks."""
    return lcm(core.pools.block_size, core.chunk_unit)


def tail_split(core: ModelCore, num_tokens: int) -> int:
    """Where the last chunk of a prompt should start, so that a snapshot is of use; 0: nowhere.

    The boundary before the last token: a longer prompt matches so far, and what a chat's template
    put behind it does not come again.
    """
    unit = tail_unit(core)
    return 0 if core.states is None else (num_tokens - 1) // unit * unit


def pieces(core: ModelCore, start: int, end: int, split: int) -> list[tuple[int, int]]:
    """Positions ``start`` … ``end`` − 1 in steps that fit, one of which ends at ``split``.

    The others end at multiples of the recurrence's chunk.
    """
    unit, most = core.chunk_unit, core.limits.piece_rows
    steps = []
    for first, last in pairwise([start, split, end] if start < split < end else [start, end]):
        at = first
        while at < last:
            stop = min(last, (at + most) // unit * unit)
            assert stop > at, "a step holds a chunk of the recurrence"
            steps.append((at, stop))
            at = stop
    return steps


def keep_tail(core: ModelCore, seq: SequenceState) -> None:
    """Remember a state that stands at a block's end, for the prefix cache."""
    if core.prefix_cache is not None and seq.held is not None:
        seq.held.keep_tail()
