"""The block pool: free + held = all, whatever is taken, shared and returned."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from atlas._native.block_pool import BlockPool
from atlas.errors import InvalidArgumentError, KvExhausted

SIZE = 12


def test_a_new_pool_is_free() -> None:
    pool = BlockPool(SIZE)
    assert (pool.num_total, pool.num_free) == (SIZE, SIZE)
    assert [pool.references(block) for block in range(SIZE)] == [0] * SIZE


@pytest.mark.parametrize("num_blocks", [0, -1, 2**31])
def test_sizes_that_no_pool_has(num_blocks: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"num_blocks is {num_blocks}"):
        BlockPool(num_blocks)


def test_all_or_none() -> None:
    pool = BlockPool(SIZE)
    taken = pool.allocate(SIZE - 2)
    with pytest.raises(KvExhausted, match=f"3 KV blocks needed, 2 of {SIZE} are free"):
        pool.allocate(3)
    assert pool.num_free == 2
    assert sorted([*taken, *pool.allocate(2)]) == list(range(SIZE))
    assert pool.allocate(0) == []
    with pytest.raises(KvExhausted):
        pool.allocate(1)


def test_counts_and_blocks_out_of_range() -> None:
    pool = BlockPool(SIZE)
    for count in (-1, -(2**62)):
        with pytest.raises(InvalidArgumentError, match="count"):
            pool.allocate(count)
    with pytest.raises(KvExhausted):
        pool.allocate(2**62)
    for block in (SIZE, 2**32 - 1):
        with pytest.raises(InvalidArgumentError):
            pool.references(block)
        with pytest.raises(InvalidArgumentError):
            pool.retain(block)
        with pytest.raises(InvalidArgumentError):
            pool.release(block)
    for block in (-1, 2**32):
        with pytest.raises(OverflowError):
            pool.release(block)
    assert pool.num_free == SIZE


def test_a_shared_block_is_freed_by_its_last_holder() -> None:
    pool = BlockPool(SIZE)
    (block,) = pool.allocate(1)
    pool.retain(block)
    pool.release(block)
    assert (pool.references(block), pool.num_free) == (1, SIZE - 1)
    pool.release(block)
    assert (pool.references(block), pool.num_free) == (0, SIZE)
    for call in (pool.release, pool.retain):
        with pytest.raises(InvalidArgumentError, match="not in use"):
            call(block)
    assert pool.num_free == SIZE


class Pool(RuleBasedStateMachine):
    """A pool beside a list of the references that are held."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(SIZE)
        self.held: list[int] = []

    @rule(count=st.integers(0, SIZE + 1))
    def allocate(self, count: int) -> None:
        free = SIZE - len(set(self.held))
        if count > free:
            with pytest.raises(KvExhausted):
                self.pool.allocate(count)
            return
        taken = self.pool.allocate(count)
        assert len(set(taken)) == count
        assert not set(taken) & set(self.held)
        self.held += taken

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.pool.retain(block)
        self.held.append(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.pool.release(block)
        self.held.remove(block)

    @invariant()
    def counts(self) -> None:
        assert self.pool.num_free == SIZE - len(set(self.held))
        for block in range(SIZE):
            assert self.pool.references(block) == self.held.count(block)


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
