"""Reference models of all architectures, built once per session."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.helpers.reference import ReferenceModel, build


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ReferenceModel]:
    """``reference(name)``: the tiny model of that name."""
    built: dict[str, ReferenceModel] = {}

    def get(name: str) -> ReferenceModel:
        if name not in built:
            built[name] = build(name, tmp_path_factory.mktemp(name))
        return built[name]

    return get
