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
from atlas.cache.state_slots import StateSlots
from atlas.config import ModelConfig
from atlas.errors import (
    InvalidArgumentError,
    ModelBusyError,
    PromptTooLongError,
    SequenceStateError,
    StaleHandleError,
    WrongThreadError,
)
from atlas.layers.network import Network, Replay
from atlas.layers.step import StepBuffers, StepShape, first_rows_with_logits
from atlas.model import recurrence, room, two_phase
from atlas.model.batch import Batch, RowKind, Window
from atlas.model.lifetime import Lifetime
from atlas.model.logits_view import LogitsArena, LogitsView
from atlas.model.sequence import SequenceState
from atlas.model.step_result import StepResult
from atlas.whole_number import whole_number

if TYPE_CHECKING:
    from atlas.model.records import Stream, TokenIds
    from atlas.sampling_table import Draw

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
        The backend's side: ``run``, ``ops``, ``recurrence_chunk``, ``close``.
    pools : KvPools
    buffers : StepBuffers
    limits : Limits
    states : StateSlots, optional
        Of a model with recurrent layers.
    replay : Replay, optional
        Those layers alone.
    """

    def __init__(
        self,
        config: ModelConfig,
        network: Network,
        runtime: Any,
        pools: KvPools,
        buffers: StepBuffers,
        limits: Limits,
        states: StateSlots | None = None,
        replay: Replay | None = None,
    ) -> None:
        self.config = config
        self.network = network
        self.runtime = runtime
        self.pools = pools
        self.buffers = buffers
        self.limits = limits
        self.states = states
        self.replay = replay
        self.chunk_unit: int = 1 if states is None else runtime.recurrence_chunk
        self.blocks = BlockPool(pools.num_blocks)
        self.lifetime = Lifetime()
        self.lifetime.fault = runtime.fault
        self.arena = LogitsArena(buffers.logits, self.lifetime.require, runtime.to_host)
        self.key = object()
        self.streams: set[int] = {0}
        self.prefix_cache: PrefixCache | None = None
        self.reuse_generated = True  # whether blocks of step tokens may serve a prompt
        self.last_decode: tuple[int, int] | None = None  # (arena generation, rows)
        self._all_logits = False  # the last step's
        self._thread = threading.get_ident()
        self._driver: int | None = None  # thread of an engine's step that is under way
        self._in_step = False

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
        if self._in_step:
            raise ModelBusyError("a callback of a step cannot drive the model by hand")
        for seq in seqs:
            if not isinstance(seq, SequenceState):
                raise InvalidArgumentError(
                    f"seq is a {type(seq).__name__}; allowed: what lifecycle.alloc_sequence gives"
                )
            if seq.model_key is not self.key:
                raise StaleHandleError("this sequence belongs to another model")

    @contextmanager
    def driven_here(self, *, step: bool = False) -> Iterator[None]:
        """Let the calling thread drive the model for a while (the engine's lock is held).

        With ``step`` only the engine's loop does: a call by hand, which a callback of the step
        could make, would write over the logits of other requests.
        """
        self.require_alive()
        before = self._thread, self._driver, self._in_step
        self._thread = self._driver = threading.get_ident()
        self._in_step |= step
        try:
            yield
        finally:
            self._thread, self._driver, self._in_step = before

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
            if self.states is not None:
                del self.states.pools  # sequences that outlive the model hold only its slots
            self.states = self.replay = None

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
        recurrence.require_state(seq)
        if not np.array_equal(seq.tokens, ids[:chunk_start]):
            raise InvalidArgumentError("the prompt differs from what the sequence holds already")
        self.require_length(end)
        recurrence.require_split(self, end, len(ids))
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
            recurrence.require_state(seq)
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
        inputs = self._write(batch)
        keeps = self.states is not None and recurrence.place(inputs, batch)
        shape = StepShape.of(
            batch.num_rows,
            len(batch.seqs),
            len(batch.logits_rows),
            batch.first_logits,
            batch.rows[: batch.num_step_seqs],
            keeps_inputs=keeps,
        )
        self._run(inputs, shape)

    def _write(self, batch: Batch) -> Any:
        """A batch's integers into the backend's inputs, which are returned."""
        inputs, rows = self.runtime.inputs(self.buffers), batch.num_rows
        inputs.token_ids[:rows] = batch.token_ids
        inputs.positions[:rows] = batch.positions[0]
        inputs.logits_rows[: len(batch.logits_rows)] = batch.logits_rows
        np.cumsum(batch.rows, out=inputs.cu_rows[1 : len(batch.seqs) + 1])
        tables, size = inputs.block_tables, self.pools.block_size
        for i, seq in enumerate(batch.seqs):
            seq.native.write_block_table(tables[i])
        block, offset = np.divmod(batch.positions[0], size)
        owner = np.repeat(np.arange(len(batch.seqs)), batch.rows)
        inputs.slots[:rows] = tables[owner, block] * size + offset
        return inputs

    def run_long(self, ids: Ints, seq: SequenceState, piece_rows: int) -> None:
        """A whole prompt in one sweep, layer by layer; its last row's logits go to arena row 0."""
        assert seq.held is not None
        seq.held.length = -1  # until the sweep is over
        self.last_decode = None
        self.arena.overwrite(0, 1)
        two_phase.run(self, ids, seq, piece_rows)

    def launch_plan(
        self,
        plan: Plan,
        *,
        wants_tokens: bool,
        host_rows: Sequence[int],
        draws: Sequence[Draw] = (),
        before: StepResult | None = None,
    ) -> StepResult:
        """One sweep for a scheduler's plan; its logits go to the arena rows from 0 on.

        Parameters
        ----------
        plan : Plan
        wants_tokens : bool
            Whether somebody will read the greedy choice.
        host_rows : sequence of int
            Logits rows that will be read.
        draws : sequence of Draw
            Tokens to choose by more than the greatest logit, where ``runtime.samples``.
        before : StepResult, optional
            The step before, where it is not settled yet: rows of this one may take its tokens.
        """
        inputs = self.runtime.inputs(self.buffers)
        write_batch(
            plan,
            inputs.token_ids,
            inputs.positions,
            inputs.slots,
            inputs.cu_rows,
            inputs.block_tables,
            inputs.logits_rows,
            inputs.state_slots,
        )
        fed = np.flatnonzero(plan.source_rows >= 0) if before is not None else ()
        if len(fed):
            self.runtime.feed(inputs, fed, plan.source_rows[fed], before)
        if draws:
            self.runtime.draw(draws)
        steps = np.diff(inputs.cu_rows[: plan.num_decode + 1])
        shape = StepShape.of(plan.num_rows, plan.num_seqs, plan.num_logits, 0, steps)
        self._run(inputs, shape)
        result: StepResult = self.runtime.result(
            self.buffers, plan.num_logits, wants_tokens=wants_tokens, host_rows=host_rows
        )
        return result

    def _run(self, inputs: Any, shape: StepShape) -> None:
        """The sweep, once the step's integers are in the inputs."""
        seqs = shape.step_seqs
        prompts = inputs.cu_rows[seqs : shape.seqs + 1]
        np.subtract(prompts, shape.step_rows, out=inputs.prompt_cu_rows[: len(prompts)])
        if len(prompts) > 1:
            logits = inputs.logits_rows[: shape.logits]
            first = inputs.prompt_first_rows[: len(prompts) - 1]
            first_rows_with_logits(logits - shape.step_rows, inputs.prompt_cu_rows, out=first)
        self.last_decode = None
        self._all_logits = shape.all_logits
        self.arena.overwrite(shape.first_logits, self.runtime.logits_written(shape))
        self.runtime.run(self.network, self.buffers, shape)

    def argmax_rows(self, count: int) -> Ints:
        """Greedy id of arena rows 0 … count − 1; −1 marks a row that is not finite."""
        ids: Ints = self.runtime.greedy(self.buffers, 0, count)
        return ids

    def commit(self, seq: SequenceState, ids: Ints, kind: RowKind, verify_rows: int = 0) -> None:
        """Advance a sequence over rows that ran."""
        seq.native.advance(ids, verify_rows)
        if seq.held is not None:
            seq.held.absorbed(seq.seq_len, is_step=kind == "step")
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
        self.arena.check(view)
        self.arena.mark_read(view)
        ids: Ints = self.runtime.greedy(self.buffers, view.first_row, view.num_rows)
        return ids

    def whole_arena(self) -> LogitsView:
        """Every row of the arena as it stands now."""
        return LogitsView(self.arena, 0, self.limits.logits_rows)

    def decode_hidden(self) -> NDArray[np.float32]:
        """The final norm's rows of the last decode step, a copy [rows, D]."""
        if self.last_decode is None:
            raise StaleHandleError("no decode ran, or another forward overwrote its rows")
        return np.array(self._normed_rows(self.last_decode[1]), np.float32)

    def _normed_rows(self, count: int) -> NDArray[Any]:
        """The final norm of the last step's first rows that have logits."""
        buffers = self.buffers
        hidden = buffers.hidden if self._all_logits else buffers.last_hidden
        normed = buffers.normed[:count]
        self.network.final_norm.forward(self.runtime.ops, hidden[:count], normed)
        rows: NDArray[Any] = self.runtime.to_host(normed)
        return rows
