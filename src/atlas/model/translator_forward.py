"""Forwards of an encoder-decoder: sources in, logits of their translations out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from atlas.errors import InvalidArgumentError, SequenceStateError
from atlas.model.batch import Window, build
from atlas.model.beam_decode import beam_search
from atlas.model.forward import DenseForward
from atlas.model.records import MixedBatchResult, PrefillSlice

if TYPE_CHECKING:
    from atlas.model.core import Ints
    from atlas.model.logits_view import LogitsView
    from atlas.model.records import BeamHypothesis, BeamRequest, LogitsMode, Stream, TokenIds
    from atlas.model.sequence import SequenceState
    from atlas.model.translator_core import TranslatorCore


class TranslatorForward(DenseForward):
    """A prefill reads a source's subwords and begins its translation.

    The languages are those of ``seq.source_language`` and ``seq.target_language`` (0: the
    deployment's default). The encoder reads tag, subwords and end token, whole; then the decoder
    runs its start token and the target's tag, so that ``seq_len`` is 2 afterwards and the logits
    are of the translation's first token ("all": of both positions). Decoding goes on from there.
    """

    requires_single_chunk = True
    supports_beam = True

    def __init__(self, core: TranslatorCore) -> None:
        super().__init__(core)
        self._translator = core

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
        piece = PrefillSlice(tokens, seq, chunk_start, chunk_len, is_last_chunk)
        return self.prefill_batch_chunk([piece], logits=logits, stream=stream)[0]

    def prefill_twophase(
        self,
        tokens: TokenIds,
        seq: SequenceState,
        chunk_size: int,
        *,
        stream: Stream | None = None,
    ) -> LogitsView:
        view = self.prefill(tokens, seq, stream=stream)
        assert view is not None
        return view

    def generate_beam_batch(  # type: ignore[override]
        self, requests: Sequence[BeamRequest]
    ) -> list[list[BeamHypothesis]]:
        self._core.enter()
        return beam_search(self._translator, requests)

    def _step(
        self,
        decode_tokens: TokenIds,
        decode_seqs: Sequence[SequenceState],
        slices: Sequence[PrefillSlice],
        logits: LogitsMode,
        row_base: int,
        stream: Stream | None,
    ) -> MixedBatchResult:
        """Encode the slices' sources, then one sweep of the decoder for everyone."""
        core = self._translator
        seqs = [*decode_seqs, *(piece.seq for piece in slices)]
        core.enter(*seqs)
        core.check_stream(stream)
        if not seqs:
            raise InvalidArgumentError("a step of no sequences; allowed: 1 or more")
        if len({id(seq) for seq in seqs}) != len(seqs):
            raise InvalidArgumentError("a sequence is given twice; allowed: distinct sequences")
        if logits not in ("last", "all", "none"):
            raise InvalidArgumentError(f"logits is {logits!r}; allowed: 'last', 'all', 'none'")
        windows = core.decode_windows(decode_tokens, decode_seqs)
        wanted = {"last": 1, "all": 2, "none": 0}[logits]
        sources: list[Ints] = []
        for piece in slices:
            source, first = self._begin(piece)
            sources.append(source)
            windows.append(Window(piece.seq, first, "prompt", wanted))
        core.require_rows(windows)
        first_row = core.place_logits(row_base, sum(window.num_logits for window in windows))
        encoded = core.encode(sources)
        try:
            for piece, held in zip(slices, encoded, strict=True):
                piece.seq.encoder = held
            with core.room(seqs, [len(window.token_ids) for window in windows]):
                core.run(build(windows, first_row))
                for window in windows:
                    core.commit(window.seq, window.token_ids, window.kind)
        except BaseException:
            for piece, held in zip(slices, encoded, strict=True):
                piece.seq.encoder = None
                held.release()
            raise
        num_decode = len(decode_seqs)
        decode_view = core.claim_decode(num_decode) if num_decode else None
        at = first_row + num_decode
        views = [
            core.arena.claim(at + i * wanted, wanted) if wanted else None
            for i in range(len(slices))
        ]
        return MixedBatchResult(decode_view, views)

    def _begin(self, piece: PrefillSlice) -> tuple[Ints, Ints]:
        """What encoder and decoder read of a slice, after checking it."""
        core, seq = self._translator, piece.seq
        if piece.chunk_start or not piece.is_last_chunk:
            raise InvalidArgumentError(
                f"window [{piece.chunk_start}, {piece.chunk_start + piece.chunk_len}) of a source "
                f"of {len(piece.prompt_tokens)} tokens; allowed: all of it in one chunk"
            )
        seq.native.check()
        if seq.seq_len or seq.encoder is not None:
            raise SequenceStateError("the sequence translates a source already; use a new one")
        source, target = core.languages(seq.source_language, seq.target_language)
        core.require_length(2)
        return core.source_ids(piece.prompt_tokens, source), core.first_tokens(target)
