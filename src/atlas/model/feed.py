"""Device feed: launch a step whose input ids the previous step has yet to choose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from atlas.model.logits_view import LogitsView
    from atlas.model.records import Event, FeedSource, RowExclusion, Stream
    from atlas.model.sequence import SequenceState


class ModelDeviceFeed(Protocol):
    """Keep the argmax of a step on the device and let the next step read it there.

    A fed step moves no counter: the scheduler's core advances its sequences once the step before
    has been committed, or returns the blocks of a step that is discarded. ``seq`` and ``seqs``
    name sequences; ``stream`` is where work is queued, None being the default stream.

    Raises
    ------
    StaleHandleError
        An event or pinned buffer that was released, or that this model did not make.
    """

    @property
    def supported(self) -> bool:
        """Whether this model and backend can feed; when False the step methods raise."""
        ...

    def decode_batch_fed(
        self,
        sources: Sequence[FeedSource],
        seqs: Sequence[SequenceState],
        *,
        stream: Stream | None = None,
    ) -> LogitsView:
        """Run a decode step whose ids are read on the device.

        Allocates the block, if needed, and writes position ``seq_len``, but appends no token and
        advances nothing.

        Parameters
        ----------
        sources
            One per sequence: an id of the host's, or the cell of a row of the previous step.

        Returns
        -------
        LogitsView
            ``[B, V]``; row i is ``seqs[i]``'s.
        """
        ...

    def argmax_batch_to_feed(
        self,
        logits: LogitsView,
        masks: Sequence[RowExclusion],
        dst: npt.NDArray[np.uint32],
        event: Event,
        *,
        stream: Stream | None = None,
    ) -> None:
        """Queue the argmax of each row into its feed cell and into ``dst``; never synchronises.

        Parameters
        ----------
        logits
            The rows of a decode step.
        masks
            One per row: ids that its argmax must not choose.
        dst
            uint32 ``[rows]`` in pinned memory; valid only once ``event`` is done.
        event
            Recorded behind the copy.
        """
        ...

    def reserve_decode_block(self, seq: SequenceState) -> int:
        """Allocate the block of the next decode position, if it is missing.

        Returns
        -------
        int
            Blocks added, 0 or 1.

        Raises
        ------
        KvExhausted
            If the pool is empty.
        """
        ...

    def release_decode_blocks(self, seq: SequenceState, n: int) -> None:
        """Return the last ``n`` blocks of the table, those that a discarded step had reserved."""
        ...

    def step_settled(self) -> None:
        """Note that a fed step is done on the device; the graph it replayed may be evicted."""
        ...

    def event_query(self, event: Event) -> bool:
        """Whether the work recorded in ``event`` is done; never blocks."""
        ...

    def event_synchronize(self, event: Event) -> None:
        """Block the calling thread until the work recorded in ``event`` is done."""
        ...

    def destroy_event(self, event: Event) -> None:
        """Release ``event``; later uses of it raise."""
        ...

    def copy_to_host_async(
        self, src: LogitsView, dst: npt.NDArray[Any], stream: Stream | None = None
    ) -> None:
        """Queue a copy of ``src`` to the host and return at once.

        Parameters
        ----------
        src
            Rows of the arena, in the dtype they are stored in.
        dst
            A buffer of exactly that many bytes; keep it alive and unread until the stream is
            synchronised. Pinned memory lets the copy overlap.
        """
        ...

    def alloc_pinned(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Return ``num_bytes`` of page-locked host memory, zeroed.

        Raises
        ------
        OutOfMemoryError
            If the system refuses to lock that much.
        """
        ...

    def free_pinned(self, buffer: npt.NDArray[np.uint8]) -> None:
        """Release a ``buffer`` of :meth:`alloc_pinned`; arrays that view it become invalid."""
        ...
