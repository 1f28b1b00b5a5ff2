"""Searches and their sequences, many at once, against the definition and a KV cache of tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atlas._native import beam_search, source_rows
from atlas._native.block_pool import BlockPool
from atlas._native.source_rows import SourceRows
from atlas.errors import InvalidArgumentError, KvExhausted, NonFiniteLogitsError
from atlas.model.beam_search import BeamSearch

FIRST = (90, 91)
BLOCK, NUM_BLOCKS, SOURCE_LEN = 4, 512, 6
VALUES = np.array([-0.25, -0.5, -0.5, -1, -1.5, -3], np.float32)  # few, for ties


class Request:
    """A search as the definition has it, the same search natively, and its sequences."""

    def __init__(self, pool: BlockPool, options: dict[str, Any]) -> None:
        self.naive = BeamSearch(FIRST, **options)
        self.native = beam_search.BeamSearch(FIRST, **options)
        blocks = np.array(pool.allocate(-(-SOURCE_LEN // BLOCK)), np.int32)
        self.source_blocks = blocks.tolist()
        first = np.array(FIRST, np.int32)
        self.rows = SourceRows(pool, BLOCK, blocks, SOURCE_LEN, first)

    def candidates(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Sorted rows with ties, some of fewer ids than there may be."""
        count, k = len(self.naive.running), self.naive.num_candidates
        ids = np.argsort(rng.random((count, k + 8)), axis=1).astype(np.int32)[:, :k]
        values = -np.sort(-rng.choice(VALUES, (count, k)), axis=1)
        for row, banned in enumerate(self.naive.bans()):
            kept = [i for i in range(k) if ids[row, i] not in banned and rng.random() < 0.9]
            ids[row], values[row] = (
                [*ids[row, kept], *[-1] * (k - len(kept))],
                [*values[row, kept], *[-np.inf] * (k - len(kept))],
            )
        return ids, values

    def check(self) -> None:
        """Both searches stand in the same place, to the bit."""
        naive, native = self.naive, self.native
        running = [(beam.token_ids[2:], float(beam.log_prob)) for beam in naive.running]
        assert native.running == running
        assert native.num_running == len(running) == len(self.rows)
        ended = [(found.token_ids, found.score) for found in naive.best(naive.num_beams)]
        assert native.best(naive.num_beams) == ended
        assert native.best(1) == ended[:1]
        assert native.done == naive.done
        assert native.chosen() == naive.chosen()
        assert self.rows.tokens[:, -1].tolist() == [b.token_ids[-1] for b in naive.running]


