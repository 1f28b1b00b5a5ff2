"""``atlas doctor``: what this machine offers and what Atlas would use of it."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path

import click

from atlas.cli.options import debug_option

_LIBRARIES = (
    "numba", "llvmlite", "numpy", "tokenizers", "safetensors", "jinja2", "cffi", "click", "rich",
)  # fmt: skip
_CUDA_LIBRARIES = ("cuda-bindings", "numba-cuda", "nvmath-python", "nvidia-cublas")
_FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512vnni", "amx-int8")


@click.command()
@debug_option
def doctor() -> None:
    """Report CPU, GPUs, library versions, the kernel cache, and what would be used."""
    from atlas.cli.table import print_rows

    print_rows([*cpu_rows(), *gpu_rows(), *library_rows(), *cache_rows(), *choice_rows()])


def cpu_rows() -> Iterator[tuple[str, str]]:
    """The processor and the instruction set that kernels are compiled for."""
    from llvmlite import binding as llvm

    from atlas.backends.cpu.target import cpu_target
    from atlas.model.memory import available_memory

    host = llvm.get_host_cpu_features()
    yield "cpu", f"{_cpu_name()} ({llvm.get_host_cpu_name()})"
    yield "features", " ".join(name for name in _FEATURES if host.get(name)) or "none of interest"
    target = cpu_target()
    asked = os.environ.get("ATLAS_CPU_TARGET")
    why = f" (ATLAS_CPU_TARGET={asked})" if asked else ""
    yield "simd level", f"{target.level}, compiled for {target.cpu}{why}"
    yield "cpus", f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}"
    yield "memory", f"{available_memory() / 2**30:.1f} GiB free"


def gpu_rows(root: Path = Path("/")) -> Iterator[tuple[str, str]]:
    """NVIDIA GPUs by the driver's own files: no CUDA library is loaded to look.

    Parameters
    ----------
    root : Path
        Where ``dev`` and ``proc`` are.
    """
    devices = sorted((root / "dev").glob("nvidia[0-9]*"))
    version = root / "proc/driver/nvidia/version"
    names = [
        line.partition(":")[2].strip()
        for file in sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
        for line in file.read_text(errors="replace").splitlines()
        if line.startswith("Model:")
    ]
    if not devices and not version.exists():
        yield "gpu", "none found"
        return
    yield "gpu", ", ".join(names) or f"{len(devices)} NVIDIA devices"
    if version.exists():
        yield "gpu driver", version.read_text(errors="replace").splitlines()[0]


def cuda_versions() -> Iterator[str]:
    """The installed distributions of the extra ``cuda``, with versions."""
    from importlib.metadata import PackageNotFoundError, version

    for name in _CUDA_LIBRARIES:
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:
            continue


def library_rows() -> Iterator[tuple[str, str]]:
    """Versions of Atlas, Python and what they run on."""
    from importlib.metadata import version

    from atlas import __version__

    yield "atlas", f"{__version__} in {Path(__file__).resolve().parents[1]}"
    libc = " ".join(platform.libc_ver())
    yield (
        "python",
        f"{platform.python_version()} on {platform.system()} {platform.machine()}, {libc}",
    )
    yield "libraries", ", ".join(f"{name} {version(name)}" for name in _LIBRARIES)
    yield "cuda", ", ".join(cuda_versions()) or "none: pip install 'atlas-llm[cuda]'"


def cache_rows() -> Iterator[tuple[str, str]]:
    """Where compiled kernels are kept, and under which key."""
    from atlas.backends.cpu.code_cache import cache_folder, cache_key

    folder = cache_folder()
    state = "writable" if is_writable(folder) else "not writable: every process compiles anew"
    yield "kernel cache", f"{folder} ({state})"
    kept = len(list((folder / "cpu" / cache_key()).glob("*.o")))
    yield "cache key", f"{cache_key()}, {kept} kernels compiled"


def choice_rows() -> Iterator[tuple[str, str]]:
    """What an engine with default settings would run on."""
    from atlas.backends.backend import choose_device
    from atlas.backends.cpu.target import cpu_target
    from atlas.errors import ModelFileError
    from atlas.weights.locate import locate

    device, reason = choose_device("auto")
    threads = len(os.sched_getaffinity(0))
    if device == "cuda":
        yield "would use", f"cuda: {reason}"
    else:
        yield "would use", f"cpu-{cpu_target().level} with {threads} threads; no GPU: {reason}"
    try:
        yield "smollm2", locate("smollm2").path
    except ModelFileError as error:
        yield "smollm2", str(error)


def is_writable(folder: Path) -> bool:
    """Whether files could be made in ``folder``, which need not exist."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
