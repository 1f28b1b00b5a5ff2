"""What the capability groups of an encoder-decoder share: both networks and their sweeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from atlas._native.sequence import Sequence as NativeSequence
from atlas._native.source_rows import SourceRows, write_rows
from atlas.errors import InvalidArgumentError, PromptTooLongError, shown
from atlas.interrupts import interrupts_deferred
from atlas.layers.encoder_decoder import EncoderDecoder
from atlas.layers.translation_step import DecodeShape, EncodeShape, TranslationBuffers
from atlas.model.batch import Window, build
from atlas.model.core import Ints, Limits, ModelCore
from atlas.model.encoded_source import EncodedSource
from atlas.model.records import MAX_BEAMS
from atlas.model.sequence import SequenceState

if TYPE_CHECKING:
    from atlas.cache.kv import KvPools
    from atlas.config import EncoderConfig, ModelConfig
    from atlas.model.batch import Batch
    from atlas.model.records import TokenIds
    from atlas.sampling_table import Draw

Floats = NDArray[np.float32]
_NO_BANS = np.zeros(0, np.int32), np.zeros(2, np.int32)  # for one row


class TranslatorCore(ModelCore):
    """An encoder-decoder on one backend.

    A source is encoded once; its cross-attention K and V lie in blocks of the pools that also hold
    the decoder's own, so that one number of tokens bounds both.

    Attributes
    ----------
    default_languages : (int, int), optional
        Ids of the source's and the target's tag where a request says 0.
    language_ids : frozenset of int, optional
        The tags' ids; None where nothing says which they are, and any id but the model's start,
        end and padding tokens may be one.
    tag_last : bool
        A source's tag stands behind its end token; else before its subwords.
    """

    network: EncoderDecoder  # type: ignore[assignment]
    buffers: TranslationBuffers  # type: ignore[assignment]

    def __init__(
        self,
        config: ModelConfig,
        network: EncoderDecoder,
        runtime: Any,
        pools: KvPools,
        buffers: TranslationBuffers,
        limits: Limits,
        max_source_len: int,
    ) -> None:
        super().__init__(config, network, runtime, pools, buffers, limits)  # type: ignore[arg-type]
        self.max_source_len = max_source_len
        self.default_languages: tuple[int, int] | None = None
        self.language_ids: frozenset[int] | None = None
        self.tag_last = False

    @property
    def encoder_config(self) -> EncoderConfig:
        """Sizes of the encoder, and the tokens a translation begins with."""
        assert self.config.encoder is not None
        return self.config.encoder

    @property
    def max_sweep_seqs(self) -> int:
        """Beams and samples of one sweep at most: each is a sequence with a row of logits."""
        return min(self.limits.max_seqs, self.limits.logits_rows)

    @property
    def reserved_ids(self) -> frozenset[int]:
        """Start, end and padding tokens, which are no language's tag."""
        encoder = self.encoder_config
        ends = self.config.eos_token_ids
        return frozenset((encoder.padding_token_id, encoder.start_token_id, *ends))

    # -- arguments ----------------------------------------------------------------------------

    def languages(self, source: int, target: int) -> tuple[int, int]:
        """Ids of both tags, with the defaults in place of 0; refused if equal or unknown."""
        ids = []
        for i, (what, language) in enumerate((("source", source), ("target", target))):
            if language == 0 and self.default_languages is None:
                raise InvalidArgumentError(
                    f"the {what} language is 0, and this model has no default; allowed: a tag's id"
                )
            chosen = language or (self.default_languages or (0, 0))[i]
            if not 0 < chosen < self.config.vocab_size:
                raise InvalidArgumentError(
                    f"the {what} language is {shown(chosen)}; allowed: a tag's id, "
                    f"1 … {self.config.vocab_size - 1}"
                )
            known = self.language_ids
            if chosen in self.reserved_ids or (known is not None and chosen not in known):
                raise InvalidArgumentError(
                    f"the {what} language is {chosen}, which is no language's tag; "
                    "allowed: a tag's id"
                )
            ids.append(chosen)
        if ids[0] == ids[1]:
            raise InvalidArgumentError(
                f"source and target language are both {ids[0]}; allowed: two languages"
            )
        return ids[0], ids[1]

    def source_ids(self, subwords: TokenIds, language: int) -> Ints:
        """What the encoder reads: the language's tag, the subwords, the end token.

        With ``tag_last``: subwords, end token, tag.
        """
        padding = self.encoder_config.padding_token_id
        if not len(subwords):
            raise InvalidArgumentError("the source is empty; allowed: one subword or more")
        ids = self.token_array(subwords, "source tokens")
        if (ids == padding).any():
            raise InvalidArgumentError(
                f"the source holds the padding token {padding}; allowed: every other id"
            )
        if len(ids) + 2 > self.max_source_len:
            raise PromptTooLongError(
                f"the source has {len(ids)} subwords; allowed: up to {self.max_source_len - 2} "
                f"(the encoder's {self.max_source_len} positions less tag and end token)"
            )
        end = self.config.eos_token_ids[0]
        subwords = ids.tolist()
        placed = [*subwords, end, language] if self.tag_last else [language, *subwords, end]
        return np.array(placed, np.int32)

    def first_tokens(self, target: int) -> Ints:
        """What every translation begins with: start token and the target's tag."""
        return np.array([self.encoder_config.start_token_id, target], np.int32)

    # -- sweeps -------------------------------------------------------------------------------

    def encode(self, sources: Sequence[Ints]) -> list[EncodedSource]:
        """Run the encoder over sources as :meth:`source_ids` gives them.

        Several share a sweep as long as they fit its rows. The caller holds the results.

        Raises
        ------
        KvExhausted
            The pool lacks blocks for one of them; nothing is kept.
        """
        encoded: list[EncodedSource] = []
        size = self.pools.block_size
        try:
            with interrupts_deferred():
                for ids in sources:
                    encoded.append(EncodedSource(self.blocks, size, ids))
            for group in self._sweeps(encoded):
                self._encode(group)
        except BaseException:
            for source in encoded:
                source.release()
            raise
        return encoded

    def _sweeps(self, sources: Sequence[EncodedSource]) -> list[list[EncodedSource]]:
        """Neighbours whose tokens fit one sweep together."""
        groups: list[list[EncodedSource]] = []
        room = 0
        for source in sources:
            if len(source) > room or len(groups[-1]) == self.limits.max_seqs:
                groups.append([])
                room = self.limits.max_rows
            groups[-1].append(source)
            room -= len(source)
        return groups

    def _encode(self, sources: Sequence[EncodedSource]) -> None:
        inputs, size = self.runtime.inputs(self.buffers), self.pools.block_size
        rows = 0
        for i, source in enumerate(sources):
            place = slice(rows, rows + len(source))
            inputs.token_ids[place] = source.token_ids
            inputs.positions[place] = np.arange(len(source))
            inputs.slots[place] = source.slots(size)
            rows += len(source)
            inputs.source_cu_rows[i + 1] = rows
        self.last_decode = None
        self.runtime.run(self.network.encoder, self.buffers, EncodeShape(rows, len(sources)))

    def prepare(self, encode: EncodeShape, decode: DecodeShape) -> None:
        """Load, or compile, the bodies that sweeps of these shapes and the choice run."""
        self.runtime.prepare(self.network.encoder, self.buffers, [encode])
        self.runtime.prepare(self.network.decoder, self.buffers, [decode])
        self.top_candidates(1, 1, *_NO_BANS)

    def warm_up(self) -> None:
        """Record the sweeps of one search of 1 … 16 beams, and read every weight once."""
        source = self.source_ids([self.encoder_config.start_token_id], 0)
        held = self.encode([source])[0]
        seq = self.new_sequence(held)
        try:
            self.reserve(seq, 2)
            self.run(build([Window(seq, self.first_tokens(0), "step", 1)]))
            self.top_candidates(1, 1, *_NO_BANS)
        finally:
            seq.native.release()
            held.release()
        beams = range(1, MAX_BEAMS + 1)
        shapes = [DecodeShape(n, n, 1, n, max_source_rows=n) for n in beams]
        self.runtime.prepare(self.network.decoder, self.buffers, shapes)

    def run(self, batch: Batch) -> None:
        """One sweep of the decoder. Sequences of one source lie side by side in ``batch``."""
        inputs = self._write(batch)
        sources, rows, source = 0, 0, None
        for seq, count in zip(batch.seqs, batch.rows.tolist(), strict=True):
            if seq.encoder is not source:
                source = seq.encoder
                inputs.source_tables[sources, : len(source.blocks)] = source.blocks
                inputs.source_lens[sources] = len(source)
                sources += 1
            rows += count
            inputs.source_cu_rows[sources] = rows
        num_logits, most = len(batch.logits_rows), int(batch.rows.max())
        assert most > 1 or num_logits == rows
        shape = DecodeShape(
            rows,
            len(batch.seqs),
            sources,
            num_logits,
            batch.first_logits,
            most,
            int(np.diff(inputs.source_cu_rows[: sources + 1]).max()),
        )
        self._decode(shape)

    def run_rows(self, sources: list[SourceRows], draws: Sequence[Draw] = ()) -> None:
        """One sweep of the decoder over sequences whose blocks are reserved: :meth:`run`, natively.

        The last row of each gets logits, in arena rows from 0 on. ``draws``: tokens to choose by
        more than the greatest logit, where ``runtime.samples``.
        """
        inputs = self.runtime.inputs(self.buffers)
        if draws:
            self.runtime.draw(draws)
        rows, seqs, most, most_of_source = write_rows(
            sources,
            inputs.token_ids,
            inputs.positions,
            inputs.slots,
            inputs.cu_rows,
            inputs.block_tables,
            inputs.logits_rows,
            inputs.source_cu_rows,
            inputs.source_lens,
            inputs.source_tables,
        )
        self._decode(DecodeShape(rows, seqs, len(sources), seqs, 0, most, most_of_source))

    def _decode(self, shape: DecodeShape) -> None:
        """The sweep, once its integers are in the inputs."""
        self.last_decode = None
        self.arena.overwrite(shape.first_logits, self.runtime.logits_written(shape))
        self.runtime.run(self.network.decoder, self.buffers, shape)

    def _normed_rows(self, count: int) -> Floats:
        """The final norm of the last sweep's first rows with logits; every sweep keeps it."""
        rows: Floats = self.runtime.to_host(self.buffers.last_hidden[:count])
        return rows

    def logits_row(self, row: int) -> Floats:
        """float32 [C] of an arena row in host memory, as the last sweep left it."""
        values: Floats = self.runtime.to_host(self.buffers.logits[row])
        return values

    def top_candidates(
        self, rows: int, k: int, banned: Ints, cu_banned: Ints
    ) -> tuple[Ints, Floats]:
        """The k most probable ids of arena rows 0 … rows − 1 and their log-probabilities.

        Parameters
        ----------
        rows : int
        k : int
        banned, cu_banned : int32 [NB], int32 [rows + 1]
            For each row the ids that may not be among them, row after row, and where each begins.

        Returns
        -------
        ids, log_probs : int32 [rows, k], float32 [rows, k]
            As the op ``top_candidates``: −1 and −∞ where there are fewer; NaN in a row that is not
            finite.
        """
        found = self.runtime.top_candidates(self.buffers, rows, k, banned, cu_banned)
        ids, values, totals = found
        return ids, values - np.log(totals)[:, None]

    # -- sequences ----------------------------------------------------------------------------

    def new_sequence(self, source: EncodedSource) -> SequenceState:
        """A sequence that translates a source; the caller keeps the source alive."""
        native = NativeSequence(self.blocks, self.pools.block_size)
        return SequenceState(native, self.key, self.limits.max_seq_len, encoder=source)
