"""What the capability groups of one model share: weights, pools, buffers, and ``run(batch)``."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from atlas._native.batch_writer import write_batch
from atlas._native.block_pool import BlockPool
from atlas._native.plan import Plan
from atlas._native.prefix_cache import PrefixCache
from atlas.cache.kv import KvPools
from atlas.config import ModelConfig
from atlas.errors import (
    InvalidArgumentError,
    ModelBusyError,
    PromptTooLongError,
    SequenceStateError,
    StaleHandleError,
    WrongThreadError,
)
from atlas.layers.network import Network
from atlas.layers.step import StepBuffers, StepShape
from atlas.model import room
from atlas.model.batch import Batch, RowKind, Window
from atlas.model.lifetime import Lifetime
from atlas.model.logits_view import LogitsArena, LogitsView
from atlas.model.sequence import SequenceState
from atlas.whole_number import whole_number

if TYPE_CHECKING:
    from atlas.model.records import Stream, TokenIds

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes fixed at load.

    ``max_rows`` rows in one step, ``piece_rows`` rows that a prefill runs at a time, ``max_seqs``
    sequences in one step, ``logits_rows`` rows in the arena, ``max_seq_len`` positions of a
    sequence.
    """

    max_rows: int
    piece_rows: int
    max_seqs: int
    logits_rows: int
    max_seq_len: int


