"""The prefix cache, rule by rule; ``test_prefix_histories`` has them all at once."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from atlas._native.block_pool import BlockPool
from atlas._native.prefix_cache import MissReason, PrefixCache, PrefixMatch
from atlas._native.sequence import Sequence
from atlas.errors import InvalidArgumentError, KvExhausted

BLOCK = 4


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def text(num_blocks: int, start: int = 0) -> np.ndarray:
    """Tokens of whole blocks, all different."""
    return np.arange(start * BLOCK, (start + num_blocks) * BLOCK, dtype=np.int32)


def table(blocks: list[int]) -> np.ndarray:
    return np.array(blocks, np.uint32)


class World:
    """A pool, its cache, and calls with the arguments that most tests share."""

    def __init__(self, num_blocks: int = 32, recurrent: bool = False) -> None:
        self.pool = BlockPool(num_blocks)
        self.cache = PrefixCache(self.pool, BLOCK, recurrent=recurrent)

    def insert(
        self, tokens: np.ndarray, blocks: list[int], prompt_len: int | None = None, seed: int = 0
    ) -> int:
        prompt_len = len(tokens) if prompt_len is None else prompt_len
        return self.cache.insert(tokens, table(blocks), len(tokens), prompt_len, seed)

    def put(self, tokens: np.ndarray, prompt_len: int | None = None, seed: int = 0) -> list[int]:
        """Cache ``tokens`` in fresh blocks that nobody else holds."""
        blocks = self.pool.allocate(len(tokens) // BLOCK)
        self.insert(tokens, blocks, prompt_len, seed)
        self.release(blocks)
        return blocks

    def match(
        self,
        tokens: np.ndarray,
        seed: int = 0,
        reuse_generated: bool = True,
        max_tokens: int | None = None,
    ) -> PrefixMatch:
        limit = len(tokens) if max_tokens is None else max_tokens
        return self.cache.match(tokens, seed, reuse_generated, limit)

    def peek(self, tokens: np.ndarray, **options: object) -> tuple[list[int], MissReason]:
        """Match and give the references back."""
        found = self.match(tokens, **options)  # type: ignore[arg-type]
        self.release(found.blocks.tolist())
        return found.blocks.tolist(), found.reason

    def release(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.pool.release(block)


@pytest.fixture
def world() -> World:
    return World()


# -- references ----------------------------------------------------------------------------------


def test_one_reference_a_node_beside_the_inserters(world: World) -> None:
    blocks = world.pool.allocate(3)
    assert world.insert(text(3), blocks) == 3
    assert [world.pool.references(b) for b in blocks] == [2, 2, 2]
    world.release(blocks)
    assert [world.pool.references(b) for b in blocks] == [1, 1, 1]
    assert world.cache.num_blocks == 3


def test_a_match_takes_one_reference_a_block(world: World) -> None:
    blocks = world.put(text(3))
    found = world.match(text(3))
    assert found.blocks.tolist() == blocks
    assert found.blocks.dtype == np.uint32
    assert found.num_tokens == found.exact_tokens == 3 * BLOCK
    assert [world.pool.references(b) for b in blocks] == [2, 2, 2]


def test_the_first_writers_block_stays(world: World) -> None:
    first = world.put(text(2))
    own = world.pool.allocate(3)
    assert world.insert(text(3), own) == 1
    assert world.peek(text(3))[0] == [*first, own[2]]
    assert [world.pool.references(b) for b in own] == [1, 1, 2]


def test_an_ended_cache_gives_its_references_back(world: World) -> None:
    held = world.put(text(4))[:1]
    world.pool.retain(held[0])
    world.cache = None  # type: ignore[assignment]
    gc.collect()
    assert world.pool.num_free == world.pool.num_total - 1
    world.release(held)
    assert PrefixCache(world.pool, BLOCK).num_blocks == 0


def test_a_cache_reachable_from_garbage_cycles_ends_cleanly() -> None:
    for _ in range(50):
        world = World()
        world.put(text(4))
        loop: list[object] = [world.cache]
        loop.append(loop)
        del world, loop
    gc.collect()


def test_works_with_sequences(world: World) -> None:
    sequence = Sequence(world.pool, BLOCK)
    sequence.reserve(10)
    sequence.advance(np.arange(10, dtype=np.int32))
    assert world.cache.insert(sequence.tokens, sequence.block_table, 10, 10, 0) == 2
    assert world.cache.evict(32) == 0
    sequence.release()
    assert world.pool.num_free == world.pool.num_total - 2
    assert world.cache.evict(32) == 2


# -- keys ----------------------------------------------------------------------------------------


def test_seeds_share_nothing(world: World) -> None:
    base = world.put(text(2))
    other = world.put(text(2), seed=2**64 - 1)
    assert world.cache.num_blocks == 4
    assert world.peek(text(2))[0] == base
    assert world.peek(text(2), seed=2**64 - 1)[0] == other
    assert world.peek(text(2), seed=1) == ([], MissReason.COLD)


def test_a_block_is_found_only_after_the_same_prefix(world: World) -> None:
    world.put(np.concatenate([text(1, 0), text(1, 9)]))
    world.put(text(1, 1))
    tokens = np.concatenate([text(1, 1), text(1, 9)])
    assert world.peek(tokens)[1] == MissReason.DIVERGED


@pytest.mark.parametrize("block_size", [1, 2, 3, 16, 17])
def test_block_sizes(block_size: int) -> None:
    pool = BlockPool(8)
    cache = PrefixCache(pool, block_size)
    tokens = np.arange(5 * block_size, dtype=np.int32)
    blocks = table(pool.allocate(5))
    assert cache.insert(tokens, blocks, 5 * block_size, 5 * block_size, 0) == 5
    for position in range(len(tokens)):
        changed = tokens.copy()
        changed[position] = -1
        found = cache.match(changed, 0, True, len(tokens))
        assert found.num_tokens == position // block_size * block_size
        for block in found.blocks.tolist():
            pool.release(block)
    cache.check()


def test_a_hash_is_never_trusted(world: World) -> None:
    world.cache.weaken_hash(0)
    first = world.put(text(2))
    assert world.peek(text(2), seed=1) == ([], MissReason.COLD)
    assert world.peek(text(2)[::-1].copy()) == ([], MissReason.COLD)
    other = world.put(text(2)[::-1].copy())
    assert world.peek(text(2))[0] == first
    assert world.peek(text(2)[::-1].copy())[0] == other
    # Same tokens, other parent.
    assert world.peek(np.concatenate([text(2)[::-1][:BLOCK], text(2)[BLOCK:]]))[0] == other[:1]


# -- what a match may use, and why it ended ------------------------------------------------------


def test_whole_blocks_only(world: World) -> None:
    tokens = np.arange(2 * BLOCK + 3, dtype=np.int32)
    blocks = world.pool.allocate(3)
    assert world.cache.insert(tokens, table(blocks), len(tokens), len(tokens), 0) == 2
    assert world.match(tokens).num_tokens == 2 * BLOCK


def test_only_valid_tokens_are_cached(world: World) -> None:
    blocks = world.pool.allocate(3)
    assert world.cache.insert(text(3), table(blocks), 2 * BLOCK - 1, 3 * BLOCK, 0) == 1


def test_reasons(world: World) -> None:
    blocks = world.put(text(3), prompt_len=2 * BLOCK + 1)
    assert world.peek(ids()) == ([], MissReason.COMPLETE)
    assert world.peek(text(1)[:2]) == ([], MissReason.COMPLETE)
    assert world.peek(text(3, 7)) == ([], MissReason.COLD)
    assert world.peek(text(4)) == (blocks, MissReason.DIVERGED)
    assert world.peek(text(3)) == (blocks, MissReason.COMPLETE)
    assert world.peek(text(3), max_tokens=3 * BLOCK - 1) == (blocks[:2], MissReason.CAPPED)
    assert world.peek(text(3), reuse_generated=False) == (blocks[:2], MissReason.GENERATED)
    # Beyond the cap lies a block that could not be used anyway: nothing was missed.
    assert world.peek(text(3), reuse_generated=False, max_tokens=2 * BLOCK) == (
        blocks[:2],
        MissReason.COMPLETE,
    )
    assert world.peek(text(3), max_tokens=0) == ([], MissReason.CAPPED)
    assert world.peek(text(3), max_tokens=10**9) == (blocks, MissReason.COMPLETE)
    assert world.cache.hits == 6
    assert world.cache.matched_tokens == (3 + 3 + 2 + 2 + 2 + 3) * BLOCK
    assert world.cache.misses == {
        MissReason.COLD: 1,
        MissReason.DIVERGED: 1,
        MissReason.GENERATED: 1,
        MissReason.CAPPED: 2,
        MissReason.SNAPSHOT: 0,
    }


def test_a_block_with_one_step_token_is_generated(world: World) -> None:
    world.put(text(3), prompt_len=2 * BLOCK - 1)
    found = world.match(text(3))
    assert (found.num_tokens, found.exact_tokens) == (3 * BLOCK, BLOCK)
    assert world.peek(text(3), reuse_generated=False)[1] == MissReason.GENERATED


def test_prompt_tokens_on_generated_blocks_are_not_exact(world: World) -> None:
    """A second turn prefills on top of the first answer: a cold prefill might differ."""
    world.put(text(2), prompt_len=BLOCK)
    matched = world.match(text(3))
    turn = [*matched.blocks.tolist(), *world.pool.allocate(1)]
    world.insert(text(3), turn)  # all of it is this request's prompt
    assert world.match(text(3)).exact_tokens == BLOCK


# -- upgrades ------------------------------------------------------------------------------------


def test_an_exact_block_replaces_a_generated_one(world: World) -> None:
    old = world.put(text(3), prompt_len=BLOCK)
    reader = world.match(text(3)).blocks.tolist()
    own = world.pool.allocate(2)
    assert world.insert(text(2), own) == 0
    assert world.cache.upgraded_blocks == 1
    assert world.peek(text(3), reuse_generated=False)[0] == [old[0], own[1]]
    assert world.peek(text(3))[0] == [old[0], own[1], old[2]]
    # The reader keeps the block that left the tree; it is free when the reader lets go.
    assert world.pool.references(old[1]) == 1
    world.release(reader)
    assert world.pool.references(old[1]) == 0


def test_a_replaced_block_that_nobody_holds_is_free(world: World) -> None:
    old = world.put(text(2), prompt_len=0)
    world.put(text(2))
    assert [world.pool.references(b) for b in old] == [0, 0]


def test_a_generated_block_replaces_nothing(world: World) -> None:
    for prompt_len in (8, 0):
        first = world.put(text(2, 10 * prompt_len), prompt_len=prompt_len)
        world.put(text(2, 10 * prompt_len), prompt_len=0)
        assert world.peek(text(2, 10 * prompt_len))[0] == first
    assert world.cache.upgraded_blocks == 0


def test_what_stands_on_a_replaced_block_stays_generated(world: World) -> None:
    world.put(text(2), prompt_len=BLOCK)
    reader = world.match(text(2))
    assert reader.exact_tokens == BLOCK
    world.put(text(2))  # upgrades block 1 under the reader
    tail = world.pool.allocate(1)
    # The cache cannot see any more that the reader began on a generated block: the reader says so.
    world.insert(text(3), [*reader.blocks.tolist(), *tail], prompt_len=reader.exact_tokens)
    assert world.match(text(3)).exact_tokens == 2 * BLOCK
    assert world.peek(text(3), reuse_generated=False)[1] == MissReason.GENERATED


# -- eviction ------------------------------------------------------------------------------------


def test_least_recently_used_leaf_first(world: World) -> None:
    a = world.put(text(2, 0))
    b = world.put(text(2, 10))
    assert world.peek(text(2, 0))[0] == a
    assert world.cache.evict(1) == 1
    assert world.peek(text(2, 10))[0] == b[:1]
    assert world.cache.evict(2) == 2  # a is older than that look at b
    assert [world.pool.references(block) for block in (*a, *b)] == [0, 0, 1, 0]
    assert world.cache.evict(5) == 1
    assert world.cache.evict(5) == 0
    assert world.pool.num_free == world.pool.num_total
    assert world.cache.evicted_blocks == 4


def test_letting_go_is_a_use(world: World) -> None:
    a = world.pool.allocate(1)
    world.insert(text(1, 0), a)
    b = world.put(text(1, 10))
    world.release(a)
    assert world.cache.evict(1) == 1
    assert (world.pool.references(a[0]), world.pool.references(b[0])) == (1, 0)


def test_held_blocks_and_what_leads_to_them_stay(world: World) -> None:
    blocks = world.put(text(3))
    side = world.put(np.concatenate([text(1), text(1, 8)]))
    held = world.match(text(2)).blocks.tolist()
    assert world.cache.evict(9) == 2
    assert world.cache.evict(9) == 0
    assert [world.pool.references(b) for b in (*blocks, side[1])] == [2, 2, 0, 0]
    world.release(held)
    assert world.cache.evict(9) == 2


def test_a_parent_only_the_cache_holds_waits_for_its_child(world: World) -> None:
    """Another sequence's copy of the parent leads to the child: nothing can be evicted yet."""
    world.put(text(1))
    own = world.pool.allocate(2)
    world.insert(text(2), own)
    assert world.cache.evict(9) == 0
    world.release(own)
    assert world.cache.evict(9) == 2
    assert world.pool.num_free == world.pool.num_total


