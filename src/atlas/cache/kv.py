"""The KV pools: one K and one V array of blocks for each attention layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atlas import pages
from atlas.config import ModelConfig
from atlas.layers.step import Array

BLOCK_SIZE = 16
_TAIL_BYTES = 64  # a vector load of the last head may run past the pool's end


@dataclass(frozen=True, slots=True, eq=False)
class KvPools:
    """``keys[i]`` [B, HK, K, S] and ``values[i]`` [B, HK, S, K] of the i-th attention layer.

    S tokens a block. Without attention layers blocks are counted all the same, and hold nothing.
    """

    keys: tuple[Array, ...]
    values: tuple[Array, ...]
    num_blocks: int
    block_size: int

    @property
    def dtype(self) -> str:
        """Name of the elements' type."""
        return self.keys[0].dtype.name if self.keys else "none"

    @property
    def block_parts(self) -> tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]:
        """Shape and host type of one block of each pool: layer by layer, K then V."""
        return tuple((pool.shape[1:], pool.dtype) for pool in self._pools())

    def read(self, blocks: NDArray[Any], last_used: int = 0) -> Iterator[Array]:
        """Copies of blocks in host memory, layer by layer, K then V: [n, …] each.

        Where ``last_used`` is given, places of the last block behind that many tokens are zero.
        """
        for layer in zip(self.keys, self.values, strict=True):
            keys, values = (pool[blocks] for pool in layer)
            if last_used:
                keys[-1][..., last_used:] = 0
                values[-1][:, last_used:] = 0
            yield keys
            yield values

    def write(self, blocks: NDArray[Any], parts: Iterable[Array]) -> None:
        """What :meth:`read` gave, into the first of these blocks."""
        for pool, part in zip(self._pools(), parts, strict=True):
            pool[blocks[: len(part)]] = part

    def copy_block(self, source: int, target: int) -> None:
        """Copy on write: one block, all layers."""
        self.copy_blocks(np.array([[source, target]], np.int32))

    def copy_blocks(self, pairs: NDArray[np.int32]) -> None:
        """Copy blocks, int32 [n, 2]: the first of each pair into the second.

        No block may be written, or copied, twice, or both.
        """
        for source, target in pairs.tolist():
            for pool in self._pools():
                pool[target] = pool[source]

    def _pools(self) -> Iterator[Array]:
        for layer in zip(self.keys, self.values, strict=True):
            yield from layer

    @property
    def block_bytes(self) -> int:
        """Bytes of one block index over all layers, K and V."""
        return sum(pool[0].nbytes for pool in (*self.keys, *self.values))

    @property
    def nbytes(self) -> int:
        """Bytes of all pools."""
        return self.num_blocks * self.block_bytes


def kv_block_bytes(config: ModelConfig, dtype: str) -> int:
    """Bytes of one block over all layers before anything is allocated."""
    width = np.dtype(dtype).itemsize
    per_layer = config.num_kv_heads * config.head_dim * BLOCK_SIZE * width
    return 2 * len(config.attention_layers) * per_layer


def allocate_pools(config: ModelConfig, num_blocks: int, dtype: str) -> KvPools:
    """Zeroed pools; pages that no token reaches cost no memory."""
    heads, dim = config.num_kv_heads, config.head_dim

    def pool(*shape: int) -> Array:
        count = int(np.prod(shape))
        tail = _TAIL_BYTES // np.dtype(dtype).itemsize
        return pages.zeros(count + tail, dtype)[:count].reshape(shape)

    layers = config.attention_layers
    return KvPools(
        keys=tuple(pool(num_blocks, heads, dim, BLOCK_SIZE) for _ in layers),
        values=tuple(pool(num_blocks, heads, BLOCK_SIZE, dim) for _ in layers),
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
    )