class Cache:
    """KV blocks that hold the tokens of their positions."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.blocks = np.full((NUM_BLOCKS, BLOCK), -1, np.int32)

    def sweep(self, requests: list[Request]) -> None:
        """Run the rows of all requests, and read every sequence back."""
        sources = [request.rows for request in requests]
        needed, free = source_rows.blocks_needed(sources), self.pool.num_free
        for source, target in source_rows.reserve(sources).tolist():
            self.blocks[target] = self.blocks[source]
        assert free - self.pool.num_free == needed
        assert not len(source_rows.reserve(sources))
        token_ids, positions, slots, logits_rows, lens = np.zeros((5, 256), np.int32)
        cu_rows, source_cu_rows = np.zeros((2, 257), np.int32)
        tables, source_tables = np.zeros((2, 128, 8), np.int32)
        num_rows, num_seqs, most, most_of_source = source_rows.write_rows(
            sources, token_ids, positions, slots, cu_rows, tables, logits_rows, source_cu_rows,
            lens, source_tables,
        )  # fmt: skip
        self.blocks.ravel()[slots[:num_rows]] = token_ids[:num_rows]
        seqs = iter(range(num_seqs))
        for i, request in enumerate(requests):
            begin = source_cu_rows[i]
            assert lens[i] == SOURCE_LEN
            assert source_tables[i, : len(request.source_blocks)].tolist() == request.source_blocks
            for beam in request.naive.running:
                n, at = len(beam.token_ids), next(seqs)
                read = self.blocks[tables[at, : -(-n // BLOCK)]].ravel()[:n]
                assert read.tolist() == list(beam.token_ids)
                assert positions[cu_rows[at] : cu_rows[at + 1]].tolist()[-1] == n - 1
                assert logits_rows[at] == cu_rows[at + 1] - 1
                assert most >= cu_rows[at + 1] - cu_rows[at]
            assert source_cu_rows[i + 1] == cu_rows[at + 1] <= begin + most_of_source
        assert next(seqs, None) is None
        assert source_rows.longest(sources) == positions[:num_rows].max() + 1
        source_rows.advance(sources)


def padded(rows: np.ndarray, k: int, value: float) -> np.ndarray:
    return np.pad(rows, ((0, 0), (0, k - rows.shape[1])), constant_values=value)


OPTIONS = st.fixed_dictionaries(
    {
        "end_ids": st.sampled_from([(0,), (0, 3), (1, 2, 5)]),
        "num_beams": st.integers(1, 16),
        "max_new": st.integers(1, 14),
        "length_penalty": st.sampled_from([-1.0, 0.0, 0.6, 1.0, 1.7]),
        "early_stopping": st.sampled_from([True, False, "never"]),
        "no_repeat_ngram": st.integers(0, 3),
    }
)


@given(st.lists(OPTIONS, min_size=1, max_size=5), st.integers(0, 10**6))
@settings(max_examples=120, deadline=None)
def test_searches_are_the_definition_s(options: list[dict[str, Any]], seed: int) -> None:
    """Step by step: hypotheses, scores, bans and what every sequence reads in its blocks."""
    pool, rng = BlockPool(NUM_BLOCKS), np.random.default_rng(seed)
    cache, requests = Cache(pool), [Request(pool, given) for given in options]
    active = requests
    while active:
        searches = [request.native for request in active]
        bans = [row for request in active for row in request.naive.bans()]
        banned, cu_banned = beam_search.bans(searches)
        assert banned.tolist() == [token for row in bans for token in row]
        assert np.diff(cu_banned, prepend=0).tolist() == [0, *map(len, bans)]
        cache.sweep(active)
        found = [request.candidates(rng) for request in active]
        k = max(ids.shape[1] for ids, _ in found)
        ids = np.concatenate([padded(rows, k, -1) for rows, _ in found])
        log_probs = np.concatenate([padded(rows, k, -np.inf) for _, rows in found])
        assert beam_search.step(searches, [r.rows for r in active], ids, log_probs) == []
        for request, (rows, values) in zip(active, found, strict=True):
            request.naive.step(rows, values)
            request.check()
        active = [request for request in active if not request.naive.done]
    for request in requests:
        request.rows.release()
        for block in request.source_blocks:
            pool.release(block)
    assert pool.num_free == NUM_BLOCKS


def wide(**more: Any) -> dict[str, Any]:
    return {
        "end_ids": (0,), "num_beams": 2, "max_new": 9, "length_penalty": 1.0,
        "early_stopping": False, "no_repeat_ngram": 0,
    } | more  # fmt: skip


def test_a_row_that_is_not_finite_ends_its_own_search_alone() -> None:
    pool = BlockPool(NUM_BLOCKS)
    cache, requests = Cache(pool), [Request(pool, wide()) for _ in range(3)]
    cache.sweep(requests)
    ids = np.tile(np.arange(5, 9, dtype=np.int32), (3, 1))
    log_probs = np.tile(-np.arange(1, 5, dtype=np.float32), (3, 1))
    log_probs[1, 3] = np.nan
    searches, sources = [r.native for r in requests], [r.rows for r in requests]
    ((index, error),) = beam_search.step(searches, sources, ids, log_probs)
    assert index == 1
    assert isinstance(error, NonFiniteLogitsError)
    assert searches[1].running == [((), 0.0)]
    assert searches[0].running == searches[2].running == [((5,), -1.0), ((6,), -2.0)]
    assert [len(rows) for rows in sources] == [2, 1, 2]


def test_a_pool_that_is_too_small_changes_nothing() -> None:
    pool = BlockPool(4)
    requests = [Request(pool, wide()), Request(pool, wide())]
    with pytest.raises(KvExhausted, match="2 KV blocks needed, 0 of 4"):
        source_rows.reserve([request.rows for request in requests])
    assert [request.rows.num_blocks for request in requests] == [0, 0]


def test_arguments_that_do_not_fit() -> None:
    pool = BlockPool(NUM_BLOCKS)
    request = Request(pool, wide())
    rows, none = request.rows, np.zeros(0, np.int32)
    with pytest.raises(InvalidArgumentError, match="first_tokens is empty"):
        SourceRows(pool, BLOCK, none, 0, none)
    with pytest.raises(InvalidArgumentError, match=r"parents\[1\] is 1; allowed: 0 … 0"):
        rows.go_on(np.array([0, 1], np.int32), np.array([5, 6], np.int32))
    with pytest.raises(InvalidArgumentError, match="2 parents for 1 tokens"):
        rows.go_on(np.zeros(2, np.int32), np.zeros(1, np.int32))
    source_rows.reserve([rows])
    one, table = np.zeros(1, np.int32), np.zeros((1, 1), np.int32)
    with pytest.raises(InvalidArgumentError, match="a sweep of 2 rows, 1 sequences"):
        source_rows.write_rows([rows], one, one, one, one, table, one, one, one, table)
    with pytest.raises(InvalidArgumentError, match=r"allowed: \[1, 4\] of 1"):
        beam_search.step([request.native], [rows], *candidates_of(3))
    ended = Request(pool, wide()).rows
    ended.release()
    with pytest.raises(InvalidArgumentError, match=r"sources\[0\] has 0 sequences; allowed: one"):
        beam_search.step([request.native], [ended], *candidates_of(4))
    with pytest.raises(InvalidArgumentError, match="num_beams is 17"):
        beam_search.BeamSearch(FIRST, **wide(num_beams=17))
    rows.go_on(none, none)
    assert (len(rows), rows.tokens.shape) == (0, (0, 1))


def candidates_of(k: int) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros((1, k), np.int32), np.zeros((1, k), np.float32)
