"""Declarations of kernels: ``@kernel`` puts a Python function, or a family of them, in a table."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

KINDS = ("ptr", "i32", "i64", "f32")
MODULES = (
    "activation",
    "argmax",
    "attention_decode",
    "attention_prefill",
    "attention_prefill_wgmma",
    "attention_step",
    "beam",
    "block_copy",
    "cast",
    "conv1d",
    "cross_attention",
    "embedding",
    "encoder_attention",
    "feed",
    "gemm_finish",
    "gated_delta_chunk",
    "gated_delta_mixer",
    "gated_delta_prefill",
    "gated_delta_step",
    "gated_norm",
    "gemm_norm",
    "gemm_step",
    "gemm_step_mma",
    "gemm_step_quant",
    "gemm_step_tiles",
    "kv_store",
    "moe_down",
    "moe_gate_up",
    "moe_grouped",
    "moe_grouped_wgmma",
    "moe_route",
    "moe_router",
    "moe_scores",
    "moe_sort",
    "mamba2_chunk",
    "mamba2_prefill",
    "mamba2_step",
    "norm",
    "recurrent_plan",
    "rope",
    "sampling",
    "sampling_choose",
    "sampling_score",
    "state_slots",
)
"""The files that declare kernels."""

Body = Callable[..., None]
Function = TypeVar("Function", bound=Callable[..., Any])
Setting = int | Callable[..., int]  # a number, or a function of the variant's parameters


class KernelDeclarationError(ValueError):
    """A declaration contradicts itself or the table."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """A compilation target: ``Architecture.parse("sm_90a")``."""

    major: int
    minor: int
    suffix: str = ""

    @classmethod
    def parse(cls, text: str) -> Architecture:
        """``sm_`` and a capability, with ``a`` for the instructions of that one alone."""
        match = re.fullmatch(r"sm_(\d+)(\d)(a?)", text)
        if match is None:
            raise KernelDeclarationError(f"architecture {text!r}; allowed: sm_80, sm_90a, …")
        found = cls(int(match[1]), int(match[2]), match[3])
        if found.capability < 80:
            raise KernelDeclarationError(f"architecture {text}; allowed: sm_80 and newer")
        return found

    @classmethod
    def of_device(cls, major: int, minor: int) -> Architecture:
        """What to compile for a device of this compute capability: Hopper's own set on Hopper."""
        return cls.parse(f"sm_{major}{minor}{'a' if (major, minor) == (9, 0) else ''}")

    @property
    def capability(self) -> int:
        """80 for sm_80."""
        return 10 * self.major + self.minor

    @property
    def number(self) -> str:
        """``90a`` for sm_90a."""
        return f"{self.capability}{self.suffix}"

    def runs(self, needed: Architecture) -> bool:
        """Whether code written for ``needed`` compiles for this target."""
        return self == needed if needed.suffix else self.capability >= needed.capability

    def __str__(self) -> str:
        return f"sm_{self.number}"


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Kernel:
    """One kernel: a variant of an op, with all that compiling and launching it needs.

    ``make`` returns the Python function; ``shared_bytes`` is the dynamic shared memory of a launch
    and ``cluster`` the thread blocks of a cluster.
    """

    name: str
    op: str
    variant: str
    kinds: tuple[str, ...]
    threads: int
    min_blocks: int
    shared_bytes: int
    cluster: int
    needs: Architecture
    lto: bool
    make: Callable[[], Body]
    module: str

    @property
    def entry(self) -> str:
        """The entry point's name in the cubin."""
        return f"atlas_{self.name}"

    @property
    def is_builtin(self) -> bool:
        """Declared by this package, not by its user."""
        return self.module.startswith(__package__ + ".")


KERNELS: dict[str, Kernel] = {}
"""Every declared kernel by name (``rmsnorm_bf16``); complete after ``load_table``."""


def load_table() -> dict[str, Kernel]:
    """Import every file that declares kernels; needs numba-cuda, no GPU."""
    for name in MODULES:
        importlib.import_module(f"{__package__}.{name}")
    return KERNELS


