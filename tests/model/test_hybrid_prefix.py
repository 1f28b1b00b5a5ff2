"""The prefix cache under hand-driven hybrids: what a prompt finds is blocks and a state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from atlas._native.prefix_cache import MissReason, PrefixCache
from atlas.errors import KvExhausted
from atlas.model import Model
from atlas.model.load import LoadedModel
from atlas.model.prefix import matched_tokens
from atlas.model.records import PrefillSlice
from atlas.model.sequence import SequenceState
from tests.helpers.random_model import random_model
from tests.model.checks import bits, prefilled, row_after, unchanged

TEXT = [(37 * p + p * p) % 203 for p in range(100)]


@pytest.fixture(params=["delta", "mamba"])
def loaded(request: pytest.FixtureRequest) -> Iterator[LoadedModel]:
    """With a prefix cache, as an engine gives its model one; 20 blocks, 3 snapshots."""
    options = {"threads": 2, "kv_tokens": 320, "max_seq_len": 200, "state_snapshots": 3}
    with random_model(request.param, **options) as loaded:
        core = loaded.core
        assert core.states is not None
        core.prefix_cache = PrefixCache(core.blocks, core.pools.block_size, recurrent=True)
        core.states.snapshots.cache = core.prefix_cache
        yield loaded
        core.prefix_cache.check()
        assert core.states.snapshots.num_used == core.prefix_cache.num_snapshots


def leave(model: Model, seq: SequenceState) -> None:
    """Cache a sequence and free it."""
    model.lifecycle.cache_sequence(seq)
    model.lifecycle.free_sequence(seq)


def matched(model: Model, tokens: Sequence[int]) -> int:
    """Tokens that a prompt finds; its row must be that of a run without the cache."""
    expected = row_after(model, tokens)
    seq = model.lifecycle.alloc_sequence()
    assert bits(model.forward.prefill(tokens, seq)) == expected
    assert bits(model.forward.decode(7, seq)) == row_after(model, [*tokens, 7])
    found = seq.matched_tokens
    model.lifecycle.free_sequence(seq)
    return found


def snapshots(loaded: LoadedModel) -> int:
    cache = loaded.core.prefix_cache
    assert cache is not None
    return cache.num_snapshots


@pytest.mark.contract("lifecycle.cache_sequence")
def test_a_prompts_tail_serves_the_next(loaded: LoadedModel) -> None:
    model = loaded.model
    leave(model, prefilled(model, TEXT[:50]))
    assert snapshots(loaded) == 1
    assert matched(model, TEXT[:70]) == 48
    assert matched(model, TEXT[:50]) == 48
    assert matched(model, TEXT[:48]) == 0, "the state after 47 tokens is needed, or one before"
    assert model.forward.prefill_tail_split(TEXT[:70]) == 64
    assert model.forward.prefill_tail_split(TEXT[:50]) is None


@pytest.mark.parametrize("cuts", [[48], [10, 48, 49], [47], [16, 32]])
def test_windows_keep_the_tail_where_one_ends_there(loaded: LoadedModel, cuts: list[int]) -> None:
    """A window that runs over the tail boundary is cut there; one of a batch cannot be."""
    model = loaded.model
    for batched in (False, True):
        seq, start = model.lifecycle.alloc_sequence(), 0
        for end in [*cuts, 50]:
            if batched:
                piece = PrefillSlice(TEXT[:50], seq, start, end - start, end == 50)
                model.forward.prefill_batch_chunk([piece])
            else:
                model.forward.prefill_chunk(TEXT[:50], seq, start, end - start, end == 50)
            start = end
        leave(model, seq)
        expected = 48 if not batched or 48 in cuts else 0
        assert matched(model, TEXT[:60]) == expected
        assert loaded.core.prefix_cache is not None
        loaded.core.prefix_cache.clear()


@pytest.mark.contract("ssm.prefix_checkpoint")
def test_decoded_states_serve_the_next_turn(loaded: LoadedModel) -> None:
    model = loaded.model
    assert model.ssm is not None
    seq = prefilled(model, TEXT[:20])
    for token in TEXT[20:70]:
        model.forward.decode(token, seq)
        model.ssm.prefix_checkpoint(seq)
    assert snapshots(loaded) == 3, "at 32, 48 and 64; the tail at 16 gave way"
    model.lifecycle.free_sequence(seq)
    assert matched(model, TEXT[:90]) == 64
    loaded.core.reuse_generated = False
    assert matched(model, TEXT[:90]) == 0


def test_a_state_at_a_boundary_is_cached_with_its_blocks(loaded: LoadedModel) -> None:
    model = loaded.model
    seq = prefilled(model, TEXT[:20])
    for token in TEXT[20:48]:
        model.forward.decode(token, seq)
    leave(model, seq)
    assert matched(model, TEXT[:90]) == 48


def test_a_call_that_lacks_blocks_replays_its_lookup(loaded: LoadedModel) -> None:
    """The snapshot may go in between: its state lies in the sequence's own slot by then."""
    model, core = loaded.model, loaded.core
    leave(model, prefilled(model, TEXT[:50]))
    expected = row_after(model, TEXT[:90])
    taken = core.blocks.allocate(core.blocks.num_free)
    seq = model.lifecycle.alloc_sequence()
    with unchanged(model, seq), pytest.raises(KvExhausted):
        model.forward.prefill(TEXT[:90], seq)
    assert (seq.matched_tokens, seq.lookup_done) == (48, True)
    for block in taken:
        core.blocks.release(block)
    assert core.states is not None
    for _ in range(3):
        core.states.snapshots.take()
    assert snapshots(loaded) == 0
    assert bits(model.forward.prefill(TEXT[:90], seq)) == expected
    assert seq.matched_tokens == 48
    core.states.snapshots.give(core.states.pools.counts.running)
    core.states.snapshots.give(core.states.pools.counts.running + 1)
    core.states.snapshots.give(core.states.pools.counts.running + 2)


