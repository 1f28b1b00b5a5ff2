"""Engines on tiny random models, one of each kind a session."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from atlas import Engine
from atlas.backends.cpu import code_cache, compiler
from tests.engine.folders import write_model
from tests.text.vocabularies import byte_level_library

Script = Callable[[Sequence[int], Sequence[int], NDArray[np.float32]], NDArray[np.float32]]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without tokenizer files."""
    return write_model(tmp_path_factory.mktemp("ids"))


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a byte-level tokenizer and a chat template."""
    library = byte_level_library()
    eos = library.token_to_id("</s>")
    assert eos is not None
    return write_model(
        tmp_path_factory.mktemp("text"),
        vocab_size=library.get_vocab_size(),
        eos=eos,
        library=library,
        bos_token="<s>",
        eos_token="</s>",
        chat_template="{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>"
        "{% endfor %}<|im_start|>assistant\n",
    )


@pytest.fixture(scope="session")
def shared_engine(folder: Path) -> Iterator[Engine]:
    with Engine(folder, threads=1, quiet=True) as engine:
        yield engine


@pytest.fixture(scope="session")
def shared_text_engine(text_folder: Path) -> Iterator[Engine]:
    with Engine(text_folder, threads=1, quiet=True) as engine:
        yield engine


@pytest.fixture
def warm_cache(shared_engine: Engine, tmp_path: Path) -> Path:
    """A copy of the compiled bodies that the shared engine loaded, and no others."""
    folder = tmp_path / "warm"
    for name in compiler._ADDRESSES:
        source = code_cache.entry_path(name)
        if not source.exists():
            pytest.skip(f"compiled bodies are not cached in {code_cache.cache_folder()}")
        target = folder / source.relative_to(code_cache.cache_folder())
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
    return folder


def num_taken(engine: Engine) -> int:
    """KV blocks that somebody holds, the prefix cache left out."""
    lifecycle = engine.model.lifecycle
    cached = engine._loop.cache.num_blocks if engine._loop.cache is not None else 0
    return lifecycle.num_total_blocks - lifecycle.num_free_blocks - cached


@pytest.fixture
def engine(shared_engine: Engine) -> Iterator[Engine]:
    """An engine for token ids; every test must leave it usable, with all its blocks free."""
    yield shared_engine
    assert num_taken(shared_engine) == 0
    assert len(shared_engine.generate([5, 6]).token_ids) > 0


@pytest.fixture
def text_engine(shared_text_engine: Engine) -> Iterator[Engine]:
    """An engine with a tokenizer, left usable and empty."""
    yield shared_text_engine
    assert num_taken(shared_text_engine) == 0


@pytest.fixture(scope="session")
def says() -> Callable[[Sequence[int]], Script]:
    """``says(ids)``: a logits processor under which greedy output is ``ids``, then the first."""

    def force(ids: Sequence[int]) -> Script:
        def processor(
            prompt: Sequence[int], output: Sequence[int], row: NDArray[np.float32]
        ) -> NDArray[np.float32]:
            forced = np.full_like(row, -np.inf)
            forced[ids[len(output)] if len(output) < len(ids) else ids[0]] = 0.0
            return forced

        return processor

    return force
