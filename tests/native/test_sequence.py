"""A sequence owns its tokens, its length and its blocks."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atlas._native.block_pool import BlockPool
from atlas._native.sequence import Sequence
from atlas.errors import InvalidArgumentError, KvExhausted, SequenceStateError, StaleHandleError

BLOCK = 4
SIZE = 10


def tokens(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def new(length: int = 0) -> Sequence:
    """A sequence in a pool of its own that holds the tokens 0 … length − 1."""
    seq = Sequence(BlockPool(SIZE), BLOCK)
    seq.reserve(length)
    seq.advance(np.arange(length, dtype=np.int32))
    return seq


def test_a_new_sequence_is_empty() -> None:
    seq = new()
    assert (seq.seq_len, seq.num_tokens, seq.num_blocks, seq.verify_rows) == (0, 0, 0, 0)
    assert (seq.prompt_len, seq.kv_valid_tokens, seq.failed, seq.freed) == (0, 0, False, False)
    assert (seq.tokens.dtype, seq.block_table.dtype) == (np.int32, np.uint32)
    assert seq.block_size == BLOCK


def test_reserve_takes_whole_blocks_once() -> None:
    seq = new()
    for positions, blocks in ((1, 1), (4, 1), (0, 1), (5, 2), (3, 2), (40, 10)):
        seq.reserve(positions)
        assert (seq.num_blocks, seq.pool.num_free) == (blocks, SIZE - blocks)
    with pytest.raises(KvExhausted):
        seq.reserve(41)
    assert (seq.num_blocks, seq.pool.num_free) == (10, 0)


def test_advance_needs_room() -> None:
    seq = new(4)
    with pytest.raises(SequenceStateError, match=r"5 positions need reserve\(\) first; room for 4"):
        seq.advance(tokens(9))
    assert (seq.seq_len, seq.num_tokens) == (4, 4)
    with pytest.raises(SequenceStateError):
        seq.require_reserved(5)
    seq.require_reserved(4)


def test_tokens_and_table_are_copies() -> None:
    seq = new(9)
    seq.tokens[:] = 77
    seq.block_table[:] = 77
    assert seq.tokens.tolist() == list(range(9))
    assert set(seq.block_table.tolist()) <= set(range(SIZE))


def test_write_block_table_fills_the_front() -> None:
    seq = new(9)
    row = np.full(5, -1, np.int32)
    seq.write_block_table(row)
    assert row.tolist() == [*seq.block_table.tolist(), -1, -1]
    with pytest.raises(InvalidArgumentError, match="2 entries for 3 blocks"):
        seq.write_block_table(np.zeros(2, np.int32))


def test_a_long_text_is_kept() -> None:
    seq = Sequence(BlockPool(2000), BLOCK)
    for start in range(0, 5000, 7):
        seq.reserve(start + 7)
        seq.advance(np.arange(start, start + 7, dtype=np.int32))
    assert seq.tokens.tolist() == list(range(5005))
    assert len(set(seq.block_table.tolist())) == 1252


@given(length=st.integers(0, 40), to=st.integers(-2, 42), extra=st.integers(0, 40))
@settings(max_examples=60, deadline=None)
def test_rewind_keeps_the_front(length: int, to: int, extra: int) -> None:
    seq = new(length)
    seq.prompt_len = length // 2
    seq.reserve(max(length, extra))
    before = seq.block_table.tolist()
    if not 0 <= to <= length:
        with pytest.raises(InvalidArgumentError, match=f"new_len is {to}"):
            seq.rewind(to)
        assert (seq.seq_len, seq.block_table.tolist()) == (length, before)
        return
    seq.rewind(to)
    assert seq.tokens.tolist() == list(range(to))
    assert (seq.seq_len, seq.kv_valid_tokens) == (to, to)
    assert seq.prompt_len == min(to, length // 2)
    kept = -(-to // BLOCK)
    assert seq.block_table.tolist() == before[:kept]
    assert seq.pool.num_free == SIZE - kept


def test_rewind_drops_one_reference_of_a_shared_block() -> None:
    seq = new(8)
    shared = int(seq.block_table[1])
    seq.pool.retain(shared)
    seq.rewind(4)
    assert (seq.pool.references(shared), seq.pool.num_free) == (1, SIZE - 2)


def test_trim_spares_committed_positions() -> None:
    seq = new(5)
    seq.reserve(20)
    seq.trim(4)
    assert seq.num_blocks == 4
    seq.trim(0)
    assert (seq.num_blocks, seq.pool.num_free) == (2, SIZE - 2)


@pytest.mark.parametrize("kept", range(4))
def test_accept_ends_a_verify(kept: int) -> None:
    seq = new(7)
    seq.reserve(10)
    seq.advance(tokens(50, 51, 52), 3)
    assert (seq.seq_len, seq.verify_rows) == (10, 3)
    for call in (seq.check, lambda: seq.rewind(7)):
        with pytest.raises(SequenceStateError, match="3 rows awaits accept or free"):
            call()
    for count in (-1, 4):
        with pytest.raises(InvalidArgumentError, match=f"rows_kept is {count}"):
            seq.accept(count)
    assert seq.verify_rows == 3
    seq.accept(kept)
    assert seq.tokens.tolist() == [*range(7), 50, 51, 52][: 7 + kept]
    assert (seq.verify_rows, seq.num_blocks) == (0, -(-(7 + kept) // BLOCK))
    seq.check()
    with pytest.raises(SequenceStateError, match="no verify"):
        seq.accept(1)


def test_a_failed_sequence_may_only_be_released() -> None:
    seq = new(6)
    seq.fail()
    for call in (
        seq.check,
        lambda: seq.reserve(8),
        lambda: seq.advance(tokens(1)),
        lambda: seq.rewind(0),
        lambda: seq.accept(0),
    ):
        with pytest.raises(SequenceStateError, match="failed"):
            call()
    seq.release()
    assert seq.pool.num_free == SIZE


def test_release_is_idempotent() -> None:
    seq = new(6)
    seq.advance(tokens(), 0)
    for _ in range(2):
        seq.release()
        assert (seq.freed, seq.num_blocks, seq.pool.num_free) == (True, 0, SIZE)
    for call in (seq.check, lambda: seq.reserve(1), lambda: seq.advance(tokens(1))):
        with pytest.raises(StaleHandleError, match="freed"):
            call()


def test_dropping_a_sequence_returns_its_blocks() -> None:
    seq = new(6)
    pool = seq.pool
    del seq
    assert pool.num_free == SIZE


def test_the_garbage_of_a_cycle_returns_its_blocks() -> None:
    """The collector must not clear the sequence's pool before the sequence itself goes."""

    class Holder:
        """Refers to itself and to a sequence."""

    pool = BlockPool(SIZE)
    for _ in range(3):
        holder = Holder()
        holder.me, holder.seq = holder, Sequence(pool, BLOCK)  # type: ignore[attr-defined]
        holder.seq.reserve(9)  # type: ignore[attr-defined]
        del holder
    gc.collect()
    assert pool.num_free == SIZE


