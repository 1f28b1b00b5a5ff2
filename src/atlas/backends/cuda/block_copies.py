"""Copies of KV blocks within their pools, many in one launch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from atlas.backends.cuda.array import DeviceArray
from atlas.backends.cuda.launch import KernelLaunch, Recording
from atlas.backends.cuda.memory import Arena, PinnedMemory

if TYPE_CHECKING:
    from atlas._native.cuda_launch import CudaLaunchList
    from atlas.backends.cuda.device import CudaDevice

Ints = NDArray[np.int32]

COPY_BYTES = 16 << 10
"""Device memory for the pairs of a launch; more of them take another."""
_MOST = COPY_BYTES // 8


class BlockCopies:
    """Copies within the pools of one model.

    Parameters
    ----------
    device : CudaDevice
    arena : Arena
        Gives ``COPY_BYTES``.
    pools : DeviceArray
        The first of ``num_pools``, which lie ``pool_bytes`` apart.
    num_pools, pool_bytes, block_bytes : int
    """

    kernel = "copy_blocks"

    def __init__(
        self,
        device: CudaDevice,
        arena: Arena,
        pools: DeviceArray,
        num_pools: int,
        pool_bytes: int,
        block_bytes: int,
    ) -> None:
        self._device, self._pools = device, pools
        self._sizes = num_pools, pool_bytes, block_bytes
        self._pairs = arena.take((_MOST, 2), "int32")
        self._pinned: PinnedMemory | None = None  # until a block is copied
        self._event: Any = None
        self._launches: dict[int, CudaLaunchList] = {}  # by number of pairs

    def copy(self, pairs: Ints) -> None:
        """Put the copies on the stream, behind the steps launched before; does not wait for it.

        Parameters
        ----------
        pairs : int32 [n, 2]
            A source and a target each.
        """
        for first in range(0, len(pairs), _MOST):
            self._put(pairs[first : first + _MOST])

    def _put(self, pairs: Ints) -> None:
        device, count = self._device, len(pairs)
        device.enter()
        if self._pinned is None:
            self._pinned, self._event = PinnedMemory(device, COPY_BYTES), device.create_event()
        device.wait(self._event)  # of the launch before, which read the pinned memory
        self._pinned.array[: 8 * count].view(np.int32).reshape(count, 2)[:] = pairs
        device.copy_in(self._pairs.address, self._pinned.address, 8 * count)
        device.record(self._event)
        if count not in self._launches:
            num_pools, pool_bytes, block_bytes = self._sizes
            args = (self._pools, self._pairs, pool_bytes, block_bytes)
            launch = KernelLaunch(self.kernel, (count, num_pools), args)
            self._launches[count] = Recording([launch]).compile(device)
        device.run(self._launches[count])

    def close(self) -> None:
        """Free the pinned memory; idempotent."""
        self._launches.clear()
        pinned, self._pinned = self._pinned, None
        if pinned is not None:
            self._device.destroy_event(self._event)
            pinned.close()
