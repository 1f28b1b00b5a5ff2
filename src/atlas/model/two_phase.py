"""A whole prompt, layer by layer: each recurrence runs over all of it in one launch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from atlas.layers.gated_delta import GatedDelta
from atlas.layers.mamba2 import Mamba2
from atlas.layers.step import StepBuffers, StepShape

if TYPE_CHECKING:
    from atlas.model.core import Ints, ModelCore
    from atlas.model.sequence import SequenceState

_LONG = ("token_ids", "positions", "slots", "hidden", "mixed", "convolved", "recurred")


class LongPrompt:
    """The rows of one prompt from position 0 on, of which a step's buffers hold a piece only.

    What passes between the parts of a recurrent block is as long as the prompt; all else is the
    model's workspace, used piece after piece.
    """

    def __init__(self, core: ModelCore, ids: Ints, seq: SequenceState) -> None:
        assert seq.held is not None
        size, count = core.pools.block_size, len(ids)
        whole = core.buffers
        positions = np.arange(count, dtype=np.int32)
        block, offset = np.divmod(positions, size)
        self._arrays = {
            name: np.empty((count, *getattr(whole, name).shape[1:]), getattr(whole, name).dtype)
            for name in _LONG
        }
        self._arrays["token_ids"][:] = ids
        self._arrays["positions"][:] = positions
        self._arrays["slots"][:] = seq.block_table[block] * size + offset
        seq.native.write_block_table(whole.block_tables[0])
        whole.state_slots[0] = seq.held.slot
        self._buffers = whole
        self._count = count

    def whole(self) -> StepBuffers:
        """All rows: what ``recur`` reads and writes; the rest of the buffers is too short."""
        view = self._buffers.view(StepShape.prompt(1, 0))
        return _with(view, self._arrays, self._count)

    def piece(self, start: int, end: int) -> StepBuffers:
        """Rows ``start`` … ``end`` − 1; the last row has logits."""
        rows, is_last = end - start, end == self._count
        view = self._buffers.view(StepShape.prompt(rows, int(is_last)))
        view.logits_rows[:] = rows - 1
        arrays = {name: array[start:end] for name, array in self._arrays.items()}
        return _with(view, arrays, rows)


def _with(view: StepBuffers, arrays: dict[str, Any], rows: int) -> StepBuffers:
    cu_rows, first = np.array([0, rows], np.int32), rows - len(view.logits_rows)
    first_rows = np.array([first], np.int32)
    return replace(view, **arrays, prompt_cu_rows=cu_rows, prompt_first_rows=first_rows)


def run(core: ModelCore, ids: Ints, seq: SequenceState, piece_rows: int) -> None:
    """One sweep for a prompt that an empty sequence has blocks for; its logits in arena row 0."""
    ops, network, prompt = core.runtime.ops, core.network, LongPrompt(core, ids, seq)
    pieces = [
        prompt.piece(start, min(start + piece_rows, len(ids)))
        for start in range(0, len(ids), piece_rows)
    ]
    for piece in pieces:
        network.embed(ops, piece)
    for block in network.of_all_rows(pieces[0]):
        if isinstance(block, GatedDelta | Mamba2):
            for piece in pieces:
                block.project(ops, piece)
            block.recur(ops, prompt.whole())
            for piece in pieces:
                block.finish(ops, piece)
        else:
            for piece in pieces:
                block.forward(ops, piece)
    for piece in pieces:
        network.finish(ops, piece)
