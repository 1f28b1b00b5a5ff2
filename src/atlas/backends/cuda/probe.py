"""Whether this machine has a GPU that Atlas can use, found out without taking it."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from atlas.errors import AtlasError

_MODULES = ("cuda.bindings", "numba_cuda", "atlas_kernels")
_DRIVER_FILES = ("proc/driver/nvidia/version", "dev/nvidiactl", "dev/dxg")


@dataclass(frozen=True, slots=True)
class FoundGpu:
    """``words`` names the GPU, or says why there is none to use."""

    usable: bool
    words: str


def find_gpu(root: Path = Path("/")) -> FoundGpu:
    """Look for a GPU; never raises for what is missing or broken.

    Where the driver's files are missing no CUDA library is loaded.
    """
    if not any((root / name).exists() for name in _DRIVER_FILES):
        return FoundGpu(False, "no NVIDIA driver is loaded")
    missing = [name for name in _MODULES if not _is_installed(name)]
    if missing:
        names = ", ".join(missing)
        return FoundGpu(False, f"{names} missing: pip install 'atlas-llm[cuda]'")
    from atlas.backends.cuda.device import describe
    from atlas.backends.cuda.driver import Driver

    try:
        return FoundGpu(True, describe(Driver()))
    except AtlasError as error:
        return FoundGpu(False, str(error))


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
