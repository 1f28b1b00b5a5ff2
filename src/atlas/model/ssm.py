"""Recurrent state: what lowering a sequence's length does not undo."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from atlas.errors import InvalidArgumentError, SequenceStateError
from atlas.model import recurrence
from atlas.model.prefix import cache_state, insert_blocks
from atlas.whole_number import whole_number

if TYPE_CHECKING:
    from atlas.cache.state_slots import HeldState
    from atlas.model.core import ModelCore
    from atlas.model.records import Stream
    from atlas.model.sequence import SequenceState

RING_SLOTS = 4


class ModelSsmState(Protocol):
    """Keep and restore the recurrent state of a hybrid's sequences.

    Recurrent layers hold one state matrix and one convolution tail per sequence, in the pool slot
    ``seq.slot``, overwritten by every token. Lowering ``seq_len`` rewinds paged KV but not this
    state: it has to be restored. A snapshot's label is the number of tokens truly absorbed.

    The group is None for pure-attention models. Asynchronous members queue copies on a secondary
    stream, which :meth:`sync_secondary` joins; nothing else may touch that state before.
    """

    def checkpoint(self, seq: SequenceState) -> None:
        """Keep ``seq``'s present state, so that :meth:`rollback` can return to it.

        One checkpoint a sequence; a later one replaces it. ``verify`` takes its own: call this
        by hand around steps that are not a verify.
        """
        ...

    def rollback(self, seq: SequenceState, rows_kept: int) -> None:
        """Restore the state after ``rows_kept`` rows since the checkpoint; 0 is the checkpoint.

        Exact: the bits are those that these rows alone leave. ``seq_len`` is not changed.

        Raises
        ------
        SequenceStateError
            If ``seq`` has no checkpoint.
        InvalidArgumentError
            If ``rows_kept`` exceeds the rows since then.
        """
        ...

    def start_checkpoint_async(self, seq: SequenceState) -> None:
        """Queue :meth:`checkpoint` of ``seq`` on the secondary stream and return at once.

        It may overlap a proposer's work. Join it before the next verify.
        """
        ...

    def start_rollback_and_checkpoint_async(self, seq: SequenceState, rows_kept: int) -> None:
        """Queue :meth:`rollback` to ``rows_kept`` rows of ``seq``, then a new checkpoint there.

        The reject path of a step. Join it before the next verify.
        """
        ...

    def sync_secondary(self) -> None:
        """Wait until the secondary stream has done everything that was queued on it."""
        ...

    def commit_accepted_prefix(self, seq: SequenceState, rows_kept: int, k: int) -> None:
        """Make the state after row ``rows_kept`` of a verify of ``k`` rows the live one.

        Nothing is copied when ``rows_kept == k``: the last row's state is live already. Where
        ``verify.fold_accepted`` has folded ``seq``'s slot, only the convolution tails are
        restored. Runs on the secondary stream.
        """
        ...

    @property
    def rollback_unsupported(self) -> bool:
        """Whether a layer keeps state that no snapshot restores; then a rewind is refused."""
        ...

    @property
    def rollback_ring_slots(self) -> int:
        """Snapshots in a sequence's ring: the cap on rewinds plus 1; 0 = no ring."""
        ...

    def save_snapshot(self, seq: SequenceState, ring_slot: int) -> None:
        """Copy ``seq``'s live state into its ring, for rewinding further than one verify.

        Parameters
        ----------
        seq
            Its state is final for its ``seq_len``, which becomes the snapshot's label.
        ring_slot
            0 … :attr:`rollback_ring_slots` − 1; what it held is overwritten.
        """
        ...

    def restore_snapshot(self, seq: SequenceState, ring_slot: int) -> None:
        """Make the snapshot in ``ring_slot`` the live state of ``seq``.

        Rewind ``seq`` to the snapshot's label afterwards.

        Raises
        ------
        SequenceStateError
            If this sequence saved nothing there.
        """
        ...

    def prefix_checkpoint(self, seq: SequenceState) -> None:
        """While decoding, give the prefix cache a block-aligned snapshot of ``seq``.

        Called after each step, once the state is final (after accept). It acts only at snapshot
        intervals; the next turn then resumes from decoded state instead of prefilling it again.
        """
        ...

    def normalize(self, seq: SequenceState, *, stream: Stream | None = None) -> None:
        """Clamp the norm of ``seq``'s state matrices between prefill chunks, if switched on.

        Off by default, and then a no-op: the reference models do not clamp. When on, it acts at
        multiples of the recurrence chunk only, so that results do not depend on the split, and
        every rank acts alike. ``stream`` None is the default stream.
        """
        ...

    @property
    def snapshot_occupancy(self) -> tuple[int, int] | None:
        """(used, total) slots of the snapshot pool; None without a pool."""
        ...


