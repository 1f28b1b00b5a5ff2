"""KV blocks in host memory while their sequence is preempted, and copies between blocks."""

from __future__ import annotations

import numpy as np

from atlas._native.plan import ActionKind, Plan
from atlas.cache.kv import KvPools
from atlas.errors import AtlasError, CapabilityError, OutOfMemoryError
from atlas.layers.step import Array


class HostStore:
    """Carries out a plan's actions on the KV pools, in order."""

    def __init__(self, pools: KvPools) -> None:
        self._pools = pools
        self._spilled: dict[int, list[Array]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of spilled blocks."""
        return sum(part.nbytes for parts in self._spilled.values() for part in parts)

    def put(self, handle: int, parts: list[Array]) -> None:
        """Blocks of a saved session, for a RESTORE to come."""
        self._spilled[handle] = parts

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
            Handles of requests whose blocks could not be kept, and why.
        """
        lost: dict[int, AtlasError] = {}
        actions = plan.actions
        if not len(actions):
            return lost
        blocks = plan.action_blocks
        for action in actions:
            kind, handle = int(action["kind"]), int(action["handle"])
            first = int(action["first_block"])
            named = blocks[first : first + int(action["num_blocks"])].astype(np.int64)
            if kind == ActionKind.COPY_BLOCK:
                self._pools.copy_block(int(action["source"]), int(action["target"]))
            elif kind == ActionKind.SPILL:
                try:
                    self._spilled[handle] = self.read(named)
                except MemoryError as error:
                    lost[handle] = OutOfMemoryError(
                        f"no host memory for the {len(named)} KV blocks of a preempted request"
                    )
                    lost[handle].__cause__ = error
            elif kind == ActionKind.RESTORE:
                self._pools.write(named, self._spilled.pop(handle))
            elif kind != ActionKind.REQUEUE:
                raise CapabilityError(f"action {ActionKind(kind).name} needs recurrent state")
        return lost
