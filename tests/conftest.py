"""Shared fixtures, and ``--noop GROUP.METHOD``: do tests notice a method that does nothing?

With that option the method's implementations are replaced by no-ops, only the tests that declare
the row (``@pytest.mark.contract``) run, and the run succeeds exactly when each of them fails.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

import atlas.model
from atlas.model import GROUPS, Unavailable

if TYPE_CHECKING:
    from tests.helpers.reference import ReferenceModel


ON_CUDA = os.environ.setdefault("ATLAS_DEVICE", "cpu") == "cuda"
"""Whether engines of these tests run on a GPU (`make gpu`)."""


def implementing_classes(group: str) -> list[type]:
    """Return the classes of ``atlas.model`` that inherit the protocol of ``group``."""
    for module in pkgutil.iter_modules(atlas.model.__path__, "atlas.model."):
        importlib.import_module(module.name)
    found: list[type] = []
    pending = [GROUPS[group]]
    while pending:
        subclasses = pending.pop().__subclasses__()
        pending.extend(subclasses)
        found.extend(cls for cls in subclasses if cls.__module__.startswith("atlas.model."))
    return sorted(set(found), key=lambda cls: cls.__qualname__)


def replace_by_noop(row: str) -> None:
    """Replace every implementation of the method ``row`` names, for the life of the process."""
    group, _, method = row.partition(".")
    if group not in GROUPS or method not in vars(GROUPS[group]):
        raise pytest.UsageError(f"--noop {row}: no such method; give GROUP.METHOD")
    owners = [
        cls
        for cls in implementing_classes(group)
        if method in vars(cls) and not isinstance(vars(cls)[method], Unavailable)
    ]
    if not owners:
        raise pytest.UsageError(f"--noop {row}: nothing implements it")
    for cls in owners:
        if callable(vars(cls)[method]):
            setattr(cls, method, lambda self, *args, **kwargs: None)
        else:
            setattr(cls, method, property(lambda self: None))


class NoopRun:
    """Select the tests that declare one row, and turn the verdict around: all must fail."""

    def __init__(self, row: str) -> None:
        replace_by_noop(row)
        self.row = row
        self.declared: set[str] = set()
        self.failed: set[str] = set()

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        chosen = [
            item
            for item in items
            if any(self.row in mark.args for mark in item.iter_markers("contract"))
        ]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen
        self.declared.update(function_id(item.nodeid) for item in chosen)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(function_id(report.nodeid))

    @property
    def survivors(self) -> list[str]:
        """Tests that passed although the method does nothing."""
        return sorted(self.declared - self.failed)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if self.declared and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            session.exitstatus = 1 if self.survivors else 0

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        verdict = ", ".join(self.survivors) or "every declared test noticed"
        terminalreporter.write_line(f"no-op {self.row}: {verdict}")


def function_id(nodeid: str) -> str:
    """Return a node id without the case of a parametrised test; one failing case suffices."""
    return nodeid.partition("[")[0]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--noop", metavar="GROUP.METHOD", help="expect declared tests to fail")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "contract(row, ...): rows of the Model interface that the test exercises"
    )
    if ON_CUDA:
        # Without feed an event comes with the step that made it, as these tests expect; feed has
        # tests of its own, in tests/backends/cuda.
        from atlas.backends.cuda.runtime import CudaRuntime

        CudaRuntime.gains_by_feed = False
        CudaRuntime.tail_least = 0  # prompts of these tests are short
    row = config.getoption("--noop")
    if row is not None:
        config.pluginmanager.register(NoopRun(row), "atlas-noop")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what looks into the CPU backend where engines run on a GPU."""
    if ON_CUDA:
        left_out = [item for item in items if item.get_closest_marker("cpu")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session", name="implementing_classes")
def implementing_classes_fixture() -> object:
    """Give tests the search for implementing classes."""
    return implementing_classes


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ReferenceModel]:
    """``reference(name)``: transformers' tiny model of that name, built once per session."""
    from tests.helpers.reference import build  # torch is slow to import, few tests need it

    built: dict[str, ReferenceModel] = {}

    def get(name: str) -> ReferenceModel:
        if name not in built:
            built[name] = build(name, tmp_path_factory.mktemp(name))
        return built[name]

    return get
