"""The kernels as compiled here, once a session, in a cache of its own."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.compiling import ROTATED, compile_every, ptx_path, ptx_text
from tests.kernels.launches import Bench, gpu_bench, machine_bench

HAS_COMPILER = importlib.util.find_spec("numba_cuda") is not None
NO_COMPILER = "numba-cuda is not installed (the extra 'cuda'): kernels cannot be compiled"


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for compiled kernels that all tests of the session share."""
    if not HAS_COMPILER:
        pytest.skip(NO_COMPILER)
    return tmp_path_factory.mktemp("kernels")


_reports: list[str] = []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in _reports:
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def every_kernel(kernel_cache: Path) -> None:
    """Every kernel in the cache, for sm_90a and the architecture of the day."""
    _reports.append(f"{compile_every(kernel_cache)} kernels compiled for sm_90a and {ROTATED}")


@pytest.fixture(scope="session")
def ptx_of(request: pytest.FixtureRequest, kernel_cache: Path) -> Callable[[str], str]:
    """Name of a kernel → its PTX for sm_90a."""
    if any("every_kernel" in getattr(item, "fixturenames", ()) for item in request.session.items):
        request.getfixturevalue("every_kernel")  # they are wanted anyway: do nothing twice

    @cache
    def text(name: str) -> str:
        path = ptx_path(kernel_cache, name)
        return path.read_text() if path.exists() else ptx_text(name)

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
