"""Who uses which slot of the recurrent pools, and what each of them holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from atlas._native.prefix_cache import PrefixCache
from atlas._native.slot_pool import SlotPool
from atlas.cache.recurrent import CHECKPOINT_ROWS, RecurrentPools
from atlas.errors import OutOfMemoryError
from atlas.layers.step import Array


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A kept state: its slot, and its label, the number of tokens truly absorbed."""

    slot: int
    length: int


@dataclass(slots=True)
class Checkpoint:
    """A state to roll back to, and how many step rows since then could be run again."""

    slot: int
    length: int
    num_kept: int = 0
    is_open: bool = True  # no prompt row came in between


class SnapshotSlots:
    """The slots of snapshots. The prefix cache's give way by value, spare ones before them."""

    def __init__(self, first: int, count: int) -> None:
        self.num_total = count
        self.cache: PrefixCache | None = None
        self._free = list(range(first + count - 1, first - 1, -1))
        self._spare: dict[int, Callable[[int], None]] = {}

    @property
    def num_used(self) -> int:
        """Slots that hold something."""
        self.collect()
        return self.num_total - len(self._free)

    def collect(self) -> None:
        """Take back slots whose prefix was evicted.

        What they hold stays until a slot is taken; nobody does that between a plan and its actions.
        """
        if self.cache is not None:
            self._free += self.cache.drain_snapshots()

    def take(self) -> int | None:
        """A slot to keep; None when every slot is in the same need."""
        self.collect()
        if not self._free and self._spare:
            slot, taken_away = next(iter(self._spare.items()))
            self.give(slot)
            taken_away(slot)
        if not self._free and self.cache is not None:
            self._free += self.cache.evict_snapshots(1)
        return self._free.pop() if self._free else None

    def take_free(self) -> int | None:
        """A slot that nobody has to give up."""
        self.collect()
        return self._free.pop() if self._free else None

    def make_spare(self, slot: int, taken_away: Callable[[int], None]) -> None:
        """Let a slot in use go when it is needed; ``taken_away(slot)`` is told."""
        self._spare[slot] = taken_away

    def make_kept(self, slot: int) -> None:
        """A spare slot is spare no longer."""
        self._spare.pop(slot, None)

    def give(self, slot: int) -> None:
        """Give a slot back."""
        self._spare.pop(slot, None)
        self._free.append(slot)


class StateSlots:
    """The recurrent pools of a model, and what their slots are used for.

    ``running`` slots belong to requests, or to sequences driven by hand; a scheduler shares them.
    """

    def __init__(self, pools: RecurrentPools) -> None:
        counts = pools.counts
        self.pools = pools
        self.running = SlotPool(counts.running)
        self.snapshots = SnapshotSlots(counts.running, counts.snapshots)
        self.checkpoints = list(range(counts.total - 1, counts.first_checkpoint - 1, -1))

    def keep(self, source: int) -> int | None:
        """A snapshot of slot ``source``: its slot, None where none is to be had."""
        slot = self.snapshots.take()
        if slot is not None:
            self.pools.copy(source, slot)
        return slot


