"""Kept recurrent states of an engine's requests: for the prefix cache, and for rewinds.

A request's state is there between two steps only, so whatever is to be resumed later is copied when
the state passes by, behind the step that made it and before the next:

- where a prompt's chunk was cut for it (the tail boundary, a branch point): for the prefix cache,
  and for rewinds to the start of the answer;
- at block boundaries while tokens are generated: for rewinds, and the latest one, once the request
  ends, for the prompt that sends its answer back.

A snapshot's label is the number of tokens that the state has absorbed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from atlas._native.plan import ActionKind, EntryFlag, EntryKind, Plan
from atlas._native.prefix_cache import PrefixCache
from atlas._native.scheduler import Scheduler
from atlas.cache.state_slots import Snapshot, StateSlots
from atlas.errors import SequenceStateError
from atlas.model.ssm import RING_SLOTS


@dataclass(slots=True, eq=False)
class Ring:
    """A request's snapshots of its own.

    Attributes
    ----------
    start : Snapshot, optional
        The latest before the prompt's last token; spare: it goes when somebody needs its slot more.
    older : list of Snapshot
        At earlier block boundaries, oldest first; spare.
    boundary : Snapshot, optional
        At the latest one, for the prefix cache when the request ends.
    tokens : int32 array
        Those that ``boundary`` has absorbed.
    """

    start: Snapshot | None = None
    older: list[Snapshot] = field(default_factory=list)
    boundary: Snapshot | None = None
    tokens: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))

    @property
    def snapshots(self) -> list[Snapshot]:
        """All of them, shortest first."""
        ends = (self.start, *self.older, self.boundary)
        return [snapshot for snapshot in ends if snapshot is not None]

    def forget(self, slot: int) -> None:
        """A slot is no longer this request's."""
        if self.start is not None and self.start.slot == slot:
            self.start = None
        if self.boundary is not None and self.boundary.slot == slot:
            self.boundary = None
        self.older = [snapshot for snapshot in self.older if snapshot.slot != slot]