class ModelCore:
    """One model on one backend, driven by one thread at a time.

    Parameters
    ----------
    config : ModelConfig
    network : Network
        With weights packed for ``runtime``.
    runtime : object
        The backend's side: ``run``, ``ops``, ``close``.
    pools : KvPools
    buffers : StepBuffers
    limits : Limits
    """

    def __init__(
        self,
        config: ModelConfig,
        network: Network,
        runtime: Any,
        pools: KvPools,
        buffers: StepBuffers,
        limits: Limits,
    ) -> None:
        self.config = config
        self.network = network
        self.runtime = runtime
        self.pools = pools
        self.buffers = buffers
        self.limits = limits
        self.blocks = BlockPool(pools.num_blocks)
        self.lifetime = Lifetime()
        self.arena = LogitsArena(buffers.logits, self.lifetime.require)
        self.key = object()
        self.streams: set[int] = {0}
        self.prefix_cache: PrefixCache | None = None
        self.reuse_generated = True  # whether blocks of step tokens may serve a prompt
        self.last_decode: tuple[int, int] | None = None  # (arena generation, rows)
        self._thread = threading.get_ident()
        self._driver: int | None = None  # thread of an engine's step that is under way

    # -- who may call -------------------------------------------------------------------------

    def require_alive(self) -> None:
        """Raise when the model was closed or belongs to a parent process."""
        self.lifetime.require()

    def enter(self, *seqs: SequenceState) -> None:
        """Check the calling thread and the sequences of a call."""
        self.require_alive()
        if threading.get_ident() != self._thread:
            raise WrongThreadError(
                "this model is bound to another thread; call lifecycle.bind_to_thread() first"
            )
        for seq in seqs:
            if not isinstance(seq, SequenceState):
                raise InvalidArgumentError(
                    f"seq is a {type(seq).__name__}; allowed: what lifecycle.alloc_sequence gives"
                )
            if seq.model_key is not self.key:
                raise StaleHandleError("this sequence belongs to another model")

    @contextmanager
    def driven_here(self) -> Iterator[None]:
        """Let the calling thread drive the model for a while (the engine's lock is held)."""
        self.require_alive()
        before = self._thread, self._driver
        self._thread = self._driver = threading.get_ident()
        try:
            yield
        finally:
            self._thread, self._driver = before

    def bind_to_thread(self) -> None:
        """Make the calling thread the one that drives the model."""
        self.require_alive()
        if self._driver not in (None, threading.get_ident()):
            raise ModelBusyError("an engine drives this model in another thread right now")
        self._thread = threading.get_ident()

    def close(self) -> None:
        """End the backend and let go of all memory; later calls raise ClosedError.

        Refused in the middle of a step.
        """
        if not self.lifetime.closed:
            self.runtime.close()
            self.lifetime.closed = True
            self.arena.drop()
            del self.network, self.pools, self.buffers

    # -- arguments ----------------------------------------------------------------------------

    def token_array(self, tokens: TokenIds, what: str = "tokens") -> Ints:
        """Ids as int32 [n], n ≥ 1, each in the vocabulary."""
        try:
            ids = np.asarray(tokens)
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError(f"{what} are not token ids: {error}") from None
        if ids.ndim != 1 or not len(ids):
            raise InvalidArgumentError(f"{what} has shape {ids.shape}; allowed: one or more ids")
        if ids.dtype.kind not in "iu":
            raise InvalidArgumentError(f"{what} have dtype {ids.dtype}; allowed: integers")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.config.vocab_size:
            bad = low if low < 0 else high
            raise InvalidArgumentError(
                f"{what} hold id {bad}; allowed: 0 … {self.config.vocab_size - 1}"
            )
        return np.ascontiguousarray(ids, np.int32)

    def require_length(self, num_positions: int) -> None:
        """Raise when a sequence would outgrow ``max_seq_len``."""
        if num_positions > self.limits.max_seq_len:
            raise PromptTooLongError(
                f"{num_positions} positions; allowed: up to max_seq_len {self.limits.max_seq_len}"
            )

    def reserve(self, seq: SequenceState, num_positions: int) -> None:
        """Room for positions 0 … num_positions − 1 of one sequence."""
        replaced = room.reserve(self, seq, num_positions)
        if replaced is not None:
            self.blocks.release(replaced.block)

    def room(
        self, seqs: Sequence[SequenceState], counts: Sequence[int]
    ) -> AbstractContextManager[None]:
        """Reserve ``counts[i]`` more positions of each sequence for the step in the body.

        A prefix that was found for a sequence becomes its first positions. When the pool is
        exhausted, or the body raises, every sequence is as before: lengths, tokens and blocks.
        """
        return room.room(self, seqs, counts)

    def check_stream(self, stream: Stream | None) -> None:
        """Raise for a stream that this model did not make."""
        if stream is not None and stream not in self.streams:
            raise StaleHandleError(f"stream {stream} was not made by this model")

    def window(
        self,
        tokens: TokenIds,
        seq: SequenceState,
        chunk_start: int,
        chunk_len: int,
        is_last_chunk: bool,
    ) -> Ints:
        """The ids of one prompt window, after checking it against prompt and sequence."""
        ids = self.token_array(tokens, "prompt tokens")
        chunk_start = whole_number("chunk_start", chunk_start, 0)
        chunk_len = whole_number("chunk_len", chunk_len, 1)
        end = chunk_start + chunk_len
        if end > len(ids):
            raise InvalidArgumentError(
                f"window [{chunk_start}, {end}) of {len(ids)} prompt tokens; "
                "allowed: one token or more, inside the prompt"
            )
        if is_last_chunk != (end == len(ids)):
            raise InvalidArgumentError(
                f"is_last_chunk is {is_last_chunk}, but the window ends at {end} of {len(ids)}"
            )
        seq.native.check()
        if seq.seq_len != chunk_start:
            raise InvalidArgumentError(
                f"the window starts at {chunk_start}, the sequence stands at {seq.seq_len}"
            )
        if not np.array_equal(seq.tokens, ids[:chunk_start]):
            raise InvalidArgumentError("the prompt differs from what the sequence holds already")
        self.require_length(end)
        return ids[chunk_start:end]

    def decode_windows(self, tokens: TokenIds, seqs: Sequence[SequenceState]) -> list[Window]:
        """One step row for each sequence."""
        if len(tokens) != len(seqs):
            raise InvalidArgumentError(f"{len(tokens)} tokens for {len(seqs)} sequences")
        if not seqs:
            return []
        ids = self.token_array(tokens)
        for seq in seqs:
            seq.native.check()
            if not seq.seq_len:
                raise SequenceStateError("decode needs a sequence with at least one position")
            self.require_length(seq.seq_len + 1)
        return [Window(seq, ids[i : i + 1], "step", 1) for i, seq in enumerate(seqs)]

    def require_rows(self, windows: Sequence[Window]) -> None:
        """Raise when a step has more rows or sequences than its buffers."""
        rows = sum(len(window.token_ids) for window in windows)
        if rows > self.limits.max_rows or len(windows) > self.limits.max_seqs:
            raise InvalidArgumentError(
                f"a step of {rows} rows and {len(windows)} sequences; "
                f"allowed: {self.limits.max_rows} and {self.limits.max_seqs}"
            )

    def place_logits(self, row_base: int, count: int) -> int:
        """Arena row of a step's first logits: ``row_base``, or 0 where that does not fit."""
        limit = self.limits.logits_rows
        if row_base + count <= limit:
            return row_base
        if count <= limit and not self.arena.num_unread_decode:
            return 0
        raise InvalidArgumentError(
            f"logits rows {row_base} … {row_base + count - 1}; allowed: 0 … {limit - 1}"
            + (", and rows of an unread decode are in the way" if count <= limit else "")
        )

    # -- the step -----------------------------------------------------------------------------

    def run(self, batch: Batch) -> None:
        """One sweep over the weights. Neither allocates nor advances.

        Every sequence must hold blocks for its rows. Logits go to the arena rows from
        ``batch.first_logits`` on; the caller claims them.
        """
        self._write(batch)
        step_seqs = batch.num_step_seqs
        step_rows = int(batch.rows[:step_seqs].sum())
        num_logits, first = len(batch.logits_rows), batch.first_logits
        self._run(
            StepShape(batch.num_rows, len(batch.seqs), num_logits, first, step_rows, step_seqs)
        )

    def _write(self, batch: Batch) -> None:
        """A batch's integers into the buffers."""
        buffers, rows = self.buffers, batch.num_rows
        buffers.token_ids[:rows] = batch.token_ids
        buffers.positions[:rows] = batch.positions[0]
        buffers.logits_rows[: len(batch.logits_rows)] = batch.logits_rows
        np.cumsum(batch.rows, out=buffers.cu_rows[1 : len(batch.seqs) + 1])
        start = 0
        for i, (seq, count) in enumerate(zip(batch.seqs, batch.rows, strict=True)):
            table = buffers.block_tables[i]
            seq.native.write_block_table(table)
            positions = batch.positions[0, start : start + count]
            block, offset = np.divmod(positions, self.pools.block_size)
            buffers.slots[start : start + count] = table[block] * self.pools.block_size + offset
            start += int(count)

    def run_plan(self, plan: Plan) -> None:
        """One sweep for a scheduler's plan; its logits go to the arena rows from 0 on."""
        buffers = self.buffers
        write_batch(
            plan,
            buffers.token_ids,
            buffers.positions,
            buffers.slots,
            buffers.cu_rows,
            buffers.block_tables,
            buffers.logits_rows,
        )
        step_rows = int(buffers.cu_rows[plan.num_decode])
        self._run(
            StepShape(plan.num_rows, plan.num_seqs, plan.num_logits, 0, step_rows, plan.num_decode)
        )

    def _run(self, shape: StepShape) -> None:
        """The sweep, once the step's integers are in the buffers."""
        buffers, seqs = self.buffers, shape.step_seqs
        prompts = buffers.cu_rows[seqs : shape.seqs + 1]
        np.subtract(prompts, shape.step_rows, out=buffers.prompt_cu_rows[: len(prompts)])
        self.last_decode = None
        self.arena.overwrite(shape.first_logits, shape.logits)
        self.runtime.run(self.network, buffers, shape)

    def argmax_rows(self, count: int) -> Ints:
        """Greedy id of arena rows 0 … count − 1; −1 marks a row that is not finite."""
        out = np.empty(count, np.int32)
        self.runtime.ops.argmax(self.buffers.logits[:count], out=out)
        return out

    def commit(self, seq: SequenceState, ids: Ints, kind: RowKind, verify_rows: int = 0) -> None:
        """Advance a sequence over rows that ran."""
        seq.native.advance(ids, verify_rows)
        if kind == "prompt":
            seq.native.prompt_len = seq.seq_len

    def claim_decode(self, count: int) -> LogitsView:
        """The view of decode rows 0 … count − 1, which stay theirs until read."""
        view = self.arena.claim(0, count)
        self.arena.num_unread_decode = count
        self.last_decode = (self.arena.generation, count)
        return view

    def argmax(self, view: LogitsView) -> Ints:
        """Greedy id of each row, int32 [rows]; −1 marks a row that is not finite."""
        out = np.empty(view.num_rows, np.int32)
        self.runtime.ops.argmax(view.numpy(), out=out)
        return out

    def whole_arena(self) -> LogitsView:
        """Every row of the arena as it stands now."""
        return LogitsView(self.arena, 0, self.limits.logits_rows)

    def decode_hidden(self) -> NDArray[np.float32]:
        """The final norm's rows of the last decode step, a copy [rows, D]."""
        if self.last_decode is None:
            raise StaleHandleError("no decode ran, or another forward overwrote its rows")
        return self.buffers.last_hidden[: self.last_decode[1]].copy()
