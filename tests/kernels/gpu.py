"""The first GPU: memory, launches and timing for tests and ``tools/gpu_smoke.py``."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

from atlas.backends.cuda.launch import carveout

Array = np.ndarray[Any, Any]
_TYPES = {
    "ptr": ctypes.c_int64,
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "f32": ctypes.c_float,
}


class Gpu:
    """Device memory and kernels on a stream of its own; ``put`` and ``get`` as in ``Memory``."""

    def __init__(self) -> None:
        from cuda.bindings import driver
        from cuda.core import Device

        self.driver = driver
        self.device = Device()
        self.device.set_current()
        self.stream = self.device.create_stream()
        self.kernels: dict[str, tuple[Any, Any, Any]] = {}
        self.allocations: list[int] = []

    @cached_property
    def arch(self) -> str:
        """What kernels are compiled for, such as ``sm_90a``."""
        from atlas_kernels.registry import Architecture

        return str(Architecture.of_device(*self.device.compute_capability))

    def add(self, kernel: Any) -> None:
        """Load a ``CompiledKernel``."""
        driver, info = self.driver, kernel.info
        module = self._check(driver.cuModuleLoadData(kernel.cubin))
        function = self._check(driver.cuModuleGetFunction(module, info.entry.encode()))
        attribute = driver.CUfunction_attribute
        limit = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._check(driver.cuFuncSetAttribute(function, limit, info.dynamic_shared_bytes))
        share = attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        self._check(driver.cuFuncSetAttribute(function, share, 100))  # as the backend
        self.kernels[info.name] = (info, module, function)

    def reserve(self, num_bytes: int) -> int:
        """Address of new memory, a multiple of 256."""
        address = int(self._check(self.driver.cuMemAlloc(max(num_bytes, 256))))
        self.allocations.append(address)
        return address

    def put(self, values: Array, shift: int = 0) -> int:
        """Copy an array in."""
        values = np.ascontiguousarray(values)
        address = self.reserve(values.nbytes + shift) + shift
        self._check(self.driver.cuMemcpyHtoD(address, values.ctypes.data, values.nbytes))
        self._check(self.driver.cuCtxSynchronize())  # our stream does not wait for the copy
        return address

    def get(self, address: int, like: Array) -> Array:
        """A copy of what lies at an address, once all launches are done."""
        self.stream.sync()
        out = np.empty_like(like, order="C")
        self._check(self.driver.cuMemcpyDtoH(out.ctypes.data, address, out.nbytes))
        return out

    def free(self) -> None:
        """Give all memory back."""
        self.stream.sync()
        while self.allocations:
            self._check(self.driver.cuMemFree(self.allocations.pop()))

    def run(self, name: str, grid: tuple[int, int], args: list[Any]) -> None:
        """Launch a kernel, with dependent launch where the device has it."""
        driver = self.driver
        info, _, function = self.kernels[name]
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = *grid, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = info.threads, 1, 1
        config.sharedMemBytes, config.hStream = info.dynamic_shared_bytes, self.stream.handle
        place = self.device.properties.multiprocessor_count, self.device.compute_capability
        share = carveout(info.dynamic_shared_bytes, math.prod(grid), *place)
        config.attrs = self._attributes(info.cluster, share)
        config.numAttrs = len(config.attrs)
        values = tuple(v.item() if isinstance(v, np.generic) else v for v in args)
        types = tuple(_TYPES[kind] for _, kind in info.arguments)
        self._check(driver.cuLaunchKernelEx(config, function, (values, types), 0))

    def _attributes(self, cluster: int, share: int) -> list[Any]:
        identifiers, found = self.driver.CUlaunchAttributeID, []
        if self.device.compute_capability >= (9, 0):
            dependent = self.driver.CUlaunchAttribute()
            dependent.id = identifiers.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            dependent.value.programmaticStreamSerializationAllowed = 1
            found.append(dependent)
        if cluster > 1:
            together = self.driver.CUlaunchAttribute()
            together.id = identifiers.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            size = together.value.clusterDim
            size.x, size.y, size.z = cluster, 1, 1
            found.append(together)
        if share >= 0:
            shared = self.driver.CUlaunchAttribute()
            shared.id = identifiers.CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
            shared.value.sharedMemCarveout = share
            found.append(shared)
        return found

    def tensor_map(
        self,
        address: int,
        shape: tuple[int, ...],
        box: tuple[int, ...],
        strides: tuple[int, ...] | None = None,
    ) -> bytes:
        """The tensor map of a bf16 array, as its 128 bytes; the swizzle is as wide as the box.

        ``shape`` and ``box`` from the outermost dimension to the innermost; ``strides`` in bytes,
        without the innermost's, those of a contiguous array if absent.
        """
        driver = self.driver
        if strides is None:
            strides = tuple(2 * math.prod(shape[i:]) for i in range(1, len(shape)))
        encoded = self._check(
            driver.cuTensorMapEncodeTiled(
                driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                len(shape),
                address,
                [driver.cuuint64_t(size) for size in shape[::-1]],
                [driver.cuuint64_t(stride) for stride in strides[::-1]],
                [driver.cuuint32_t(size) for size in box[::-1]],
                [driver.cuuint32_t(1)] * len(shape),
                driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
                getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{2 * box[-1]}B"),
                driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        )
        return ctypes.string_at(int(encoded.getPtr()), 128)

    def microseconds(self, work: Callable[[], None], count: int = 20, repeats: int = 7) -> float:
        """Median time of ``work``, a graph of ``count`` of it replayed ``repeats`` times."""
        timer = self.timer(work, count)
        return float(np.median([timer() for _ in range(repeats + 1)][1:]))  # the first warms up

    def timer(self, work: Callable[[], None], count: int) -> Callable[[], float]:
        """A graph of ``count`` of ``work``; a call replays it and gives microseconds of one."""
        driver, stream = self.driver, self.stream.handle
        work()
        self.stream.sync()
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._check(driver.cuStreamBeginCapture(stream, mode))
        for _ in range(count):
            work()
        graph = self._check(driver.cuStreamEndCapture(stream))
        executable = self._check(driver.cuGraphInstantiate(graph, 0))
        self._check(driver.cuGraphDestroy(graph))
        start, end = (self._check(driver.cuEventCreate(0)) for _ in range(2))

        def once() -> float:
            self._check(driver.cuEventRecord(start, stream))
            self._check(driver.cuGraphLaunch(executable, stream))
            self._check(driver.cuEventRecord(end, stream))
            self.stream.sync()
            return float(self._check(driver.cuEventElapsedTime(start, end)) * 1e3 / count)

        weakref.finalize(once, driver.cuGraphExecDestroy, executable)
        return once

    @staticmethod
    def _check(result: tuple[Any, ...]) -> Any:
        if int(result[0]) != 0:
            raise RuntimeError(f"CUDA: {result[0]!r}")
        return result[1] if len(result) > 1 else None
