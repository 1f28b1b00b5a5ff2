"""How long the prefix cache takes: ``python benchmarks/prefix_cache.py``.

Calls from Python on prompts of 1,000 blocks of 16 tokens, in a cache of 100,000 blocks whose
numbers are shuffled. Medians, in microseconds a call and block operations a second.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

from atlas._native.block_pool import BlockPool
from atlas._native.prefix_cache import PrefixCache, PrefixMatch

BLOCK_SIZE, PROMPT_BLOCKS, NUM_PROMPTS = 16, 1_000, 100
PROMPT_LEN = BLOCK_SIZE * PROMPT_BLOCKS


def median_s(call: Callable[[int], object]) -> float:
    """Return the median time of ``call(i)`` over all prompts, in seconds."""
    times = []
    for i in range(NUM_PROMPTS):
        start = time.perf_counter()
        call(i)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    random = np.random.default_rng(0)
    pool = BlockPool(NUM_PROMPTS * PROMPT_BLOCKS)
    cache = PrefixCache(pool, BLOCK_SIZE)
    prompts = random.integers(0, 150_000, (NUM_PROMPTS, PROMPT_LEN), dtype=np.int32)
    blocks = random.permutation(pool.allocate(pool.num_total)).astype(np.uint32)
    tables = blocks.reshape(NUM_PROMPTS, PROMPT_BLOCKS)
    matches: list[PrefixMatch] = []

    def insert(i: int) -> None:
        cache.insert(prompts[i], tables[i], PROMPT_LEN, PROMPT_LEN, 0)

    def match(i: int) -> None:
        matches.append(cache.match(prompts[i], 0, True, PROMPT_LEN - 1))

    def reclaim(i: int) -> None:
        cache.reclaim_for(prompts[i], 0, True, PROMPT_BLOCKS)

    rows = {
        "insert, new": median_s(insert),
        "insert, known": median_s(insert),
        "match": median_s(match),
    }
    for found in matches:
        for block in found.blocks[::-1].tolist():
            pool.release(block)
    for block in blocks[::-1].tolist():
        pool.release(block)
    rows["reclaim_for, satisfied"] = median_s(reclaim)
    rows["evict"] = median_s(lambda i: cache.evict(PROMPT_BLOCKS))
    print(f"{PROMPT_BLOCKS} blocks of {BLOCK_SIZE} tokens, cache of {pool.num_total} blocks")
    for name, seconds in rows.items():
        print(f"{name:24}{seconds * 1e6:8.1f} us{PROMPT_BLOCKS / seconds / 1e6:10.1f} M blocks/s")


if __name__ == "__main__":
    main()
