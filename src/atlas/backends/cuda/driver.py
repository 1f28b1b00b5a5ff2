"""The CUDA driver API, every call checked: a status that is not success becomes a typed error."""

from __future__ import annotations

import ctypes
from typing import Any

from atlas.errors import AtlasError, CapabilityError, KernelError, OutOfMemoryError

OLDEST_DRIVER = 12080
"""CUDA 12.8: the first whose dependent launches can be captured as this backend makes them."""
_OUT_OF_MEMORY = 2
_LAUNCH_CONFIG_ABI = 12000  # the version of cuLaunchKernelEx that _native/cuda_launch.pyx knows
# After these, every call in the context fails: memory faults, traps, hangs, lost devices.
_FATAL = frozenset({46, 214, 219, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 999})


class Driver:
    """The driver of this process.

    Raises
    ------
    CapabilityError
        The extra ``cuda`` is not installed, there is no driver, or it is too old; why, in words.

    Attributes
    ----------
    api : module
        ``cuda.bindings.driver``.
    version : int
        12080 for CUDA 12.8.
    launch_address : int
        Of ``cuLaunchKernelEx``.
    failure : AtlasError, optional
        The error after which nothing more can run on the device in this process.
    """

    def __init__(self) -> None:
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CapabilityError(f"no NVIDIA driver: {error}") from None
        try:
            from cuda.bindings import driver as api
        except ImportError as error:
            raise CapabilityError(
                f"Python's CUDA libraries are missing ({error}): pip install 'atlas-llm[cuda]'"
            ) from error
        self.api = api
        self.failure: AtlasError | None = None
        (status,) = api.cuInit(0)
        if int(status):
            raise CapabilityError(f"the NVIDIA driver does not start: {self.words(int(status))}")
        self.version = int(self(api.cuDriverGetVersion()))
        if self.version < OLDEST_DRIVER:
            raise CapabilityError(
                f"the NVIDIA driver supports CUDA {dotted(self.version)}; "
                f"allowed: {dotted(OLDEST_DRIVER)} and newer"
            )
        pointer, _ = self(api.cuGetProcAddress(b"cuLaunchKernelEx", _LAUNCH_CONFIG_ABI, 0))
        self.launch_address = int(pointer)

    def __call__(self, result: tuple[Any, ...], doing: str = "") -> Any:
        """The values of a call of ``api``; its status, when it is an error, is raised."""
        status = int(result[0])
        if status:
            raise self.error(status, doing)
        values = result[1:]
        return values[0] if len(values) == 1 else values

    def error(self, status: int, doing: str = "") -> AtlasError:
        """The error for a status (a negative one is cuBLASLt's); fatal ones are remembered."""
        what = f"{doing}: " if doing else ""
        if status < 0:
            return KernelError(f"{what}cuBLASLt status {-status}")
        if status == _OUT_OF_MEMORY:
            return OutOfMemoryError(f"{what}out of GPU memory")
        error = KernelError(f"{what}{self.words(status)}")
        if status in _FATAL and self.failure is None:
            self.failure = KernelError(
                f"the GPU failed earlier ({error}); nothing can run on it in this process any more"
            )
        return error

    def words(self, status: int) -> str:
        """A status as the driver names it."""
        try:
            known = self.api.CUresult(status)
        except ValueError:
            return f"CUDA status {status}"
        text = self.api.cuGetErrorString(known)
        reason = text[1].decode() if int(text[0]) == 0 and text[1] else ""
        return f"{known.name} ({reason})" if reason else str(known.name)


def dotted(version: int) -> str:
    """12080 as 12.8."""
    return f"{version // 1000}.{version % 1000 // 10}"
