"""A small random model for each test, its definition in NumPy, and snapshots of sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from numpy.typing import NDArray

from atlas._native.prefix_cache import PrefixCache
from atlas.model import Model
from atlas.model.load import LoadedModel
from tests.helpers import plain_decoder
from tests.helpers.random_model import CONFIGS, RandomCheckpoint, random_model

Expected = Callable[[Sequence[int]], NDArray[Any]]


@pytest.fixture
def loaded() -> Iterator[LoadedModel]:
    """A fresh float32 model of two layers with 20 blocks of 16 positions, on two threads."""
    with random_model("dense", threads=2, kv_tokens=320, max_seq_len=200) as loaded:
        yield loaded


@pytest.fixture
def model(loaded: LoadedModel) -> Model:
    """The twelve groups of ``loaded``."""
    return loaded.model


@pytest.fixture
def cached(loaded: LoadedModel) -> LoadedModel:
    """``loaded`` with a prefix cache, as an engine gives its model one."""
    core = loaded.core
    core.prefix_cache = PrefixCache(core.blocks, core.pools.block_size)
    return loaded


@pytest.fixture(scope="session")
def expected() -> Expected:
    """``expected(ids)``: logits at every position of ``ids``, float64, by definition."""
    checkpoint: Any = RandomCheckpoint(CONFIGS["dense"])
    weights = plain_decoder.load_weights(checkpoint)
    return lambda ids: plain_decoder.logits(checkpoint.config, weights, ids)
