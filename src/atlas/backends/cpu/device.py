"""The CPU as a device: threads, compiled bodies, scratch memory, and queues of launches."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atlas import pages
from atlas._native.pool import LaunchList, WorkerPool
from atlas.backends.cpu.compiler import BodyCompiler

Array = NDArray[Any]
Args = tuple[int, ...]


class CpuDevice:
    """Worker threads and what their launches share.

    Parameters
    ----------
    threads : int
        Results do not depend on it.
    on_compile : callable, optional
        Called with a body's name before it is compiled.
    """

    def __init__(self, threads: int, on_compile: Callable[[str], None] | None = None) -> None:
        self.pool = WorkerPool(threads)
        self.compiler = BodyCompiler(on_compile)
        self.threads = threads
        self._scratch = np.empty(0, np.uint8)

    def scratch(self, nbytes: int) -> Array:
        """At least ``nbytes`` at a multiple of 64, shared by all launches, grown on demand.

        Launches run one after another, so one buffer serves them all; a launch list that was
        recorded with an older, smaller buffer keeps that one.
        """
        if self._scratch.nbytes < nbytes:
            raw = pages.zeros(nbytes + 64, np.uint8)
            start = -raw.ctypes.data % 64
            self._scratch = raw[start : start + nbytes]
        return self._scratch

    def close(self) -> None:
        """End the threads and let go of the scratch; idempotent."""
        self.pool.close()
        self._scratch = np.empty(0, np.uint8)


class Queue:
    """Where ops launch bodies: runs each at once, or records them into a list.

    ``launches`` is None for an eager queue.
    """

    def __init__(self, device: CpuDevice, launches: LaunchList | None = None) -> None:
        self.device = device
        self.launches = launches

    def launch(self, name: str, args: Args, keep: object) -> None:
        """Run or record the body ``name``; ``keep`` owns the memory behind the addresses."""
        entry = self.device.compiler.address(name)
        if self.launches is not None:
            self.launches.append(name, entry, args, keep)
            return
        once = LaunchList()
        once.append(name, entry, args, keep)
        self.device.pool.run(once)


def address(array: Array) -> int:
    """Address of an array's first element."""
    return int(array.__array_interface__["data"][0])


def float_bits(value: float) -> int:
    """The bits of a float32, as bodies receive it."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])
