"""Slots copied and zeroed over pools of several sizes."""

from __future__ import annotations

import numpy as np

from tests.kernels.launches import Bench


def test_a_slot_is_copied_and_zeroed_in_every_pool(bench: Bench) -> None:
    rng = np.random.default_rng(0)
    pools = [rng.integers(0, 1 << 30, (4, size)).astype(np.int32) for size in (8, 12288, 4)]
    places = [bench.memory.put(pool) for pool in pools]
    table = np.array(
        [(at, pool[0].nbytes) for at, pool in zip(places, pools, strict=True)], np.int64
    )
    for source, target in ((2, 0), (-1, 3)):
        bench.run("copy_slot", (3, 2), [bench.memory.put(table), source, target])
        for at, pool in zip(places, pools, strict=True):
            pool[target] = pool[source] if source >= 0 else 0
            np.testing.assert_array_equal(bench.memory.get(at, pool), pool)
