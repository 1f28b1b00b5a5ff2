"""Every family's decoder in plain NumPy: what ModelConfig and canonical weights mean.

One function per idea, float64, no cache, one prompt. It shows that configuration and weights say
all there is to know about a model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from atlas.architectures import expected_weights
from atlas.architectures.weight_names import is_array
from atlas.config import LayerKind, ModelConfig, MoeConfig
from atlas.layers.rope import rope_table
from atlas.ops.blocks import dequantize
from atlas.weights.checkpoint import Checkpoint
from tests.helpers import plain_recurrent

Doubles = NDArray[np.float64]
Weights = Mapping[str, Doubles]


def load_weights(checkpoint: Checkpoint) -> dict[str, NDArray[np.float32]]:
    """All canonical weights of a checkpoint as float32 arrays."""
    return {
        name: checkpoint.vector(name)
        if is_array(name, shape)
        else dequantize(checkpoint.matrix(name))
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
        for kind in config.layer_blocks(i):
            x = x + _block(config, kind, layer, i, x)
    x = _norm(config, x, weights["final_norm"])
    head = weights["embedding" if config.tie_embeddings else "head"]
    return _softcap(config.final_softcap, x @ head.T)


def _block(
    config: ModelConfig, kind: LayerKind, layer: Weights, layer_idx: int, x: Doubles
) -> Doubles:
    """What a block adds to the residual stream."""
    if kind in ("mlp", "moe"):
        y = _norm(config, x, layer["mlp_norm"])
        y = _experts(config, config.moe, layer, y) if kind == "moe" else _mlp(config, layer, y)
        return _norm(config, y, layer["post_mlp_norm"]) if config.post_norms else y
    if kind == "attention":
        y = _attention(config, layer, layer_idx, _norm(config, x, layer["attention_norm"]))
        return _norm(config, y, layer["post_attention_norm"]) if config.post_norms else y
    y = _norm(config, x, layer["mixer_norm"])
    if config.gated_delta is not None:
        return plain_recurrent.gated_delta(config.gated_delta, config.norm_eps, layer, y)
    assert config.mamba2 is not None
    return plain_recurrent.mamba2(config.mamba2, config.norm_eps, layer, y)


def _norm(config: ModelConfig, x: Doubles, weight: Doubles) -> Doubles:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.norm_eps) * weight


def _softcap(cap: float | None, x: Doubles) -> Doubles:
    return x if cap is None else cap * np.tanh(x / cap)


def _linear(layer: Weights, name: str, x: Doubles) -> Doubles:
    return x @ layer[f"{name}_proj"].T + layer.get(f"{name}_bias", np.zeros(1))


def _attention(config: ModelConfig, layer: Weights, layer_idx: int, x: Doubles) -> Doubles:
    num_tokens, window = len(x), config.windows[layer_idx]
    rope = config.rope_local if window is not None and config.rope_local else config.rope
    gate = _linear(layer, "q_gate", x) if config.attention_gate else None
    q, k, v = (_linear(layer, name, x).reshape(num_tokens, -1, config.head_dim) for name in "qkv")
    if config.qk_norm:
        q, k = _norm(config, q, layer["q_norm"]), _norm(config, k, layer["k_norm"])
    if config.rotary:
        table = rope_table(rope, config.head_dim, num_tokens).astype(np.float64)
        q, k = _rotate(q, table), _rotate(k, table)
    group = config.num_heads // config.num_kv_heads
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("thd,shd->hts", q, k) * config.attention_scale
    scores = _softcap(config.attention_softcap, scores)
    distance = np.arange(num_tokens)[:, None] - np.arange(num_tokens)
    visible = (distance >= 0) & (distance < (window or num_tokens))
    mixed = np.einsum("hts,shd->thd", _softmax(np.where(visible, scores, -np.inf)), v)
    mixed = mixed.reshape(num_tokens, -1)
    return _linear(layer, "o", mixed if gate is None else mixed * _sigmoid(gate))


def _rotate(x: Doubles, table: Doubles) -> Doubles:
    cos, sin = table[:, None, 0], table[:, None, 1]
    half = cos.shape[-1]
    first, second, rest = np.split(x, [half, 2 * half], axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def _sigmoid(x: Doubles) -> Doubles:
    return 1 / (1 + np.exp(-x))


def _softmax(x: Doubles) -> Doubles:
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def _activation(config: ModelConfig) -> Callable[[Doubles], Doubles]:
    if config.activation == "silu":
        return lambda x: x / (1 + np.exp(-x))
    return lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _mlp(config: ModelConfig, layer: Weights, x: Doubles) -> Doubles:
    up = _linear(layer, "up", x)
    if config.activation == "relu_squared":
        return _linear(layer, "down", np.maximum(up, 0) ** 2)
    return _linear(layer, "down", _activation(config)(_linear(layer, "gate", x)) * up)


def _experts(config: ModelConfig, moe: MoeConfig | None, layer: Weights, x: Doubles) -> Doubles:
    assert moe is not None
    scores = x @ layer["router"].T
    probabilities = _softmax(scores) if moe.scoring == "softmax" else _sigmoid(scores)
    inputs = x @ layer["latent.in_proj"].T if moe.latent_size else x
    out = np.zeros_like(inputs)
    names = ("gate", "up", "down") if config.has_mlp_gate else ("up", "down")
    stacks = {
        f"{name}_proj": np.split(layer[f"experts.{name}_proj"], moe.num_experts) for name in names
    }
    for t, row in enumerate(probabilities):
        chosen = _chosen(moe, row + layer.get("router_bias", 0.0))
        shares = row[chosen] / (row[chosen].sum() if moe.normalize_top_k else 1.0) * moe.scale
        for share, expert in zip(shares, chosen, strict=True):
            weights = {name: stack[expert] for name, stack in stacks.items()}
            out[t] += share * _mlp(config, weights, inputs[t])
    if moe.latent_size:
        out = out @ layer["latent.out_proj"].T
    if moe.shared_size:
        own = {name.removeprefix("shared."): w for name, w in layer.items() if "shared." in name}
        shared = _mlp(config, own, x)
        out = out + (shared * _sigmoid(x @ own["router"].T) if moe.shared_gate else shared)
    return out


def _chosen(moe: MoeConfig, choice: Doubles) -> NDArray[np.intp]:
    """The experts of one row, best first, within the best groups."""
    groups = choice.reshape(moe.num_groups, -1)
    worth = np.sort(groups, axis=-1)[:, -2:].sum(-1)
    best = np.argsort(-worth, kind="stable")[: moe.top_groups]
    allowed = np.full_like(groups, -np.inf)
    allowed[best] = groups[best]
    return np.argsort(-allowed.reshape(-1), kind="stable")[: moe.top_k]
