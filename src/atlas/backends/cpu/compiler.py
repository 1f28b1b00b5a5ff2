"""Bodies to machine code: Numba makes LLVM IR, LLVM an object, and objects are cached on disk.

A warm start reads objects (``code_cache``) and imports neither Numba nor the bodies.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable
from functools import cache

from llvmlite import binding as llvm

from atlas.backends.cpu.code_cache import read_entry, write_entry
from atlas.backends.cpu.target import cpu_target
from atlas.errors import KernelError

_ADDRESSES: dict[str, int] = {}  # of bodies that this process has loaded; they stay

# Held across a fork: a child of a process that was compiling finds LLVM's and Numba's locks free.
_LLVM_LOCK = threading.RLock()
os.register_at_fork(
    before=_LLVM_LOCK.acquire,
    after_in_parent=_LLVM_LOCK.release,
    after_in_child=_LLVM_LOCK.release,
)


class BodyCompiler:
    """Finds bodies by name: in this process, in the disk cache, or by compiling them.

    ``on_compile`` is called with a body's name before it is compiled (for progress displays);
    ``num_compiled`` counts how often that was.
    """

    def __init__(self, on_compile: Callable[[str], None] | None = None) -> None:
        self.on_compile = on_compile
        self.num_compiled = 0

    def address(self, name: str) -> int:
        """Entry address of the body called ``name``, valid as long as the process lives."""
        with _LLVM_LOCK:
            if name not in _ADDRESSES:
                _ADDRESSES[name] = self._load(name)
            return _ADDRESSES[name]

    def _load(self, name: str) -> int:
        code = read_entry(name)
        if code is None:
            if self.on_compile is not None:
                self.on_compile(name)
            code = compile_body(name)
            self.num_compiled += 1
            write_entry(name, code)
        linker = _linker()
        linker.add_object_file(llvm.ObjectFileRef.from_data(code))
        linker.finalize_object()
        address = int(linker.get_function_address(_symbol(name)))
        if not address:
            raise KernelError(f"compiled body {name} has no entry {_symbol(name)}")
        return address


def _symbol(name: str) -> str:
    return "atlas_body_" + name.replace(".", "_")


@cache
def _linker() -> llvm.ExecutionEngine:
    """One for all objects, as each would cost over 2 MB.

    It is never disposed of: that takes a lock of LLVM's, which a fork could leave held for ever.
    """
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target_machine())


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
    from numba.core.errors import NumbaError
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
    signature = (types.int64, types.int64, types.CPointer(types.int64))  # type: ignore[attr-defined]
    contexts = numba_target.typing_context, numba_target.target_context
    try:
        compiled = compiler.compile_extra(*contexts, BODIES[name], signature, types.void, flags, {})
    except NumbaError as error:
        raise KernelError(f"body {name} does not compile: {error}") from error
    module = llvm.parse_assembly(compiled.library.get_llvm_str())
    module.get_function(compiled.fndesc.llvm_func_name).name = _symbol(name)
    # Numba numbers what a body calls by the order of compilation in its process, so objects of two
    # processes may give one weak name to different functions. Only the entry may be seen outside.
    for value in (*module.functions, *module.global_variables):
        if value.name != _symbol(name) and not value.is_declaration:
            value.linkage = "internal"
    module.verify()
    return bytes(_target_machine().emit_object(module))
