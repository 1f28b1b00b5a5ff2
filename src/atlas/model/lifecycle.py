"""Lifecycle: sequences, their blocks and slots, and the model's end."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, Protocol

import numpy as np

from atlas._native.sequence import Sequence
from atlas.cache.sequence_file import (
    SequenceHeader,
    SequenceLayout,
    fingerprint,
    read_sequence,
    write_sequence,
)
from atlas.errors import InvalidArgumentError, SequenceStateError
from atlas.model.capability import Unavailable
from atlas.model.prefix import prefix_seed
from atlas.model.records import PrefixReclaim
from atlas.model.sequence import SequenceState
from atlas.whole_number import whole_number

if TYPE_CHECKING:
    from atlas.model.core import ModelCore
    from atlas.model.records import TokenIds


class SwapDims(NamedTuple):
    """The shape of a KV cache whose blocks can be swapped to disk."""

    num_kv_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    element_bytes: int


class ModelLifecycle(Protocol):
    """Make, grow, shrink, move, keep and free sequences; own the pools that they share.

    Counters and block table of a ``seq`` live in one native object. Its blocks come from one
    pool, reference-counted: a block may be shared with the prefix cache or with a fork, and is
    never written while it is. Free counts are read from the pool itself, so sequences driven by
    hand and by the engine are counted alike.

    Raises
    ------
    StaleHandleError
        A ``seq`` of another model, of a freed or closed one, or of a parent process.
    WrongThreadError, ModelBusyError
        The calling thread does not drive the model.
    """

    def bind_to_thread(self) -> None:
        """Make the calling thread the one that drives this model, with its device context.

        The thread that built the model is bound already. Another thread's next call raises
        ``WrongThreadError``. Not allowed while an engine's owner thread runs.
        """
        ...

    def alloc_sequence(self, budget_tokens: int | None = None) -> SequenceState:
        """Return an empty sequence with its recurrent slot, if the model needs one, zeroed.

        No KV block is taken; :meth:`reserve` does that.

        Parameters
        ----------
        budget_tokens
            The most positions it can reach (prompt plus new tokens). State of a proposer that
            grows with context is sized by it; None sizes it for ``max_seq_len``.

        Raises
        ------
        InvalidArgumentError
            If ``budget_tokens`` is outside 1 … ``max_seq_len``.
        OutOfMemoryError
            If no recurrent slot is free.
        """
        ...

    def reserve(self, seq: SequenceState, num_positions: int) -> None:
        """Make room in ``seq``'s block table for positions 0 … ``num_positions`` − 1.

        The only allocator of blocks. It does nothing when the room is there; otherwise it takes
        all missing blocks or none. A shared block that the next position would write is replaced
        by a private copy. A scheduler calls it when it plans, a forward driven by hand first.

        Raises
        ------
        KvExhausted
            If the pool lacks blocks; nothing was changed.
        PromptTooLongError
            If ``num_positions`` exceeds ``max_seq_len``.
        """
        ...

    def rewind(self, seq: SequenceState, new_len: int) -> None:
        """Drop the positions from ``new_len`` on.

        ``tokens``, ``seq_len`` and ``kv_valid_tokens`` are cut, and blocks that hold no kept
        position are returned: a reference is dropped, shared contents are left alone.

        Raises
        ------
        InvalidArgumentError
            If ``new_len`` is outside 0 … ``seq_len``.
        SequenceStateError
            If a verify awaits its accept, or the model has recurrent state that does not stand at
            ``new_len`` (restore a snapshot first).
        """
        ...

    def free_sequence(self, seq: SequenceState) -> None:
        """Give back blocks, prefix references, slot and adapter reference. Idempotent.

        Afterwards every use of ``seq`` but this one raises ``StaleHandleError``.
        """
        ...

    def compact_sequence(self, seq: SequenceState, new_slot: int) -> None:
        """Move ``seq``'s recurrent state, all layers, to pool slot ``new_slot``.

        Keeps running sequences in slots 0 … N − 1. The slot belongs to a retired sequence, on
        which :meth:`detach_slot_for_reuse` must be called next, with nothing in between.

        Raises
        ------
        InvalidArgumentError
            If ``new_slot`` is not a slot of the pool.
        """
        ...

    def detach_slot_for_reuse(self, retired: SequenceState) -> None:
        """Make ``retired`` give up a slot that :meth:`compact_sequence` has just filled.

        Its ``slot`` becomes None, and freeing or dropping it no longer releases the slot, which
        the moved sequence owns now.
        """
        ...

    def fork(self, seq: SequenceState) -> SequenceState:
        """Return a second sequence that stands where ``seq`` stands.

        Blocks are shared and copied on the first write; recurrent state is copied now.

        Raises
        ------
        OutOfMemoryError
            If no recurrent slot is free; nothing was changed.
        SequenceStateError
            If a verify awaits its accept.
        """
        ...

    def cache_sequence(self, seq: SequenceState) -> None:
        """Insert prompt and generated tokens of ``seq`` into the prefix cache.

        Call it before :meth:`free_sequence`, while the blocks are held. Only whole blocks within
        ``kv_valid_tokens`` are inserted, under the key of the sequence's adapter and images.

        Raises
        ------
        SequenceStateError
            If a verify awaits its accept.
        """
        ...

    @property
    def num_free_blocks(self) -> int:
        """KV blocks that can be allocated now; cached blocks are not among them. 0 without KV."""
        ...

    @property
    def num_total_blocks(self) -> int:
        """KV blocks of the pool; 0 without a paged cache."""
        ...

    @property
    def kv_block_bytes(self) -> int:
        """Bytes of one block index over all layers, K and V together; 0 without a pool."""
        ...

    def reclaim_prefix_blocks(self, n: int) -> int:
        """Evict up to ``n`` blocks from the prefix cache; return how many became free.

        For callers that look at :attr:`num_free_blocks` before they allocate. 0 means that
        nothing can be evicted: stop asking.
        """
        ...

    def reclaim_prefix_blocks_for(
        self, prompt: TokenIds, adapter_slot: int, blocks_needed: int
    ) -> PrefixReclaim:
        """Evict cached blocks until a prefill of ``prompt`` fits beside what it will reuse.

        Evicts until ``num_free_blocks >= blocks_needed - r`` or nothing is left to evict.

        Parameters
        ----------
        prompt
            The prompt to be admitted; r is the number of cached blocks that it will reuse under
            the adapter, which are never evicted. An empty prompt reuses nothing (r = 0).
        adapter_slot
            As in the request: a resident slot, or −1 for the active adapter.
        blocks_needed
            Blocks of the whole prompt plus headroom, reused ones included.
        """
        ...

    def save_sequence_state(self, seq: SequenceState, writer: BinaryIO) -> None:
        """Write ``seq``'s KV blocks and recurrent state to ``writer``; frees nothing.

        KV layer by layer, block by block, K then V; then each recurrent layer. A header carries
        the format's version and a fingerprint of the model and its numerics.
        """
        ...

    def restore_sequence_state(self, seq: SequenceState, num_blocks: int, reader: BinaryIO) -> None:
        """Read what :meth:`save_sequence_state` wrote into the allocated, empty ``seq``.

        Allocates ``num_blocks`` blocks. All that ``reader`` gives is checked before use, and on
        an error the sequence is as before. A restored sequence continues bitwise as the saved one.

        Raises
        ------
        KvExhausted
            If the pool lacks blocks.
        InvalidArgumentError
            If version, fingerprint, sizes or contents disagree.
        """
        ...

    def poll_kv_calibration(self) -> None:
        """Advance the calibration of a quantised KV cache; called once per prefill chunk.

        Nothing happens for caches that need no calibration.
        """
        ...

    @property
    def swap_dims(self) -> SwapDims | None:
        """Shape of the KV cache for swapping blocks to disk; None where that is unsupported."""
        ...

    def teardown(self) -> None:
        """Release everything the model owns, newest first; later calls raise ``ClosedError``.

        Called once, after running work has drained and the streams are synchronised. It is never
        left to a destructor, which can neither order nor report.
        """
        ...


class DenseLifecycle(ModelLifecycle):
    """Sequences whose only state is paged KV.

    They have no recurrent slot, so ``slot`` is always None: :meth:`compact_sequence` refuses every
    ``new_slot``, and :meth:`detach_slot_for_reuse` finds nothing to give up. Without a prefix cache
    (a model that no engine drives, or one whose engine has none) nothing is cached or evicted.
    """

    poll_kv_calibration = Unavailable("lifecycle")
    swap_dims = None

    def __init__(self, core: ModelCore) -> None:
        self._core = core

    def bind_to_thread(self) -> None:
        self._core.bind_to_thread()

    def alloc_sequence(self, budget_tokens: int | None = None) -> SequenceState:
        core = self._core
        core.enter()
        most = core.limits.max_seq_len
        budget = most if budget_tokens is None else budget_tokens
        budget = whole_number("budget_tokens", budget, 1, most)
        return SequenceState(Sequence(core.blocks, core.pools.block_size), core.key, budget)

    def reserve(self, seq: SequenceState, num_positions: int) -> None:
        self._core.enter(seq)
        self._core.reserve(seq, whole_number("num_positions", num_positions, 0))

    def rewind(self, seq: SequenceState, new_len: int) -> None:
        self._core.enter(seq)
        new_len = whole_number("new_len", new_len, 0)
        seq.native.rewind(new_len)
        if new_len == 0:
            seq.forget_lookup()

    def free_sequence(self, seq: SequenceState) -> None:
        self._core.enter(seq)
        seq.forget_lookup()
        seq.native.release()

    def compact_sequence(self, seq: SequenceState, new_slot: int) -> None:
        self._core.enter(seq)
        raise InvalidArgumentError(
            f"new_slot is {new_slot}; allowed: none, this model has no recurrent slots"
        )

    def detach_slot_for_reuse(self, retired: SequenceState) -> None:
        self._core.enter(retired)
        retired.slot = None

    def fork(self, seq: SequenceState) -> SequenceState:
        core = self._core
        core.enter(seq)
        native = Sequence(core.blocks, core.pools.block_size)
        native.share(seq.native)
        forked = replace(
            seq,
            native=native,
            prefix=None,
            layer_states=list(seq.layer_states),
            vision_spans=list(seq.vision_spans),
        )
        if not forked.seq_len:
            forked.forget_lookup()
        return forked

    def cache_sequence(self, seq: SequenceState) -> None:
        core = self._core
        core.enter(seq)
        native = seq.native
        native.check()
        if core.prefix_cache is not None and native.kv_valid_tokens >= native.block_size:
            core.prefix_cache.insert(
                native.tokens,
                native.block_table,
                native.kv_valid_tokens,
                seq.num_exact,
                prefix_seed(seq),
            )

    @property
    def num_free_blocks(self) -> int:
        self._core.require_alive()
        return self._core.blocks.num_free

    @property
    def num_total_blocks(self) -> int:
        self._core.require_alive()
        return self._core.blocks.num_total

    @property
    def kv_block_bytes(self) -> int:
        self._core.require_alive()
        return self._core.pools.block_bytes

    def reclaim_prefix_blocks(self, n: int) -> int:
        core = self._core
        core.enter()
        if n < 0:
            raise InvalidArgumentError(f"n is {n}; allowed: 0 or more")
        return 0 if core.prefix_cache is None else core.prefix_cache.evict(n)

    def reclaim_prefix_blocks_for(
        self, prompt: TokenIds, adapter_slot: int, blocks_needed: int
    ) -> PrefixReclaim:
        core = self._core
        core.enter()
        ids = core.token_array(prompt, "prompt tokens") if len(prompt) else np.empty(0, np.int32)
        if adapter_slot != -1:
            raise InvalidArgumentError(
                f"adapter_slot is {adapter_slot}; allowed: -1, this model has no adapters"
            )
        if blocks_needed < 0:
            raise InvalidArgumentError(f"blocks_needed is {blocks_needed}; allowed: 0 or more")
        if core.prefix_cache is None:
            return PrefixReclaim(0, 0, core.blocks.num_free >= blocks_needed)
        seed = 0  # of the base model
        return PrefixReclaim(
            *core.prefix_cache.reclaim_for(ids, seed, core.reuse_generated, blocks_needed)
        )

    def save_sequence_state(self, seq: SequenceState, writer: BinaryIO) -> None:
        core = self._core
        core.enter(seq)
        native = seq.native
        native.check()
        held = native.block_table[: -(-native.seq_len // native.block_size)]
        header = SequenceHeader(
            fingerprint(core),
            native.seq_len,
            native.prompt_len,
            seq.num_exact,
            native.kv_valid_tokens,
        )
        write_sequence(writer, header, native.tokens, core.pools.read(held))

    def restore_sequence_state(self, seq: SequenceState, num_blocks: int, reader: BinaryIO) -> None:
        core = self._core
        core.enter(seq)
        native, size = seq.native, core.pools.block_size
        native.check()
        if native.seq_len:
            raise SequenceStateError(
                f"the sequence holds {native.seq_len} positions; restore needs an empty one"
            )
        most = -(-core.limits.max_seq_len // size)
        num_blocks = whole_number("num_blocks", num_blocks, 0, most)
        before = native.num_blocks
        core.reserve(seq, min(num_blocks * size, core.limits.max_seq_len))
        try:
            saved = read_sequence(reader, SequenceLayout.of(core))
            needed = -(-saved.header.seq_len // size)
            if needed > num_blocks:
                raise InvalidArgumentError(
                    f"num_blocks is {num_blocks}; the saved sequence fills {needed}"
                )
            core.pools.write(native.block_table[:needed], saved.parts)
            native.advance(saved.tokens)
        except BaseException:
            native.trim(before)
            raise
        native.prompt_len = saved.header.prompt_len
        native.kv_valid_tokens = saved.header.kv_valid_tokens
        seq.forget_lookup()
        if saved.header.exact_len < saved.header.prompt_len:
            seq.exact_len = saved.header.exact_len

    def teardown(self) -> None:
        self._core.close()
