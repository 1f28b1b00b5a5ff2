"""Lifecycle: sequences and blocks, threads and processes, and the end of a model."""

from __future__ import annotations

import gc
import io
import os
import threading
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atlas.errors import (
    AtlasError,
    CapabilityError,
    ClosedError,
    InvalidArgumentError,
    KvExhausted,
    PromptTooLongError,
    SequenceStateError,
    StaleHandleError,
    WrongThreadError,
)
from atlas.model import Model
from atlas.model.sequence import SequenceState
from tests.helpers.random_model import CONFIGS, load_random, random_model
from tests.model.checks import PROMPT, prefilled, state, unchanged

N = len(PROMPT)


@pytest.mark.contract("lifecycle.alloc_sequence")
def test_alloc_sequence_gives_an_empty_one_without_blocks(model: Model) -> None:
    seqs = [model.lifecycle.alloc_sequence(), model.lifecycle.alloc_sequence(30)]
    for seq in seqs:
        assert state(seq) == {
            "tokens": [],
            "blocks": [],
            "seq_len": 0,
            "prompt_len": 0,
            "kv_valid_tokens": 0,
            "verify_rows": 0,
            "status": "active",
        }
    assert [seq.budget_tokens for seq in seqs] == [200, 30]
    assert model.lifecycle.num_free_blocks == 20


@pytest.mark.contract("lifecycle.alloc_sequence")
@pytest.mark.parametrize("budget", [0, -1, 201])
def test_alloc_sequence_refuses_other_budgets(model: Model, budget: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"budget_tokens is {budget}"):
        model.lifecycle.alloc_sequence(budget)


@pytest.mark.contract("lifecycle.reserve")
def test_reserve_takes_what_is_missing(model: Model) -> None:
    lifecycle, seq = model.lifecycle, model.lifecycle.alloc_sequence()
    lifecycle.reserve(seq, 17)
    assert len(seq.block_table) == 2
    held = seq.block_table.tolist()
    for enough in (0, 1, 17, 32):
        lifecycle.reserve(seq, enough)
        assert seq.block_table.tolist() == held
    lifecycle.reserve(seq, 33)
    assert seq.block_table.tolist()[:2] == held
    assert (len(seq.block_table), lifecycle.num_free_blocks) == (3, 17)
    assert (seq.seq_len, seq.tokens.tolist()) == (0, [])
    with unchanged(model, seq), pytest.raises(InvalidArgumentError, match="-1"):
        lifecycle.reserve(seq, -1)
    with unchanged(model, seq), pytest.raises(PromptTooLongError, match="201"):
        lifecycle.reserve(seq, 201)


@pytest.mark.contract("lifecycle.reserve")
def test_reserve_takes_all_missing_blocks_or_none(model: Model) -> None:
    lifecycle, seq, other = (
        model.lifecycle,
        model.lifecycle.alloc_sequence(),
        model.lifecycle.alloc_sequence(),
    )
    lifecycle.reserve(other, 190)
    lifecycle.reserve(seq, 20)
    with unchanged(model, seq, other), pytest.raises(KvExhausted, match="7 KV blocks needed, 6"):
        lifecycle.reserve(seq, 129)
    lifecycle.reserve(seq, 128)
    assert lifecycle.num_free_blocks == 0


@pytest.mark.contract("lifecycle.reserve")
def test_a_forward_uses_what_was_reserved(model: Model) -> None:
    lifecycle, seq = model.lifecycle, model.lifecycle.alloc_sequence()
    lifecycle.reserve(seq, 100)
    held, free = seq.block_table.tolist(), lifecycle.num_free_blocks
    model.forward.prefill(PROMPT, seq)
    model.forward.decode(1, seq)
    assert (seq.block_table.tolist(), lifecycle.num_free_blocks) == (held, free)
    assert len(held) == 7


