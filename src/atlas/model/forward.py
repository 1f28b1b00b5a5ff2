"""Forward passes: prefill, decode and their mixtures, each one sweep over the weights.

Long because contract and implementation of a group stay in one file; two thirds are docstrings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from atlas.errors import InvalidArgumentError
from atlas.model import recurrence
from atlas.model.batch import Window, build
from atlas.model.capability import Unavailable
from atlas.model.prefix import begin, matched_tokens
from atlas.model.records import MixedBatchResult, MixedForwardResult
from atlas.whole_number import whole_number

if TYPE_CHECKING:
    from atlas.model.core import ModelCore
    from atlas.model.logits_view import LogitsView
    from atlas.model.records import (
        BeamHypothesis,
        BeamRequest,
        LogitsMode,
        PrefillSlice,
        Stream,
        TokenIds,
    )
    from atlas.model.sequence import SequenceState


class ModelForward(Protocol):
    """Run tokens through the model.

    Every method builds a ``Batch`` for one internal ``run(batch)``. Before that it checks its
    arguments and calls ``lifecycle.reserve`` for each ``seq``; after it, it advances the
    sequences. A call that raises has advanced none of them, or has marked them failed.

    A prefill writes prompt tokens (``seq.prompt_len`` grows with it), a decode writes a step
    token; both append to ``seq.tokens``, so that ``len(seq.tokens) == seq.seq_len`` between
    calls. Row r depends on its own sequence only, bitwise, whoever shares the sweep.

    Logits are float32 or bfloat16 rows of an arena: the returned view is valid until a later
    call writes its rows. ``logits`` says which rows are made: "last" those of a prompt's last
    position, "all" those of every position in the window, packed in order (refused beyond the
    arena's rows), "none" no row, and then None is returned in the view's place.

    ``stream`` is where the work is queued; None is the model's default stream. Reading a view
    from another stream needs an event in between.

    Raises
    ------
    InvalidArgumentError
        Any method: no tokens, an id outside the vocabulary, lengths that disagree, a sequence
        given twice, a window outside its prompt, rows that do not fit the arena.
    PromptTooLongError
        A position would reach ``max_seq_len``.
    KvExhausted
        The pool lacks blocks; nothing was changed.
    SequenceStateError
        A sequence was freed, has failed, or has a verify that was not accepted.
    WrongThreadError, ModelBusyError
        The calling thread does not drive the model.
    """

    def prefill(
        self,
        tokens: TokenIds,
        seq: SequenceState,
        *,
        logits: LogitsMode = "last",
        stream: Stream | None = None,
    ) -> LogitsView | None:
        """Run a whole prompt and return the logits of its last position.

        Parameters
        ----------
        tokens
            The prompt, at least one id.
        seq
            A sequence without committed positions; afterwards ``seq_len`` is ``len(tokens)``.

        Returns
        -------
        LogitsView or None
            ``[1, V]`` in row 0; ``[len(tokens), V]`` for "all"; None for "none".
        """
        ...

    def prefill_chunk(
        self,
        tokens: TokenIds,
        seq: SequenceState,
        chunk_start: int,
        chunk_len: int,
        is_last_chunk: bool,
        *,
        logits: LogitsMode = "last",
        stream: Stream | None = None,
    ) -> LogitsView | None:
        """Run one window of a prompt; recurrent state carries over from the window before.

        Any allowed split leaves the state and logits of one pass, bitwise. The first window looks
        the prefix cache up once: it takes references and records the decision in ``seq``, and a
        retry after an error replays that record. Matched positions are not computed again; at least
        one token of that window is. With "all" the cache is not read: they would have no rows.

        Parameters
        ----------
        tokens
            The whole prompt, the same in every call.
        seq
            Holds the prompt's positions before ``chunk_start``.
        chunk_start, chunk_len
            The window ``[chunk_start, chunk_start + chunk_len)``; it starts where the previous one
            ended, the first at 0.
        is_last_chunk
            True exactly when the window ends the prompt; only then do final norm and head run,
            unless ``logits="all"`` asks for each window's rows.

        Returns
        -------
        LogitsView or None
            As :meth:`prefill` for the last window; else None, or ``[chunk_len, V]`` for "all".

        Raises
        ------
        InvalidArgumentError
            Also for a split of a prompt when :attr:`requires_single_chunk`, and for an end that a
            chunked recurrence cannot reproduce.
        """
        ...

    def decode(self, token: int, seq: SequenceState, *, stream: Stream | None = None) -> LogitsView:
        """Append ``token``, write position ``seq.seq_len``, advance by 1; logits ``[1, V]``.

        ``seq`` holds at least one position. It runs on the batch of one, unpadded.
        """
        ...

    def decode_batch(
        self,
        tokens: TokenIds,
        seqs: Sequence[SequenceState],
        *,
        stream: Stream | None = None,
    ) -> LogitsView:
        """Run one decode step of several sequences in one sweep.

        Parameters
        ----------
        tokens
            One id per sequence, 1 … the most that may run.
        seqs
            Distinct sequences; ``tokens[i]`` belongs to ``seqs[i]``.

        Returns
        -------
        LogitsView
            ``[B, V]``; row i is ``seqs[i]``'s. Rows 0 … B − 1 (up to the padded count) of the
            arena belong to decode until they are read or decode runs again.
        """
        ...

    def mixed_forward(
        self,
        decode_tokens: TokenIds,
        decode_seqs: Sequence[SequenceState],
        prefill_slice: PrefillSlice,
        *,
        logits: LogitsMode = "last",
        stream: Stream | None = None,
    ) -> MixedForwardResult:
        """Run one decode step of several sequences and one prompt window, weights read once.

        Parameters
        ----------
        decode_tokens, decode_seqs
            As for :meth:`decode_batch`, but may be empty.
        prefill_slice
            The window; its sequence is not among ``decode_seqs``.
        logits
            Applies to the window. Decode rows always have logits, in rows below the window's.
        """
        ...

    def prefill_batch_chunk(
        self,
        slices: Sequence[PrefillSlice],
        *,
        row_base: int = 0,
        logits: LogitsMode = "last",
        stream: Stream | None = None,
    ) -> list[LogitsView | None]:
        """Run one window of each of several prompts, every weight matrix read once.

        Parameters
        ----------
        slices
            At least one, with distinct sequences.
        row_base
            Where logits start: slice i's last row goes to arena row ``row_base + i``; with "all"
            the slices' rows follow one another from ``row_base``. The rows are checked before any
            work. When they do not fit, row 0 is used instead if no unread decode rows live there;
            otherwise the call raises, because it would overwrite another sequence's logits.

        Returns
        -------
        list of LogitsView or None
            Parallel to ``slices``; an entry as :meth:`prefill_chunk` returns it.
        """
        ...

    def mixed_forward_batch(
        self,
        decode_tokens: TokenIds,
        decode_seqs: Sequence[SequenceState],
        slices: Sequence[PrefillSlice],
        *,
        logits: LogitsMode = "last",
        stream: Stream | None = None,
    ) -> MixedBatchResult:
        """Run the general step: decode rows and prompt windows together, weights read once.

        A host with its own scheduler drives this one. Decode rows own the arena's rows from 0 on
        (the padded count when padded); the windows' rows lie above them, and a mixed step that the
        scheduler may plan always fits.

        Parameters
        ----------
        decode_tokens, decode_seqs
            As for :meth:`decode_batch`, but may be empty.
        slices
            Windows, may be empty when there are decode tokens; all sequences are distinct.
        logits
            Applies to the windows.
        """
        ...

    def prefill_twophase(
        self,
        tokens: TokenIds,
        seq: SequenceState,
        chunk_size: int,
        *,
        stream: Stream | None = None,
    ) -> LogitsView:
        """Run a whole prompt layer by layer, each recurrence in one launch over the sequence.

        Per layer: projections, one launch of the recurrence over all of ``tokens`` from ``seq``'s
        state, then the rest, in pieces of ``chunk_size`` tokens where a piece must fit the
        workspace. Without recurrent layers it is one whole chunk. Logits ``[1, V]`` of the last
        position, equal to :meth:`prefill`'s.
        """
        ...

    def prefill_tail_split(self, tokens: TokenIds) -> int | None:
        """Return the index at which the last chunk of the prompt ``tokens`` should start.

        A recurrent snapshot taken there is where the next, longer prompt will match. It is
        ⌊(n − 1) / u⌋ · u for n tokens; u is the block size or, for a chunked recurrence, the least
        common multiple of block and chunk. None when that is 0, at or below the prefix already
        matched, or when the model has no recurrent state to snapshot.
        """
        ...

    @property
    def requires_single_chunk(self) -> bool:
        """Whether a prompt must run as one chunk; False where any split is allowed."""
        ...

    @property
    def hc_mult(self) -> int:
        """Number of hyper-connection streams, 0 = none; above 0 one sequence runs at a time."""
        ...

    @property
    def kv_block_size(self) -> int | None:
        """Positions per KV block; None without a paged cache."""
        ...

    @property
    def supports_beam(self) -> bool:
        """Whether :meth:`generate_beam_batch` works; True for encoder-decoder models only."""
        ...

    def generate_beam_batch(self, requests: Sequence[BeamRequest]) -> list[list[BeamHypothesis]]:
        """Run each request's beam search to its end.

        Returns
        -------
        list of list of BeamHypothesis
            Parallel to ``requests``: the ``num_return`` best hypotheses, best first, each ended by
            the end token.

        Raises
        ------
        CapabilityError
            If :attr:`supports_beam` is False.
        """
        ...


class DenseForward(ModelForward):
    """Forwards of a decoder, with or without recurrent layers."""

    requires_single_chunk = False
    hc_mult = 0
    supports_beam = False
    generate_beam_batch = Unavailable("forward")

    def __init__(self, core: ModelCore) -> None:
        self._core = core

    @property
    def kv_block_size(self) -> int | None:
        self._core.require_alive()
        return self._core.pools.block_size

    def prefill_tail_split(self, tokens: TokenIds) -> int | None:
        core = self._core
        core.enter()
        ids = core.token_array(tokens, "prompt tokens")
        if core.states is None:
            return None
        split = recurrence.tail_split(core, len(ids))
        return split if split > matched_tokens(core, ids) else None

    def prefill_twophase(
        self,
        tokens: TokenIds,
        seq: SequenceState,
        chunk_size: int,
        *,
        stream: Stream | None = None,
    ) -> LogitsView:
        core = self._core
        core.enter(seq)
        core.check_stream(stream)
        rows = whole_number("chunk_size", chunk_size, 1, core.limits.max_rows)
        ids = core.token_array(tokens, "prompt tokens")
        if core.states is None or not core.runtime.has_two_phases:
            view = self.prefill(ids, seq)
            assert view is not None
            return view
        core.window(ids, seq, 0, len(ids), True)
        seq.forget_lookup()  # every position runs
        with core.room([seq], [len(ids)]):
            core.run_long(ids, seq, rows)
            core.commit(seq, ids, "prompt")
        return core.arena.claim(0, 1)

    def prefill(
        self,
        tokens: TokenIds,
        seq: SequenceState,
        *,
        logits: LogitsMode = "last",
        stream: Stream | None = None,
    ) -> LogitsView | None:
        ids = self._core.token_array(tokens, "prompt tokens")
        return self.prefill_chunk(ids, seq, 0, len(ids), True, logits=logits, stream=stream)

    def prefill_chunk(
        self,
        tokens: TokenIds,
        seq: SequenceState,
        chunk_start: int,
        chunk_len: int,
        is_last_chunk: bool,
        *,
        logits: LogitsMode = "last",
        stream: Stream | None = None,
    ) -> LogitsView | None:
        core = self._core
        core.enter(seq)
        core.check_stream(stream)
        ids = core.window(tokens, seq, chunk_start, chunk_len, is_last_chunk)
        num_logits = _num_logits(logits, chunk_len, is_last_chunk)
        if num_logits > core.limits.logits_rows:
            raise InvalidArgumentError(
                f'logits="all" of {num_logits} positions; '
                f"allowed: up to {core.limits.logits_rows} a call"
            )
        window = begin(core, Window(seq, ids, "prompt", 0), read_cache=logits != "all")
        matched = chunk_len - len(window.token_ids)
        # Without a cache to give it to, a snapshot is not worth a step of its own.
        tail = 0 if core.prefix_cache is None else recurrence.tail_split(core, len(tokens))
        with core.room([seq], [chunk_len]):
            # A long window runs in pieces: same bits, as any split.
            for start, end in recurrence.pieces(
                core, chunk_start + matched, chunk_start + chunk_len, tail
            ):
                start, end = start - chunk_start, end - chunk_start
                piece = ids[start:end]
                wanted = min(len(piece), max(0, num_logits - (chunk_len - end)))
                first = num_logits - (chunk_len - end) - wanted if wanted else 0
                core.run(build([Window(seq, piece, "prompt", wanted)], first))
                core.commit(seq, piece, "prompt")
                if chunk_start + end == tail:
                    recurrence.keep_tail(core, seq)
        return core.arena.claim(0, num_logits) if num_logits else None

    def decode(self, token: int, seq: SequenceState, *, stream: Stream | None = None) -> LogitsView:
        return self.decode_batch([token], [seq], stream=stream)

    def decode_batch(
        self,
        tokens: TokenIds,
        seqs: Sequence[SequenceState],
        *,
        stream: Stream | None = None,
    ) -> LogitsView:
        if not len(seqs):
            raise InvalidArgumentError("decode_batch of no sequences; allowed: 1 or more")
        view = self.mixed_forward_batch(tokens, seqs, [], stream=stream).decode_logits
        assert view is not None
        return view

    def mixed_forward(
        self,
        decode_tokens: TokenIds,
        decode_seqs: Sequence[SequenceState],
        prefill_slice: PrefillSlice,
        *,
        logits: LogitsMode = "last",
        stream: Stream | None = None,
    ) -> MixedForwardResult:
        result = self.mixed_forward_batch(
            decode_tokens, decode_seqs, [prefill_slice], logits=logits, stream=stream
        )
        return MixedForwardResult(result.decode_logits, result.prefill_logits[0])

    def prefill_batch_chunk(
        self,
        slices: Sequence[PrefillSlice],
        *,
        row_base: int = 0,
        logits: LogitsMode = "last",
        stream: Stream | None = None,
    ) -> list[LogitsView | None]:
        if not slices:
            raise InvalidArgumentError("prefill_batch_chunk of no slices; allowed: 1 or more")
        row_base = whole_number("row_base", row_base, 0)
        return self._step([], [], slices, logits, row_base, stream).prefill_logits

    def mixed_forward_batch(
        self,
        decode_tokens: TokenIds,
        decode_seqs: Sequence[SequenceState],
        slices: Sequence[PrefillSlice],
        *,
        logits: LogitsMode = "last",
        stream: Stream | None = None,
    ) -> MixedBatchResult:
        return self._step(decode_tokens, decode_seqs, slices, logits, 0, stream)

    def _step(
        self,
        decode_tokens: TokenIds,
        decode_seqs: Sequence[SequenceState],
        slices: Sequence[PrefillSlice],
        logits: LogitsMode,
        row_base: int,
        stream: Stream | None,
    ) -> MixedBatchResult:
        """Decode rows first, then the slices' windows; one run, then every sequence advances."""
        core = self._core
        seqs = [*decode_seqs, *(piece.seq for piece in slices)]
        core.enter(*seqs)
        core.check_stream(stream)
        if not seqs:
            raise InvalidArgumentError("a step of no sequences; allowed: 1 or more")
        if len({id(seq) for seq in seqs}) != len(seqs):
            raise InvalidArgumentError("a sequence is given twice; allowed: distinct sequences")
        windows = core.decode_windows(decode_tokens, decode_seqs)
        num_decode = len(windows)
        counts = _logits_of_slices(slices, logits)
        for piece, count in zip(slices, counts, strict=True):
            ids = core.window(
                piece.prompt_tokens,
                piece.seq,
                piece.chunk_start,
                piece.chunk_len,
                piece.is_last_chunk,
            )
            windows.append(Window(piece.seq, ids, "prompt", count))
        core.require_rows(windows)
        first = core.place_logits(row_base, sum(window.num_logits for window in windows))
        lengths = [len(window.token_ids) for window in windows]
        read_cache = logits != "all"
        windows[num_decode:] = [
            begin(core, window, read_cache=read_cache) for window in windows[num_decode:]
        ]
        with core.room(seqs, lengths):
            core.run(build(windows, first))
            for window in windows:
                core.commit(window.seq, window.token_ids, window.kind)
            for piece in slices:
                if piece.seq.seq_len == recurrence.tail_split(core, len(piece.prompt_tokens)):
                    recurrence.keep_tail(core, piece.seq)
        decode_view = core.claim_decode(num_decode) if num_decode else None
        views: list[LogitsView | None] = []
        at = first + num_decode
        for piece, count in zip(slices, counts, strict=True):
            wanted = _num_logits(logits, piece.chunk_len, piece.is_last_chunk)
            views.append(core.arena.claim(at, wanted) if wanted else None)
            at += count
        return MixedBatchResult(decode_view, views)


def _num_logits(mode: LogitsMode, chunk_len: int, is_last_chunk: bool) -> int:
    """Rows of a window that get logits."""
    if mode == "all":
        return chunk_len
    if mode == "last":
        return int(is_last_chunk)
    if mode == "none":
        return 0
    raise InvalidArgumentError(f"logits is {mode!r}; allowed: 'last', 'all', 'none'")


def _logits_of_slices(slices: Sequence[PrefillSlice], mode: LogitsMode) -> list[int]:
    """Rows that each slice takes in the arena.

    With "last", slice i owns row i: a slice that ends nothing still takes its row when a later
    slice ends its prompt.
    """
    counts = [_num_logits(mode, piece.chunk_len, piece.is_last_chunk) for piece in slices]
    if mode == "last" and any(counts):
        last = int(np.flatnonzero(counts)[-1])
        return [1] * (last + 1) + [0] * (len(counts) - last - 1)
    return counts