class RecurrentState(ModelSsmState):
    """Recurrent state in the slots of one set of pools.

    A copy is done when a call returns (CPU) or stands on the stream before later steps (CUDA): the
    asynchronous members are the others under another name, and :meth:`sync_secondary` finds nothing
    to wait for.
    """

    rollback_unsupported = False
    rollback_ring_slots = RING_SLOTS

    def __init__(self, core: ModelCore) -> None:
        self._core = core

    def checkpoint(self, seq: SequenceState) -> None:
        self._at_rest(seq).take_checkpoint()

    def rollback(self, seq: SequenceState, rows_kept: int) -> None:
        core = self._core
        core.enter(seq)
        seq.native.check()
        checkpoint = _held(seq).checkpoint
        if checkpoint is None:
            raise SequenceStateError("this sequence has no checkpoint to roll back to")
        recurrence.roll_back(
            core, seq, whole_number("rows_kept", rows_kept, 0, checkpoint.num_kept)
        )

    def start_checkpoint_async(self, seq: SequenceState) -> None:
        self.checkpoint(seq)

    def start_rollback_and_checkpoint_async(self, seq: SequenceState, rows_kept: int) -> None:
        self.rollback(seq, rows_kept)
        _held(seq).take_checkpoint()

    def sync_secondary(self) -> None:
        self._core.enter()

    def commit_accepted_prefix(self, seq: SequenceState, rows_kept: int, k: int) -> None:
        core = self._core
        core.enter(seq)
        if not seq.verify_rows or k != seq.verify_rows:
            raise SequenceStateError(
                f"k is {k}, but a verify of {seq.verify_rows} rows awaits its accept"
            )
        rows_kept = whole_number("rows_kept", rows_kept, 0, k)
        if _held(seq).length != seq.seq_len - k + rows_kept:
            recurrence.roll_back(core, seq, rows_kept)

    def save_snapshot(self, seq: SequenceState, ring_slot: int) -> None:
        held = self._at_rest(seq)
        held.put_in_ring(whole_number("ring_slot", ring_slot, 0, RING_SLOTS - 1))
        seq.snapshot_ring_position = (ring_slot + 1) % RING_SLOTS

    def restore_snapshot(self, seq: SequenceState, ring_slot: int) -> None:
        self._core.enter(seq)
        seq.native.check()
        held = _held(seq)
        snapshot = held.ring.get(whole_number("ring_slot", ring_slot, 0, RING_SLOTS - 1))
        if snapshot is None:
            raise SequenceStateError(f"this sequence saved no snapshot in ring slot {ring_slot}")
        held.copy_from(snapshot.slot, snapshot.length)

    def prefix_checkpoint(self, seq: SequenceState) -> None:
        core = self._core
        held = self._at_rest(seq)
        if core.prefix_cache is None or not seq.seq_len or seq.seq_len % core.pools.block_size:
            return
        insert_blocks(core, seq)
        cache_state(core, seq, held)

    def normalize(self, seq: SequenceState, *, stream: Stream | None = None) -> None:
        """Nothing to do: no model of ours clamps its state."""
        self._core.enter(seq)
        self._core.check_stream(stream)

    @property
    def snapshot_occupancy(self) -> tuple[int, int] | None:
        self._core.require_alive()
        states = self._core.states
        assert states is not None
        if not states.snapshots.num_total:
            return None
        return states.snapshots.num_used, states.snapshots.num_total

    def _at_rest(self, seq: SequenceState) -> HeldState:
        """The state of a sequence that stands where its tokens end, with no verify pending."""
        self._core.enter(seq)
        seq.native.check()
        recurrence.require_state(seq)
        return _held(seq)


def _held(seq: SequenceState) -> HeldState:
    held = seq.held
    if held is None or held.slot is None:
        raise InvalidArgumentError("this sequence has no recurrent slot")
    return held
