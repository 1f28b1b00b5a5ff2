"""What the CPU can do, and for which instruction set bodies are compiled."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from typing import Literal

from llvmlite import binding as llvm

from atlas.errors import InvalidArgumentError

SimdLevel = Literal["avx512", "avx2", "plain"]
_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni")


@dataclass(frozen=True, slots=True)
class CpuTarget:
    """An LLVM processor with its features, and the SIMD level the bodies choose by."""

    cpu: str
    features: str
    level: SimdLevel


@cache
def cpu_target() -> CpuTarget:
    """The host, or what ``ATLAS_CPU_TARGET`` (native, avx2, plain) asks for.

    Read once a process: compiled bodies are for one target.
    """
    asked = os.environ.get("ATLAS_CPU_TARGET", "native")
    if asked not in ("native", "avx2", "plain"):
        raise InvalidArgumentError(
            f"ATLAS_CPU_TARGET is {asked!r}; allowed: 'native', 'avx2', 'plain'"
        )
    host = llvm.get_host_cpu_features()
    if asked == "native":
        level: SimdLevel = "plain"
        if all(host.get(name) for name in _AVX512):
            level = "avx512"
        elif all(host.get(name) for name in _AVX2):
            level = "avx2"
        return CpuTarget(llvm.get_host_cpu_name(), host.flatten(), level)
    if asked == "avx2":
        if not all(host.get(name) for name in _AVX2):
            raise InvalidArgumentError(
                f"ATLAS_CPU_TARGET is 'avx2', which needs {', '.join(_AVX2)}; "
                f"this CPU is {llvm.get_host_cpu_name()}"
            )
        return CpuTarget("x86-64-v3", "", "avx2")
    generic = llvm.get_process_triple().split("-")[0]
    return CpuTarget("x86-64" if generic == "x86_64" else "generic", "", "plain")


def simd_level() -> SimdLevel:
    """The SIMD level of :func:`cpu_target`."""
    return cpu_target().level