def test_a_fork_of_a_recorded_lookup_starts_empty(loaded: LoadedModel) -> None:
    model, core = loaded.model, loaded.core
    leave(model, prefilled(model, TEXT[:50]))
    expected = row_after(model, TEXT[:20])
    taken = core.blocks.allocate(core.blocks.num_free)
    seq = model.lifecycle.alloc_sequence()
    with pytest.raises(KvExhausted):
        model.forward.prefill(TEXT[:90], seq)
    twin = model.lifecycle.fork(seq)
    for block in taken:
        core.blocks.release(block)
    assert bits(model.forward.prefill(TEXT[:20], twin)) == expected


def test_another_prompt_after_a_lookup_starts_empty(loaded: LoadedModel) -> None:
    model, core = loaded.model, loaded.core
    leave(model, prefilled(model, TEXT[:50]))
    other = TEXT[::-1]
    expected = row_after(model, other)
    taken = core.blocks.allocate(core.blocks.num_free)
    seq = model.lifecycle.alloc_sequence()
    with pytest.raises(KvExhausted):
        model.forward.prefill(TEXT[:90], seq)
    for block in taken:
        core.blocks.release(block)
    assert bits(model.forward.prefill(other, seq)) == expected
    assert seq.matched_tokens == 0


def test_snapshots_go_by_value_and_the_misses_say_so(loaded: LoadedModel) -> None:
    model, cache = loaded.model, loaded.core.prefix_cache
    assert cache is not None
    for first in range(5):
        leave(model, prefilled(model, [first, *TEXT[:40]]))
    assert snapshots(loaded) == 3
    prompts = [np.array([first, *TEXT[:50]], np.int32) for first in range(5)]
    assert [matched_tokens(loaded.core, prompt) for prompt in prompts] == [0, 0, 32, 32, 32]
    before = cache.misses
    assert matched(model, prompts[0].tolist()) == 0
    assert cache.misses[MissReason.SNAPSHOT] - before[MissReason.SNAPSHOT] == 1
