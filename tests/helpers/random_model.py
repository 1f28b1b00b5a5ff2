"""Random models without a file and without torch: any shape, weight format and architecture.

Loading one takes milliseconds, so exactness and contract tests make what they need: windows
shorter than a prompt, softcaps, experts, shapes that no vector width divides.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atlas.architectures import expected_weights
from atlas.config import ModelConfig, MoeConfig
from atlas.model.load import LoadedModel, LoadOptions, load_model
from atlas.ops.blocks import FORMATS, HostMatrix, quantize
from tests.ops.cases import random_matrix

_DENSE = ModelConfig(
    architecture="random",
    vocab_size=203,
    hidden_size=72,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=24,
    intermediate_size=100,
    norm_eps=1e-5,
    max_seq_len=1024,
    qkv_bias=True,
)
# Whole blocks of 256; q and k normalised, because random blocks hold large weights.
_WIDE = replace(_DENSE, hidden_size=256, head_dim=64, intermediate_size=256, qk_norm=True)
_GEMMA = {
    "num_layers": 3,
    "windows": (7, None, 40),
    "activation": "gelu_tanh",
    "attention_softcap": 2.0,
    "final_softcap": 5.0,
    "embedding_scale": 1.5,
    "tie_embeddings": True,
    "qkv_bias": False,
    "post_norms": True,
}


def _moe(width: int) -> dict[str, Any]:
    experts = MoeConfig(5, 2, width, normalize_top_k=True, sparse_layers=(True, False, True))
    return {"num_layers": 3, "windows": (None, 300, 7), "qk_norm": True, "moe": experts}


CONFIGS: dict[str, ModelConfig] = {
    "dense": _DENSE,
    "gemma": replace(_DENSE, **_GEMMA),
    "moe": replace(_DENSE, num_kv_heads=1, **_moe(50)),
    "dense_wide": _WIDE,
    "gemma_wide": replace(_WIDE, **_GEMMA),
    "moe_wide": replace(_WIDE, **_moe(256)),
    "wide_heads": replace(_WIDE, head_dim=128, num_heads=8, qkv_bias=False),
}
"""``*_wide`` shapes suit every quantised format; the others suit no vector width."""


class RandomCheckpoint:
    """What ``load_model`` reads of a checkpoint, drawn at random; equal for equal arguments."""

    format_name = "random"
    path = "random"

    def __init__(self, config: ModelConfig, format: str = "f32", seed: int = 0) -> None:
        self.config = config
        self._format = format
        self._seed = seed
        self._shapes = expected_weights(config)

    @property
    def identity(self) -> tuple[tuple[str, int, int], ...]:
        return ((f"random {self._format}", self._seed, 0),)

    @property
    def nbytes(self) -> int:
        return sum(4 * int(np.prod(shape)) for shape in self._shapes.values())

    def stored_bytes(self, name: str) -> int:
        return 4 * int(np.prod(self._shapes[name]))

    def weight_formats(self) -> dict[str, str]:
        return {name: self._format_of(name) for name in self._shapes}

    def matrix(self, name: str) -> HostMatrix:
        rows, cols = self._shapes[name]
        format, rng = self._format_of(name), self._rng(name)
        if format not in ("f32", "f16", "bf16", "q8_0", "q4_0"):
            return random_matrix(rng, format, rows, cols)
        weights = (rng.standard_normal((rows, cols)) * 0.15).astype(np.float32)
        if format == "bf16":
            return HostMatrix(format, rows, cols, (weights.view(np.uint32) >> 16).astype(np.uint16))
        if format in ("q8_0", "q4_0"):
            return quantize(HostMatrix("f32", rows, cols, weights), format)
        return HostMatrix(format, rows, cols, weights.astype(FORMATS[format].dtype))

    def vector(self, name: str) -> NDArray[np.float32]:
        (size,) = self._shapes[name]
        values = self._rng(name).standard_normal(size) * 0.2 + ("norm" in name)
        return values.astype(np.float32)

    def release(self, name: str) -> None:
        """Nothing is mapped."""

    def close(self) -> None:
        """Nothing is open."""

    def _format_of(self, name: str) -> str:
        return "f32" if len(self._shapes[name]) == 1 or "router" in name else self._format

    def _rng(self, name: str) -> np.random.Generator:
        return np.random.default_rng([self._seed, *name.encode()])


def load_random(
    name: str = "dense", format: str = "f32", *, seed: int = 0, **options: Any
) -> LoadedModel:
    """A new model of ``CONFIGS[name]``; ``options`` are those of ``LoadOptions``."""
    checkpoint: Any = RandomCheckpoint(CONFIGS[name], format, seed)
    return load_model(checkpoint, LoadOptions(**{"max_seq_len": 640, "kv_tokens": 8192} | options))


@cache
def shared_random(name: str, format: str = "f32", **options: Any) -> LoadedModel:
    """As :func:`load_random`, one for the whole session: leave its pools as they were."""
    return load_random(name, format, **options)


@contextmanager
def random_model(name: str = "dense", format: str = "f32", **options: Any) -> Iterator[LoadedModel]:
    """A model that ends with the block."""
    loaded = load_random(name, format, **options)
    try:
        yield loaded
    finally:
        loaded.core.close()