@dataclass(slots=True, eq=False)
class HeldState:
    """The state of one sequence driven by hand; its slots go back once, however it ends.

    Attributes
    ----------
    slots : StateSlots
    slot : int, optional
        The live state's; None after it was given up.
    length : int
        Tokens that the live state has absorbed; −1 while a step runs, and after one that failed.
    checkpoint : Checkpoint, optional
    ring : dict
        Snapshots by their place in the ring.
    tail : Snapshot, optional
        For the prefix cache: the latest block boundary where the state was seen.
    """

    slots: StateSlots
    slot: int | None
    length: int = 0
    checkpoint: Checkpoint | None = None
    ring: dict[int, Snapshot] = field(default_factory=dict)
    tail: Snapshot | None = None

    @classmethod
    def claim(cls, slots: StateSlots) -> HeldState:
        """An empty state.

        Raises
        ------
        OutOfMemoryError
            No running slot is free.
        """
        slot = slots.running.claim()
        slots.pools.zero(slot)
        return cls(slots, slot)

    def absorbed(self, length: int, *, is_step: bool) -> None:
        """A step is over: the live state has absorbed ``length`` tokens."""
        self.length = length
        checkpoint = self.checkpoint
        if checkpoint is not None:
            checkpoint.is_open &= is_step
            if checkpoint.is_open:
                checkpoint.num_kept = min(length - checkpoint.length, CHECKPOINT_ROWS)

    def rows_to_keep(self, start: int, count: int) -> range:
        """Where the inputs of step rows ``start``, … go; short or empty: no more are kept."""
        checkpoint = self.checkpoint
        if checkpoint is None or not checkpoint.is_open:
            return range(0)
        behind = start - checkpoint.length
        end = max(behind, min(behind + count, CHECKPOINT_ROWS))
        return self.kept_rows()[behind:end]

    def kept_rows(self) -> range:
        """Where the inputs of rows behind the checkpoint are."""
        assert self.checkpoint is not None
        place = self.checkpoint.slot - self.slots.pools.counts.first_checkpoint
        return range(place * CHECKPOINT_ROWS, (place + 1) * CHECKPOINT_ROWS)

    def zero(self) -> None:
        """Back to a sequence that has absorbed nothing."""
        if self.slot is not None:
            self.slots.pools.zero(self.slot)
        self.length = 0

    def copy_from(self, source: int, length: int) -> None:
        """Make the state in slot ``source`` the live one."""
        assert self.slot is not None
        self.slots.pools.copy(source, self.slot)
        self.length = length

    def take_checkpoint(self) -> None:
        """Keep the live state in place of an earlier checkpoint.

        Raises
        ------
        OutOfMemoryError
            All checkpoint slots are in use.
        """
        assert self.slot is not None
        free = self.slots.checkpoints
        if self.checkpoint is None and not free:
            raise OutOfMemoryError(
                f"all {self.slots.pools.counts.checkpoints} checkpoints of recurrent state are in "
                "use; accept or free a sequence that holds one"
            )
        slot = self.checkpoint.slot if self.checkpoint is not None else free.pop()
        self.slots.pools.copy(self.slot, slot)
        self.checkpoint = Checkpoint(slot, self.length)

    def drop_checkpoint(self) -> None:
        """Give the checkpoint's slot back."""
        if self.checkpoint is not None:
            self.slots.checkpoints.append(self.checkpoint.slot)
            self.checkpoint = None

    def put_in_ring(self, place: int) -> None:
        """Snapshot the live state.

        Raises
        ------
        OutOfMemoryError
            No snapshot slot is to be had.
        """
        assert self.slot is not None
        old = self.ring.pop(place, None)
        if old is not None:
            self.slots.snapshots.give(old.slot)
        slot = self.slots.keep(self.slot)
        if slot is None:
            raise OutOfMemoryError(
                f"all {self.slots.snapshots.num_total} snapshot slots are in use"
            )
        self.ring[place] = Snapshot(slot, self.length)

    def keep_tail(self) -> None:
        """Remember the live state for the prefix cache, if there is a slot for it."""
        assert self.slot is not None
        self.drop_tail()
        slot = self.slots.keep(self.slot)
        if slot is not None:
            self.tail = Snapshot(slot, self.length)

    def drop_tail(self) -> None:
        """Give the tail's slot back."""
        if self.tail is not None:
            self.slots.snapshots.give(self.tail.slot)
            self.tail = None

    def cut(self, length: int) -> None:
        """Forget what was kept of tokens from ``length`` on."""
        for place, snapshot in list(self.ring.items()):
            if snapshot.length > length:
                self.slots.snapshots.give(self.ring.pop(place).slot)
        if self.tail is not None and self.tail.length > length:
            self.drop_tail()
        if self.checkpoint is not None and self.checkpoint.length > length:
            self.drop_checkpoint()
        elif self.checkpoint is not None:
            kept = length - self.checkpoint.length
            self.checkpoint.num_kept = min(self.checkpoint.num_kept, kept)

    def fork(self) -> HeldState:
        """A second state that stands where this one stands."""
        assert self.slot is not None
        child = HeldState(self.slots, self.slots.running.claim())
        child.copy_from(self.slot, self.length)
        return child

    def move_to(self, slot: int) -> None:
        """Into a slot whose owner gives it up; the old one is free."""
        assert self.slot is not None
        self.slots.pools.copy(self.slot, slot)
        self.slots.running.release(self.slot)
        self.slot = slot

    def read(self) -> list[Array]:
        """Copies of the live state's arrays."""
        assert self.slot is not None
        return self.slots.pools.read(self.slot)

    def write(self, parts: list[Array], length: int) -> None:
        """What :meth:`read` gave of a state that had absorbed ``length`` tokens."""
        assert self.slot is not None
        self.slots.pools.write(self.slot, parts)
        self.length = length

    def give_up_slot(self) -> None:
        """The live state's slot has another owner now."""
        self.slot = None

    def release(self) -> None:
        """Give everything back; idempotent."""
        self.cut(-1)
        if self.slot is not None:
            self.slots.running.release(self.slot)
            self.slot = None

    def __del__(self) -> None:
        self.release()
