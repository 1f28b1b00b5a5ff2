"""Every kernel compiled once for a run of the tests, by two processes, for all tests to share."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import datetime
import multiprocessing
import os
from pathlib import Path

OTHERS = ("sm_80", "sm_100", "sm_120")
TODAY = OTHERS[datetime.datetime.now(datetime.UTC).date().toordinal() % len(OTHERS)]
ROTATED = os.environ.get("ATLAS_KERNEL_ARCH", TODAY)
"""Besides sm_90a, one architecture a day (UTC): all of them would take the check too long."""
_JOBS = 2
_FIRST = ("sampling_choose", "gated_delta", "attention", "mamba2")
"""How names of kernels that take long begin: those come first, so that no process waits at the end.
"""


def ptx_path(folder: Path, name: str) -> Path:
    """Where a kernel's PTX for sm_90a lies."""
    return folder / "ptx" / f"{name}.ptx"


def ptx_text(name: str) -> str:
    """A kernel's PTX for sm_90a."""
    from atlas_kernels import build
    from atlas_kernels.registry import Architecture

    declared = build.find(name)
    if declared.lto:
        declared = dataclasses.replace(declared, lto=False)
    target = Architecture.parse("sm_90a")
    return build.compile_body(declared.make(), declared, target).decode()


def compile_every(folder: Path) -> int:
    """Compile for sm_90a and ``ROTATED`` into the cache ``folder``, keep the PTX; how many.

    Numba's part, by far the longest, is done once for all three.
    """
    from atlas_kernels import build

    names = sorted(build.names_for("sm_90a"), key=lambda name: not name.startswith(_FIRST))
    ptx_path(folder, "").parent.mkdir(exist_ok=True)
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(
        _JOBS, context, initializer=_use_cache, initargs=(folder,)
    )
    with pool:
        for done in [pool.submit(_compile, name, folder) for name in names]:
            done.result()
    return len(names)


def _use_cache(folder: Path) -> None:
    os.environ["ATLAS_CACHE_DIR"] = str(folder)


def _compile(name: str, folder: Path) -> None:
    from atlas_kernels import build

    ptx_path(folder, name).write_text(ptx_text(name))
    build.load(name, "sm_90a")
    if name in build.names_for(ROTATED):
        build.load(name, ROTATED)