def test_an_exhausted_pool_is_served_by_eviction() -> None:
    world = World(num_blocks=4)
    world.put(text(4))
    with pytest.raises(KvExhausted):
        world.pool.allocate(1)
    assert world.cache.evict(1) == 1
    assert world.put(text(1, 20))
    world.cache.check()


def test_clear_frees_what_nobody_else_holds(world: World) -> None:
    world.put(text(4))
    held = world.match(text(2)).blocks.tolist()
    world.cache.attach_snapshot(text(4), 2 * BLOCK, 0, 5)
    assert world.cache.clear() == 2
    assert world.cache.drain_snapshots() == [5]
    assert (world.cache.num_blocks, world.cache.num_snapshots) == (0, 0)
    assert [world.pool.references(b) for b in held] == [1, 1]
    world.cache.check()
    world.release(held)
    assert world.put(text(4))
    assert world.cache.evict(9) == 4


def test_a_large_tree_under_constant_eviction() -> None:
    random = np.random.default_rng(0)
    world = World(num_blocks=1000)
    running: list[list[int]] = []
    for step in range(3000):
        tokens = random.integers(0, 3, BLOCK * random.integers(1, 12)).astype(np.int32)
        needed = len(tokens) // BLOCK
        _, reusable, satisfied = world.cache.reclaim_for(tokens, 0, True, needed)
        assert satisfied
        blocks = world.match(tokens, max_tokens=len(tokens) - 1).blocks.tolist()
        assert len(blocks) == reusable
        blocks += world.pool.allocate(needed - reusable)
        world.insert(tokens, blocks)
        running.append(blocks)
        if len(running) > 60:
            world.release(running.pop(random.integers(len(running))))
        if step % 300 == 0:
            world.cache.check()
    assert world.cache.hits > 1000
    assert world.cache.evicted_blocks > 5000
    for blocks in running:
        world.release(blocks)
    evicted = world.cache.evicted_blocks
    assert world.cache.evict(1001) == world.cache.evicted_blocks - evicted > 0
    world.cache.check()
    assert world.pool.num_free == world.pool.num_total