class Snapshots:
    """Takes, finds and drops them.

    Parameters
    ----------
    states : StateSlots
    scheduler : Scheduler
    cache : PrefixCache, optional
    block_size : int
    reuse_generated : bool
        Whether the cache may give out what generated tokens made.
    """

    def __init__(
        self,
        states: StateSlots,
        scheduler: Scheduler,
        cache: PrefixCache | None,
        block_size: int,
        *,
        reuse_generated: bool,
    ) -> None:
        self._states = states
        self._scheduler = scheduler
        self._cache = cache
        self._block_size = block_size
        self._reuse_generated = reuse_generated
        self._rings: dict[int, Ring] = {}
        self._offered: dict[tuple[int, int], Snapshot] = {}  # by step and handle, until the commit

    def begin(self, plan: Plan) -> None:
        """After a plan's actions: what a prompt starts from is its first way back."""
        for action in plan.actions:
            if action["kind"] == ActionKind.RESTORE_SNAPSHOT:
                handle = int(action["handle"])
                length = self._scheduler.matched(handle)[0]
                self._keep_start(handle, int(action["other"]), length)

    def keep(self, plan: Plan) -> None:
        """After a step, before the next: copy the states that stand where they will be of use.

        A step with drafts is left out: how many of its rows count is not known yet.
        """
        columns = ("handle", "kind", "flags", "start", "rows", "num_drafts", "slot")
        for handle, kind, flags, start, rows, num_drafts, slot in zip(
            *(plan.entries[name].tolist() for name in columns), strict=True
        ):
            length = start + rows
            if flags & EntryFlag.SNAPSHOT:
                kept = None if self._cache is None else self._states.keep(slot)
                if kept is not None:
                    self._offered[plan.step_id, handle] = Snapshot(kept, length)
                self._keep_start(handle, slot, length)
            elif kind == EntryKind.STEP and not num_drafts and length % self._block_size == 0:
                self._keep_boundary(handle, slot, length)

    def follow(self, plan: Plan) -> None:
        """After a commit: the prefix cache gets what was copied of rows that count."""
        columns = ("handle", "start", "rows", "reason", "dropped")
        for handle, start, rows, reason, dropped in zip(
            *(plan.entries[name].tolist() for name in columns), strict=True
        ):
            offered = self._offered.pop((plan.step_id, handle), None)
            if reason or dropped:
                if offered is not None:
                    self._states.snapshots.give(offered.slot)
                continue
            if offered is not None:
                matched, exact, _ = self._scheduler.matched(handle)
                tokens = self._scheduler.tokens(handle)
                self._attach(tokens, offered, is_generated=exact < matched)
            ring = self._rings.get(handle)
            if ring is not None and ring.boundary is not None:
                length = ring.boundary.length
                if length == start + rows and len(ring.tokens) < length:  # it ran ahead of them
                    ring.tokens = self._scheduler.tokens(handle)[:length]

    def fork(self, handle: int, twin: int) -> None:
        """Copy a request's state into its fork's slot, if that has one already."""
        if self._scheduler.slot(twin) >= 0:
            self._states.pools.copy(self._scheduler.slot(handle), self._scheduler.slot(twin))

    def rewind(self, handle: int, position: int) -> None:
        """Drop a request's tokens from ``position`` on; its state goes back to a snapshot.

        Within the first block it goes back to nothing.

        Raises
        ------
        SequenceStateError
            No snapshot is early enough.
        """
        standing = self._scheduler.sequence(handle).seq_len
        if position > standing:
            self._scheduler.rewind(handle, position)
            return
        kept = self._rings.get(handle, Ring()).snapshots
        early = [snapshot for snapshot in kept if snapshot.length < position]
        if not early and position > self._block_size:
            raise SequenceStateError(
                f"no snapshot of the recurrent state reaches back to position {position}; kept "
                f"are those after {', '.join(str(s.length) for s in kept) or 'no'} tokens"
            )
        self._return_to(handle, position, early[-1] if early else None)

    def rebuild(self, handle: int) -> bool:
        """A step ran and counts for nothing: absorb the tokens again, from a snapshot on.

        False where that would not give the same state.
        """
        standing = self._scheduler.sequence(handle).seq_len
        kept = self._rings.get(handle, Ring()).snapshots
        early = [snapshot for snapshot in kept if snapshot.length <= standing]
        matched, exact, _ = self._scheduler.matched(handle)
        if not early and exact < matched:
            return False
        position = len(self._scheduler.tokens(handle))
        self._return_to(handle, position, early[-1] if early else None)
        return True

    def _return_to(self, handle: int, position: int, snapshot: Snapshot | None) -> None:
        length = 0 if snapshot is None else snapshot.length
        self._scheduler.rewind(handle, position, state_len=length)
        slot = self._scheduler.slot(handle)
        if snapshot is None:
            self._states.pools.zero(slot)
        else:
            self._states.pools.copy(snapshot.slot, slot)
        ring = self._rings.get(handle, Ring())
        for later in ring.snapshots:
            if later.length >= position:
                self._drop(ring, later.slot)

    def end(self, handle: int) -> None:
        """A request has retired: its latest boundary is for the prompt that sends it back."""
        ring = self._rings.pop(handle, None)
        if ring is None:
            return
        boundary, ring.boundary = ring.boundary, None
        for snapshot in ring.snapshots:
            self._states.snapshots.give(snapshot.slot)
        if boundary is None:
            return
        if self._reuse_generated and len(ring.tokens) == boundary.length:
            self._attach(ring.tokens, boundary, is_generated=True)
        else:
            self._states.snapshots.give(boundary.slot)

    def _attach(self, tokens: NDArray[np.int32], snapshot: Snapshot, *, is_generated: bool) -> None:
        unused: int | None = snapshot.slot
        if self._cache is not None:
            unused = self._cache.attach_snapshot(
                tokens, snapshot.length, 0, snapshot.slot, is_generated
            )
        if unused is not None:
            self._states.snapshots.give(unused)

    def _keep_start(self, handle: int, slot: int, length: int) -> None:
        ring = self._rings.setdefault(handle, Ring())
        if ring.start is None:
            kept = self._states.snapshots.take_free()
            if kept is None:
                return
            self._states.snapshots.make_spare(kept, ring.forget)
        elif length > ring.start.length:
            kept = ring.start.slot
        else:
            return  # the prompt runs again
        self._states.pools.copy(slot, kept)
        ring.start = Snapshot(kept, length)

    def _keep_boundary(self, handle: int, slot: int, length: int) -> None:
        """The latest boundary; the one before becomes spare while there is room."""
        ring = self._rings.setdefault(handle, Ring())
        if ring.boundary is not None and length <= ring.boundary.length:
            return  # tokens that run again
        snapshots = self._states.snapshots
        kept = snapshots.take_free() if len(ring.older) < RING_SLOTS - 2 else None
        if kept is None and ring.older:
            kept = ring.older.pop(0).slot
            snapshots.make_kept(kept)
        if kept is not None and ring.boundary is not None:
            ring.older.append(ring.boundary)
            snapshots.make_spare(ring.boundary.slot, ring.forget)
        elif kept is None and ring.boundary is not None:
            kept = ring.boundary.slot
        elif kept is None:
            kept = snapshots.take()
        if kept is None:
            return
        self._states.pools.copy(slot, kept)
        ring.boundary = Snapshot(kept, length)
        ring.tokens = self._scheduler.tokens(handle)[:length]

    def _drop(self, ring: Ring, slot: int) -> None:
        ring.forget(slot)
        self._states.snapshots.give(slot)