@pytest.mark.contract("lifecycle.rewind")
def test_rewind_cuts_tokens_and_returns_blocks(model: Model) -> None:
    lifecycle, seq = model.lifecycle, prefilled(model, [*PROMPT, *PROMPT])
    model.forward.decode(1, seq)
    assert len(seq.block_table) == 3
    first = seq.block_table.tolist()[0]
    lifecycle.rewind(seq, 33)
    assert (seq.seq_len, len(seq.block_table), seq.kv_valid_tokens) == (33, 3, 33)
    lifecycle.rewind(seq, 16)
    assert seq.tokens.tolist() == PROMPT[:16]
    assert (seq.block_table.tolist(), lifecycle.num_free_blocks) == ([first], 19)
    lifecycle.rewind(seq, 0)
    assert (seq.seq_len, lifecycle.num_free_blocks) == (0, 20)


@pytest.mark.contract("lifecycle.rewind")
def test_rewind_into_the_prompt_shortens_it(model: Model) -> None:
    """Tokens decoded afterwards are step tokens, not prompt tokens."""
    seq = prefilled(model, PROMPT)
    model.lifecycle.rewind(seq, 5)
    assert seq.prompt_len == 5
    model.forward.decode(1, seq)
    assert (seq.seq_len, seq.prompt_len) == (6, 5)


@pytest.mark.contract("lifecycle.rewind")
def test_rewind_refuses_what_it_cannot_do(model: Model) -> None:
    seq = prefilled(model, PROMPT)
    with unchanged(model, seq):
        for new_len in (-1, N + 1):
            with pytest.raises(InvalidArgumentError, match=f"new_len is {new_len}"):
                model.lifecycle.rewind(seq, new_len)
    model.verify.decode_verify([1, 2], seq)
    with unchanged(model, seq), pytest.raises(SequenceStateError, match="verify"):
        model.lifecycle.rewind(seq, 3)


@pytest.mark.contract("lifecycle.free_sequence")
def test_free_sequence_is_idempotent_and_final(model: Model) -> None:
    seq = prefilled(model, PROMPT)
    for _ in range(3):
        model.lifecycle.free_sequence(seq)
        assert (model.lifecycle.num_free_blocks, seq.status) == (20, "freed")
    for use in uses(model, seq):
        with pytest.raises(StaleHandleError, match="freed"):
            use()
    assert model.lifecycle.num_free_blocks == 20


