"""Device memory in arenas sized at load, and pinned host memory."""

from __future__ import annotations

import ctypes
from math import prod
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from atlas.backends.cuda.array import ITEM_BYTES, DeviceArray
from atlas.errors import OutOfMemoryError

if TYPE_CHECKING:
    from atlas.backends.cuda.device import CudaDevice

ALIGNMENT = 256
"""Every array starts at a multiple of this."""
Bytes = NDArray[np.uint8]


def aligned(nbytes: int) -> int:
    """Bytes that an array takes of an arena."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Arena:
    """One allocation of device memory, given out front to back and freed as a whole.

    Parameters
    ----------
    device : CudaDevice
    nbytes : int
    what : str
        For the error when it is exhausted.
    """

    def __init__(self, device: CudaDevice, nbytes: int, what: str) -> None:
        self.nbytes = nbytes
        self.used = 0
        self.address = device.allocate(nbytes, what) if nbytes else 0
        self._device = device
        self._what = what

    def take(self, shape: tuple[int, ...], dtype: str, *, zero: bool = False) -> DeviceArray:
        """An array of it; its contents are undefined unless ``zero``."""
        nbytes = prod(shape) * ITEM_BYTES[dtype]
        if self.used + aligned(nbytes) > self.nbytes:
            raise OutOfMemoryError(
                f"{self._what} were planned with {self.nbytes} bytes; {self.used} are taken, and "
                f"{list(shape)} of {dtype} need {nbytes}"
            )
        array = DeviceArray(self.address + self.used, shape, dtype, owner=self)
        self.used += aligned(nbytes)
        if zero and nbytes:
            self._device.fill(array.address, nbytes)
        return array

    def close(self) -> None:
        """Free it; idempotent."""
        if self.address:
            self._device.free(self.address)
            self.address = 0


class Workspace:
    """Memory that launches share: scratch, and counters that are zero between launches."""

    def __init__(self, device: CudaDevice, scratch_bytes: int, zeroed_bytes: int) -> None:
        self._arena = Arena(device, aligned(scratch_bytes) + aligned(zeroed_bytes), "workspaces")
        self._scratch = self._arena.take((scratch_bytes,), "uint8")
        self._zeroed = self._arena.take((zeroed_bytes,), "uint8", zero=True)

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self._arena.nbytes

    def address(self, nbytes: int, *, zeroed: bool) -> int:
        """Address of ``nbytes`` bytes; OutOfMemoryError beyond what was planned."""
        region = self._zeroed if zeroed else self._scratch
        if nbytes > region.nbytes:
            raise OutOfMemoryError(
                f"an op needs {nbytes} bytes of {'zeroed ' if zeroed else ''}workspace; "
                f"planned were {region.nbytes}"
            )
        return region.address

    def close(self) -> None:
        """Free it; idempotent."""
        self._arena.close()


class PinnedMemory:
    """Page-locked host memory: what the device copies from and to while the host goes on.

    Attributes
    ----------
    array : uint8 [nbytes]
    address : int
    """

    def __init__(self, device: CudaDevice, nbytes: int) -> None:
        self._device = device
        self.address = device.allocate_pinned(nbytes)
        self.array: Bytes = np.ctypeslib.as_array(
            (ctypes.c_uint8 * nbytes).from_address(self.address)
        )

    def close(self) -> None:
        """Free it; arrays over it are invalid from now on. Idempotent."""
        if self.address:
            self.array = np.empty(0, np.uint8)
            self._device.free_pinned(self.address)
            self.address = 0
