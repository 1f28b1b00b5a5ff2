"""Bodies to machine code: Numba makes LLVM IR, LLVM an object, and objects are cached on disk.

The cache key covers every source the code depends on (all files of ``bodies/``), the versions of
Python, Numba and LLVM, and the target CPU; Numba's own cache misses a change in a callee of another
file. A warm start reads objects and imports neither Numba nor the bodies. Entries are written to a
temporary name and renamed, so that two processes cannot see half of one; a damaged entry is
recompiled. A cache that cannot be written is reported once and done without.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import logging
import os
import platform
import tempfile
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path

from llvmlite import binding as llvm

from atlas.backends.cpu.target import cpu_target
from atlas.errors import KernelError

_log = logging.getLogger("atlas")
_DIGEST_BYTES = 32


def cache_folder() -> Path:
    """``$ATLAS_CACHE_DIR``, else ``$XDG_CACHE_HOME/atlas``, else ``~/.cache/atlas``."""
    if chosen := os.environ.get("ATLAS_CACHE_DIR"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "atlas"


@cache
def cache_key() -> str:
    """Hex digest of everything that compiled bodies depend on."""
    digest = hashlib.sha256()
    target = cpu_target()
    versions = [importlib.metadata.version(name) for name in ("numba", "llvmlite")]
    for text in (*versions, platform.python_version(), target.cpu, target.features, target.level):
        digest.update(text.encode() + b"\0")
    here = Path(__file__).parent
    for source in (*sorted((here / "bodies").glob("*.py")), here / "compiler.py"):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:32]


class BodyCompiler:
    """Loads bodies by name: from memory, from the disk cache, or by compiling them.

    ``on_compile`` is called with a body's name before it is compiled (for progress displays).
    """

    def __init__(self, on_compile: Callable[[str], None] | None = None) -> None:
        self.on_compile = on_compile
        self.num_compiled = 0
        self._lock = threading.Lock()
        self._addresses: dict[str, int] = {}
        self._cache_writable = True
        # One engine for all objects: each would cost over 2 MB.
        self._linker = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target_machine())

    def address(self, name: str) -> int:
        """Entry address of the body called ``name``."""
        with self._lock:
            if name not in self._addresses:
                self._addresses[name] = self._load(name)
            return self._addresses[name]

    def _load(self, name: str) -> int:
        path = cache_folder() / "cpu" / cache_key() / f"{name}.o"
        code = _read_entry(path)
        if code is None:
            if self.on_compile is not None:
                self.on_compile(name)
            code = compile_body(name)
            self.num_compiled += 1
            self._write_entry(path, code)
        self._linker.add_object_file(llvm.ObjectFileRef.from_data(code))
        self._linker.finalize_object()
        address = int(self._linker.get_function_address(_symbol(name)))
        if not address:
            raise KernelError(f"compiled body {name} has no entry {_symbol(name)}")
        return address

    def _write_entry(self, path: Path, code: bytes) -> None:
        if not self._cache_writable:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=path.parent)
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(code).digest() + code)
            os.replace(temporary, path)
        except OSError as error:
            self._cache_writable = False
            _log.warning("compiled kernels are not cached: %s", error)


def _read_entry(path: Path) -> bytes | None:
    """The object in a cache entry; None when absent, unreadable or damaged."""
    try:
        entry = path.read_bytes()
    except OSError:
        return None
    digest, code = entry[:_DIGEST_BYTES], entry[_DIGEST_BYTES:]
    return code if hashlib.sha256(code).digest() == digest else None


def _symbol(name: str) -> str:
    return "atlas_body_" + name.replace(".", "_")


def _target_machine() -> llvm.TargetMachine:
    """A new one each time: an execution engine takes ownership of its machine."""
    target = cpu_target()
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=target.cpu, features=target.features, opt=3, codemodel="jitdefault", jit=True
    )


def compile_body(name: str) -> bytes:
    """Compile the body called ``name`` for :func:`cpu_target`; returns an object file."""
    from numba.core import compiler, types
    from numba.core.registry import cpu_target as numba_target

    from atlas.backends.cpu.bodies import BODIES

    importlib.import_module(f"atlas.backends.cpu.bodies.{name.split('.')[0]}")
    if name not in BODIES:
        raise KernelError(f"no body is called {name}; there are {', '.join(sorted(BODIES))}")
    flags = compiler.Flags()
    flags.no_cpython_wrapper = True
    flags.no_cfunc_wrapper = True
    flags.error_model = "numpy"
    flags.nrt = False
    compiled = compiler.compile_extra(
        numba_target.typing_context,
        numba_target.target_context,
        BODIES[name],
        (types.int64, types.int64, types.CPointer(types.int64)),  # type: ignore[attr-defined]
        types.void,
        flags,
        {},
    )
    module = llvm.parse_assembly(compiled.library.get_llvm_str())
    module.get_function(compiled.fndesc.llvm_func_name).name = _symbol(name)
    return bytes(_target_machine().emit_object(module))
