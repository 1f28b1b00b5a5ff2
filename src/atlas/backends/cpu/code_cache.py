"""Compiled bodies on disk, under a key of everything that they depend on.

Numba's own cache misses a change in a callee of another file; this key covers every source, the
versions of Python, Numba and LLVM, and the target CPU. Entries are written to a temporary name and
renamed, so that no process sees half of one; a damaged or misplaced entry counts as absent. A
folder that cannot be written is reported once and done without.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import logging
import os
import platform
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from llvmlite import binding as llvm

import atlas
from atlas.backends.cpu.target import CpuTarget, cpu_target

_log = logging.getLogger("atlas")
_DIGEST_BYTES = 32
_UNWRITABLE: set[Path] = set()  # reported in this process


def cache_folder() -> Path:
    """``$ATLAS_CACHE_DIR``, else ``$XDG_CACHE_HOME/atlas``, else ``~/.cache/atlas``."""
    if chosen := os.environ.get("ATLAS_CACHE_DIR"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "atlas"


def source_files() -> list[Path]:
    """Every file of the package that compiled code depends on."""
    here, package = Path(__file__).parent, Path(atlas.__file__).parent
    others = (here / "compiler.py", here / "target.py", package / "ops" / "attention.py")
    return [*sorted((here / "bodies").glob("*.py")), *others]


def key_of(sources: Iterable[Path], target: CpuTarget) -> str:
    """Hex digest of sources, versions and target."""
    digest = hashlib.sha256()
    versions = [importlib.metadata.version(name) for name in ("numba", "llvmlite")]
    machine = (llvm.get_process_triple(), target.cpu, target.features, target.level)
    for text in (*versions, platform.python_version(), *machine):
        digest.update(text.encode() + b"\0")
    for source in sources:
        digest.update(source.name.encode() + b"\0" + hashlib.sha256(source.read_bytes()).digest())
    return digest.hexdigest()[:32]


@cache
def cache_key() -> str:
    """The key of this process: one set of sources, one target."""
    return key_of(source_files(), cpu_target())


def entry_path(name: str) -> Path:
    """Where the object of the body ``name`` lies."""
    return cache_folder() / "cpu" / cache_key() / f"{name}.o"


def read_entry(name: str) -> bytes | None:
    """The object of a body; None when it is absent, unreadable, damaged, or not this one's."""
    try:
        entry = entry_path(name).read_bytes()
    except OSError:
        return None
    code = entry[_DIGEST_BYTES:]
    return code if entry[:_DIGEST_BYTES] == _digest(name, code) else None


def write_entry(name: str, code: bytes) -> None:
    """Keep the object of a body for later processes, where the folder allows it."""
    path = entry_path(name)
    if path.parent in _UNWRITABLE:
        return
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(_digest(name, code) + code)
        os.replace(temporary, path)
        temporary = None
    except OSError as error:
        _UNWRITABLE.add(path.parent)
        _log.warning("compiled kernels are not cached: %s", error)
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def _digest(name: str, code: bytes) -> bytes:
    return hashlib.sha256(f"{cache_key()}/{name}\0".encode() + code).digest()
