"""The prefix cache, read by the first window of a hand-driven prompt."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from atlas._native.sequence import Sequence
from atlas.cache.state_slots import HeldState
from atlas.model.batch import Window

if TYPE_CHECKING:
    from atlas.model.core import ModelCore
    from atlas.model.sequence import SequenceState


def prefix_seed(seq: SequenceState) -> int:
    """What a sequence's prefix key holds besides tokens: its adapter; 0 = the base model."""
    return seq.adapter_id


def begin(core: ModelCore, window: Window, *, read_cache: bool) -> Window:
    """What is left to run of a prompt window once the cache was looked up.

    Only the first window of a prompt reads the cache, once: the decision is recorded in its
    sequence, whose ``prefix`` holds the matched blocks until ``ModelCore.room`` puts them into
    the table. A call that fails after this leaves the record, and its retry replays it. At least
    one token of the window is left.
    """
    seq, ids = window.seq, window.token_ids
    if seq.seq_len:
        return window
    if not (read_cache and _is_replayable(seq, window)):
        seq.forget_lookup()
        if read_cache and core.prefix_cache is not None:
            found = core.prefix_cache.match(
                ids, prefix_seed(seq), core.reuse_generated, len(ids) - 1
            )
            seq.matched_tokens, seq.matched_blocks = found.num_tokens, len(found.blocks)
            if found.exact_tokens < found.num_tokens:
                seq.exact_len = found.exact_tokens
            if seq.held is not None and found.snapshot_id is not None:
                seq.held.copy_from(found.snapshot_id, found.num_tokens)
            if found.num_tokens:
                seq.prefix = Sequence(core.blocks, core.pools.block_size)
                seq.prefix.adopt(ids[: found.num_tokens], found.blocks)
        seq.lookup_done = read_cache
    return replace(window, token_ids=ids[seq.matched_tokens :])


def matched_tokens(core: ModelCore, prompt: NDArray[np.int32]) -> int:
    """Tokens of a prompt of the base model that the prefix cache would give; counts nothing."""
    if core.prefix_cache is None:
        return 0
    _, num_blocks, _ = core.prefix_cache.reclaim_for(prompt, 0, core.reuse_generated, 0)
    return num_blocks * core.pools.block_size


def _is_replayable(seq: SequenceState, window: Window) -> bool:
    """Whether a decision was recorded for a window that begins as this one does."""
    if not seq.lookup_done or seq.prefix is None:
        return seq.lookup_done
    matched = seq.prefix.tokens
    return len(matched) < len(window.token_ids) and np.array_equal(
        matched, window.token_ids[: len(matched)]
    )


def insert_blocks(core: ModelCore, seq: SequenceState) -> None:
    """Give the prefix cache a sequence's whole blocks."""
    assert core.prefix_cache is not None
    native = seq.native
    exact = seq.num_exact // core.chunk_unit * core.chunk_unit
    core.prefix_cache.insert(
        native.tokens, native.block_table, native.kv_valid_tokens, exact, prefix_seed(seq)
    )


def cache_state(core: ModelCore, seq: SequenceState, held: HeldState) -> None:
    """Give the prefix cache a sequence's state at the latest block boundary where it was seen.

    Its blocks were inserted before.
    """
    at_boundary = seq.seq_len and seq.seq_len % core.pools.block_size == 0
    if at_boundary and held.length == seq.seq_len:
        held.keep_tail()
    tail, held.tail = held.tail, None
    if tail is None or core.states is None:
        return
    assert core.prefix_cache is not None
    is_generated = tail.length > seq.num_exact
    spare = core.prefix_cache.attach_snapshot(
        seq.tokens, tail.length, prefix_seed(seq), tail.slot, is_generated
    )
    if spare is not None:
        core.states.snapshots.give(spare)
