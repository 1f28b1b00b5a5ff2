"""Verify: run drafted tokens as K rows of a sequence, then keep some of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from atlas.errors import InvalidArgumentError, SequenceStateError
from atlas.model.batch import Window, build
from atlas.model.capability import Unavailable
from atlas.whole_number import whole_number

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from atlas.model.core import ModelCore
    from atlas.model.logits_view import LogitsView
    from atlas.model.records import LogitsMode, Stream, TokenIds
    from atlas.model.sequence import SequenceState


class VerifyResult(NamedTuple):
    """What a verify returns.

    ``argmax`` is int32 ``[rows]``: the greedy next id after each row, or ``records.NON_FINITE``.
    ``logits`` is the view of those rows (None when none were asked for), which sampling needs.
    """

    argmax: npt.NDArray[np.int32]
    logits: LogitsView | None


class ModelVerify(Protocol):
    """Check drafts: K tokens of a sequence in one sweep, each row as serial decoding makes it.

    ``tokens`` of a ``seq`` are [anchor, draft 0, …, draft K − 2]; the anchor is the last accepted
    token, not yet written. A verify appends them, writes K positions, advances by K and keeps what
    a rollback needs. Row r is **bitwise** the row that serial decoding would have produced.

    Counts of rows kept include the anchor: 1 … K, and 0 abandons the verify. Exactly one of
    :meth:`accept` and ``lifecycle.free_sequence`` may follow a verify of a sequence.

    ``logits`` is "all" (K rows), "last" or "none"; ``stream`` None is the default stream.
    Verifies raise as forwards do, and ``SequenceStateError`` while a verify awaits its accept. A
    verify that raises has advanced nobody.
    """

    def decode_verify(
        self,
        tokens: TokenIds,
        seq: SequenceState,
        *,
        logits: LogitsMode = "all",
        stream: Stream | None = None,
    ) -> VerifyResult:
        """Verify one sequence.

        Parameters
        ----------
        tokens
            K ≥ 1 ids.
        seq
            Holds at least one position.
        """
        ...

    def graphed(
        self,
        tokens: TokenIds,
        seq: SequenceState,
        *,
        logits: LogitsMode = "all",
        stream: Stream | None = None,
    ) -> VerifyResult:
        """Verify one ``seq`` like :meth:`decode_verify`, as a captured graph.

        A graph is keyed by batch rung and K only and serves any sequence and any K ``tokens``.
        With a block drafter, its context is captured at row 0, the confirmed token, never at a
        draft that may be rejected. Backends without graphs run it eagerly and disclose that.
        """
        ...

    def can_batch(self, ks: Sequence[int]) -> bool:
        """Whether :meth:`batched` takes ``len(ks)`` sequences with ``ks[i]`` rows each.

        When False, verify one sequence at a time.
        """
        ...

    def batched(
        self,
        tokens: TokenIds,
        ks: Sequence[int],
        seqs: Sequence[SequenceState],
        *,
        write_on_accept: bool = False,
        logits: LogitsMode = "all",
        stream: Stream | None = None,
    ) -> VerifyResult:
        """Verify several sequences in one sweep that reads every weight matrix once.

        Never a loop over sequences: their rows would overwrite each other in the arena.

        Parameters
        ----------
        tokens
            Σ ``ks`` ids, sequence after sequence; sequence i's rows start at Σ ``ks[:i]``.
        ks
            Rows of each sequence, at least 1, not necessarily equal.
        seqs
            Distinct sequences; each advances by its own ``ks[i]``, all or none.
        write_on_accept
            Keep recurrent state where it was; :meth:`fold_accepted` writes it for the rows kept.

        Returns
        -------
        VerifyResult
            Rows in the order of ``tokens``; with "last" one row per sequence.

        Raises
        ------
        CapabilityError
            If :meth:`can_batch` says no.
        """
        ...

    def fold_accepted(self, slots: Sequence[int], rows_kept: Sequence[int], k_rows: int) -> bool:
        """Write the recurrent state of a ``write_on_accept`` verify for the rows that were kept.

        Parameters
        ----------
        slots
            Recurrent slots in the verify's batch order.
        rows_kept
            Rows kept in each, anchor included.
        k_rows
            Rows per sequence of that verify.

        Returns
        -------
        bool
            True: the state matrices are committed here, and ``ssm.commit_accepted_prefix`` then
            restores only the convolution tails of these slots. False: nothing was folded.
        """
        ...

    def accept(self, seq: SequenceState, rows_kept: int) -> None:
        """End the verify of ``seq``, keeping its first ``rows_kept`` rows.

        The only way to end one. ``seq_len`` and ``tokens`` are lowered to the kept rows, surplus
        blocks are returned, the recurrent state after the last kept row is selected and the
        proposer's state is trimmed. In an engine, commit moves the counters and the rest runs as
        here. Afterwards the sequence is bitwise what decoding those rows serially leaves.

        Raises
        ------
        InvalidArgumentError
            If ``rows_kept`` is outside 0 … K; the verify still awaits its accept.
        SequenceStateError
            If no verify is pending.
        """
        ...


class DenseVerify(ModelVerify):
    """Verify for models whose only state is paged KV: a rollback lowers the length.

    Where the circuit runs graphs, steps of drafts are graphs as steps of one row are, so that
    ``decode_verify`` and ``graphed`` are one: the same bits, and the circuit's disclosure of both.
    """

    batched = Unavailable("verify")

    def __init__(self, core: ModelCore) -> None:
        self._core = core

    def decode_verify(
        self,
        tokens: TokenIds,
        seq: SequenceState,
        *,
        logits: LogitsMode = "all",
        stream: Stream | None = None,
    ) -> VerifyResult:
        core = self._core
        core.enter(seq)
        core.check_stream(stream)
        ids = core.token_array(tokens)
        seq.native.check()
        if not seq.seq_len:
            raise SequenceStateError("verify needs a sequence with at least one position")
        if logits not in ("all", "last", "none"):
            raise InvalidArgumentError(f"logits is {logits!r}; allowed: 'last', 'all', 'none'")
        k = len(ids)
        core.require_length(seq.seq_len + k)
        window = Window(seq, ids, "step", k)
        core.require_rows([window])
        first = core.place_logits(0, k)
        with core.room([seq], [k]):
            core.run(build([window], first))
            view = core.arena.claim(first, k)
            argmax = core.argmax(view)
            core.commit(seq, ids, "step", verify_rows=k)
        if logits == "all":
            return VerifyResult(argmax, view)
        return VerifyResult(argmax, view[k - 1] if logits == "last" else None)

    def graphed(
        self,
        tokens: TokenIds,
        seq: SequenceState,
        *,
        logits: LogitsMode = "all",
        stream: Stream | None = None,
    ) -> VerifyResult:
        return self.decode_verify(tokens, seq, logits=logits, stream=stream)

    def can_batch(self, ks: Sequence[int]) -> bool:
        return False

    def fold_accepted(self, slots: Sequence[int], rows_kept: Sequence[int], k_rows: int) -> bool:
        return False

    def accept(self, seq: SequenceState, rows_kept: int) -> None:
        self._core.enter(seq)
        seq.native.accept(whole_number("rows_kept", rows_kept, 0))
