"""The engines of the composition matrix: one for each model and chunk size."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import atlas.step_loop
from atlas import Engine
from atlas._native.scheduler import Scheduler
from tests.engine.folders import write_model

MODELS = {"float32": None, "q8_0": "q8_0"}
KV_TOKENS = 1024

MakeEngine = Callable[[str, int, bool], Engine]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("composition"))


@pytest.fixture(scope="session")
def make_engine(folder: Path) -> Iterator[MakeEngine]:
    """``make_engine(model, chunk_tokens, feed)``; blocks are reserved late and nobody is immune."""
    made: dict[tuple[str, int, bool], Engine] = {}
    eager = functools.partial(Scheduler, watermark=0, immune_tokens=1)

    def make(model: str, chunk_tokens: int, feed: bool) -> Engine:
        key = (model, chunk_tokens, feed)
        if key not in made:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(atlas.step_loop, "Scheduler", eager)
                made[key] = Engine(
                    folder,
                    threads=1,
                    quiet=True,
                    quantize=MODELS[model],  # type: ignore[arg-type]
                    kv_tokens=KV_TOKENS,
                    max_seq_len=KV_TOKENS // 2,
                    chunk_tokens=chunk_tokens,
                    feed=feed,
                )
        return made[key]

    yield make
    for engine in made.values():
        engine.close()
