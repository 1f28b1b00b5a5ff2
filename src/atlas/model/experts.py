"""Experts: one model over several ranks, driven by the head's commands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from atlas.model.records import TokenIds
    from atlas.model.sequence import SequenceState


class ModelEp(Protocol):
    """Mirror the head's steps on every worker rank.

    Rank 0 is the head and broadcasts; the other ranks are workers. A command opens with
    (sequence id, word), and follow-up words of the same command come without the id. Decode and
    prefill are separate commands: a mixed forward has none.

    A command that was received and failed is ``ExpertCommandFailed``, which keeps the class and
    message of its cause through any wrapping; the head answers that request with the same error.
    The head never waits for ever on a lost worker, and health says that it is lost.
    """

    def worker_step(self, slots: list[SequenceState | None]) -> bool:
        """Receive one command and run it in the addressed slot; workers only.

        Parameters
        ----------
        slots
            One entry per sequence that the head may run; None where none is. Updated in place.

        Returns
        -------
        bool
            False when the head asked the worker to shut down.

        Raises
        ------
        ExpertCommandFailed
            The command failed: log it and stay up.
        InvalidArgumentError
            A sequence id outside ``slots``; no slot was touched.
        AtlasError
            Anything else is a failed receive: the link is gone and the worker ends.
        """
        ...

    @property
    def is_parallel(self) -> bool:
        """Whether the model spans several ranks; mixed forwards are ruled out then."""
        ...

    def broadcast_command(self, cmd: int) -> None:
        """Send the follow-up word ``cmd`` of an open command to every worker; head only."""
        ...

    def broadcast_command_for(self, seq_id: int, cmd: int) -> None:
        """Open a command: send (``seq_id``, ``cmd``) to every worker; head only.

        Without :attr:`protocol_v2` the id is not sent.
        """
        ...

    @property
    def protocol_v2(self) -> bool:
        """Whether commands carry their sequence id; slots are then pinned, without compaction."""
        ...

    def broadcast_tokens(self, tokens: TokenIds) -> list[int]:
        """Send ``tokens`` to every worker in one collective; return them as every rank has them."""
        ...
