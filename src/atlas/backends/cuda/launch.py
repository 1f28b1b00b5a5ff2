"""Queues: where ops put their launches, and the lists that a step replays.

An op gets a queue first and says *what* is launched: a kernel's name, a grid, arguments. A
recording queue keeps that in a :class:`Recording`; ``Recording.compile`` loads the kernels, all
missing ones at once, and builds the list that runs without Python for each launch. An eager queue
does the same for a single launch, and runs it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from atlas._native.cuda_launch import CudaLaunchList
from atlas.backends.cuda.array import DeviceArray
from atlas.errors import KernelError, ShapeError

if TYPE_CHECKING:
    from atlas.backends.cuda.device import CudaDevice
    from atlas.backends.cuda.memory import Workspace

Grid = tuple[int, int] | tuple[int, int, int]
Argument = int | float | DeviceArray


@dataclass(frozen=True, slots=True, eq=False)
class KernelLaunch:
    """A kernel by name; ``args`` in the kinds that its declaration names."""

    kernel: str
    grid: Grid
    args: tuple[Argument, ...]


@dataclass(frozen=True, slots=True, eq=False)
class MatmulLaunch:
    """A call of ``cublasLtMatmul``: its address and its arguments without the stream."""

    function: int
    args: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class HostCall:
    """A Python function that puts work of its own on the stream it is called with."""

    function: Callable[[int], None]


Launch = KernelLaunch | MatmulLaunch | HostCall
_LONG, _HALF = 4, 50
_LARGE_SM, _SMALL_SM = (9, 0), (12, 0)  # from and below


def has_large_sms(capability: tuple[int, int]) -> bool:
    """Whether an SM has 228 KB of shared memory, of which a thread block may have 227."""
    return _LARGE_SM <= capability < _SMALL_SM


def carveout(
    dynamic_shared_bytes: int, num_blocks: int, num_sms: int, capability: tuple[int, int]
) -> int:
    """Per cent of L1 and shared memory that are shared memory; −1: what all kernels prefer.

    They prefer as much as there is, which leaves 28 KB of L1. All loads into registers pass through
    it: too little for a kernel that has many on their way, as those without dynamic shared memory
    may have. But with a share of its own, none of its thread blocks starts beside the kernel
    before, so it is for those that take long: of more than four blocks for each SM. And half must
    be enough for as many thread blocks, which on smaller SMs it is not.
    """
    is_long = dynamic_shared_bytes == 0 and num_blocks > _LONG * num_sms
    return _HALF if is_long and has_large_sms(capability) else -1


@dataclass(eq=False)
class Recording:
    """What one step launches, in order; ``keep`` owns the memory behind the addresses."""

    launches: list[Launch] = field(default_factory=list)
    keep: list[object] = field(default_factory=list)

    def compile(self, device: CudaDevice) -> CudaLaunchList:
        """Load the kernels and build the list that replays these launches."""
        names = {item.kernel for item in self.launches if isinstance(item, KernelLaunch)}
        device.kernels.load(sorted(names))
        place = device.num_sms, device.capability
        compiled = CudaLaunchList(device.driver.launch_address)
        for item in self.launches:
            if isinstance(item, KernelLaunch):
                kernel = device.kernels[item.kernel]
                info = kernel.info
                compiled.append_kernel(
                    item.kernel,
                    kernel.function,
                    (*item.grid, 1)[:3],
                    info.threads,
                    info.dynamic_shared_bytes,
                    info.cluster,
                    device.has_dependent_launch,
                    carveout(info.dynamic_shared_bytes, math.prod(item.grid), *place),
                    packed_arguments(item.kernel, info.arguments, item.args),
                )
            elif isinstance(item, MatmulLaunch):
                compiled.append_matmul(item.function, item.args)
            else:
                compiled.append_call(item.function)
        compiled.keep.extend(self.keep)
        return compiled


class Queue:
    """Where ops launch kernels: records each launch, or (eager) runs it at once.

    Parameters
    ----------
    device : CudaDevice
        ``arch`` ("sm_90a"), ``capability`` ((9, 0)), ``num_sms``: what a grid may depend on.
    workspace : Workspace
        Memory that launches share.
    recording : Recording, optional
        None for an eager queue.

    Attributes
    ----------
    reading : int
        Bytes of weights that the last launch reads, if it is a step product, else 0: how long it
        takes is what the next kernel may do ahead of its turn.
    """

    def __init__(
        self, device: CudaDevice, workspace: Workspace, recording: Recording | None = None
    ) -> None:
        self.device = device
        self.workspace = workspace
        self.recording = recording
        self.reading = 0

    def launch(
        self, kernel: str, grid: Grid, args: tuple[Argument, ...], keep: object = None
    ) -> None:
        """Launch a kernel of ``atlas_kernels``, or one registered under a name of its own.

        Parameters
        ----------
        kernel : str
            As in ``atlas_kernels.registry.KERNELS``.
        grid : (x, y) or (x, y, z)
            Thread blocks; threads, shared memory and cluster are the kernel's own. An axis of 0
            launches nothing.
        args : tuple
            In the order of the declaration. A ``DeviceArray`` stands for its address; ``ptr``,
            ``i32`` and ``i64`` take integers, ``f32`` numbers. Python's values are read now:
            whatever changes from step to step must lie in device memory.
        keep : object
            Owns memory behind the addresses, where no array among ``args`` does.
        """
        if 0 not in grid:
            self._put(KernelLaunch(kernel, grid, args), (args, keep))

    def matmul(self, function: int, args: tuple[int, ...], keep: object = None) -> None:
        """Call ``cublasLtMatmul``.

        Parameters
        ----------
        function : int
            The function's address in the library that made the handle.
        args : tuple of 15 int
            Handle, operation, address of alpha, A, its layout, B, its layout, address of beta, C,
            its layout, D, its layout, address of the algorithm, workspace, bytes of the workspace.
            Host addresses (alpha, beta, the algorithm) are read at every replay.
        keep : object
            Owns the descriptors and the host memory.
        """
        self._put(MatmulLaunch(function, args), (args, keep))

    def call(self, function: Callable[[int], None], keep: object = None) -> None:
        """Call a Python function with the stream's handle at every replay: a user's own op.

        It must put all its device work on that stream and wait for nothing.
        """
        self._put(HostCall(function), keep)

    def scratch(self, nbytes: int, *, zeroed: bool = False) -> int:
        """Address (a multiple of 256) of memory for results between an op's own launches.

        All ops share it: its contents last until the op's last launch, and an op asks once, or
        once for each kind. ``zeroed`` memory (counters) is zero when a launch finds it, and the
        launch that used it leaves it zero.

        Raises
        ------
        OutOfMemoryError
            More than was planned at load.
        """
        return self.workspace.address(nbytes, zeroed=zeroed)

    def tensor_map(
        self,
        array: DeviceArray,
        box: tuple[int, ...],
        shape: tuple[int, ...] | None = None,
        strides: tuple[int, ...] | None = None,
    ) -> int:
        """Device address of a TMA tensor map with a swizzle; out of bounds reads 0.

        Parameters
        ----------
        array : bfloat16 or float16
            The innermost axis is contiguous.
        box : tuple of int
            Elements of a box, outermost axis first; 64 in the innermost for the 128-byte swizzle,
            32 for the 64-byte one.
        shape, strides : tuple of int, optional
            Another description of the same memory (``strides`` in bytes, without the innermost).
        """
        return self.device.tensor_maps.address(array, box, shape, strides)

    def _put(self, launch: Launch, keep: object) -> None:
        self.reading = 0
        if self.recording is not None:
            self.recording.launches.append(launch)
            self.recording.keep.append(keep)
            return
        self.device.enter()  # the first call of a thread may be this one
        self.device.run(Recording([launch], [keep]).compile(self.device))


def packed_arguments(
    kernel: str, declared: tuple[tuple[str, str], ...], args: tuple[Argument, ...]
) -> tuple[int, ...]:
    """Arguments as the 64-bit words that the driver reads them from.

    Raises
    ------
    ShapeError
        Their number is not the declaration's.
    KernelError
        One does not fit its kind.
    """
    if len(args) != len(declared):
        raise ShapeError(f"kernel {kernel} takes {len(declared)} arguments, got {len(args)}")
    return tuple(
        _word(kernel, name, kind, value) for (name, kind), value in zip(declared, args, strict=True)
    )


def _word(kernel: str, name: str, kind: str, value: Any) -> int:
    if isinstance(value, DeviceArray):
        value = value.address
    if kind == "f32":
        return int(struct.unpack("<I", struct.pack("<f", value))[0])
    number = int(value)
    limit = 1 << 31 if kind == "i32" else 1 << 63
    if number != value or not -limit <= number < limit:
        raise KernelError(f"kernel {kernel}: {name} is {value!r}; allowed: an {kind}")
    return number
