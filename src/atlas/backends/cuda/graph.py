"""A launch list captured as a CUDA graph: one call launches all of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atlas._native.cuda_launch import CudaLaunchList
    from atlas.backends.cuda.device import CudaDevice


class CapturedGraph:
    """What a list launches, replayed by the device itself.

    Kernels read slots, positions, lengths and block tables from device memory, so a graph holds
    nothing of the sequences that run in it.

    Parameters
    ----------
    device : CudaDevice
    launches : CudaLaunchList
        Is kept: it owns what the kernels' arguments point to.
    stream : int
        Captured on this stream, which nobody else uses meanwhile; a foreign stream may not allow
        it.
    """

    def __init__(self, device: CudaDevice, launches: CudaLaunchList, stream: int) -> None:
        self._device = device
        self._launches = launches
        driver, api = device.driver, device.driver.api
        mode = api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        driver(api.cuStreamBeginCapture(stream, mode), "capturing a graph")
        try:
            device.run(launches, stream)
        except BaseException:
            _, graph = api.cuStreamEndCapture(stream)
            if graph:
                api.cuGraphDestroy(graph)
            raise
        graph = driver(api.cuStreamEndCapture(stream), "capturing a graph")
        try:
            self._executable = driver(api.cuGraphInstantiate(graph, 0), "instantiating a graph")
        finally:
            driver(api.cuGraphDestroy(graph))
        driver(api.cuGraphUpload(self._executable, device.stream))

    def launch(self) -> None:
        """Put all of it on the device's stream; does not wait."""
        driver = self._device.driver
        driver(driver.api.cuGraphLaunch(self._executable, self._device.stream), "launching a graph")

    def close(self) -> None:
        """Release it; work under way ends first. Idempotent."""
        executable, self._executable = self._executable, None
        if executable is not None and self._device.driver.failure is None:
            driver = self._device.driver
            driver(driver.api.cuGraphExecDestroy(executable))
