"""The KV pools in device memory, and their blocks' way to the host and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from atlas.backends.cuda.array import DeviceArray
from atlas.backends.cuda.block_copies import COPY_BYTES, BlockCopies
from atlas.backends.cuda.memory import Arena, PinnedMemory, aligned
from atlas.cache.kv import BLOCK_SIZE

if TYPE_CHECKING:
    from atlas.backends.cuda.device import CudaDevice
    from atlas.config import ModelConfig

Array = NDArray[Any]
_STAGING_BYTES = 4 << 20


def pool_bytes(config: ModelConfig, num_blocks: int) -> int:
    """Bytes of all pools: bfloat16, K and V of every attention layer."""
    one = 2 * num_blocks * config.num_kv_heads * BLOCK_SIZE * config.head_dim
    return 2 * len(config.attention_layers) * aligned(one)


class CudaKvPools:
    """``keys[i]`` and ``values[i]`` of the i-th attention layer: bfloat16 [B, HK, S, K].

    S tokens a block; without attention layers blocks hold nothing.

    ``nbytes`` are those of all pools. The host sees blocks as uint16 [HK, S, K]. Copies run on the
    device's stream, so they follow the steps launched before and precede those launched after.
    """

    dtype = "bfloat16"

    def __init__(self, device: CudaDevice, config: ModelConfig, num_blocks: int) -> None:
        self._device = device
        self.nbytes = pool_bytes(config, num_blocks)
        self._arena = Arena(device, self.nbytes + COPY_BYTES, "the KV cache")
        self._staging: PinnedMemory | None = None
        self._copies: BlockCopies | None = None
        self.num_blocks = num_blocks
        self.block_size = BLOCK_SIZE
        self._part = (config.num_kv_heads, BLOCK_SIZE, config.head_dim)
        shape = (num_blocks, *self._part)
        layers = config.attention_layers
        # Zeroed: a masked key's weight is 0, and 0 times what memory held before may be NaN.
        self.keys = tuple(self._arena.take(shape, self.dtype, zero=True) for _ in layers)
        self.values = tuple(self._arena.take(shape, self.dtype, zero=True) for _ in layers)
        if layers:  # pools of one size follow each other
            size = aligned(self.keys[0].nbytes)
            self._copies = BlockCopies(
                device, self._arena, self.keys[0], 2 * len(layers), size, self._part_bytes
            )

    @property
    def block_bytes(self) -> int:
        """Bytes of one block index over all layers, K and V."""
        return 2 * len(self.keys) * self._part_bytes

    @property
    def block_parts(self) -> tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]:
        """Shape and host type of one block of each pool: layer by layer, K then V."""
        return ((self._part, np.dtype(np.uint16)),) * (2 * len(self.keys))

    def read(self, blocks: NDArray[Any], last_used: int = 0) -> Iterator[Array]:
        """Copies of blocks in host memory, layer by layer, K then V: uint16 [n, HK, S, K] each.

        Where ``last_used`` is given, places of the last block behind that many tokens are zero.
        """
        for pool in self._pools():
            part = np.empty((len(blocks), *self._part), np.uint16)
            flat = part.reshape(-1).view(np.uint8)
            for first, named in self._portions(blocks):
                staging = self._pinned()
                at = 0
                for start, count in runs(named):
                    nbytes = count * self._part_bytes
                    source = pool.address + start * self._part_bytes
                    self._device.copy_out(staging.address + at, source, nbytes)
                    at += nbytes
                self._device.synchronize()
                target = first * self._part_bytes
                flat[target : target + at] = staging.array[:at]
            if last_used:
                part[-1][:, last_used:] = 0
            yield part

    def write(self, blocks: NDArray[Any], parts: Iterable[Array]) -> None:
        """What :meth:`read` gave, into the first of these blocks."""
        self._device.enter()
        for pool, part in zip(self._pools(), parts, strict=True):
            flat = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
            for first, named in self._portions(blocks[: len(part)]):
                staging = self._pinned()
                nbytes = len(named) * self._part_bytes
                source = first * self._part_bytes
                staging.array[:nbytes] = flat[source : source + nbytes]
                at = staging.address
                for start, count in runs(named):
                    target = pool.address + start * self._part_bytes
                    self._device.copy_in(target, at, count * self._part_bytes)
                    at += count * self._part_bytes
                self._device.synchronize()

    def copy_block(self, source: int, target: int) -> None:
        """Copy on write: one block, all layers."""
        self.copy_blocks(np.array([[source, target]], np.int32))

    def copy_blocks(self, pairs: NDArray[np.int32]) -> None:
        """Copy blocks, int32 [n, 2], in one launch: the first of each pair into the second.

        No block may be written, or copied, twice, or both.
        """
        if self._copies is not None:  # else blocks hold nothing
            self._copies.copy(pairs)

    def close(self) -> None:
        """Free the pools; idempotent."""
        if self._staging is not None:
            self._staging.close()
            self._staging = None
        if self._copies is not None:
            self._copies.close()
        self._arena.close()

    @property
    def _part_bytes(self) -> int:
        return 2 * prod(self._part)

    def _pools(self) -> Iterator[DeviceArray]:
        for layer in zip(self.keys, self.values, strict=True):
            yield from layer

    def _pinned(self) -> PinnedMemory:
        if self._staging is None:
            self._device.enter()
            self._staging = PinnedMemory(self._device, max(_STAGING_BYTES, self._part_bytes))
        return self._staging

    def _portions(self, blocks: NDArray[Any]) -> Iterator[tuple[int, NDArray[Any]]]:
        """Blocks in portions that the staging memory holds, each with its first one's number."""
        most = max(1, _STAGING_BYTES // self._part_bytes)
        for first in range(0, len(blocks), most):
            yield first, blocks[first : first + most]


def runs(blocks: NDArray[Any]) -> Iterator[tuple[int, int]]:
    """(first, count) of neighbours that are copied at once."""
    numbers = np.asarray(blocks, np.int64)
    cuts = np.flatnonzero(np.diff(numbers) != 1) + 1
    for piece in np.split(numbers, cuts):
        if len(piece):
            yield int(piece[0]), len(piece)
