"""Fork: two sequences on the same blocks, and copies on the first write."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atlas.errors import KernelError, KvExhausted, PromptTooLongError, SequenceStateError
from atlas.model import Model
from atlas.model.load import LoadedModel
from tests.helpers.random_model import random_model
from tests.model.checks import (
    PROMPT,
    assert_accounted,
    bits,
    prefilled,
    row_after,
    state,
    unchanged,
)

N = len(PROMPT)


@pytest.mark.contract("lifecycle.fork")
def test_a_fork_stands_where_its_parent_stands(loaded: LoadedModel) -> None:
    model = loaded.model
    seq = prefilled(model, PROMPT)
    model.forward.decode(1, seq)
    with unchanged(model, seq):
        fork = model.lifecycle.fork(seq)
    assert state(fork) == state(seq)
    assert fork.budget_tokens == seq.budget_tokens
    assert_accounted(loaded, [seq, fork])


@pytest.mark.contract("lifecycle.fork")
def test_each_goes_on_alone(loaded: LoadedModel) -> None:
    """The whole block stays shared, the begun one is copied once, and neither sees the other."""
    model = loaded.model
    seq = prefilled(model, PROMPT)
    forks = [seq, model.lifecycle.fork(seq), model.lifecycle.fork(seq)]
    texts = [[*PROMPT, token] for token in (1, 2, 3)]
    for fork, text in zip(forks, texts, strict=True):
        assert bits(model.forward.decode(text[-1], fork)) == row_after(model, text)
    tables = [fork.block_table.tolist() for fork in forks]
    assert len({table[0] for table in tables}) == 1
    assert len({table[1] for table in tables}) == 3
    assert model.lifecycle.num_free_blocks == 20 - 4
    for fork, text in zip(forks, texts, strict=True):
        text.append(7)
        assert bits(model.forward.decode(7, fork)) == row_after(model, text)
    for fork in forks:
        model.lifecycle.free_sequence(fork)
        assert_accounted(loaded, [other for other in forks if other.status == "active"])
    assert model.lifecycle.num_free_blocks == 20


@pytest.mark.contract("lifecycle.fork")
def test_a_fork_outlives_its_parent(model: Model) -> None:
    seq = prefilled(model, PROMPT)
    fork = model.lifecycle.fork(seq)
    model.lifecycle.free_sequence(seq)
    other = prefilled(model, PROMPT[::-1])
    assert bits(model.forward.decode(1, fork)) == row_after(model, [*PROMPT, 1])
    assert bits(model.forward.decode(1, other)) == row_after(model, [*PROMPT[::-1], 1])


@pytest.mark.contract("lifecycle.fork")
def test_fork_refuses_a_pending_verify(model: Model) -> None:
    seq = prefilled(model, PROMPT)
    model.verify.decode_verify([1, 2], seq)
    with unchanged(model, seq), pytest.raises(SequenceStateError, match="verify"):
        model.lifecycle.fork(seq)


@pytest.mark.contract("lifecycle.fork")
def test_reserved_blocks_are_not_shared(loaded: LoadedModel) -> None:
    lifecycle, seq = loaded.model.lifecycle, prefilled(loaded.model, PROMPT)
    lifecycle.reserve(seq, 100)
    fork = lifecycle.fork(seq)
    assert fork.block_table.tolist() == seq.block_table.tolist()[:2]
    empty = lifecycle.fork(lifecycle.alloc_sequence())
    assert (empty.seq_len, len(empty.block_table)) == (0, 0)
    assert_accounted(loaded, [seq, fork])


@pytest.mark.contract("lifecycle.reserve")
def test_reserve_copies_a_shared_block_that_would_be_written(model: Model) -> None:
    lifecycle, seq = model.lifecycle, prefilled(model, PROMPT)
    fork = lifecycle.fork(seq)
    table = seq.block_table.tolist()
    with unchanged(model, seq, fork):
        lifecycle.reserve(fork, N)
    lifecycle.reserve(fork, N + 1)
    assert seq.block_table.tolist() == table
    assert fork.block_table.tolist()[0] == table[0]
    assert fork.block_table.tolist()[1] != table[1]
    with unchanged(model, seq, fork):
        lifecycle.reserve(seq, N + 1)
        lifecycle.reserve(fork, N + 1)
    assert bits(model.forward.decode(5, fork)) == row_after(model, [*PROMPT, 5])


def test_a_copy_needs_a_block() -> None:
    with random_model("dense", threads=1, kv_tokens=64, max_seq_len=60) as loaded:
        model, lifecycle = loaded.model, loaded.model.lifecycle
        seq = prefilled(model, PROMPT)
        fork, hog = lifecycle.fork(seq), lifecycle.alloc_sequence()
        lifecycle.reserve(hog, 32)
        with unchanged(model, seq, fork):
            for needed, tokens in ((1, [1]), (2, [1] * 13)):
                with pytest.raises(KvExhausted, match=f"{needed} KV blocks needed, 0 of 4"):
                    model.verify.decode_verify(tokens, fork)
                with pytest.raises(KvExhausted, match=f"{needed} KV blocks needed, 0 of 4"):
                    lifecycle.reserve(seq, N + len(tokens))
        lifecycle.rewind(hog, 0)
        row = bits(model.forward.decode(1, fork))
        lifecycle.free_sequence(fork)
        assert row == row_after(model, [*PROMPT, 1])


def test_a_failed_step_takes_its_copies_back(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, run = loaded.model, loaded.core.runtime.run
    seq = prefilled(model, PROMPT)
    fork = model.lifecycle.fork(seq)

    def broken(*args: Any) -> None:
        run(*args)
        raise KernelError("kernel attention reported an error")

    monkeypatch.setattr(loaded.core.runtime, "run", broken)
    with unchanged(model, seq, fork):
        with pytest.raises(KernelError):
            model.forward.decode_batch([1, 2], [seq, fork])
        with pytest.raises(KernelError):
            model.verify.decode_verify([4, 5, 6], fork)
    assert_accounted(loaded, [seq, fork])
    monkeypatch.undo()
    for sequence, token in ((seq, 1), (fork, 2)):
        view = model.forward.decode(token, sequence)
        assert bits(view) == row_after(model, [*PROMPT, token])


MOVES = st.one_of(
    st.tuples(st.just("fork"), st.integers(0, 9), st.just(0)),
    st.tuples(st.just("decode"), st.integers(0, 9), st.integers(0, 202)),
    st.tuples(st.just("verify"), st.integers(0, 9), st.integers(0, 20)),
    st.tuples(st.just("rewind"), st.integers(0, 9), st.integers(1, 20)),
    st.tuples(st.just("free"), st.integers(0, 9), st.just(0)),
)


@settings(max_examples=30, deadline=None)
@given(st.lists(MOVES, max_size=25))
def test_a_family_of_forks(moves: list[tuple[str, int, int]]) -> None:
    """Whatever they do, each row is that of the sequence's own tokens, and every block counts."""
    with random_model("dense", threads=1, kv_tokens=160, max_seq_len=90) as loaded:
        model, lifecycle = loaded.model, loaded.model.lifecycle
        family = [(prefilled(model, PROMPT), [*PROMPT])]
        for move, which, value in moves:
            if not family:
                break
            seq, tokens = family[which % len(family)]
            try:
                if move == "fork":
                    family.append((lifecycle.fork(seq), [*tokens]))
                elif move == "decode":
                    row = bits(model.forward.decode(value, seq))
                    tokens.append(value)
                    assert len(tokens) > 40 or row == row_after(model, tokens)
                elif move == "verify":
                    drafts = [(value + i) % 203 for i in range(1 + value % 18)]
                    model.verify.decode_verify(drafts, seq)
                    model.verify.accept(seq, value % (len(drafts) + 1))
                    tokens += drafts[: value % (len(drafts) + 1)]
                elif move == "rewind":
                    del tokens[max(1, len(tokens) - value) :]
                    lifecycle.rewind(seq, len(tokens))
                else:
                    lifecycle.free_sequence(seq)
                    family.pop(which % len(family))
            except (KvExhausted, PromptTooLongError):
                pass
            assert_accounted(loaded, [seq for seq, _ in family])
            assert [seq.tokens.tolist() for seq, _ in family] == [kept for _, kept in family]
        for other, _ in family[1:]:
            lifecycle.free_sequence(other)
        if family and len(family[0][1]) < 80:
            seq, tokens = family[0]
            row = bits(model.forward.decode(9, seq))
            lifecycle.free_sequence(seq)
            assert row == row_after(model, [*tokens, 9])
