"""State in host memory while its sequence is preempted, and moves between blocks and slots."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from atlas._native.plan import ActionKind, Plan
from atlas.cache.kv import KvPools
from atlas.cache.recurrent import RecurrentPools
from atlas.errors import AtlasError, OutOfMemoryError
from atlas.layers.step import Array


class Spilled(NamedTuple):
    """One sequence in host memory: its blocks, and its recurrent state (empty without one)."""

    blocks: list[Array]
    state: list[Array]


class HostStore:
    """Carries out a plan's actions on the pools, in order."""

    def __init__(self, pools: KvPools, recurrent: RecurrentPools | None = None) -> None:
        self._pools = pools
        self._recurrent = recurrent
        self._spilled: dict[int, Spilled] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of spilled blocks and states."""
        return sum(
            part.nbytes for kept in self._spilled.values() for parts in kept for part in parts
        )

    def put(self, handle: int, blocks: list[Array], state: list[Array]) -> None:
        """What a saved session holds, for a RESTORE to come."""
        self._spilled[handle] = Spilled(blocks, state)

    def read(self, blocks: Array) -> list[Array]:
        """Copies of blocks of all layers, as the pools give them."""
        return list(self._pools.read(blocks))

    def forget(self, handle: int) -> None:
        """A request ended: drop what is still spilled of it."""
        self._spilled.pop(handle, None)

    def perform(self, plan: Plan) -> dict[int, AtlasError]:
        """What must happen before the plan's step runs.

        Returns
        -------
        dict
            Handles of requests whose state could not be kept, and why.
        """
        lost: dict[int, AtlasError] = {}
        actions = plan.actions
        if not len(actions):
            return lost
        blocks = plan.action_blocks
        for action in actions:
            kind, handle = int(action["kind"]), int(action["handle"])
            source, target = int(action["source"]), int(action["target"])
            first = int(action["first_block"])
            named = blocks[first : first + int(action["num_blocks"])].astype(np.int64)
            if kind == ActionKind.COPY_BLOCK:
                self._pools.copy_block(source, target)
            elif kind == ActionKind.SPILL:
                try:
                    self._spilled[handle] = Spilled(self.read(named), self._read_state(source))
                except MemoryError as error:
                    lost[handle] = OutOfMemoryError(
                        f"no host memory for the {len(named)} KV blocks of a preempted request"
                    )
                    lost[handle].__cause__ = error
            elif kind == ActionKind.RESTORE:
                kept = self._spilled.pop(handle)
                self._pools.write(named, kept.blocks)
                if self._recurrent is not None:
                    self._recurrent.write(target, kept.state)
            elif kind != ActionKind.REQUEUE:
                self._fill_slot(kind, source, target, int(action["other"]))
        return lost

    def _read_state(self, slot: int) -> list[Array]:
        return [] if self._recurrent is None else self._recurrent.read(slot)

    def _fill_slot(self, kind: int, source: int, target: int, other: int) -> None:
        assert self._recurrent is not None, "slots are planned for recurrent layers only"
        if kind == ActionKind.ZERO_SLOT:
            self._recurrent.zero(target)
        else:
            snapshot = kind == ActionKind.RESTORE_SNAPSHOT
            self._recurrent.copy(other if snapshot else source, target)
