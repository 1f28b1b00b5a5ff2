"""Where each canonical weight lies in a file, and what is done to it on the way in."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from math import prod
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from atlas.architectures import m2m100
from atlas.architectures.dense import family_named
from atlas.architectures.weight_names import Shape, expected_weights
from atlas.config import ModelConfig

FileKind = Literal["gguf", "safetensors"]


@dataclass(frozen=True, slots=True)
class Source:
    """The file's tensors behind one canonical weight.

    Parameters
    ----------
    tensors : tuple of str
        Names in the file; several (one per expert) are stacked by rows.
    shape : tuple of int
        The shape that each of them must have.
    interleaved_heads : int
        Not 0: rows of that many heads are stored in pairs for interleaved RoPE.
    half : int or None
        0 or 1: of each expert's rows, the first half (gate) or the second (up).
    num_experts : int
        Experts in a fused tensor; read with `half`.
    offset : float
        Added to a vector: 1 where the file stores w for a norm that multiplies by 1 + w.
    """

    tensors: tuple[str, ...]
    shape: Shape
    interleaved_heads: int = 0
    half: int | None = None
    num_experts: int = 1
    offset: float = 0.0

    def row_index(self) -> NDArray[np.int64] | None:
        """Rows of the file's tensor in canonical order; None where they already are."""
        rows = np.arange(prod(self.shape[: max(1, len(self.shape) - 1)]))
        if self.interleaved_heads:
            # File row 2j + s of a head is row j of its half s: we rotate half with half.
            return rows.reshape(self.interleaved_heads, -1, 2).swapaxes(1, 2).reshape(-1)
        if self.half is not None:
            return rows.reshape(self.num_experts, 2, -1)[:, self.half].reshape(-1)
        return None


_HUGGINGFACE_GLOBAL = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
}
_HUGGINGFACE_LAYER = {
    "attention_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "router": "mlp.gate.weight",
    **{f"{x}_proj": f"self_attn.{x}_proj.weight" for x in "qkvo"},
    **{f"{x}_bias": f"self_attn.{x}_proj.bias" for x in "qkvo"},
    **{f"{x}_proj": f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")},
    **{f"{x}_bias": f"mlp.{x}_proj.bias" for x in ("gate", "up", "down")},
}
_HUGGINGFACE_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "post_mlp_norm": "post_feedforward_layernorm.weight",
}
_GGUF_GLOBAL = {
    "embedding": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "head": "output.weight",
}
_GGUF_LAYER = {
    "attention_norm": "attn_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "post_attention_norm": "post_attention_norm.weight",
    "post_mlp_norm": "post_ffw_norm.weight",
    "router": "ffn_gate_inp.weight",
    **{f"{x}_proj": f"attn_{x}.weight" for x in "qkv"},
    **{f"{x}_bias": f"attn_{x}.bias" for x in "qkv"},
    "o_proj": "attn_output.weight",
    "o_bias": "attn_output.bias",
    **{f"{x}_proj": f"ffn_{x}.weight" for x in ("gate", "up", "down")},
    **{f"{x}_bias": f"ffn_{x}.bias" for x in ("gate", "up", "down")},
    **{f"experts.{x}_proj": f"ffn_{x}_exps.weight" for x in ("gate", "up", "down")},
}


def sources(config: ModelConfig, kind: FileKind, names: Container[str]) -> dict[str, Source]:
    """The file's tensors behind every canonical weight of `config`.

    `names` are the tensors of the file: Hugging Face folders hold experts one by one or, as
    transformers 5 keeps them in memory, fused.
    """
    if config.encoder is not None:
        return {
            name: Source((m2m100.tensor_name(config, name, names),), shape)
            for name, shape in expected_weights(config).items()
        }
    find = _gguf_source if kind == "gguf" else _huggingface_source
    return {
        name: find(config, name, shape, names) for name, shape in expected_weights(config).items()
    }


def _split(name: str) -> tuple[str, str]:
    """``layers.3.q_proj`` into ``3`` and ``q_proj``."""
    _, layer_idx, leaf = name.split(".", 2)
    return layer_idx, leaf


def _gguf_source(config: ModelConfig, name: str, shape: Shape, names: Container[str]) -> Source:
    if name in _GGUF_GLOBAL:
        return Source((_GGUF_GLOBAL[name],), shape)
    layer_idx, leaf = _split(name)
    tensor = f"blk.{layer_idx}.{_GGUF_LAYER[leaf]}"
    if config.moe is not None and leaf.startswith("experts."):
        experts = config.moe.num_experts
        return Source((tensor,), (experts, shape[0] // experts, shape[1]))
    heads = 0
    if family_named(config.architecture).rows_interleaved_in_gguf:
        if leaf in ("q_proj", "q_bias"):
            heads = config.num_heads
        elif leaf in ("k_proj", "k_bias"):
            heads = config.num_kv_heads
    return Source((tensor,), shape, interleaved_heads=heads)


def _huggingface_source(
    config: ModelConfig, name: str, shape: Shape, names: Container[str]
) -> Source:
    offset = 1.0 if config.norm_offset and name.endswith("_norm") else 0.0
    if name in _HUGGINGFACE_GLOBAL:
        tensor = _HUGGINGFACE_GLOBAL[name]
        if name == "embedding" and config.tie_embeddings and tensor not in names:
            # Of two tied tensors a file may keep either.
            tensor = _HUGGINGFACE_GLOBAL["head"]
        return Source((tensor,), shape, offset=offset)
    layer_idx, leaf = _split(name)
    layer = f"model.layers.{layer_idx}"
    if config.moe is not None and leaf.startswith("experts."):
        return _huggingface_experts(config.moe.num_experts, f"{layer}.mlp", leaf, shape, names)
    table = _HUGGINGFACE_LAYER
    if config.post_norms and leaf in _HUGGINGFACE_SANDWICH:
        table = _HUGGINGFACE_SANDWICH
    return Source((f"{layer}.{table[leaf]}",), shape, offset=offset)


def _huggingface_experts(
    experts: int, mlp: str, leaf: str, shape: Shape, names: Container[str]
) -> Source:
    rows, cols = shape[0] // experts, shape[1]
    if f"{mlp}.experts.gate_up_proj" in names:
        if leaf == "experts.down_proj":
            return Source((f"{mlp}.experts.down_proj",), (experts, rows, cols))
        half = 0 if leaf == "experts.gate_proj" else 1
        return Source(
            (f"{mlp}.experts.gate_up_proj",),
            (experts, 2 * rows, cols),
            half=half,
            num_experts=experts,
        )
    projection = leaf.removeprefix("experts.")
    tensors = tuple(f"{mlp}.experts.{e}.{projection}.weight" for e in range(experts))
    return Source(tensors, (rows, cols))
