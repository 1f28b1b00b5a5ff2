"""The dense family's decoder in plain NumPy: what ModelConfig and canonical weights mean.

One function per idea, float64, no cache, one prompt. It shows that configuration and weights say
all there is to know about a model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from atlas.architectures import expected_weights
from atlas.config import ModelConfig, MoeConfig
from atlas.layers.rope import rope_table
from atlas.ops.blocks import dequantize
from atlas.weights.checkpoint import Checkpoint

Doubles = NDArray[np.float64]
Weights = Mapping[str, Doubles]


def load_weights(checkpoint: Checkpoint) -> dict[str, NDArray[np.float32]]:
    """All canonical weights of a checkpoint as float32 arrays."""
    return {
        name: checkpoint.vector(name) if len(shape) == 1 else dequantize(checkpoint.matrix(name))
        for name, shape in expected_weights(checkpoint.config).items()
    }


def logits(
    config: ModelConfig, loaded: Mapping[str, NDArray[np.float32]], ids: Sequence[int]
) -> Doubles:
    """Logits at every position: float64 [T, vocab_size]."""
    weights = {name: values.astype(np.float64) for name, values in loaded.items()}
    x = weights["embedding"][list(ids)] * config.embedding_scale
    for i in range(config.num_layers):
        layer = {
            name.removeprefix(f"layers.{i}."): values
            for name, values in weights.items()
            if name.startswith(f"layers.{i}.")
        }
        y = _attention(config, layer, i, _norm(config, x, layer["attention_norm"]))
        if config.post_norms:
            y = _norm(config, y, layer["post_attention_norm"])
        x = x + y
        y = _norm(config, x, layer["mlp_norm"])
        y = _experts(config, config.moe, layer, y) if "router" in layer else _mlp(config, layer, y)
        if config.post_norms:
            y = _norm(config, y, layer["post_mlp_norm"])
        x = x + y
    x = _norm(config, x, weights["final_norm"])
    head = weights["embedding" if config.tie_embeddings else "head"]
    return _softcap(config.final_softcap, x @ head.T)


def _norm(config: ModelConfig, x: Doubles, weight: Doubles) -> Doubles:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.norm_eps) * weight


def _softcap(cap: float | None, x: Doubles) -> Doubles:
    return x if cap is None else cap * np.tanh(x / cap)


def _linear(layer: Weights, name: str, x: Doubles) -> Doubles:
    return x @ layer[f"{name}_proj"].T + layer.get(f"{name}_bias", np.zeros(1))


def _attention(config: ModelConfig, layer: Weights, layer_idx: int, x: Doubles) -> Doubles:
    num_tokens, window = len(x), config.windows[layer_idx]
    rope = config.rope_local if window is not None and config.rope_local else config.rope
    table = rope_table(rope, config.head_dim, num_tokens).astype(np.float64)
    q, k, v = (_linear(layer, name, x).reshape(num_tokens, -1, config.head_dim) for name in "qkv")
    if config.qk_norm:
        q, k = _norm(config, q, layer["q_norm"]), _norm(config, k, layer["k_norm"])
    q, k = _rotate(q, table), _rotate(k, table)
    group = config.num_heads // config.num_kv_heads
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("thd,shd->hts", q, k) * config.attention_scale
    scores = _softcap(config.attention_softcap, scores)
    distance = np.arange(num_tokens)[:, None] - np.arange(num_tokens)
    visible = (distance >= 0) & (distance < (window or num_tokens))
    mixed = np.einsum("hts,shd->thd", _softmax(np.where(visible, scores, -np.inf)), v)
    return _linear(layer, "o", mixed.reshape(num_tokens, -1))


def _rotate(x: Doubles, table: Doubles) -> Doubles:
    cos, sin = table[:, None, 0], table[:, None, 1]
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _softmax(x: Doubles) -> Doubles:
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def _activation(config: ModelConfig) -> Callable[[Doubles], Doubles]:
    if config.activation == "silu":
        return lambda x: x / (1 + np.exp(-x))
    return lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _mlp(config: ModelConfig, layer: Weights, x: Doubles) -> Doubles:
    inner = _activation(config)(_linear(layer, "gate", x)) * _linear(layer, "up", x)
    return _linear(layer, "down", inner)


def _experts(config: ModelConfig, moe: MoeConfig | None, layer: Weights, x: Doubles) -> Doubles:
    assert moe is not None
    probabilities = _softmax(x @ layer["router"].T)
    out = np.zeros_like(x)
    stacks = {
        f"{name}_proj": np.split(layer[f"experts.{name}_proj"], moe.num_experts)
        for name in ("gate", "up", "down")
    }
    for t, row in enumerate(probabilities):
        chosen = np.argsort(-row, kind="stable")[: moe.top_k]
        shares = row[chosen] / (row[chosen].sum() if moe.normalize_top_k else 1.0)
        for share, expert in zip(shares, chosen, strict=True):
            weights = {name: stack[expert] for name, stack in stacks.items()}
            out[t] += share * _mlp(config, weights, x[t])
    return out
