"""Draft: propose tokens for a verify, and keep the proposer in step with the sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from atlas.model.logits_view import LogitsView
    from atlas.model.records import Stream, TokenIds
    from atlas.model.sequence import SequenceState
    from atlas.request import Completion
    from atlas.sampling import SamplingParams


class DraftBatch(NamedTuple):
    """Drafts of several sequences: ids, and ln p of each as the drafter's own first choice.

    Both are one list per sequence, of equal shapes. A log-probability of 0.0 means that it was
    not measured: never prune on it.
    """

    drafts: list[list[int]]
    log_probs: list[list[float]]


class ModelDraft(Protocol):
    """Propose drafts with the model's own head, with itself, or with a block drafter.

    The order of a step is the contract: verify; save the hidden rows that proposing reads (they
    share buffers with the proposer and the next propose overwrites them); accept; propose at the
    sequence's length after the accept. Counts named ``num_drafts_accepted`` leave the anchor
    out, so they are rows kept − 1. ``seq`` and ``seqs`` name the sequences concerned and ``stream``
    the queue, None being the default stream.

    Members of a kind of proposer that is not there answer None, 0 or an empty list, or do nothing
    where it is said so; copying rows that do not exist raises ``InvalidArgumentError``.
    """

    @property
    def has_proposer(self) -> bool:
        """Whether anything can draft: a trained head, a block drafter, or self-speculation."""
        ...

    @property
    def has_self_speculative(self) -> bool:
        """Whether :meth:`decode_draft` can draft with the model's own layers."""
        ...

    def save_hidden(self, token_idx: int, *, stream: Stream | None = None) -> None:
        """Copy hidden row ``token_idx`` of the last forward to the proposer's input.

        It is the hidden *before* the final norm; the head has a norm of its own. Save before any
        propose.
        """
        ...

    def stash_hidden_rows(self, rows: Sequence[int], *, stream: Stream | None = None) -> None:
        """Copy hidden row ``rows[i]`` of the last batched verify to stash slot i.

        Before any propose of the step; one row per sequence, that of its last kept position.
        """
        ...

    def save_hidden_from_stash(self, i: int, *, stream: Stream | None = None) -> None:
        """Copy stash slot ``i`` to the proposer's input, as :meth:`save_hidden` would have."""
        ...

    def stash_catchup_rows(self, slot_rows: Sequence[tuple[int, int]]) -> None:
        """Copy rows of the last batched verify to catch-up slots; nothing without a head.

        Parameters
        ----------
        slot_rows
            (catch-up slot, verify row) pairs.
        """
        ...

    def catchup_batched(
        self,
        tokens: Sequence[TokenIds],
        first_slot: Sequence[int],
        first_pos: Sequence[int],
        seqs: Sequence[SequenceState],
    ) -> int:
        """Append one proposer row per accepted draft, before the next propose.

        Parameters
        ----------
        tokens
            The accepted drafts of each sequence.
        first_slot, first_pos
            Catch-up slot and position of each sequence's first one; the rest follow.

        Returns
        -------
        int
            Rows written; 0 where the proposer needs none.
        """
        ...

    def save_hidden_for_catchup(self, token_idx: int, pos: int) -> None:
        """Keep hidden row ``token_idx`` of a serial decode for catching up at position ``pos``.

        Does nothing where the proposer needs none.
        """
        ...

    def propose(
        self, token: int, position: int, seq: SequenceState, *, stream: Stream | None = None
    ) -> int | None:
        """Draft one token after ``token`` from the saved hidden; None without a proposer.

        Parameters
        ----------
        token
            The token to continue, accepted and not yet written: the next verify's anchor.
        position
            ``seq.seq_len`` after the accept.
        """
        ...

    def propose_multi(
        self,
        token: int,
        position: int,
        seq: SequenceState,
        num_drafts: int,
        grammar_mask: npt.NDArray[np.int32] | None = None,
        *,
        stream: Stream | None = None,
    ) -> list[int]:
        """Draft up to ``num_drafts`` tokens; the list may be shorter or empty.

        Parameters
        ----------
        token, position
            As for :meth:`propose`.
        num_drafts
            At most :meth:`slot_draft_capacity` of the sequence's slot.
        grammar_mask
            int32 ``[⌈V/32⌉]`` or ``[num_drafts, ⌈V/32⌉]``, bit set = allowed. One mask fits the
            matcher's present position only, so it allows one draft; more need one mask per draft.
            None leaves drafts free.
        """
        ...

    def propose_batched(
        self,
        tokens: TokenIds,
        positions: Sequence[int],
        stash_slots: Sequence[int],
        num_drafts: int,
        seqs: Sequence[SequenceState],
        *,
        stream: Stream | None = None,
    ) -> DraftBatch | None:
        """Draft for several sequences, the drafter's weights read once per draft position.

        Parameters
        ----------
        tokens, positions
            One per sequence, as for :meth:`propose`. Sequences under a grammar are left out.
        stash_slots
            Where :meth:`stash_hidden_rows` put each sequence's hidden.
        num_drafts
            Drafts per sequence.

        Returns
        -------
        DraftBatch or None
            None: unsupported. Then, for each sequence, re-save its stash row
            (:meth:`save_hidden_from_stash`) and call :meth:`propose_multi`.
        """
        ...

    @property
    def propose_batch_max(self) -> int:
        """Most sequences that one :meth:`propose_batched` takes; 1 = one sequence at a time."""
        ...

    def trim(
        self, seq: SequenceState, num_drafts_accepted: int, *, stream: Stream | None = None
    ) -> None:
        """Drop the proposer's rows of rejected drafts; ``verify.accept`` calls it.

        ``num_drafts_accepted`` is 0 when all were rejected.
        """
        ...

    def slot_draft_capacity(self, slot: int) -> int | None:
        """Most drafts that a verify may carry for the sequence in recurrent ``slot``.

        Set by the room for per-row states; a step takes the least over its sequences. None =
        unbounded.
        """
        ...

    def decode_draft(
        self, token: int, seq: SequenceState, *, stream: Stream | None = None
    ) -> LogitsView:
        """Decode ``token`` with recurrent layers skipped; draft logits ``[1, V]``.

        Advances by 1 and leaves recurrent state alone; rewind ``seq`` before it is verified.

        Raises
        ------
        CapabilityError
            If :attr:`has_self_speculative` is False.
        """
        ...

    def read_deferred_token(self) -> int | None:
        """Fetch the draft id that the last propose left on the device; None when there is none."""
        ...

    @property
    def gamma(self) -> int | None:
        """Trained block of the block drafter, its anchor included; None without one.

        It drafts ``gamma − 1`` tokens. The figure comes from the drafter's own weights, never
        from a flag.
        """
        ...

    @property
    def capture_band(self) -> int:
        """Scratch rows per sequence of a batched verify: ``gamma + 1``; 0 without block drafter.

        Sequence i of a batch captures from scratch row ``i * capture_band``.
        """
        ...

    def save_capture(self, token_idx: int, *, stream: Stream | None = None) -> None:
        """Capture row ``token_idx`` of every layer that the block drafter reads.

        After the verify's ids were read back. Nothing without a block drafter.
        """
        ...

    def commit_context(
        self, seq: SequenceState, num_committed: int, base_pos: int, scratch_row: int
    ) -> None:
        """Append captured rows to the tail of the block drafter's context.

        If the window would overflow it slides first. Nothing without a block drafter.

        Parameters
        ----------
        num_committed
            Rows to append, oldest first: the rows kept by the last verify.
        base_pos
            RoPE position of the first; the others follow. A position of the sequence, not a row
            of the context: the two differ once the window has slid.
        scratch_row
            First captured row: 0 for one sequence, ``i * capture_band`` for sequence i of a batch.
        """
        ...

    def serial_context_append(self, seq: SequenceState) -> None:
        """Append scratch row 0 at ``seq.seq_len − 1``: a token decoded while drafting rests.

        Call it for each such token, else the context has holes. The next propose then skips its
        own append (``seq.skip_next_decode_append``). Nothing without a block drafter.
        """
        ...

    def generate_speculative(
        self, prompt_tokens: TokenIds, params: SamplingParams, num_drafts: int
    ) -> Completion:
        """Generate for one prompt with drafts, verifies and accepts.

        The tokens are those of plain decoding. Without a proposer it decodes plainly, and the
        result says so.

        Parameters
        ----------
        prompt_tokens
            At least one id.
        params
            Sampling parameters.
        num_drafts
            Drafts per verify, at least 1; capped by what slots and drafter allow.
        """
        ...
