"""Checkpoints of any shape with random weights and no file, for benchmarks on a GPU.

Every matrix is a window into one random buffer of 256 MiB, so that 60 GB of weights are made in no
time; windows of different matrices start at different places.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from atlas.architectures import expected_weights
from atlas.architectures.weight_names import is_array
from atlas.config import EncoderConfig, GatedDeltaConfig, ModelConfig, MoeConfig, RopeConfig
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


def _translator(layers: int, hidden: int, heads: int, inner: int, vocab_size: int) -> ModelConfig:
    """An M2M100: as many layers in the encoder as in the decoder."""
    return ModelConfig(
        architecture="m2m_100",
        vocab_size=vocab_size,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        intermediate_size=inner,
        norm_eps=1e-5,
        max_seq_len=1024,
        activation="relu",
        embedding_scale=hidden**0.5,
        tie_embeddings=True,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        encoder=EncoderConfig(
            num_layers=layers,
            num_heads=heads,
            intermediate_size=inner,
            max_source_len=1024,
            padding_token_id=1,
            start_token_id=2,
        ),
        eos_token_ids=(2,),
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
    "qwen3.5-35b-a3b": _dense(
        40, 2048, 16, 2, 0, architecture="qwen3_5_moe", vocab_size=248320, head_dim=256,
        qk_norm=True, attention_gate=True, rope=RopeConfig(theta=1e7, rotary_dim=64),
        layer_kinds=(*("gated_delta",) * 3, "attention") * 10,
        gated_delta=GatedDeltaConfig(16, 32, 128, 128, conv_width=4),
        moe=MoeConfig(
            256, 8, 512, normalize_top_k=True, sparse_layers=(True,) * 40, shared_size=512,
            shared_gate=True,
        ),
    ),
    "tiny-hybrid": _dense(
        4, 256, 4, 2, 0, architecture="qwen3_5_moe", vocab_size=1024, head_dim=64, qk_norm=True,
        attention_gate=True, rope=RopeConfig(rotary_dim=32),
        layer_kinds=(*("gated_delta",) * 3, "attention"),
        gated_delta=GatedDeltaConfig(2, 4, 64, 64, conv_width=4),
        moe=MoeConfig(
            8, 2, 128, normalize_top_k=True, sparse_layers=(True,) * 4, shared_size=128,
            shared_gate=True,
        ),
    ),
    "nllb-200-600m": _translator(12, 1024, 16, 4096, 256_206),
    "tiny-nllb": _translator(2, 128, 2, 256, 1024),
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
        return {name: "f32" if is_array(name, s) else "bf16" for name, s in self._shapes.items()}

    def matrix(self, name: str) -> HostMatrix:
        rows, cols = self._shapes[name]
        start = zlib.crc32(name.encode()) % (_BUFFER_LEN // 64) * 64
        return HostMatrix(
            "bf16", rows, cols, self._buffer[start : start + rows * cols].reshape(rows, cols)
        )

    def vector(self, name: str) -> np.ndarray:
        """Norms and convolutions that keep the size of what they read."""
        shape = self._shapes[name]
        is_norm = "norm" in name and not name.endswith("_bias")
        value = 1.0 if is_norm else 0.5 if name.endswith(".conv") else 0.0
        return np.full(shape, value, np.float32).reshape(-1)

    def release(self, name: str) -> None:
        """Nothing is mapped."""

    def forget_metadata(self) -> None:
        """There is none."""

    def close(self) -> None:
        """Nothing is open."""
