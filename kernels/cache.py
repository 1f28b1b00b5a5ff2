"""Compiled kernels on disk, under a key of everything that they depend on.

The key covers every source of this package, the versions of the compilers and the architecture.
Entries are written to a temporary name and renamed, so that no process sees half of one; a damaged
or misplaced entry counts as absent. A folder that cannot be written is reported once and done
without. Reading an entry imports neither Numba nor a CUDA library.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import tempfile
from functools import cache
from pathlib import Path

from atlas_kernels.manifest import CompiledKernel, KernelInfo

_log = logging.getLogger("atlas")
_DIGEST_BYTES = 32
_LENGTH_BYTES = 4
_UNWRITABLE: set[Path] = set()  # reported in this process
COMPILERS = ("numba-cuda", "numba", "llvmlite", "cuda-bindings", "nvidia-nvvm", "nvidia-nvjitlink")


def cache_folder() -> Path:
    """``cuda`` in ``$ATLAS_CACHE_DIR``, else ``$XDG_CACHE_HOME/atlas``, else ``~/.cache/atlas``."""
    if chosen := os.environ.get("ATLAS_CACHE_DIR"):
        return Path(chosen).expanduser() / "cuda"
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "atlas" / "cuda"


@cache
def source_hash() -> str:
    """Hex digest of every source of this package."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.name.encode() + b"\0" + hashlib.sha256(source.read_bytes()).digest())
    return digest.hexdigest()[:32]


@cache
def cache_key(arch: str) -> str:
    """Hex digest of sources, compilers and architecture."""
    digest = hashlib.sha256(source_hash().encode())
    for text in (*map(_version, COMPILERS), platform.python_version(), arch):
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()[:32]


def entry_path(name: str, arch: str) -> Path:
    """Where a kernel lies."""
    return cache_folder() / cache_key(arch) / f"{name}.cubin"


def read_entry(name: str, arch: str) -> CompiledKernel | None:
    """A kernel; None when it is absent, unreadable, damaged, or another's."""
    try:
        entry = entry_path(name, arch).read_bytes()
    except OSError:
        return None
    content = entry[_DIGEST_BYTES:]
    if entry[:_DIGEST_BYTES] != _digest(name, arch, content):
        return None
    start = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
    info = KernelInfo.from_json(json.loads(content[_LENGTH_BYTES:start]))
    return CompiledKernel(info, content[start:])


def write_entry(compiled: CompiledKernel) -> None:
    """Keep a kernel for later processes, where the folder allows it."""
    name, arch = compiled.info.name, compiled.info.arch
    path = entry_path(name, arch)
    if path.parent in _UNWRITABLE:
        return
    header = json.dumps(compiled.info.to_json()).encode()
    content = len(header).to_bytes(_LENGTH_BYTES, "little") + header + compiled.cubin
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(_digest(name, arch, content) + content)
        os.replace(temporary, path)
        temporary = None
    except OSError as error:
        _UNWRITABLE.add(path.parent)
        _log.warning("compiled CUDA kernels are not cached: %s", error)
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def _digest(name: str, arch: str, content: bytes) -> bytes:
    return hashlib.sha256(f"{cache_key(arch)}/{name}\0".encode() + content).digest()


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "absent"  # the CUDA libraries may come from a toolkit outside Python
