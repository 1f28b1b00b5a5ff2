"""Small copies between pinned memory and the device, by a kernel instead of the copy engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atlas.backends.cuda.launch import KernelLaunch, Recording

if TYPE_CHECKING:
    from atlas._native.cuda_launch import CudaLaunchList
    from atlas.backends.cuda.device import CudaDevice

MOST_BYTES = 64 << 10
"""Takes a kernel some 2 µs of latency and, with all of it in flight over PCIe, 2 of transfer: not
more than the copy engine waits for kernels, and they for it."""
_WORDS = 128  # that a thread block copies


class SmallCopies:
    """Copies of int32 words on the device's stream, either side pinned memory or the device's.

    One recorded launch, whose arguments change: a launch copies them.
    """

    kernel = "copy_words"

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._launches: CudaLaunchList | None = None  # until something is copied

    def copy_in(self, target: int, source: int, nbytes: int) -> None:
        """As ``CudaDevice.copy_in``: pinned memory to the device; a multiple of 4 bytes."""
        if nbytes > MOST_BYTES:
            self._device.copy_in(target, source, nbytes)
        else:
            self._put(target, source, nbytes)

    def copy_out(self, target: int, source: int, nbytes: int) -> None:
        """As ``CudaDevice.copy_out``: to pinned memory; a multiple of 4 bytes."""
        if nbytes > MOST_BYTES:
            self._device.copy_out(target, source, nbytes)
        else:
            self._put(target, source, nbytes)

    def _put(self, target: int, source: int, nbytes: int) -> None:
        if self._launches is None:
            recording = Recording([KernelLaunch(self.kernel, (1, 1), (0, 0, 0))])
            self._launches = recording.compile(self._device)
        count = nbytes // 4
        self._launches.patch(0, -(-count // _WORDS), (source, target, count))
        self._device.run(self._launches)