# -- reclaim_for ---------------------------------------------------------------------------------


def test_reclaim_keeps_what_the_prompt_will_reuse() -> None:
    world = World(num_blocks=6)
    mine = world.put(text(3))  # the least recently used
    world.put(text(3, 10))
    assert world.cache.reclaim_for(text(5), 0, True, 5) == (2, 3, True)
    assert world.peek(text(5))[0] == mine
    # 3 more cannot be had without the prompt's own.
    assert world.cache.reclaim_for(text(5), 0, True, 7) == (1, 3, False)
    assert world.cache.reclaim_for(text(5), 0, True, 6) == (0, 3, True)
    assert world.peek(text(5))[0] == mine


def test_reclaim_leaves_a_token_to_compute() -> None:
    world = World(num_blocks=4)
    world.put(text(4))
    assert world.cache.reclaim_for(text(4), 0, True, 4) == (1, 3, True)


def test_reclaim_counts_only_what_this_request_may_use() -> None:
    world = World(num_blocks=4)
    world.put(text(4), prompt_len=2 * BLOCK)
    assert world.cache.reclaim_for(text(5), 7, True, 0) == (0, 0, True)
    assert world.cache.reclaim_for(text(5), 0, False, 4) == (2, 2, True)
    assert world.cache.reclaim_for(ids(), 0, True, 4) == (2, 0, True)