def test_arguments_of_other_kinds() -> None:
    seq = new(4)
    with pytest.raises(TypeError):
        Sequence(None, BLOCK)  # type: ignore[arg-type]
    with pytest.raises((TypeError, ValueError)):
        seq.advance(np.zeros(1, np.int64))
    with pytest.raises(TypeError):
        seq.write_block_table(None)  # type: ignore[arg-type]
    with pytest.raises((TypeError, ValueError)):
        seq.write_block_table(np.zeros((2, 2), np.int32))
    assert seq.seq_len == 4


# -- shared blocks ----------------------------------------------------------------------------


def test_adopt_takes_blocks_over() -> None:
    pool = BlockPool(SIZE)
    blocks = np.array(pool.allocate(2), np.uint32)
    seq = Sequence(pool, BLOCK)
    for ids, table, reason in (
        (np.arange(7), blocks, "7 tokens do not fill 2 blocks of 4"),
        (np.arange(8), [blocks[0], 9], "block 9 is not in use"),
        (np.arange(8), [blocks[0], 10], "block 10 is not in use"),
    ):
        with pytest.raises(InvalidArgumentError, match=reason):
            seq.adopt(ids.astype(np.int32), np.array(table, np.uint32))
        assert (seq.seq_len, seq.num_blocks) == (0, 0)
    seq.adopt(np.arange(8, dtype=np.int32), blocks)
    assert (seq.seq_len, seq.prompt_len, seq.kv_valid_tokens) == (8, 8, 8)
    assert seq.block_table.tolist() == blocks.tolist()
    with pytest.raises(SequenceStateError):
        seq.adopt(np.arange(8, dtype=np.int32), blocks)
    seq.release()
    assert pool.num_free == SIZE


def test_share_stands_on_the_same_blocks() -> None:
    seq = new(6)
    seq.prompt_len, seq.kv_valid_tokens = 5, 4
    other = Sequence(seq.pool, BLOCK)
    other.reserve(12)
    reserved = other.block_table.tolist()
    assert other.share(seq) == reserved[:2]
    assert other.block_table.tolist() == [*seq.block_table.tolist(), reserved[2]]
    assert other.tokens.tolist() == seq.tokens.tolist()
    assert (other.seq_len, other.prompt_len, other.kv_valid_tokens) == (6, 5, 4)
    assert [seq.pool.references(block) for block in other.block_table] == [2, 2, 1]
    for block in reserved[:2]:
        seq.pool.release(block)
    for bad in (lambda: other.share(seq), lambda: Sequence(BlockPool(2), BLOCK).share(seq)):
        with pytest.raises((SequenceStateError, InvalidArgumentError)):
            bad()
    seq.release()
    with pytest.raises(StaleHandleError):
        Sequence(seq.pool, BLOCK).share(seq)
    other.release()
    assert seq.pool.num_free == SIZE


def test_a_shared_block_is_found_and_replaced() -> None:
    seq = new(6)
    assert seq.shared_block() == -1
    other = Sequence(seq.pool, BLOCK)
    other.share(seq)
    assert (seq.shared_block(), other.shared_block()) == (1, 1)
    (copy,) = seq.pool.allocate(1)
    old = other.block_table.tolist()[1]
    assert other.replace_block(1, copy) == old
    assert other.block_table.tolist()[1] == copy
    seq.pool.release(old)
    assert (seq.shared_block(), other.shared_block()) == (-1, -1)
    seq.rewind(4)
    assert seq.shared_block() == -1  # the next block is not taken yet
    for index, block in ((-1, copy), (2, copy), (0, SIZE), (0, 9)):
        with pytest.raises(InvalidArgumentError):
            other.replace_block(index, block)
    other.release()
    with pytest.raises(StaleHandleError):
        other.shared_block()
