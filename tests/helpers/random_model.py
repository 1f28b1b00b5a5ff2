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
from atlas.architectures.weight_names import is_array
from atlas.config import GatedDeltaConfig, Mamba2Config, ModelConfig, MoeConfig, RopeConfig
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
    "layer_kinds": (),
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
    layers = {"num_layers": 3, "layer_kinds": (), "windows": (None, 300, 7)}
    return layers | {"qk_norm": True, "moe": experts}


_DELTA: dict[str, Any] = {
    "num_layers": 3,
    "layer_kinds": ("gated_delta", "attention", "gated_delta"),
    "windows": (),
    "qkv_bias": False,
    "qk_norm": True,
    "attention_gate": True,
    "gated_delta": GatedDeltaConfig(2, 6, key_dim=20, value_dim=28, conv_width=4),
    "rope": RopeConfig(rotary_dim=8),
}
_MAMBA: dict[str, Any] = {
    "num_layers": 3,
    "layer_kinds": ("mamba2", "attention", "mamba2"),
    "windows": (),
    "qkv_bias": False,
    "mamba2": Mamba2Config(6, head_dim=12, state_size=20, num_groups=2, conv_width=3),
}
_MIXERS: dict[str, Any] = _MAMBA | {
    "num_layers": 5,
    "layer_kinds": ("mamba2", "moe", "attention", "mlp", "mamba2"),
    "mixer_only": True,
    "activation": "relu_squared",
    "rotary": False,
    "moe": MoeConfig(
        8, 3, 40, normalize_top_k=True,
        sparse_layers=(False, True, False, False, False),
        scoring="sigmoid", selection_bias=True, scale=2.5, num_groups=4, top_groups=2,
        shared_size=28, latent_size=36,
    ),
}  # fmt: skip
_DELTA_MOE: dict[str, Any] = _DELTA | {
    "moe": MoeConfig(
        5, 2, 50, normalize_top_k=True, sparse_layers=(True, False, True),
        shared_size=30, shared_gate=True,
    )
}  # fmt: skip


CONFIGS: dict[str, ModelConfig] = {
    "dense": _DENSE,
    "gemma": replace(_DENSE, **_GEMMA),
    "moe": replace(_DENSE, num_kv_heads=1, **_moe(50)),
    "dense_wide": _WIDE,
    "gemma_wide": replace(_WIDE, **_GEMMA),
    "moe_wide": replace(_WIDE, **_moe(256)),
    "wide_heads": replace(_WIDE, head_dim=128, num_heads=8, qkv_bias=False),
    "delta": replace(_DENSE, **_DELTA),
    "delta_moe": replace(_DENSE, **_DELTA_MOE),
    "delta_last": replace(
        _DENSE, **_DELTA | {"layer_kinds": ("gated_delta", "gated_delta", "attention")}
    ),
    "mamba": replace(_DENSE, **_MAMBA),
    "mixers": replace(_DENSE, **_MIXERS),
    "mamba_alone": replace(
        _DENSE,
        **_MAMBA | {"layer_kinds": ("mamba2",) * 3, "mixer_only": True, "rotary": False},
        intermediate_size=0,
        **dict.fromkeys(("num_heads", "num_kv_heads", "head_dim"), 0),
    ),
    "delta_wide": replace(
        _WIDE, **_DELTA | {"gated_delta": GatedDeltaConfig(2, 4, 64, 64, 4), "qk_norm": True}
    ),
}
"""``*_wide`` shapes suit every quantised format; the others suit no vector width.

``delta`` and, with attention at the end as there, ``delta_last`` are arranged as Qwen3.5, ``mamba``
as Bamba, ``mixers`` as Nemotron-H.
"""


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
        values = self._rng(name).standard_normal(int(np.prod(self._shapes[name])))
        if name.endswith("decay_log"):
            values = 0.5 * values - 3.0  # states that last for dozens of tokens
        elif not name.endswith("conv"):
            values = 0.2 * values + ("norm" in name)
        return values.astype(np.float32)

    def release(self, name: str) -> None:
        """Nothing is mapped."""

    def close(self) -> None:
        """Nothing is open."""

    def _format_of(self, name: str) -> str:
        is_float = is_array(name, self._shapes[name]) or "router" in name
        return "f32" if is_float else self._format

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
