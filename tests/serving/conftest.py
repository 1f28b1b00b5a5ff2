"""Examples as modules, and an engine that can hold many requests at once."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from atlas import Engine
from tests.engine.folders import write_model
from tests.text.vocabularies import byte_level_library

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="session")
def example() -> Callable[[str], ModuleType]:
    """Import an example by its path below ``examples``, without running it."""

    def load(path: str) -> ModuleType:
        name = f"example_{Path(path).stem}"
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a byte-level tokenizer."""
    library = byte_level_library()
    eos = library.token_to_id("</s>")
    assert eos is not None
    return write_model(
        tmp_path_factory.mktemp("serving"),
        vocab_size=library.get_vocab_size(),
        eos=eos,
        library=library,
        bos_token="<s>",
        eos_token="</s>",
    )


@pytest.fixture(scope="session")
def engine(folder: Path) -> Iterator[Engine]:
    with Engine(folder, threads=1, kv_tokens=16 * 1024, quiet=True) as engine:
        yield engine
