"""Checkpoints of any shape with random weights and no file, for benchmarks on a GPU.

Every matrix is a window into one random buffer of 256 MiB, so that 60 GB of weights are made in no
time; windows of different matrices start at different places.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from atlas.architectures import expected_weights
from atlas.config import ModelConfig, MoeConfig, RopeConfig
from atlas.ops.blocks import HostMatrix

_BUFFER_LEN = 128 << 20  # bf16 elements


def _dense(layers: int, hidden: int, heads: int, kv_heads: int, inner: int, **more: Any) -> Any:
    return ModelConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        intermediate_size=inner,
        norm_eps=1e-6,
        max_seq_len=40960,
        **({"architecture": "qwen3", "vocab_size": 151936, "head_dim": 128} | more),
    )


SHAPES: dict[str, ModelConfig] = {
    "qwen3-8b": _dense(36, 4096, 32, 8, 12288, qk_norm=True, rope=RopeConfig(theta=1e6)),
    "llama-3.2-1b": _dense(
        16, 2048, 32, 8, 8192, architecture="llama", vocab_size=128256, head_dim=64,
        tie_embeddings=True, rope=RopeConfig(theta=5e5),
    ),
    "qwen3-30b-a3b": _dense(
        48, 2048, 32, 4, 6144, architecture="qwen3_moe", qk_norm=True, rope=RopeConfig(theta=1e6),
        moe=MoeConfig(128, 8, 768, normalize_top_k=True, sparse_layers=(True,) * 48),
    ),
    "tiny": _dense(2, 256, 4, 2, 512, vocab_size=1024, head_dim=64, qk_norm=True),
}  # fmt: skip
"""Shapes of published models, by short name."""


class RandomCheckpoint:
    """What loading reads of a checkpoint. Weights are bf16, normal, of deviation 0.02."""

    format_name = "random"
    path = "random"
    metadata: dict[str, Any] = {}  # noqa: RUF012 - nothing writes it
    ignored_options: tuple[str, ...] = ()

    def __init__(self, name: str) -> None:
        self.config = SHAPES[name]
        self._name = name
        self._shapes = expected_weights(self.config)
        rng = np.random.default_rng(0)
        values = rng.standard_normal(1 << 20, np.float32) * np.float32(0.02)
        block = (values.view(np.uint32) >> 16).astype(np.uint16)
        largest = max(int(np.prod(shape)) for shape in self._shapes.values())
        copies = -(-(largest + _BUFFER_LEN) // len(block))
        self._buffer = np.tile(block, copies)
        for i in range(copies):  # so that no two blocks are equal
            self._buffer[i * len(block) : (i + 1) * len(block)] = np.roll(block, 4099 * i)

    def __enter__(self) -> RandomCheckpoint:
        return self

    def __exit__(self, *exception: object) -> None:
        """Nothing is open."""

    @property
    def identity(self) -> tuple[tuple[str, int, int], ...]:
        return ((f"random {self._name}", 0, 0),)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights in bf16."""
        return sum(self.stored_bytes(name) for name in self._shapes)

    def bytes_of(self, part: str) -> int:
        """Bytes of the weights whose name contains ``part``."""
        return sum(self.stored_bytes(name) for name in self._shapes if part in name)

    def stored_bytes(self, name: str) -> int:
        return 2 * int(np.prod(self._shapes[name]))

    def weight_formats(self) -> dict[str, str]:
        return {name: "f32" if len(s) == 1 else "bf16" for name, s in self._shapes.items()}

    def matrix(self, name: str) -> HostMatrix:
        rows, cols = self._shapes[name]
        start = zlib.crc32(name.encode()) % (_BUFFER_LEN // 64) * 64
        return HostMatrix(
            "bf16", rows, cols, self._buffer[start : start + rows * cols].reshape(rows, cols)
        )

    def vector(self, name: str) -> np.ndarray:
        (size,) = self._shapes[name]
        return np.full(size, 1.0 if "norm" in name else 0.0, np.float32)

    def release(self, name: str) -> None:
        """Nothing is mapped."""

    def forget_metadata(self) -> None:
        """There is none."""

    def close(self) -> None:
        """Nothing is open."""
