"""One GPU: its context, its stream, its memory and its kernels."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from atlas.backends.cuda.array import DeviceArray, contiguous_strides
from atlas.backends.cuda.driver import Driver, dotted
from atlas.backends.cuda.module import KernelTable
from atlas.errors import CapabilityError, InvalidArgumentError, OutOfMemoryError, ShapeError

if TYPE_CHECKING:
    from atlas._native.cuda_launch import CudaLaunchList

_OLDEST = (8, 0)
_MAP_BYTES = 128
_SLAB_MAPS = 4096  # tensor maps allocated at a time
_SWIZZLES = {64: "CU_TENSOR_MAP_SWIZZLE_128B", 32: "CU_TENSOR_MAP_SWIZZLE_64B"}
"""By elements of a box's row."""
_log = logging.getLogger("atlas")


class CudaDevice:
    """A GPU that this process uses, with the stream on which steps run.

    Parameters
    ----------
    driver : Driver, optional
    ordinal : int
        Among the devices that ``CUDA_VISIBLE_DEVICES`` leaves.
    stream : object, optional
        A stream of another library to run on (its handle as an int, or an object with
        ``__cuda_stream__``); it must outlive this object. None: a new one.
    on_compile : callable, optional
        Called with the name of a kernel before it is compiled.

    Attributes
    ----------
    name, arch : str
        "NVIDIA H200", "sm_90a".
    capability : (int, int)
    num_sms : int
    kernels : KernelTable
    tensor_maps : TensorMaps
    products : object, optional
        cuBLASLt for products of many rows, where it was found to give the step kernel's bits.

    Raises
    ------
    CapabilityError
        No usable GPU: none, too old, no driver, libraries missing.
    """

    def __init__(
        self,
        driver: Driver | None = None,
        *,
        ordinal: int = 0,
        stream: object = None,
        on_compile: Callable[[str], None] | None = None,
    ) -> None:
        self.driver = driver = Driver() if driver is None else driver
        api = driver.api
        self._device = usable_device(driver, ordinal)
        self.ordinal = ordinal
        self.name = _text(driver(api.cuDeviceGetName(256, self._device)))
        self.capability = capability(driver, self._device)
        self.num_sms = int(
            driver(
                api.cuDeviceGetAttribute(
                    api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, self._device
                )
            )
        )
        self.context = driver(api.cuDevicePrimaryCtxRetain(self._device))
        self.pid = os.getpid()
        self.enter()
        self._owns_stream = stream is None
        self._foreign = stream
        self.stream = self.create_stream() if stream is None else foreign_stream(stream)
        self.kernels = KernelTable(self, on_compile)
        self.tensor_maps = TensorMaps(self)
        self.products: Any = None
        self._closed = False

    @property
    def arch(self) -> str:
        """What kernels are compiled for: Hopper's own instruction set on Hopper."""
        major, minor = self.capability
        return f"sm_{major}{minor}{'a' if self.capability == (9, 0) else ''}"

    @property
    def has_dependent_launch(self) -> bool:
        """Whether kernels may start before the one in front has ended."""
        return self.capability >= (9, 0)

    def enter(self) -> None:
        """Make the context the calling thread's; raises when the device failed earlier."""
        if self.driver.failure is not None:
            raise self.driver.failure
        self.driver(self.driver.api.cuCtxSetCurrent(self.context))

    # -- memory -------------------------------------------------------------------------------

    def memory_info(self) -> tuple[int, int]:
        """Bytes free now, and in all."""
        self.enter()
        free, total = self.driver(self.driver.api.cuMemGetInfo())
        return int(free), int(total)

    def allocate(self, nbytes: int, what: str) -> int:
        """Address of new memory; OutOfMemoryError says what for, and what is free."""
        try:
            return int(self.driver(self.driver.api.cuMemAlloc(nbytes), f"allocating {what}"))
        except OutOfMemoryError as error:
            free, total = self.memory_info()
            raise OutOfMemoryError(
                f"{what} need {nbytes / 2**20:.0f} MiB of GPU memory; {free / 2**20:.0f} of "
                f"{total / 2**20:.0f} MiB are free"
            ) from error

    def free(self, address: int) -> None:
        """Give memory back. A failed device frees it with its context."""
        if self.driver.failure is None:
            self.driver(self.driver.api.cuMemFree(address))

    def allocate_pinned(self, nbytes: int) -> int:
        """Address of page-locked host memory, the same for the host and for kernels."""
        return int(self.driver(self.driver.api.cuMemHostAlloc(nbytes, 0), "pinning host memory"))

    def free_pinned(self, address: int) -> None:
        """Give page-locked memory back."""
        if self.driver.failure is None:
            self.driver(self.driver.api.cuMemFreeHost(address))

    def fill(self, address: int, nbytes: int, value: int = 0) -> None:
        """Set bytes, on the stream."""
        self.driver(self.driver.api.cuMemsetD8Async(address, value, nbytes, self.stream))

    def copy_in(self, target: int, source: int, nbytes: int, stream: int | None = None) -> None:
        """Host to device, on a stream; pinned sources are read later, others before it returns."""
        stream = self.stream if stream is None else stream
        self.driver(self.driver.api.cuMemcpyHtoDAsync(target, source, nbytes, stream))

    def copy_out(self, target: int, source: int, nbytes: int) -> None:
        """Device to host, on the stream; pinned targets are written later."""
        self.driver(self.driver.api.cuMemcpyDtoHAsync(target, source, nbytes, self.stream))

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Device to device, on the stream."""
        self.driver(self.driver.api.cuMemcpyDtoDAsync(target, source, nbytes, self.stream))

    # -- work ---------------------------------------------------------------------------------

    def run(self, launches: CudaLaunchList, stream: int | None = None) -> None:
        """Put a list's launches on a stream (default: the device's); does not wait."""
        status, name = launches.run(self.stream if stream is None else stream)
        if status:
            raise self.driver.error(status, f"launching {name}")

    def create_stream(self) -> int:
        """Handle of a new stream, not ordered with the legacy default one."""
        flags = self.driver.api.CUstream_flags.CU_STREAM_NON_BLOCKING
        return int(self.driver(self.driver.api.cuStreamCreate(flags)))

    def destroy_stream(self, stream: int) -> None:
        """End a stream that ``create_stream`` made."""
        if self.driver.failure is None:
            self.driver(self.driver.api.cuStreamDestroy(stream))

    def synchronize(self, stream: int | None = None) -> None:
        """Wait for all work of a stream (default: the device's); faults of kernels appear here."""
        stream = self.stream if stream is None else stream
        self.driver(self.driver.api.cuStreamSynchronize(stream), "waiting for the GPU")

    def create_event(self) -> Any:
        """A new event without timing, done until it is recorded."""
        flags = self.driver.api.CUevent_flags.CU_EVENT_DISABLE_TIMING
        return self.driver(self.driver.api.cuEventCreate(flags))

    def destroy_event(self, event: Any) -> None:
        """End an event."""
        if self.driver.failure is None:
            self.driver(self.driver.api.cuEventDestroy(event))

    def record(self, event: Any, stream: int | None = None) -> None:
        """Let the event stand for the stream's work so far."""
        stream = self.stream if stream is None else stream
        self.driver(self.driver.api.cuEventRecord(event, stream))

    def wait(self, event: Any) -> None:
        """Block the calling thread until the event's work is done."""
        self.driver(self.driver.api.cuEventSynchronize(event), "waiting for the GPU")

    def order(self, stream: int, event: Any) -> None:
        """Hold later work of the stream until the event's is done."""
        self.driver(self.driver.api.cuStreamWaitEvent(stream, event, 0))

    def close(self) -> None:
        """Unload kernels, end the stream, release the context; idempotent."""
        if self._closed or os.getpid() != self.pid:
            return
        self._closed = True
        api = self.driver.api
        # After a failure every call reports that failure again: statuses say nothing here.
        api.cuCtxSetCurrent(self.context)
        if self.products is not None:
            self.products.close()
        self.kernels.close()
        self.tensor_maps.close()
        if self._owns_stream:
            api.cuStreamDestroy(self.stream)
        api.cuDevicePrimaryCtxRelease(self._device)


class TensorMaps:
    """TMA descriptors in device memory, one for each view and box; they live as long as the device.

    A recorded list holds their addresses, and a bucket's views are always the same.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._places: dict[tuple[object, ...], int] = {}
        self._stream = 0  # of its own: a copy here does not wait for the steps under way
        self._slabs: list[int] = []

    def address(
        self,
        array: DeviceArray,
        box: tuple[int, ...],
        shape: tuple[int, ...] | None,
        strides: tuple[int, ...] | None,
    ) -> int:
        """As ``Queue.tensor_map``."""
        if shape is None:
            shape, strides = array.shape, array.strides[:-1]
        elif strides is None:
            strides = contiguous_strides(shape, array.itemsize)[:-1]
        assert strides is not None
        if array.dtype not in ("bfloat16", "float16"):
            raise ShapeError(f"a tensor map of {array.dtype}; allowed: bfloat16, float16")
        if box[-1] not in _SWIZZLES:
            raise ShapeError(f"a box of {box[-1]} elements a row; allowed: 64, 32")
        if len(box) != len(shape) or len(strides) != len(shape) - 1:
            raise ShapeError(f"box {box} and strides {strides} for shape {shape}")
        key = (array.address, array.dtype, shape, strides, box)
        if key not in self._places:
            self._places[key] = self._place(self._encoded(array, box, shape, strides))
        return self._places[key]

    def _place(self, encoded: int) -> int:
        slot = len(self._places) % _SLAB_MAPS
        if slot == 0:
            nbytes = _SLAB_MAPS * _MAP_BYTES
            self._slabs.append(self._device.allocate(nbytes, "tensor maps"))
        if not self._stream:
            self._stream = self._device.create_stream()
        place = self._slabs[-1] + slot * _MAP_BYTES
        self._device.copy_in(place, encoded, _MAP_BYTES, self._stream)
        self._device.synchronize(self._stream)  # later launches find it, on whatever stream
        return place

    def _encoded(
        self,
        array: DeviceArray,
        box: tuple[int, ...],
        shape: tuple[int, ...],
        strides: tuple[int, ...],
    ) -> int:
        """Host address of the descriptor, valid while ``self._encoded_map`` is held."""
        driver = self._device.driver
        api = driver.api
        types = api.CUtensorMapDataType
        self._encoded_map = driver(
            api.cuTensorMapEncodeTiled(
                types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                if array.dtype == "bfloat16"
                else types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                len(shape),
                array.address,
                [api.cuuint64_t(size) for size in shape[::-1]],
                [api.cuuint64_t(stride) for stride in strides[::-1]],
                [api.cuuint32_t(size) for size in box[::-1]],
                [api.cuuint32_t(1)] * len(shape),
                api.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
                getattr(api.CUtensorMapSwizzle, _SWIZZLES[box[-1]]),
                api.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                api.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            ),
            f"tensor map of {array!r} in boxes {box}",
        )
        return int(self._encoded_map.getPtr())

    def close(self) -> None:
        """Free them; idempotent."""
        while self._slabs:
            self._device.free(self._slabs.pop())
        if self._stream:
            self._device.destroy_stream(self._stream)
            self._stream = 0
        self._places.clear()


def usable_device(driver: Driver, ordinal: int = 0) -> Any:
    """A device's handle; CapabilityError where it does not exist or is too old."""
    count = int(driver(driver.api.cuDeviceGetCount()))
    if ordinal >= count:
        raise CapabilityError(f"GPU {ordinal} does not exist; the driver shows {count}")
    device = driver(driver.api.cuDeviceGet(ordinal))
    found = capability(driver, device)
    if found < _OLDEST:
        has, needs = (".".join(map(str, pair)) for pair in (found, _OLDEST))
        name = _text(driver(driver.api.cuDeviceGetName(256, device)))
        raise CapabilityError(f"{name} has compute capability {has}; allowed: {needs} and newer")
    return device


def capability(driver: Driver, device: Any) -> tuple[int, int]:
    """Compute capability: (9, 0) for Hopper."""
    names = driver.api.CUdevice_attribute
    major = names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    minor = names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
    return (
        int(driver(driver.api.cuDeviceGetAttribute(major, device))),
        int(driver(driver.api.cuDeviceGetAttribute(minor, device))),
    )


def describe(driver: Driver) -> str:
    """The first GPU in words; no context is made. CapabilityError where it cannot be used."""
    device = usable_device(driver)
    name = _text(driver(driver.api.cuDeviceGetName(256, device)))
    total = int(driver(driver.api.cuDeviceTotalMem(device)))
    major, minor = capability(driver, device)
    return (
        f"{name}, {total / 2**30:.0f} GiB, compute capability {major}.{minor}, "
        f"driver for CUDA {dotted(driver.version)}"
    )


def foreign_stream(stream: object) -> int:
    """Handle of another library's stream.

    Raises
    ------
    InvalidArgumentError
        It is neither an int nor an object with ``__cuda_stream__`` (cuda-core, torch, cupy …).
    """
    if isinstance(stream, int) and not isinstance(stream, bool) and stream >= 0:
        return stream
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        version, handle = protocol() if callable(protocol) else protocol
        if version == 0:
            return int(handle)
    handle = getattr(stream, "cuda_stream", None)  # torch.cuda.Stream
    if isinstance(handle, int):
        return handle
    raise InvalidArgumentError(
        f"stream is {stream!r}; allowed: a handle, or an object with __cuda_stream__"
    )


def _text(name: Any) -> str:
    raw = name if isinstance(name, bytes) else bytes(name)
    return raw.split(b"\0")[0].decode()
