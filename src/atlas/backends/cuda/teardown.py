"""What a runtime holds on a device, and the order in which it is given back."""

from __future__ import annotations

import os
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from atlas.backends.cuda.graph import CapturedGraph

if TYPE_CHECKING:
    from atlas._native.cuda_launch import CudaLaunchList
    from atlas.backends.cuda.device import CudaDevice


class _Closable(Protocol):
    def close(self) -> None: ...


@dataclass(eq=False)
class RecordedStep:
    """The launches of one shape, and their graph where they run as one."""

    launches: CudaLaunchList
    graph: CapturedGraph | None = None

    def close(self) -> None:
        """Release the graph; idempotent."""
        if self.graph is not None:
            self.graph.close()


class OwnStream:
    """A stream beside the device's own."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self.handle = device.create_stream()

    def close(self) -> None:
        """End it."""
        self._device.destroy_stream(self.handle)


class Teardown:
    """Gives everything back: once, in its own process, in order, whatever state the device is in.

    Attributes
    ----------
    recorded : OrderedDict
        Steps, closed first: their graphs hold the addresses of all else.
    parts : list
        Closed newest first, before the device itself.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._pid = os.getpid()
        self.recorded: OrderedDict[tuple[object, object], RecordedStep] = OrderedDict()
        self.parts: list[_Closable] = []
        self._done = False

    def close(self) -> None:
        """Wait for the work under way and give everything back; idempotent.

        In a forked child nothing happens: what is held is the parent's.
        """
        if self._done or os.getpid() != self._pid:
            return
        self._done = True
        device = self._device
        if device.driver.failure is None:
            device.enter()
            device.driver.api.cuStreamSynchronize(device.stream)  # a fault here is reported no more
        while self.recorded:
            _, step = self.recorded.popitem()
            step.close()
        while self.parts:
            self.parts.pop().close()
        device.close()
