"""The one import of ``numba.cuda``: what kernel sources are written with, and what compiles them.

Everything else in this package goes through the names below, so that Numba's CUDA target can be
exchanged in one place. Its compiler is used and its dispatcher and driver are not: nothing here
needs, or touches, a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

if tuple(int(part) for part in np.__version__.split(".")[:2]) >= (2, 5):
    # numba-cuda 0.30 fails at import with "module 'numpy' has no attribute 'row_stack'".
    raise ImportError(f"numba-cuda needs NumPy below 2.5; installed is {np.__version__}")

from atlas_kernels.bytecode import is_collective, mark_collective, refuse_copied_calls
from numba import cuda
from numba.cuda import compiler, dispatcher, types
from numba.cuda.core import config
from numba.cuda.core.compiler_lock import global_compiler_lock
from numba.cuda.cudadrv import nvvm
from numba.cuda.extending import intrinsic

__all__ = ["compile_ir", "device", "f32", "i32", "i64", "intrinsic", "llvm_ir", "types"]

if config.ENABLE_CUDASIM:
    raise ImportError("the CUDA simulator compiles nothing: unset NUMBA_ENABLE_CUDASIM")

i32, i64, f32 = types.int32, types.int64, types.float32
"""Casts in a kernel. Numba widens int32 arithmetic to int64 and writes literals as float64: cast
where the width matters."""

ARGUMENT_TYPES = {"ptr": types.int64, "i32": types.int32, "i64": types.int64, "f32": types.float32}
"""Kinds of kernel arguments. A pointer is an address: kernels load and store through intrinsics."""


def device(function: Callable[..., Any]) -> Any:
    """A function that kernels call; always inlined, so that it costs no call and no error path."""
    refuse_copied_calls(function)
    made = cuda.jit(device=True, forceinline=True)(function)
    return mark_collective(made) if is_collective(function) else made


def llvm_ir(
    function: Callable[..., None], kinds: tuple[str, ...], entry: str, bounds: tuple[int, int]
) -> list[str]:
    """Type and lower a kernel: LLVM IR of the kernel and of each device function that it calls.

    Parameters
    ----------
    function : the kernel's Python function
    kinds : kinds of its arguments, of ``ARGUMENT_TYPES``
    entry : the name that the entry point gets
    bounds : threads in a thread block, least thread blocks to be resident on an SM
    """
    refuse_copied_calls(function)
    argument_types = tuple(ARGUMENT_TYPES[kind] for kind in kinds)
    with global_compiler_lock, _no_device():
        # cc decides nothing in this IR: our loads, stores and conversions are PTX of our own.
        compiled = compiler.compile_cuda(
            function,
            types.void,
            argument_types,
            debug=False,
            lineinfo=False,
            nvvm_options={"opt": 3},
            cc=(8, 0),
        )
        mangled = compiled.fndesc.llvm_func_name
        lowered = compiled.library.get_function(mangled)
        compiler.kernel_fixup(lowered, False)
        nvvm.set_launch_bounds(lowered, bounds)
        modules = [str(module) for module in compiled.library.modules]
    # Numba's name carries a counter of this process, and each function an unused global of 8 bytes.
    return [_ENVIRONMENT.sub("", module).replace(mangled, entry) for module in modules]


_ENVIRONMENT = re.compile(r'^@"?_ZN08NumbaEnv.*\n', re.MULTILINE)


def compile_ir(modules: list[str], target: str, *, lto: bool) -> bytes:
    """LLVM IR to PTX, or with ``lto`` to LTO-IR, for a target such as ``compute_90a``.

    ``-fma=0``: a product and a sum are two operations, unless the source says ``fma``.
    """
    options: dict[str, Any] = {"gen-lto": None} if lto else {}
    code = nvvm.compile_ir(modules, arch=target, opt=3, fma=0, **options)
    return bytes(code) if lto else bytes(code).rstrip(b"\0")


class _StandIn:
    compute_capability = (8, 0)


@contextmanager
def _no_device() -> Iterator[None]:
    """Numba asks the current device for its capability when it compiles a device function."""
    asked = dispatcher.get_current_device
    dispatcher.get_current_device = _StandIn
    try:
        yield
    finally:
        dispatcher.get_current_device = asked