def uses(model: Model, seq: SequenceState) -> list[Callable[[], object]]:
    """Every call that takes a sequence, but the one that frees it."""
    return [
        lambda: model.forward.prefill(PROMPT, seq),
        lambda: model.forward.decode(1, seq),
        lambda: model.forward.decode_batch([1], [seq]),
        lambda: model.verify.decode_verify([1, 2], seq),
        lambda: model.verify.accept(seq, 1),
        lambda: model.lifecycle.reserve(seq, 300 // 2),
        lambda: model.lifecycle.rewind(seq, 0),
        lambda: model.lifecycle.fork(seq),
        lambda: model.lifecycle.cache_sequence(seq),
        lambda: model.lifecycle.save_sequence_state(seq, io.BytesIO()),
        lambda: model.lifecycle.restore_sequence_state(seq, 1, io.BytesIO()),
    ]


@pytest.mark.contract("lifecycle.free_sequence")
def test_a_pending_verify_may_be_freed(model: Model) -> None:
    seq = prefilled(model, PROMPT)
    model.verify.decode_verify([1, 2], seq)
    model.lifecycle.free_sequence(seq)
    assert (seq.status, seq.verify_rows, model.lifecycle.num_free_blocks) == ("freed", 0, 20)


def test_a_dropped_sequence_returns_its_blocks(model: Model) -> None:
    """Also one that only a reference cycle held."""
    seq = prefilled(model, PROMPT)
    seq.proposer = seq
    assert model.lifecycle.num_free_blocks == 18
    del seq
    gc.collect()
    assert model.lifecycle.num_free_blocks == 20


def test_a_sequence_belongs_to_its_model(model: Model) -> None:
    with random_model("dense", threads=1, max_seq_len=200) as other:
        seq = prefilled(other.model, PROMPT)
        with unchanged(other.model, seq):
            for use in (*uses(model, seq), lambda: model.lifecycle.free_sequence(seq)):
                with pytest.raises(StaleHandleError, match="another model"):
                    use()


@pytest.mark.contract("lifecycle.num_free_blocks", "lifecycle.num_total_blocks")
def test_blocks_are_counted_from_the_pool(model: Model) -> None:
    lifecycle = model.lifecycle
    assert (lifecycle.num_free_blocks, lifecycle.num_total_blocks) == (20, 20)
    seqs = [prefilled(model, PROMPT[:length]) for length in (1, 16, 17, 20)]
    assert (lifecycle.num_free_blocks, lifecycle.num_total_blocks) == (20 - 6, 20)
    tables = [block for seq in seqs for block in seq.block_table.tolist()]
    assert len(set(tables)) == 6
    assert set(tables) <= set(range(20))
    for seq in seqs:
        lifecycle.free_sequence(seq)
    assert (lifecycle.num_free_blocks, lifecycle.num_total_blocks) == (20, 20)


@pytest.mark.contract("lifecycle.kv_block_bytes")
@pytest.mark.parametrize(("kv_dtype", "width"), [("float32", 4), ("float16", 2)])
def test_kv_block_bytes(kv_dtype: str, width: int) -> None:
    config = CONFIGS["dense"]
    one = config.num_kv_heads * config.head_dim * 16 * width
    try:
        loaded = load_random("dense", kv_dtype=kv_dtype)
    except CapabilityError:
        pytest.skip("this CPU target has no float16 KV")
    assert loaded.model.lifecycle.kv_block_bytes == 2 * config.num_layers * one
    assert loaded.plan.kv_pool == loaded.model.lifecycle.num_total_blocks * 4 * one
    loaded.core.close()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-40, 60)), max_size=30))
def test_no_block_is_lost_or_shared(moves: list[tuple[int, int]]) -> None:
    """Whatever grows and shrinks: free and held blocks are all blocks, each held once."""
    with random_model("dense", threads=1, kv_tokens=96, max_seq_len=90) as loaded:
        lifecycle = loaded.model.lifecycle
        seqs = [lifecycle.alloc_sequence() for _ in range(4)]
        lengths = [0] * 4
        for which, step in moves:
            seq = seqs[which]
            if step > 0 and lengths[which] + step <= 90:
                tokens = [(7 * p + which) % 200 for p in range(lengths[which] + step)]
                try:
                    loaded.model.forward.prefill_chunk(
                        tokens, seq, lengths[which], step, True, logits="none"
                    )
                    lengths[which] += step
                except KvExhausted:
                    pass
            elif step < 0:
                lengths[which] = max(0, lengths[which] + step)
                lifecycle.rewind(seq, lengths[which])
            held = [block for seq in seqs for block in seq.block_table.tolist()]
            assert (
                len(set(held))
                == len(held)
                == lifecycle.num_total_blocks - (lifecycle.num_free_blocks)
            )
            assert [seq.seq_len for seq in seqs] == lengths


# -- threads, processes, and the end ----------------------------------------------------------


def in_thread(call: Callable[[], object]) -> object:
    """The result of ``call`` in another thread, or the error it raised."""
    results: list[object] = []

    def work() -> None:
        try:
            results.append(call())
        except AtlasError as error:
            results.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return results[0]


