"""The prefix cache under hand-driven sequences: what is cached, found, replayed and evicted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atlas._native.prefix_cache import PrefixCache
from atlas.errors import InvalidArgumentError, KernelError, KvExhausted, SequenceStateError
from atlas.model import Model
from atlas.model.load import LoadedModel
from atlas.model.records import PrefillSlice, PrefixReclaim
from atlas.model.sequence import SequenceState
from tests.helpers.random_model import random_model, shared_random
from tests.model.checks import (
    OTHER,
    PROMPT,
    assert_accounted,
    bits,
    prefilled,
    row_after,
    state,
    unchanged,
)

TEXT = [(37 * p + p * p) % 203 for p in range(100)]


class Steps(list[int]):
    """Rows of every step that a model runs, from now on."""

    def __init__(self, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
        run = loaded.core.runtime.run

        def record(network: Any, buffers: Any, shape: Any) -> None:
            self.append(shape.rows)
            run(network, buffers, shape)

        monkeypatch.setattr(loaded.core.runtime, "run", record)


@pytest.fixture
def steps(cached: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> Steps:
    return Steps(cached, monkeypatch)


def cache(model: Model, tokens: Sequence[int]) -> list[int]:
    """Leave a prompt's blocks in the cache and give back its sequence; the block numbers."""
    seq = prefilled(model, tokens)
    blocks = seq.block_table.tolist()
    model.lifecycle.cache_sequence(seq)
    model.lifecycle.free_sequence(seq)
    return blocks


