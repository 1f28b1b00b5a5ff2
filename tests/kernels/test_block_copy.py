"""KV blocks copied within several pools, byte by byte."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.launches import Bench


@pytest.mark.parametrize("block_bytes", [16, 4096, 5008])
def test_copy_blocks(bench: Bench, block_bytes: int) -> None:
    """One source for two targets, a chain of none; pools with a gap between them."""
    rng = np.random.default_rng(block_bytes)
    pools = rng.integers(0, 256, (3, 7 * block_bytes + 48), np.uint8)
    pairs = [(2, 5), (2, 0), (6, 3)]
    address = bench.memory.put(pools)
    args = [address, bench.put_ints(pairs), pools.strides[0], block_bytes]
    bench.run("copy_blocks", (len(pairs), len(pools)), args)
    want = pools.copy()
    for pool in want:
        blocks = pool[: 7 * block_bytes].reshape(7, block_bytes)
        for source, target in pairs:
            blocks[target] = blocks[source]
    np.testing.assert_array_equal(bench.memory.get(address, pools), want)