def test_reclaim_without_need_evicts_nothing(world: World) -> None:
    world.put(text(3))
    assert world.cache.reclaim_for(text(4), 0, True, 32) == (0, 3, True)
    assert world.cache.num_blocks == 3
    assert world.cache.hits == 0


# -- snapshots -----------------------------------------------------------------------------------


def test_the_deepest_usable_snapshot() -> None:
    world = World(recurrent=True)
    world.put(text(4))
    assert world.peek(text(4)) == ([], MissReason.SNAPSHOT)
    assert world.cache.attach_snapshot(text(4), 2 * BLOCK, 0, 7) is None
    assert world.cache.attach_snapshot(text(4), 4 * BLOCK, 0, 8) is None
    found = world.match(text(5))
    assert (found.num_tokens, found.snapshot_id, found.snapshot_tokens) == (16, 8, 16)
    found = world.match(text(4), max_tokens=4 * BLOCK - 1)
    assert (found.num_tokens, found.snapshot_id, found.snapshot_tokens) == (8, 7, 8)
    assert found.cached_tokens == 12
    assert found.reason is MissReason.SNAPSHOT
    assert world.peek(text(4), max_tokens=2 * BLOCK - 1) == ([], MissReason.SNAPSHOT)
    assert world.cache.reclaim_for(text(1), 0, True, 0)[1] == 0
    assert world.cache.reclaim_for(text(4), 0, True, 0)[1] == 2


