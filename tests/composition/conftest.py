"""The engines of the composition matrix: one for each model and chunk size."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import atlas.step_loop
from atlas import Engine
from atlas._native.scheduler import Scheduler
from tests.composition.models import HYBRIDS, MODELS, write

KV_TOKENS = 1024

MakeEngine = Callable[[str, int, bool], Engine]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for each family of ``MODELS``."""
    return {
        family: write(tmp_path_factory.mktemp(family), family)
        for family in {model.family for model in MODELS.values()}
    }


@pytest.fixture(scope="session")
def folder(folders: dict[str, Path]) -> Path:
    """The dense model."""
    return folders["dense"]


@pytest.fixture(scope="session", params=HYBRIDS)
def hybrid_folder(folders: dict[str, Path], request: pytest.FixtureRequest) -> Path:
    """A model with recurrent layers."""
    return folders[request.param]


@pytest.fixture(scope="session")
def make_engine(folders: dict[str, Path]) -> Iterator[MakeEngine]:
    """``make_engine(model, chunk_tokens, feed)``; blocks are reserved late and nobody is immune."""
    made: dict[tuple[str, int, bool], Engine] = {}
    eager = functools.partial(Scheduler, watermark=0, immune_tokens=1)

    def make(model: str, chunk_tokens: int, feed: bool) -> Engine:
        key = (model, chunk_tokens, feed)
        if key not in made:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(atlas.step_loop, "Scheduler", eager)
                made[key] = Engine(
                    folders[MODELS[model].family],
                    threads=1,
                    quiet=True,
                    quantize=MODELS[model].quantize,
                    kv_tokens=KV_TOKENS,
                    max_seq_len=KV_TOKENS // 2,
                    chunk_tokens=chunk_tokens,
                    feed=feed,
                )
        return made[key]

    yield make
    for engine in made.values():
        engine.close()