def kernel(
    op: str,
    *,
    args: str,
    threads: Setting,
    min_blocks: Setting = 1,
    shared: Setting = 0,
    cluster: Setting = 1,
    arch: str = "sm_80",
    lto: bool = False,
    variants: Mapping[str, tuple[Any, ...]] | None = None,
    replace: bool = False,
) -> Callable[[Function], Function]:
    """Declare a kernel, or one for each of ``variants``.

    Parameters
    ----------
    op : str
        The op that it computes. A kernel is called ``op``, or ``op_variant``; its entry point
        ``atlas_op_variant``.
    args : str
        Kinds of the arguments, separated by spaces: ``ptr`` (an address of device memory), ``i32``,
        ``i64``, ``f32``. They are the kernel's parameters, one to one.
    threads, min_blocks : int
        Launch bounds: threads in a thread block (x, 1, 1), and the least thread blocks that an SM
        shall be able to hold, which bounds the registers.
    shared : int
        Bytes of dynamic shared memory.
    cluster : int
        Thread blocks in a cluster.
    arch : str
        The oldest architecture; with an ``a``, the only one.
    lto : bool
        Link from LTO-IR (kernels with ``setmaxnreg``).
    variants : mapping, optional
        Variant name → arguments with which the decorated function, then a factory, returns the
        kernel's function. ``threads``, ``min_blocks``, ``shared`` and ``cluster`` may be functions
        of the same arguments.
    replace : bool
        Take the place of a kernel of this package, which must have the same kinds of arguments;
        it is launched over the same grid.

    Raises
    ------
    KernelDeclarationError
        On an unknown kind, a taken name, an impossible number of threads.
    """
    kinds = tuple(args.split())
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise KernelDeclarationError(f"{op}: argument kind {unknown[0]!r}; allowed: {KINDS}")

    def declare(function: Function) -> Function:
        if not function.__module__.startswith(f"{__package__}."):
            load_table()  # so that a kernel of this package does not take the new one's place
        for variant, parameters in (variants or {"": ()}).items():
            name = f"{op}_{variant}" if variant else op
            if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
                raise KernelDeclarationError(f"kernel name {name!r}; allowed: a-z, 0-9 and _")
            _check_taken(name, kinds, replace)
            count = _value(threads, parameters)
            if count % 32 or not 32 <= count <= 1024:
                raise KernelDeclarationError(f"{name}: {count} threads; allowed: 32, 64, … 1024")
            make = _Maker(function, parameters, variants is not None)
            KERNELS[name] = Kernel(
                name=name,
                op=op,
                variant=variant,
                kinds=kinds,
                threads=count,
                min_blocks=_value(min_blocks, parameters),
                shared_bytes=_value(shared, parameters),
                cluster=_value(cluster, parameters),
                needs=Architecture.parse(arch),
                lto=lto,
                make=make,
                module=function.__module__,
            )
        return function

    return declare


def register(function: Body, op: str, *, args: str, threads: int, **options: Any) -> Kernel:
    """Declare a kernel of one's own at run time, in a notebook for instance; see ``kernel``.

    It may be declared again under its name, as happens when a cell is run twice. Compile it with
    ``build.compile_kernel``; it is not kept on disk.
    """
    kernel(op, args=args, threads=threads, **options)(function)
    return KERNELS[op]


def argument_names(body: Body, declared: Kernel) -> tuple[str, ...]:
    """Names of a kernel's parameters, checked against its kinds."""
    names = tuple(inspect.signature(body).parameters)
    if len(names) != len(declared.kinds):
        raise KernelDeclarationError(
            f"{declared.name}: {len(names)} parameters ({', '.join(names)})"
            f" but {len(declared.kinds)} kinds ({' '.join(declared.kinds)})"
        )
    return names


def _check_taken(name: str, kinds: tuple[str, ...], replace: bool) -> None:
    known = KERNELS.get(name)
    if known is None or not (known.is_builtin or replace):
        return
    if not replace:
        raise KernelDeclarationError(f"kernel {name} exists; pass replace=True")
    if known.kinds != kinds:
        raise KernelDeclarationError(
            f"kernel {name} takes {' '.join(known.kinds)}; its replacement {' '.join(kinds)}"
        )


@dataclass(frozen=True, slots=True)
class _Maker:
    function: Callable[..., Any]
    parameters: tuple[Any, ...]
    is_factory: bool

    def __call__(self) -> Body:
        made: Body = self.function(*self.parameters) if self.is_factory else self.function
        return made


def _value(setting: Setting, parameters: tuple[Any, ...]) -> int:
    return setting if isinstance(setting, int) else setting(*parameters)