def test_without_recurrence_no_snapshot_is_needed(world: World) -> None:
    world.put(text(2))
    found = world.match(text(2))
    assert (found.num_tokens, found.snapshot_id, found.snapshot_tokens) == (8, None, 0)


def test_a_generated_snapshot_makes_what_follows_generated() -> None:
    world = World(recurrent=True)
    world.put(text(3))
    world.cache.attach_snapshot(text(3), 2 * BLOCK, 0, 1, generated=True)
    assert world.peek(text(3), reuse_generated=False) == ([], MissReason.SNAPSHOT)
    found = world.match(text(3))
    assert (found.num_tokens, found.exact_tokens) == (2 * BLOCK, BLOCK)


def test_the_better_snapshot_stays(world: World) -> None:
    world.put(text(1))
    attach = world.cache.attach_snapshot
    assert attach(text(1), BLOCK, 0, 1, generated=True) is None
    assert attach(text(1), BLOCK, 0, 2, generated=True) == 2
    assert attach(text(1), BLOCK, 0, 3) == 1
    assert attach(text(1), BLOCK, 0, 4) == 4
    assert attach(text(1), BLOCK, 0, 5, generated=True) == 5
    assert world.cache.num_snapshots == 1
    assert attach(text(1, 5), BLOCK, 0, 6) == 6  # those tokens are not cached
    assert world.cache.detach_snapshot(text(1), BLOCK, 0) == 3
    assert world.cache.detach_snapshot(text(1), BLOCK, 0) is None
    assert world.cache.detach_snapshot(text(1, 5), BLOCK, 0) is None


def test_snapshots_of_equal_value_leave_by_recency(world: World) -> None:
    for salt in (1, 2, 3):
        world.put(text(2, salt))
        world.cache.attach_snapshot(text(2, salt), 2 * BLOCK, 0, salt)
    world.peek(text(2, 1))
    assert world.cache.evict_snapshots(2) == [2, 3]
    assert world.cache.evict_snapshots(2) == [1]
    assert world.cache.evict_snapshots(2) == []
    assert world.cache.num_blocks == 6


def test_a_snapshot_is_worth_the_tokens_that_only_it_saves(world: World) -> None:
    world.put(text(9))
    for depth in (1, 7, 9):
        world.cache.attach_snapshot(text(9), depth * BLOCK, 0, depth)
    # Depth 9 stands 2 blocks above 7, which stands 6 above 1, which saves one.
    assert world.cache.evict_snapshots(1) == [1]
    assert world.cache.evict_snapshots(1) == [9]
    assert world.cache.evict_snapshots(1) == [7]


