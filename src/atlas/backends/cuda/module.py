"""Compiled kernels on a device, by name; what is missing is compiled, several at a time."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atlas.errors import KernelError

if TYPE_CHECKING:
    from atlas.backends.cuda.device import CudaDevice

_COMPILE = (
    "import sys\n"
    "from atlas_kernels.build import build_all\n"
    "build_all(sys.argv[1], sys.argv[2], names=sys.argv[3:])"
)
_MOST_SHARED = 100
"""Per cent of what L1 and shared memory divide among them."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadedKernel:
    """A kernel's record (``atlas_kernels.manifest.KernelInfo``) and its ``CUfunction``."""

    info: Any
    module: int
    function: int


class KernelTable:
    """The kernels loaded on one device.

    Parameters
    ----------
    device : CudaDevice
    on_compile : callable, optional
        Called with a kernel's name before it is compiled.

    Notes
    -----
    ``$ATLAS_CUDA_KERNELS`` names a folder that ``atlas kernels build`` wrote; what it lacks comes
    from the user's cache, or is compiled by processes of their own (whatever the main program is,
    importing it again would not be ours to do).
    """

    def __init__(self, device: CudaDevice, on_compile: Callable[[str], None] | None = None) -> None:
        self._device = device
        self.on_compile = on_compile
        self._loaded: dict[str, LoadedKernel] = {}
        self._ahead: dict[str, Any] | None = None

    def __getitem__(self, name: str) -> LoadedKernel:
        if name not in self._loaded:
            self.load([name])
        return self._loaded[name]

    def load(self, names: Sequence[str]) -> None:
        """Load what is not loaded yet.

        Raises
        ------
        KernelError
            A kernel is unknown, does not compile, or does not load.
        """
        from atlas_kernels.build import KernelBuildError

        wanted = [name for name in names if name not in self._loaded]
        if not wanted:
            return
        try:
            for name, compiled in self._compiled(wanted).items():
                self._loaded[name] = self._on_device(compiled)
        except (KernelBuildError, ImportError) as error:
            raise KernelError(f"CUDA kernels: {error}") from error

    def forget(self, names: Sequence[str]) -> None:
        """Unload kernels (their user declared them anew); lists with them must be gone."""
        driver = self._device.driver
        for name in names:
            kernel = self._loaded.pop(name, None)
            if kernel is not None:
                driver(driver.api.cuModuleUnload(kernel.module))

    @property
    def own(self) -> list[str]:
        """Loaded kernels that are not of this package."""
        from atlas_kernels.registry import KERNELS

        return [n for n in self._loaded if n in KERNELS and not KERNELS[n].is_builtin]

    def close(self) -> None:
        """Unload all; idempotent."""
        api = self._device.driver.api
        while self._loaded:
            _, kernel = self._loaded.popitem()
            api.cuModuleUnload(kernel.module)  # a status says only that the context is broken

    def _compiled(self, names: list[str]) -> dict[str, Any]:
        from atlas_kernels import build
        from atlas_kernels.registry import KERNELS

        arch = self._device.arch
        found = {}
        for name in names:
            own = name in KERNELS and not KERNELS[name].is_builtin
            compiled = None if own else self._ahead_of_time().get(name)
            if compiled is None and not own:
                compiled = build.read_entry(name, arch)
            if compiled is not None:
                found[name] = compiled
        missing = [name for name in names if name not in found]
        builtin = [n for n in missing if n not in KERNELS or KERNELS[n].is_builtin]
        jobs = min(len(builtin), len(os.sched_getaffinity(0)))
        if jobs > 1:
            found |= self._compile_beside(builtin, jobs)
        for name in missing:
            if name not in found:
                found[name] = build.load(name, arch, on_compile=self.on_compile)
        return found

    def _ahead_of_time(self) -> dict[str, Any]:
        """Kernels of the folder that the environment names; other architectures' are not used."""
        from atlas_kernels.build import read_folder

        if self._ahead is None:
            folder = os.environ.get("ATLAS_CUDA_KERNELS")
            kernels = read_folder(folder) if folder else {}
            arch = self._device.arch
            self._ahead = {name: k for name, k in kernels.items() if k.info.arch == arch}
        return self._ahead

    def _compile_beside(self, names: list[str], jobs: int) -> dict[str, Any]:
        """Compile in ``jobs`` processes; those that fail are left to the caller, who sees why."""
        from atlas_kernels.build import KernelBuildError, read_folder

        if self.on_compile is not None:
            self.on_compile(f"{len(names)} CUDA kernels")
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)}
        with tempfile.TemporaryDirectory(prefix="atlas-kernels-") as folder:
            running = []
            for job in range(jobs):
                place = Path(folder) / str(job)
                command = [sys.executable, "-c", _COMPILE, self._device.arch, str(place)]
                running.append(
                    (
                        place,
                        subprocess.Popen(
                            [*command, *names[job::jobs]],
                            env=environment,
                            stdin=subprocess.DEVNULL,
                            stdout=subprocess.DEVNULL,
                            stderr=subprocess.DEVNULL,
                        ),
                    )
                )
            found: dict[str, Any] = {}
            for place, process in running:
                process.wait()
                try:
                    found |= read_folder(place)
                except KernelBuildError:
                    continue  # the caller compiles these, and reports
        return found

    def _on_device(self, compiled: Any) -> LoadedKernel:
        driver, info = self._device.driver, compiled.info
        doing = f"loading kernel {info.name}"
        module = driver(driver.api.cuModuleLoadData(compiled.cubin), doing)
        function = driver(driver.api.cuModuleGetFunction(module, info.entry.encode()), doing)
        attribute = driver.api.CUfunction_attribute
        if info.dynamic_shared_bytes:
            limit = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            driver(driver.api.cuFuncSetAttribute(function, limit, info.dynamic_shared_bytes), doing)
        # An SM changes how much of its L1 is shared memory only when it is empty: with one share
        # for all kernels, the next one's thread blocks find room beside the last of this one.
        share = attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        driver(driver.api.cuFuncSetAttribute(function, share, _MOST_SHARED), doing)
        return LoadedKernel(info, module, int(function))
