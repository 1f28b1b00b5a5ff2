"""``import atlas`` is fast and quiet: it loads nothing, starts nothing and configures nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

import atlas

REPORT = """
import sys, time
import logging, threading
handlers = list(logging.getLogger().handlers)
started = time.perf_counter()
import {module}
print(time.perf_counter() - started)
print(threading.active_count())
print(logging.getLogger().handlers == handlers and not logging.getLogger("atlas").handlers)
print(len(open("/proc/self/task/" + str(threading.get_native_id()) + "/children").read().split()))
print(*sorted(name.partition(".")[0] for name in sys.modules))
"""
HEAVY = {"numpy", "numba", "llvmlite", "cuda", "numba_cuda", "torch", "rich"}


def report(module: str) -> list[str]:
    result = subprocess.run(
        [sys.executable, "-c", REPORT.format(module=module)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stderr == ""
    return result.stdout.splitlines()


@pytest.mark.parametrize("module", ["atlas", "atlas.cli", "atlas_kernels"])
def test_import_is_fast_and_touches_nothing(module: str) -> None:
    # The best of three: another process may hold the disk or the processor.
    reports = [report(module) for _ in range(3)]
    assert min(float(lines[0]) for lines in reports) < 0.5
    _, threads, handlers_unchanged, children, modules = reports[0]
    assert threads == "1"
    assert handlers_unchanged == "True"
    assert children == "0"
    assert not HEAVY & set(modules.split())


def test_importing_the_engine_touches_no_cuda_library() -> None:
    modules = set(report("atlas.engine")[-1].split())
    assert "numpy" in modules  # the report does see what is loaded
    assert not {"numba", "cuda", "numba_cuda", "atlas_kernels", "torch", "transformers"} & modules


def test_every_public_name_is_there() -> None:
    for name in atlas.__all__:
        assert getattr(atlas, name) is not None
    assert set(atlas.__all__) <= set(dir(atlas))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'atlas' has no attribute 'Motor'"):
        _ = atlas.Motor
