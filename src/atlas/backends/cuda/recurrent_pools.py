"""The pools of recurrent state in device memory, by slot."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from atlas.backends.cuda.array import DeviceArray
from atlas.backends.cuda.buffers import read_array
from atlas.backends.cuda.launch import KernelLaunch, Recording
from atlas.backends.cuda.memory import Arena, aligned
from atlas.cache.recurrent import SlotCounts, recurrent_shapes
from atlas.errors import InvalidArgumentError

if TYPE_CHECKING:
    from atlas.backends.cuda.device import CudaDevice
    from atlas.config import ModelConfig

Array = NDArray[Any]
_BLOCKS = 32  # thread blocks that share a slot of one pool
_NOTHING = -1  # what a zeroed slot is copied from
_ROW_ELEMENTS = 8  # kept inputs are read and written by vectors of 16 bytes


def recurrent_pool_bytes(config: ModelConfig, counts: SlotCounts) -> int:
    """Bytes of all arrays."""
    shapes = recurrent_shapes(config, counts)
    total = sum(aligned(4 * prod(s)) for name in ("states", "tails") for s in shapes[name])
    total += aligned(2 * 2 * 8 * len(shapes["states"]))  # the table of pools
    return total + sum(aligned(2 * rows * _padded(size)) for rows, size in shapes["kept_inputs"])


class CudaRecurrentPools:
    """What ``cache.recurrent.RecurrentPools`` offers, in one arena; a copy is one launch.

    States and tails are float32, kept inputs bfloat16, as the activations they repeat. Copies run
    on the device's stream: they follow the steps launched before, and precede those launched after.
    The host sees a slot as float32 arrays.
    """

    kernel = "copy_slot"

    def __init__(self, device: CudaDevice, config: ModelConfig, counts: SlotCounts) -> None:
        if counts.running < 1:
            raise InvalidArgumentError(f"{counts.running} recurrent slots; allowed: 1 or more")
        self._device = device
        self._arena = Arena(device, recurrent_pool_bytes(config, counts), "recurrent states")
        self.counts = counts
        shapes = recurrent_shapes(config, counts)
        take = self._arena.take
        self.states = tuple(take(shape, "float32", zero=True) for shape in shapes["states"])
        self.tails = tuple(take(shape, "float32", zero=True) for shape in shapes["tails"])
        self.kept_inputs = tuple(
            take((rows, _padded(size)), "bfloat16", zero=True)[:, :size]
            for rows, size in shapes["kept_inputs"]
        )
        table = np.array([(pool.address, pool[0].nbytes) for pool in self._pools()], np.int64)
        self._table = take(table.shape, "int64")
        device.copy_in(self._table.address, table.ctypes.data, table.nbytes)
        device.synchronize()  # the array may go when this returns

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot over all layers."""
        return sum(pool[0].nbytes for pool in self._pools())

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return self._arena.nbytes

    def copy(self, source: int, target: int) -> None:
        """Make slot ``target`` equal to ``source``, all layers."""
        self._launch(source, target)

    def zero(self, slot: int) -> None:
        """The state of a sequence that has absorbed nothing."""
        self._launch(_NOTHING, slot)

    def read(self, slot: int) -> list[Array]:
        """Copies of a slot in host memory, layer by layer, state then tail; waits."""
        self._device.enter()
        return [read_array(self._device, pool[slot]) for pool in self._pools()]

    def write(self, slot: int, parts: list[Array]) -> None:
        """What :meth:`read` gave, into another slot; waits."""
        self._device.enter()
        held = [np.ascontiguousarray(part, np.float32) for part in parts]
        for pool, part in zip(self._pools(), held, strict=True):
            self._device.copy_in(pool[slot].address, part.ctypes.data, part.nbytes)
        self._device.synchronize()  # the arrays may go when the caller returns

    def part_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of what :meth:`read` gives."""
        return tuple(pool.shape[1:] for pool in self._pools())

    def close(self) -> None:
        """Free the pools; idempotent."""
        self._arena.close()

    def _launch(self, source: int, target: int) -> None:
        self._device.enter()
        grid = (len(self._table), _BLOCKS)
        launch = KernelLaunch(self.kernel, grid, (self._table, source, target))
        self._device.run(Recording([launch]).compile(self._device))

    def _pools(self) -> list[DeviceArray]:
        """Layer by layer, state then tail."""
        return [pool for layer in zip(self.states, self.tails, strict=True) for pool in layer]


def _padded(columns: int) -> int:
    return -(-columns // _ROW_ELEMENTS) * _ROW_ELEMENTS
