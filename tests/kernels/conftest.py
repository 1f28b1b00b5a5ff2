"""The kernels as compiled here, once a session, in a cache of its own."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.launches import Bench, gpu_bench, machine_bench

HAS_COMPILER = importlib.util.find_spec("numba_cuda") is not None
NO_COMPILER = "numba-cuda is not installed (the extra 'cuda'): kernels cannot be compiled"


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for compiled kernels that all tests of the session share."""
    if not HAS_COMPILER:
        pytest.skip(NO_COMPILER)
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="session")
def ptx_of(kernel_cache: Path) -> Callable[[str], str]:
    """Name of a kernel → its PTX for sm_90a."""
    from atlas_kernels import build
    from atlas_kernels.registry import Architecture

    @cache
    def text(name: str) -> str:
        declared = dataclasses.replace(build.find(name), lto=False)
        target = Architecture.parse("sm_90a")
        return build.compile_body(declared.make(), declared, target).decode()

    return text


@pytest.fixture(scope="session")
def gpu(kernel_cache: Path) -> Any:
    """The first GPU; without one a test that asks for it fails."""
    from tests.kernels.gpu import Gpu

    return Gpu()


@pytest.fixture(params=["machine", pytest.param("gpu", marks=pytest.mark.gpu)])
def bench(
    request: pytest.FixtureRequest, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bench]:
    """Where kernels run: the PTX machine, and with ``-m gpu`` the GPU."""
    if request.param == "machine":
        yield machine_bench(request.getfixturevalue("ptx_of"))
    else:
        monkeypatch.setenv("ATLAS_CACHE_DIR", str(kernel_cache))
        device = request.getfixturevalue("gpu")
        yield gpu_bench(device)
        device.free()