@pytest.mark.contract("lifecycle.bind_to_thread")
def test_one_thread_drives_a_model_until_another_is_bound(model: Model) -> None:
    seq = prefilled(model, PROMPT)
    for call in (
        lambda: model.forward.decode(1, seq),
        lambda: model.forward.prefill(PROMPT, seq),
        lambda: model.verify.decode_verify([1], seq),
        lambda: model.verify.accept(seq, 1),
        lambda: model.lifecycle.alloc_sequence(),
        lambda: model.lifecycle.reserve(seq, 40),
        lambda: model.lifecycle.rewind(seq, 0),
        lambda: model.lifecycle.free_sequence(seq),
        lambda: model.logits.hidden_after_norm(),
        lambda: model.streams.create_stream(),
    ):
        with unchanged(model, seq):
            assert isinstance(in_thread(call), WrongThreadError)

    def bind_and_decode() -> np.ndarray:
        model.lifecycle.bind_to_thread()
        return np.asarray(model.forward.decode(1, seq))

    rows = in_thread(bind_and_decode)
    assert isinstance(rows, np.ndarray)
    with unchanged(model, seq), pytest.raises(WrongThreadError, match="bind_to_thread"):
        model.forward.decode(2, seq)
    model.lifecycle.bind_to_thread()
    model.lifecycle.rewind(seq, N)
    assert np.asarray(model.forward.decode(1, seq)).tobytes() == rows.tobytes()


def test_a_forked_child_is_refused(model: Model) -> None:
    """The child's calls raise; the parent goes on."""
    seq = prefilled(model, PROMPT)
    view = model.forward.decode(1, seq)
    before = np.asarray(view)
    child = os.fork()
    if child == 0:
        refused = 0
        for use in (*uses(model, seq), lambda: model.logits.argmax(view), view.numpy):
            try:
                use()
            except StaleHandleError as error:
                refused += "parent process" in str(error)
        os._exit(refused)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 13
    np.testing.assert_array_equal(np.asarray(view), before)
    model.forward.decode(2, seq)


def test_a_forked_child_may_load_its_own(model: Model) -> None:
    seq = prefilled(model, PROMPT)
    expected = np.asarray(model.forward.decode(1, seq)).tobytes()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            own = load_random("dense", threads=2).model
            again = prefilled(own, PROMPT)
            status = int(np.asarray(own.forward.decode(1, again)).tobytes() != expected)
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.contract("lifecycle.teardown")
def test_teardown_ends_the_model_and_its_threads() -> None:
    before = num_threads()
    model = load_random("dense", threads=4, max_seq_len=200).model
    assert num_threads() == before + 3
    seq = prefilled(model, PROMPT)
    view = model.forward.decode(1, seq)
    model.lifecycle.teardown()
    assert num_threads() == before
    for use in (
        *uses(model, seq),
        view.numpy,
        lambda: model.lifecycle.alloc_sequence(),
        lambda: model.lifecycle.bind_to_thread(),
        lambda: model.logits.argmax(view),
        lambda: model.logits.hidden_after_norm(),
        lambda: model.streams.create_event(),
    ):
        with pytest.raises(ClosedError):
            use()
    model.lifecycle.teardown()


@pytest.mark.contract("lifecycle.compact_sequence")
def test_compact_sequence_needs_a_slot_of_the_pool(model: Model) -> None:
    """Attention has no recurrent state: there is no slot to move to."""
    seq = prefilled(model, PROMPT)
    for new_slot in (-1, 0, 1):
        with unchanged(model, seq), pytest.raises(InvalidArgumentError, match="recurrent slots"):
            model.lifecycle.compact_sequence(seq, new_slot)
    assert seq.slot is None


@pytest.mark.contract("lifecycle.detach_slot_for_reuse")
def test_detach_leaves_a_sequence_without_a_slot(model: Model) -> None:
    seq = prefilled(model, PROMPT)
    with unchanged(model, seq):
        assert isinstance(
            in_thread(lambda: model.lifecycle.detach_slot_for_reuse(seq)), WrongThreadError
        )
        for _ in range(2):
            model.lifecycle.detach_slot_for_reuse(seq)
            assert seq.slot is None
    model.forward.decode(1, seq)
    model.lifecycle.free_sequence(seq)
    assert model.lifecycle.num_free_blocks == 20


def test_capabilities_of_later_issues(model: Model) -> None:
    assert model.lifecycle.swap_dims is None
    with pytest.raises(CapabilityError, match=r"lifecycle\.poll_kv_calibration"):
        model.lifecycle.poll_kv_calibration()
