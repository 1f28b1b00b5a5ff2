"""Random histories of the prefix cache, compared step by step with a naive model."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import chain
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from atlas._native.block_pool import BlockPool
from atlas._native.prefix_cache import MissReason, PrefixCache
from atlas.errors import KvExhausted

SETTINGS = settings(
    max_examples=80,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@dataclass
class Node:
    """What the naive model knows of one cached block."""

    block: int
    generated: bool
    last_used: int
    snapshot: int | None = None
    snapshot_generated: bool = False
    snapshot_base: int = 0


@dataclass(eq=False)
class Run:
    """A sequence: its tokens, its blocks (all held) and what it tells the cache of its prompt."""

    tokens: tuple[int, ...]
    blocks: list[int]
    prompt_len: int
    seed: int
    num_prompt: int  # the truth


Key = tuple[int, tuple[int, ...]]


class Histories(RuleBasedStateMachine):
    """Sequences that match, grow, are cached and end; a dict of token tuples knows better."""

    TOTAL = 12
    RECURRENT = False
    HASH_BITS = 64

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.TOTAL)
        self.cache = PrefixCache(self.pool, 2, recurrent=self.RECURRENT)
        self.cache.weaken_hash(self.HASH_BITS)
        self.nodes: dict[Key, Node] = {}
        self.runs: list[Run] = []
        self.tainted: set[int] = set()  # blocks that a cold prefill would have written otherwise
        self.fallen: list[int] = []
        self.clock = 0
        self.snapshots: list[Key] = []  # least recently used first
        self.orphans: list[int] = []
        self.next_snapshot = 0
        self.snapshot_floor = 0
        self.upgraded = 0
        self.counts: Counter[str] = Counter()

    # The model.

    def held(self) -> Counter[int]:
        return Counter(block for run in self.runs for block in run.blocks)

    def references(self) -> Counter[int]:
        return self.held() + Counter(node.block for node in self.nodes.values())

    def start_use(self) -> None:
        references = self.references()
        for block in self.fallen:
            for node in self.nodes.values():
                if node.block == block and references[block] == 1:
                    self.clock += 1
                    node.last_used = self.clock
        self.fallen.clear()
        self.clock += 1

    def note_fallen(self, block: int) -> None:
        if self.references()[block] == 1 and block not in self.fallen:
            self.fallen.append(block)

    def path(self, seed: int, tokens: tuple[int, ...]) -> list[Key]:
        return [(seed, tokens[:end]) for end in range(2, len(tokens) + 1, 2)]

    def expect(
        self, seed: int, tokens: tuple[int, ...], reuse_generated: bool, max_tokens: int
    ) -> tuple[list[Key], int, Key | None, MissReason]:
        """Blocks, exact tokens, key of the snapshot and reason of a match."""
        keys: list[Key] = []
        reason = MissReason.COMPLETE
        for key in self.path(seed, tokens):
            node = self.nodes.get(key)
            usable = node is not None and (reuse_generated or not node.generated)
            if len(key[1]) > max_tokens:
                reason = MissReason.CAPPED if usable else MissReason.COMPLETE
                break
            if node is None:
                reason = MissReason.DIVERGED if keys else MissReason.COLD
                break
            if not usable:
                reason = MissReason.GENERATED
                break
            keys.append(key)
        exact = 2 * sum(not self.nodes[key].generated for key in keys)
        snapshot = None
        for key in keys:
            node = self.nodes[key]
            if node.snapshot is not None and (reuse_generated or not node.snapshot_generated):
                snapshot = key
        if snapshot is not None and self.nodes[snapshot].snapshot_generated:
            exact = min(exact, len(snapshot[1]) - 2)
        usable = 0 if snapshot is None else len(snapshot[1])
        if self.RECURRENT and usable < 2 * len(keys):
            return keys[: usable // 2], min(exact, usable), snapshot, MissReason.SNAPSHOT
        return keys, exact, snapshot, reason

    def evictable(self, protected: set[int]) -> list[tuple[int, Key]]:
        """Leaves that only the cache holds, least recently used first."""
        parents = {(seed, tokens[:-2]) for seed, tokens in self.nodes}
        held = self.held()
        return sorted(
            (node.last_used, key)
            for key, node in self.nodes.items()
            if key not in parents and not held[node.block] and node.block not in protected
        )

    def evict_one(self, protected: set[int] = frozenset()) -> bool:  # type: ignore[assignment]
        victims = self.evictable(protected)
        if not victims:
            return False
        key = victims[0][1]
        node = self.nodes.pop(key)
        if node.snapshot is not None:
            self.snapshots.remove(key)
            self.orphans.append(node.snapshot)
        return True

    def num_free(self) -> int:
        return self.TOTAL - len(self.references())

    # The rules.

    # Few texts, so that most requests share a prefix with an earlier one.
    prompts = st.lists(st.sampled_from([(0, 0), (0, 0), (0, 1)]), min_size=1, max_size=5).map(
        lambda pairs: tuple(chain.from_iterable(pairs))
    )
    reuses = st.sampled_from([True, True, False])
    seeds = st.sampled_from([0] * 9 + [5])
    caps = st.sampled_from([99] * 9 + [0, 1, 4])

    @rule(tokens=prompts, odd=st.booleans(), seed=seeds, reuse=reuses, cap=caps)
    def request(self, tokens: tuple[int, ...], odd: bool, seed: int, reuse: bool, cap: int) -> None:
        """A request comes: it makes room, matches, computes the rest and is cached."""
        tokens = tokens[: len(tokens) - odd]
        cap = min(cap, len(tokens) - 1)
        self.reclaim(tokens, seed, reuse, (len(tokens) + 1) // 2)
        keys, exact, snapshot, reason = self.expect(seed, tokens, reuse, cap)
        if snapshot is not None:
            self.snapshots.remove(snapshot)
            self.snapshots.append(snapshot)
            self.nodes[snapshot].snapshot_base = self.snapshot_floor
        found = self.cache.match(np.array(tokens, np.int32), seed, reuse, cap)
        self.counts[reason.name] += 1
        blocks = found.blocks.tolist()
        assert blocks == [self.nodes[key].block for key in keys]
        assert (found.num_tokens, found.exact_tokens) == (2 * len(keys), exact)
        assert found.reason is reason
        assert found.snapshot_id == (None if snapshot is None else self.nodes[snapshot].snapshot)
        assert found.snapshot_tokens == (0 if snapshot is None else len(snapshot[1]))
        prompt_len = len(tokens) if exact == found.num_tokens else exact
        run = Run(tokens, blocks, prompt_len, seed, len(tokens))
        self.runs.append(run)
        missing = (len(tokens) + 1) // 2 - len(blocks)
        tainted = not self.tainted.isdisjoint(blocks) or (
            snapshot is not None and self.nodes[snapshot].snapshot_generated
        )
        try:
            self.allocate(run, missing, tainted)
        except KvExhausted:
            assert missing > self.num_free()
            self.end(run)
            return
        self.counts["hits"] += bool(keys)
        self.insert(run, len(tokens))

    @precondition(lambda self: self.runs)
    @rule(index=st.integers(0, 9), tokens=prompts)
    def generate(self, index: int, tokens: tuple[int, ...]) -> None:
        run = self.runs[index % len(self.runs)]
        grown = (*run.tokens, *tokens)[:14]
        missing = (len(grown) + 1) // 2 - len(run.blocks)
        self.evict(missing)
        if missing <= self.num_free():
            self.allocate(run, missing, tainted=True)
            # Step tokens may have gone into the prompt's last block, too.
            self.tainted.update(run.blocks[min(run.num_prompt, len(run.tokens)) // 2 :])
            run.tokens = grown

    def allocate(self, run: Run, count: int, tainted: bool) -> None:
        blocks = self.pool.allocate(count)
        run.blocks += blocks
        self.tainted.difference_update(blocks)
        if tainted:
            self.tainted.update(blocks)

    @precondition(lambda self: self.runs)
    @rule(index=st.integers(0, 9))
    def fork(self, index: int) -> None:
        run = self.runs[index % len(self.runs)]
        whole = len(run.tokens) // 2
        for block in run.blocks[:whole]:
            self.pool.retain(block)
        tokens = run.tokens[: 2 * whole]
        prompt_len = min(run.prompt_len, len(tokens))
        self.runs.append(Run(tokens, run.blocks[:whole], prompt_len, run.seed, len(tokens)))

    def insert(self, run: Run, num_valid: int) -> None:
        self.start_use()
        new = 0
        exact_len = run.prompt_len
        upgrades: list[tuple[Key, int]] = []
        for i, key in enumerate(self.path(run.seed, run.tokens[:num_valid])):
            node = self.nodes.get(key)
            if node is None:
                self.nodes[key] = Node(run.blocks[i], 2 * i + 2 > exact_len, self.clock)
                new += 1
                continue
            node.last_used = self.clock
            if node.generated and node.block == run.blocks[i]:
                exact_len = min(exact_len, 2 * i)
            elif node.generated and 2 * i + 2 <= exact_len:
                upgrades.append((key, run.blocks[i]))
        self.counts["upgrades"] += len(upgrades)
        for key, block in reversed(upgrades):
            old = self.nodes[key].block
            self.nodes[key].block = block
            self.nodes[key].generated = False
            self.note_fallen(old)
        tokens = np.array(run.tokens, np.int32)
        blocks = np.array(run.blocks, np.uint32)
        assert self.cache.insert(tokens, blocks, num_valid, run.prompt_len, run.seed) == new
        assert self.cache.upgraded_blocks == self.upgraded + len(upgrades)
        self.upgraded = self.cache.upgraded_blocks

    def end(self, run: Run) -> None:
        while run.blocks:
            block = run.blocks.pop()
            self.pool.release(block)
            self.note_fallen(block)
        self.runs.remove(run)

    @precondition(lambda self: self.runs)
    @rule(index=st.integers(0, 9), valid=st.sampled_from([99, 99, 3, 0]))
    def finish(self, index: int, valid: int) -> None:
        run = self.runs[index % len(self.runs)]
        self.insert(run, min(valid, len(run.tokens)))
        self.end(run)

    @rule(count=st.integers(0, 4))
    def evict(self, count: int) -> None:
        self.start_use()
        expected = 0
        while expected < count and self.evict_one():
            expected += 1
        before = self.pool.num_free
        assert self.cache.evict(count) == expected
        assert self.pool.num_free == before + expected
        self.counts["evicted"] += expected

    @rule(tokens=prompts, seed=seeds, reuse=reuses, needed=st.integers(0, 12))
    def reclaim(self, tokens: tuple[int, ...], seed: int, reuse: bool, needed: int) -> None:
        keys = self.expect(seed, tokens, reuse, max(0, len(tokens) - 1))[0]
        self.start_use()
        kept = [self.nodes[key].block for key in keys]
        freed = 0
        while self.num_free() < needed - len(kept) and self.evict_one(set(kept)):
            freed += 1
        satisfied = self.num_free() >= needed - len(kept)
        for block in reversed(kept):
            self.note_fallen(block)
        answer = self.cache.reclaim_for(np.array(tokens, np.int32), seed, reuse, needed)
        assert answer == (freed, len(kept), satisfied)
        self.counts["evicted"] += freed
        assert satisfied or not self.evictable(set(kept))

    @precondition(lambda self: self.nodes)
    @rule(index=st.integers(0, 99), generated=st.booleans())
    def attach(self, index: int, generated: bool) -> None:
        seed, tokens = key = sorted(self.nodes)[index % len(self.nodes)]
        offered = self.next_snapshot
        self.next_snapshot += 1
        node = self.nodes[key]
        freed: int | None = None
        if node.snapshot is not None and (generated or not node.snapshot_generated):
            freed = offered
        else:
            if node.snapshot is not None:
                freed = node.snapshot
                self.snapshots.remove(key)
            node.snapshot, node.snapshot_generated = offered, generated
            node.snapshot_base = self.snapshot_floor
            self.snapshots.append(key)
        array = np.array((*tokens, 1), np.int32)
        assert self.cache.attach_snapshot(array, len(tokens), seed, offered, generated) == freed

    def value(self, key: Key) -> int:
        """Tokens that only this snapshot saves, counted from its base."""
        seed, tokens = key
        above = [
            len(tokens_above)
            for seed_above, tokens_above in self.snapshots
            if seed_above == seed and tokens_above == tokens[: len(tokens_above)]
        ]
        return (
            self.nodes[key].snapshot_base
            + len(tokens)
            - max((length for length in above if length < len(tokens)), default=0)
        )

    @precondition(lambda self: len(self.snapshots) > 2)
    @rule(count=st.integers(0, 3))
    def evict_snapshots(self, count: int) -> None:
        expected = []
        while self.snapshots and len(expected) < count:
            key = min(self.snapshots, key=self.value)  # the first of equals
            self.snapshot_floor = self.value(key)
            expected.append(self.nodes[key].snapshot)
            self.nodes[key].snapshot = None
            self.snapshots.remove(key)
        assert self.cache.evict_snapshots(count) == expected

    @precondition(lambda self: self.orphans)
    @rule()
    def drain(self) -> None:
        assert self.cache.drain_snapshots() == self.orphans
        self.orphans.clear()

    @precondition(lambda self: len(self.nodes) == self.TOTAL)
    @rule()
    def clear(self) -> None:
        references = self.references()
        lone = sum(references[node.block] == 1 for node in self.nodes.values())
        blocks = [node.block for node in self.nodes.values()]
        self.orphans += sorted(self.nodes[key].snapshot for key in self.snapshots)  # type: ignore[type-var]
        self.nodes.clear()
        self.snapshots.clear()
        assert self.cache.clear() == lone
        assert sorted(self.cache.drain_snapshots()) == sorted(self.orphans)
        self.orphans.clear()
        self.fallen = [*self.fallen, *(b for b in blocks if b not in self.fallen)]

    # After every step.

    @invariant()
    def every_reference_is_accounted_for(self) -> None:
        references = self.references()
        for block in range(self.TOTAL):
            assert self.pool.references(block) == references[block]
        assert self.pool.num_free + len(references) == self.pool.num_total

    @invariant()
    def what_is_called_exact_is(self) -> None:
        for _, _, block, generated, _ in self.cache.entries():
            assert generated or block not in self.tainted

    @invariant()
    def the_tree_is_the_models(self) -> None:
        self.cache.check()
        assert sorted(self.cache.entries()) == sorted(
            (seed, tokens, node.block, node.generated, node.snapshot)
            for (seed, tokens), node in self.nodes.items()
        )
        assert self.cache.num_blocks == len(self.nodes)
        assert self.cache.num_snapshots == len(self.snapshots)


class RecurrentHistories(Histories):
    RECURRENT = True


class CollidingHistories(Histories):
    HASH_BITS = 1


MACHINES = pytest.mark.parametrize("machine", [Histories, RecurrentHistories, CollidingHistories])


@MACHINES
def test_histories(machine: type[Histories]) -> None:
    run_state_machine_as_test(machine, settings=SETTINGS)


@MACHINES
def test_a_long_history(machine: type[Histories]) -> None:
    """The same rules, drawn without hypothesis: cheaper, so much longer."""
    random = Random(0)
    world = machine()
    pairs = [(0, 0), (0, 0), (0, 1)]

    def tokens(most: int) -> tuple[int, ...]:
        return tuple(chain.from_iterable(random.choices(pairs, k=random.randint(1, most))))

    for _ in range(20_000):
        index = random.randrange(100)
        reuse, seed = random.random() < 0.6, 5 * (random.random() < 0.1)
        match random.choice("rrrrrrggggffffffffkeeaaaaaasdc"):
            case "r":
                cap = random.choice([99] * 9 + [0, 1, 4])
                world.request(tokens(5), random.random() < 0.5, seed, reuse, cap)
            case "g" if world.runs:
                world.generate(index, tokens(2))
            case "f" if world.runs:
                world.finish(index, random.choice([99, 99, 3, 0]))
            case "k" if world.runs and len(world.runs) < 6:
                world.fork(index)
            case "e":
                world.evict(random.randint(0, 2))
            case "a" if world.nodes:
                world.attach(index, random.random() < 0.4)
            case "s":
                world.evict_snapshots(random.randint(0, 2))
            case "d":
                world.drain()
            case "c" if random.random() < 0.1:
                world.clear()
        world.what_is_called_exact_is()
        world.every_reference_is_accounted_for()
        world.the_tree_is_the_models()
    least = {"hits": 500, "evicted": 2000, "upgrades": 20, "GENERATED": 5}
    assert all(world.counts[name] >= count for name, count in least.items()), world.counts
