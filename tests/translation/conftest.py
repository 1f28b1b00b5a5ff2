"""One tiny translator a session, and engines on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from atlas import Engine
from tests.helpers import translation_model
from tests.helpers.translation_model import ReferenceTranslator


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> ReferenceTranslator:
    return translation_model.build(tmp_path_factory.mktemp("translator"))


@pytest.fixture(scope="session")
def engine(reference: ReferenceTranslator) -> Iterator[Engine]:
    """Shared by tests that leave nothing behind."""
    with Engine(reference.directory, threads=2, quiet=True) as engine:
        yield engine
        assert engine.metrics().kv_blocks_used == 0