def test_what_is_not_used_ages(world: World) -> None:
    world.put(text(5))
    world.cache.attach_snapshot(text(5), 5 * BLOCK, 0, 100)
    left = []
    for salt in range(1, 9):  # each is worth 1 block above what left last
        world.put(text(1, salt))
        world.cache.attach_snapshot(text(1, salt), BLOCK, 0, salt)
        left += world.cache.evict_snapshots(1)
    assert left == [1, 2, 3, 4, 100, 5, 6, 7]


def test_an_evicted_nodes_snapshot_is_reported(world: World) -> None:
    world.put(text(40, 0)[: 30 * BLOCK])
    for depth in range(1, 31):
        world.cache.attach_snapshot(text(30), depth * BLOCK, 0, depth)
    assert world.cache.evict(20) == 20
    assert world.cache.num_snapshots == 10
    assert world.cache.drain_snapshots() == list(range(30, 10, -1))
    assert world.cache.drain_snapshots() == []
    assert sorted(world.cache.evict_snapshots(30)) == list(range(1, 11))


# -- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([0, 1, 9], "not in use"),
        ([0, 1, 4_000_000_000], "not in use"),
        ([0, 1, 1], "cached for other tokens"),
        ([0, 1, 2], "cached for other tokens"),
        ([0, 1], "has 2 entries"),
    ],
)
def test_a_refused_insert_changes_nothing(blocks: list[int], message: str) -> None:
    world = World(num_blocks=10)
    assert world.pool.allocate(3) == [0, 1, 2]
    world.insert(text(1, 30), [2])
    world.insert(text(1), [0], prompt_len=0)
    world.pool.release(2)
    before = world.cache.entries(), [world.pool.references(b) for b in range(10)]
    with pytest.raises(InvalidArgumentError, match=message):
        world.insert(text(3), blocks)
    assert before == (world.cache.entries(), [world.pool.references(b) for b in range(10)])
    world.cache.check()
    assert world.insert(text(3), [0, 1, *world.pool.allocate(1)]) == 2


def test_a_refused_upgrade_changes_nothing(world: World) -> None:
    world.put(text(2), prompt_len=0)
    other = world.pool.allocate(1)
    world.insert(text(1, 30), other)
    before = world.cache.entries()
    with pytest.raises(InvalidArgumentError, match="cached for other tokens"):
        world.insert(text(2), [*world.pool.allocate(1), *other])
    assert world.cache.upgraded_blocks == 0
    assert sorted(before) == sorted(world.cache.entries())
    world.cache.check()


def test_bad_arguments(world: World) -> None:
    world.put(text(2))
    cache, tokens, blocks = world.cache, text(2), table([0, 1])
    for call in (
        lambda: cache.match(tokens, 0, True, -1),
        lambda: cache.insert(tokens, blocks, 9, 8, 0),
        lambda: cache.insert(tokens, blocks, -1, 8, 0),
        lambda: cache.insert(tokens, blocks, 8, -1, 0),
        lambda: cache.evict(-1),
        lambda: cache.evict_snapshots(-1),
        lambda: cache.reclaim_for(tokens, 0, True, -1),
        lambda: cache.attach_snapshot(tokens, 0, 0, 1),
        lambda: cache.attach_snapshot(tokens, BLOCK + 1, 0, 1),
        lambda: cache.attach_snapshot(tokens, 3 * BLOCK, 0, 1),
        lambda: cache.attach_snapshot(tokens, BLOCK, 0, -1),
        lambda: cache.detach_snapshot(tokens, BLOCK - 1, 0),
        lambda: cache.weaken_hash(65),
        lambda: cache.weaken_hash(8),
        lambda: PrefixCache(BlockPool(2), 0),
        lambda: PrefixCache(world.pool, BLOCK),
    ):
        with pytest.raises(InvalidArgumentError):
            call()
    with pytest.raises((TypeError, ValueError)):
        cache.match(tokens.astype(np.int64), 0, True, 8)
    cache.check()