@contextmanager
def broken(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Steps fail in the block after they ran."""
    run = loaded.core.runtime.run

    def fail(*args: Any) -> None:
        run(*args)
        raise KernelError("kernel attention reported an error")

    with monkeypatch.context() as patch:
        patch.setattr(loaded.core.runtime, "run", fail)
        yield


def record(seq: SequenceState) -> tuple[int, int, bool]:
    return seq.matched_tokens, seq.matched_blocks, seq.lookup_done


# -- what is cached ---------------------------------------------------------------------------


@pytest.mark.contract("lifecycle.cache_sequence")
def test_cached_blocks_serve_the_next_prompt(cached: LoadedModel, steps: Steps) -> None:
    model = cached.model
    expected = row_after(model, TEXT[:50])
    blocks = cache(model, TEXT[:40])
    assert model.lifecycle.num_free_blocks == 18
    del steps[:]
    seq = model.lifecycle.alloc_sequence()
    assert bits(model.forward.prefill(TEXT[:50], seq)) == expected
    assert steps == [18]
    assert record(seq) == (32, 2, True)
    assert seq.block_table.tolist()[:2] == blocks[:2]
    assert (seq.seq_len, seq.prompt_len, seq.tokens.tolist()) == (50, 50, TEXT[:50])
    assert_accounted(cached, [seq])
    assert bits(model.forward.decode(9, seq)) == row_after(model, [*TEXT[:50], 9])


@pytest.mark.contract("lifecycle.cache_sequence")
def test_generated_tokens_are_cached_as_such(cached: LoadedModel, steps: Steps) -> None:
    """They serve unless generated blocks are excluded; what stands on them counts as they do."""
    model, core = cached.model, cached.core
    seq = prefilled(model, TEXT[:20])
    for token in TEXT[20:50]:
        model.forward.decode(token, seq)
    model.lifecycle.cache_sequence(seq)
    model.lifecycle.free_sequence(seq)
    again = prefilled(model, TEXT[:70])
    assert record(again) == (48, 3, True)
    model.lifecycle.cache_sequence(again)
    model.lifecycle.free_sequence(again)
    core.reuse_generated = False
    cold = prefilled(model, TEXT[:70])
    assert record(cold) == (16, 1, True)
    model.lifecycle.cache_sequence(cold)  # now made from prompt tokens only
    exact = prefilled(model, TEXT[:70])
    assert record(exact) == (64, 4, True)


@pytest.mark.contract("lifecycle.cache_sequence")
def test_only_whole_valid_blocks_are_cached(cached: LoadedModel) -> None:
    model = cached.model
    assert cached.core.prefix_cache is not None
    seq = prefilled(model, TEXT[:47])
    seq.native.kv_valid_tokens = 31
    model.lifecycle.cache_sequence(seq)
    assert cached.core.prefix_cache.num_blocks == 1
    short = prefilled(model, OTHER)
    model.lifecycle.cache_sequence(short)
    assert cached.core.prefix_cache.num_blocks == 1
    model.verify.decode_verify([1, 2], seq)
    with unchanged(model, seq), pytest.raises(SequenceStateError, match="verify"):
        model.lifecycle.cache_sequence(seq)
    assert_accounted(cached, [seq, short])


def test_without_a_cache_nothing_is_kept_or_found(model: Model) -> None:
    lifecycle = model.lifecycle
    cache(model, TEXT[:40])
    assert lifecycle.num_free_blocks == 20
    assert record(prefilled(model, TEXT[:40])) == (0, 0, True)
    assert lifecycle.reclaim_prefix_blocks(5) == 0
    assert lifecycle.reclaim_prefix_blocks_for(TEXT, -1, 20) == PrefixReclaim(0, 0, True)
    assert lifecycle.reclaim_prefix_blocks_for(TEXT, -1, 21) == PrefixReclaim(0, 0, False)


def test_a_cached_block_is_never_written(cached: LoadedModel) -> None:
    """Rewound into the middle of it, a sequence goes on in a copy."""
    model = cached.model
    expected = row_after(model, TEXT[:40])
    seq = prefilled(model, TEXT[:40])
    model.lifecycle.cache_sequence(seq)
    model.lifecycle.rewind(seq, 21)
    table = seq.block_table.tolist()
    model.forward.prefill_chunk([*TEXT[:21], *OTHER], seq, 21, len(OTHER), True)
    assert seq.block_table.tolist()[0] == table[0]
    assert seq.block_table.tolist()[1] != table[1]
    assert bits(model.forward.decode(3, seq)) == row_after(model, [*TEXT[:21], *OTHER, 3])
    warm = model.lifecycle.alloc_sequence()
    assert bits(model.forward.prefill(TEXT[:40], warm)) == expected
    assert warm.block_table.tolist()[:2] == table
    assert_accounted(cached, [seq, warm])


# -- the lookup -------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "matched"), [(32, 16), (33, 32), (48, 32), (16, 0), (17, 16)])
def test_a_token_is_left_to_compute(
    cached: LoadedModel, steps: Steps, length: int, matched: int
) -> None:
    model = cached.model
    cache(model, TEXT[:40])
    expected = row_after(model, TEXT[:length])
    del steps[:]
    seq = model.lifecycle.alloc_sequence()
    assert bits(model.forward.prefill(TEXT[:length], seq)) == expected
    assert (steps, seq.matched_tokens) == ([length - matched], matched)


@pytest.mark.contract("forward.prefill_chunk")
def test_a_match_ends_in_the_first_window(cached: LoadedModel, steps: Steps) -> None:
    """Later windows start where they always do, and look nothing up."""
    model = cached.model
    cache(model, TEXT[:96])
    expected = row_after(model, TEXT[:80])
    del steps[:]
    seq = model.lifecycle.alloc_sequence()
    assert model.forward.prefill_chunk(TEXT[:80], seq, 0, 40, False) is None
    assert (seq.seq_len, record(seq)) == (40, (32, 2, True))
    assert bits(model.forward.prefill_chunk(TEXT[:80], seq, 40, 40, True)) == expected
    assert steps == [8, 40]


def test_all_logits_are_computed(cached: LoadedModel, steps: Steps) -> None:
    model = cached.model
    cache(model, TEXT[:40])
    del steps[:]
    seq = model.lifecycle.alloc_sequence()
    view = model.forward.prefill(TEXT[:40], seq, logits="all")
    assert view is not None
    assert view.num_rows == 40
    assert (steps, record(seq)) == ([40], (0, 0, False))


def test_windows_of_a_step_look_up_too(cached: LoadedModel, steps: Steps) -> None:
    model, lifecycle = cached.model, cached.model.lifecycle
    texts = [TEXT[:60], [*TEXT[:16], *OTHER], OTHER]
    expected = [row_after(model, text) for text in texts]
    after = row_after(model, [*PROMPT, 1])
    cache(model, TEXT[:48])
    decoding = prefilled(model, PROMPT)
    for use in ("batch", "mixed"):
        seqs = [lifecycle.alloc_sequence() for _ in texts]
        slices = [
            PrefillSlice(text, seq, 0, len(text), True)
            for text, seq in zip(texts, seqs, strict=True)
        ]
        del steps[:]
        if use == "batch":
            views = model.forward.prefill_batch_chunk(slices)
        else:
            result = model.forward.mixed_forward_batch([1], [decoding], slices)
            views = result.prefill_logits
            assert bits(result.decode_logits) == after
        assert [bits(view) for view in views] == expected
        assert steps == [12 + 7 + 7 + (use == "mixed")]
        assert [seq.matched_tokens for seq in seqs] == [48, 16, 0]
        assert_accounted(cached, [*seqs, decoding])
        for seq in seqs:
            lifecycle.free_sequence(seq)


def test_a_reserved_sequence_returns_blocks_for_what_it_shares(cached: LoadedModel) -> None:
    model, lifecycle = cached.model, cached.model.lifecycle
    blocks = cache(model, TEXT[:40])
    seq = lifecycle.alloc_sequence()
    lifecycle.reserve(seq, 80)
    assert lifecycle.num_free_blocks == 13
    model.forward.prefill(TEXT[:50], seq)
    assert seq.block_table.tolist()[:2] == blocks[:2]
    assert (len(seq.block_table), lifecycle.num_free_blocks) == (5, 15)
    assert_accounted(cached, [seq])


# -- a retry ----------------------------------------------------------------------------------


@pytest.mark.parametrize("reserved", [0, 100])
def test_a_retry_replays_the_decision(
    cached: LoadedModel, steps: Steps, monkeypatch: pytest.MonkeyPatch, reserved: int
) -> None:
    """Even if the cache has lost the blocks meanwhile: the sequence's record holds them."""
    model, lifecycle, prefix_cache = cached.model, cached.model.lifecycle, cached.core.prefix_cache
    assert prefix_cache is not None
    cache(model, TEXT[:40])
    expected = row_after(model, TEXT[:50])
    seq = lifecycle.alloc_sequence()
    lifecycle.reserve(seq, reserved)
    with broken(cached, monkeypatch):
        with unchanged(model, seq), pytest.raises(KernelError):
            model.forward.prefill(TEXT[:50], seq)
        assert record(seq) == (32, 2, True)
        prefix_cache.clear()
        with unchanged(model, seq), pytest.raises(KernelError):
            model.forward.prefill_batch_chunk([PrefillSlice(TEXT[:50], seq, 0, 50, True)])
    del steps[:]
    assert bits(model.forward.prefill(TEXT[:50], seq)) == expected
    assert (steps, record(seq), prefix_cache.hits) == ([18], (32, 2, True), 1)
    assert_accounted(cached, [seq])
    lifecycle.free_sequence(seq)
    assert lifecycle.num_free_blocks == 20


def test_a_retry_replays_that_nothing_was_found(
    cached: LoadedModel, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = cached.model
    seq = model.lifecycle.alloc_sequence()
    with broken(cached, monkeypatch), pytest.raises(KernelError):
        model.forward.prefill(TEXT[:50], seq)
    assert record(seq) == (0, 0, True)
    cache(model, TEXT[:40])
    del steps[:]
    model.forward.prefill(TEXT[:50], seq)
    assert steps == [50]


@pytest.mark.parametrize("way", ["other prompt", "all logits", "shorter window", "rewound"])
def test_another_call_than_the_failed_one_decides_anew(
    cached: LoadedModel, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    model, lifecycle = cached.model, cached.model.lifecycle
    cache(model, TEXT[:40])
    seq = lifecycle.alloc_sequence()
    with broken(cached, monkeypatch), pytest.raises(KernelError):
        model.forward.prefill(TEXT[:50], seq)
    text, expected = TEXT[:50], (32, 2, True)
    if way == "other prompt":
        text, expected = [*TEXT[:16], *OTHER, *PROMPT], (16, 1, True)
        view = model.forward.prefill(text, seq)
    elif way == "all logits":
        expected = (0, 0, False)
        view = model.forward.prefill(text, seq, logits="all")
    elif way == "shorter window":
        expected = (16, 1, True)
        model.forward.prefill_chunk(text, seq, 0, 20, False)
        view = model.forward.prefill_chunk(text, seq, 20, 30, True)
    else:
        lifecycle.rewind(seq, 0)
        assert record(seq) == (0, 0, False)
        view = model.forward.prefill(text, seq)
    assert bits(view) == row_after(model, text)
    assert record(seq) == expected
    assert_accounted(cached, [seq])


def test_a_record_goes_with_its_sequence(
    cached: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, lifecycle, prefix_cache = cached.model, cached.model.lifecycle, cached.core.prefix_cache
    assert prefix_cache is not None
    for end in ("freed", "dropped", "forked"):
        cache(model, TEXT[:40])
        seq = lifecycle.alloc_sequence()
        with broken(cached, monkeypatch), pytest.raises(KernelError):
            model.forward.prefill(TEXT[:50], seq)
        if end == "freed":
            lifecycle.free_sequence(seq)
        elif end == "forked":
            fork = lifecycle.fork(seq)
            assert record(fork) == (0, 0, False)
            lifecycle.free_sequence(seq)
        del seq
        assert_accounted(cached, [])
        prefix_cache.clear()
        assert lifecycle.num_free_blocks == 20


def test_a_rewound_sequence_looks_up_again(cached: LoadedModel, steps: Steps) -> None:
    model = cached.model
    cache(model, TEXT[:40])
    seq = prefilled(model, TEXT[:50])
    model.lifecycle.rewind(seq, 0)
    del steps[:]
    model.forward.prefill(TEXT[:34], seq)
    assert steps == [2]


# -- evicting ---------------------------------------------------------------------------------


@pytest.mark.contract("lifecycle.reclaim_prefix_blocks")
def test_reclaim_evicts_what_nobody_holds(cached: LoadedModel) -> None:
    model, lifecycle = cached.model, cached.model.lifecycle
    cache(model, TEXT[:80])
    held = prefilled(model, TEXT[:33])
    assert lifecycle.num_free_blocks == 20 - 6
    assert lifecycle.reclaim_prefix_blocks(0) == 0
    assert lifecycle.reclaim_prefix_blocks(2) == 2
    assert lifecycle.num_free_blocks == 20 - 4
    assert lifecycle.reclaim_prefix_blocks(9) == 1
    assert lifecycle.reclaim_prefix_blocks(9) == 0
    assert_accounted(cached, [held])
    with unchanged(model, held), pytest.raises(InvalidArgumentError, match="n is -1"):
        lifecycle.reclaim_prefix_blocks(-1)


@pytest.mark.contract("lifecycle.reclaim_prefix_blocks_for")
def test_reclaim_for_a_prompt_keeps_what_it_will_reuse(cached: LoadedModel, steps: Steps) -> None:
    model, lifecycle = cached.model, cached.model.lifecycle
    cache(model, TEXT[:80])
    cache(model, [7, *TEXT[:80]])
    hog = lifecycle.alloc_sequence()
    lifecycle.reserve(hog, 160)
    assert lifecycle.num_free_blocks == 0
    prompt = TEXT[:60]
    assert lifecycle.reclaim_prefix_blocks_for(prompt, -1, 3) == PrefixReclaim(0, 3, True)
    assert lifecycle.reclaim_prefix_blocks_for(prompt, -1, 7) == PrefixReclaim(4, 3, True)
    assert lifecycle.num_free_blocks == 4
    assert lifecycle.reclaim_prefix_blocks_for(prompt, -1, 99) == PrefixReclaim(3, 3, False)
    del steps[:]
    seq = prefilled(model, prompt)
    assert (steps, seq.matched_blocks) == ([12], 3)
    lifecycle.free_sequence(seq)
    assert lifecycle.reclaim_prefix_blocks_for([], -1, 10) == PrefixReclaim(3, 0, True)
    assert_accounted(cached, [hog])


@pytest.mark.contract("lifecycle.reclaim_prefix_blocks_for")
def test_reclaim_for_refuses_bad_arguments(cached: LoadedModel) -> None:
    lifecycle = cached.model.lifecycle
    cache(cached.model, TEXT[:40])
    with unchanged(cached.model):
        with pytest.raises(InvalidArgumentError, match="203"):
            lifecycle.reclaim_prefix_blocks_for([203], -1, 99)
        with pytest.raises(InvalidArgumentError, match="adapter_slot is 0"):
            lifecycle.reclaim_prefix_blocks_for([1], 0, 99)
        with pytest.raises(InvalidArgumentError, match="blocks_needed is -1"):
            lifecycle.reclaim_prefix_blocks_for([1], -1, -1)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.integers(1, 70),
            st.integers(1, 70),
            st.integers(0, 5),
            st.booleans(),
        ),
        max_size=12,
    )
)
def test_warm_is_cold(prompts: list[tuple[int, int, int, int, bool]]) -> None:
    """Whatever was cached and evicted before, in whatever windows: the bits of a cold prefill."""
    with random_model("dense", threads=1, kv_tokens=192, max_seq_len=90) as loaded:
        model, core = loaded.model, loaded.core
        core.prefix_cache = PrefixCache(core.blocks, core.pools.block_size)
        alive: list[SequenceState] = []
        for which, length, first, generated, keep in prompts:
            text = [*TEXT[: 16 * which + 5], *([which] * 70)][:length]
            seq = model.lifecycle.alloc_sequence()
            first = min(first, length)
            try:
                view = model.forward.prefill_chunk(text, seq, 0, first, first == length)
                if first < length:
                    view = model.forward.prefill_chunk(text, seq, first, length - first, True)
                row = bits(view)
                for token in range(generated):
                    text.append(token)
                    row = bits(model.forward.decode(token, seq))
            except KvExhausted:
                model.lifecycle.free_sequence(alive.pop() if alive else seq)
                model.lifecycle.free_sequence(seq)
                continue
            model.lifecycle.cache_sequence(seq)
            if keep:
                alive.append(seq)
            else:
                model.lifecycle.free_sequence(seq)
            assert_accounted(loaded, alive)
            assert row == _cold(tuple(text))


_COLD: dict[tuple[int, ...], bytes] = {}


def _cold(text: tuple[int, ...]) -> bytes:
    if text not in _COLD:
        cold = shared_random("dense", threads=1, kv_tokens=192, max_seq_len=90)
        _COLD[text] = row_after(cold.model, text)
    return _COLD[text]


def test_states_of_a_warm_and_a_cold_sequence_agree(cached: LoadedModel) -> None:
    model = cached.model
    cold = prefilled(model, TEXT[:50])
    model.lifecycle.cache_sequence(cold)
    warm = prefilled(model, TEXT[:50])
    differing = {key for key, value in state(warm).items() if value != state(cold)[key]}
    assert differing == {"blocks"}
    np.testing.assert_array_equal(warm.block_table[:3], cold.block_table[:3])
