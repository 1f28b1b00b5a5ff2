"""Tensor names and layouts of Hugging Face folders."""

from __future__ import annotations

from dataclasses import dataclass

from atlas.architectures.m2m100 import m2m100_sources
from atlas.architectures.weight_names import Shape, expected_weights
from atlas.architectures.weight_sources import (
    Part,
    Source,
    Tensors,
    experts_source,
    split_layer,
)
from atlas.config import GatedDeltaConfig, ModelConfig


@dataclass(frozen=True, slots=True)
class _Names:
    """Names of one style of model: the root's, and a layer's by canonical leaf."""

    roots: tuple[str, ...]  # of which the first that a folder uses is taken
    embedding: str
    final_norm: str
    layer: dict[str, str]
    experts: str  # the module that holds the experts


_ATTENTION = {
    "attention_norm": "input_layernorm.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "q_gate_proj": "self_attn.q_proj.weight",
    "q_gate_bias": "self_attn.q_proj.bias",
    **{f"{x}_proj": f"self_attn.{x}_proj.weight" for x in "qkvo"},
    **{f"{x}_bias": f"self_attn.{x}_proj.bias" for x in "qkvo"},
}
_DEFAULT = _Names(
    ("model", "model.language_model"),
    "embed_tokens.weight",
    "norm.weight",
    {
        **_ATTENTION,
        "mixer_norm": "input_layernorm.weight",
        "mlp_norm": "post_attention_layernorm.weight",
        "router": "mlp.gate.weight",
        "shared.router": "mlp.shared_expert_gate.weight",
        **{f"{x}_proj": f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")},
        **{f"{x}_bias": f"mlp.{x}_proj.bias" for x in ("gate", "up", "down")},
        **{
            f"shared.{x}_proj": f"mlp.shared_expert.{x}_proj.weight" for x in ("gate", "up", "down")
        },
        "delta.conv": "linear_attn.conv1d.weight",
        "delta.decay_log": "linear_attn.A_log",
        "delta.dt_bias": "linear_attn.dt_bias",
        "delta.gated_norm": "linear_attn.norm.weight",
        "delta.out_proj": "linear_attn.out_proj.weight",
    },
    "mlp",
)
_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "post_mlp_norm": "post_feedforward_layernorm.weight",
}


def _mamba(module: str) -> dict[str, str]:
    return {
        "mamba.in_proj": f"{module}.in_proj.weight",
        "mamba.in_bias": f"{module}.in_proj.bias",
        "mamba.conv": f"{module}.conv1d.weight",
        "mamba.conv_bias": f"{module}.conv1d.bias",
        "mamba.decay_log": f"{module}.A_log",
        "mamba.d": f"{module}.D",
        "mamba.dt_bias": f"{module}.dt_bias",
        "mamba.gated_norm": f"{module}.norm.weight",
        "mamba.out_proj": f"{module}.out_proj.weight",
        "mamba.out_bias": f"{module}.out_proj.bias",
    }


_BAMBA = _Names(
    ("model",),
    "embed_tokens.weight",
    "final_layernorm.weight",
    {
        **_ATTENTION,
        **_mamba("mamba"),
        "mixer_norm": "input_layernorm.weight",
        "mlp_norm": "pre_ff_layernorm.weight",
        **{f"{x}_proj": f"feed_forward.{x}_proj.weight" for x in ("gate", "up", "down")},
        **{f"{x}_bias": f"feed_forward.{x}_proj.bias" for x in ("gate", "up", "down")},
    },
    "feed_forward",
)
_MIXER = _Names(  # Mamba-2 and Nemotron-H: a layer is a norm and a mixer
    ("backbone", "model"),
    "embeddings.weight",
    "norm_f.weight",
    {
        **_mamba("mixer"),
        **dict.fromkeys(("attention_norm", "mixer_norm", "mlp_norm"), "norm.weight"),
        **{f"{x}_proj": f"mixer.{x}_proj.weight" for x in ("q", "k", "v", "o", "up", "down")},
        **{f"{x}_bias": f"mixer.{x}_proj.bias" for x in ("q", "k", "v", "o", "up", "down")},
        "router": "mixer.gate.weight",
        "router_bias": "mixer.gate.e_score_correction_bias",
        **{f"shared.{x}_proj": f"mixer.shared_experts.{x}_proj.weight" for x in ("up", "down")},
        "latent.in_proj": "mixer.fc1_latent_proj.weight",
        "latent.out_proj": "mixer.fc2_latent_proj.weight",
    },
    "mixer",
)
_MTP = {
    "mtp.in_proj": "mtp.fc.weight",
    "mtp.embedding_norm": "mtp.pre_fc_norm_embedding.weight",
    "mtp.hidden_norm": "mtp.pre_fc_norm_hidden.weight",
    "mtp.final_norm": "mtp.norm.weight",
}


def huggingface_sources(config: ModelConfig, tensors: Tensors) -> dict[str, Source]:
    """The folder's tensors behind every canonical weight."""
    if config.encoder is not None:
        return m2m100_sources(config, tensors)
    names = _names(config)
    root = _root(names, tensors)
    return {
        name: _source(config, names, root, name, shape, tensors)
        for name, shape in expected_weights(config).items()
    }


def embedding_tensor(config: ModelConfig, tensors: Tensors) -> str:
    """The folder's name of the embedding, whether it is there or not."""
    names = _names(config)
    return f"{_root(names, tensors)}.{names.embedding}"


def _root(names: _Names, tensors: Tensors) -> str:
    return next((r for r in names.roots if f"{r}.{names.embedding}" in tensors), names.roots[0])


def vision_tensors(tensors: Tensors) -> list[str]:
    """Tensors of the vision part of a multimodal folder, which a language model leaves out."""
    return [name for name in tensors if name.startswith(("model.visual.", "visual."))]


def _names(config: ModelConfig) -> _Names:
    if config.mixer_only:
        return _MIXER
    return _BAMBA if config.mamba2 is not None else _DEFAULT


def _source(
    config: ModelConfig, names: _Names, root: str, name: str, shape: Shape, tensors: Tensors
) -> Source:
    is_offset = config.norm_offset and name.endswith("_norm") and not name.endswith("gated_norm")
    offset = 1.0 if is_offset else 0.0
    if name == "head":
        return Source(("lm_head.weight",), shape)
    if name == "embedding":
        tensor = f"{root}.{names.embedding}"
        if config.tie_embeddings and tensor not in tensors and "lm_head.weight" in tensors:
            tensor = "lm_head.weight"  # of two tied tensors a file may keep either
        return Source((tensor,), shape)
    if name == "final_norm":
        return Source((f"{root}.{names.final_norm}",), shape, offset=offset)
    if name in _MTP:
        return Source((_mtp_tensor(config, name),), shape, offset=offset)
    stem, layer_idx, leaf = split_layer(name)
    layer = f"{stem}.{layer_idx}" if stem.startswith("mtp.") else f"{root}.layers.{layer_idx}"
    if config.moe is not None and leaf.startswith("experts."):
        module, gated = f"{layer}.{names.experts}", config.has_mlp_gate
        return experts_source(tensors, config.moe.num_experts, module, leaf, shape, gated)
    if config.gated_delta is not None and leaf in _DELTA_INPUTS:
        return _delta_input(config.gated_delta, f"{layer}.linear_attn", leaf, shape, tensors)
    if config.post_norms and leaf in _SANDWICH:
        return Source((f"{layer}.{_SANDWICH[leaf]}",), shape, offset=offset)
    tensor = f"{layer}.{names.layer[leaf]}"
    if leaf.endswith(".conv"):
        return Source((tensor,), (shape[0], 1, shape[1]))
    if config.attention_gate and leaf in ("q_proj", "q_bias", "q_gate_proj", "q_gate_bias"):
        return gated_query(config, tensor, leaf, shape)
    return Source((tensor,), shape, offset=offset)


def gated_query(config: ModelConfig, tensor: str, leaf: str, shape: Shape) -> Source:
    """Every head's query rows are followed by its gate's."""
    start = config.head_dim if leaf.startswith("q_gate") else 0
    part = Part(config.num_heads, start, start + config.head_dim)
    return Source((tensor,), (2 * shape[0], *shape[1:]), part=part)


def _mtp_tensor(config: ModelConfig, name: str) -> str:
    if not config.mixer_only:
        return _MTP[name]
    last = len(config.mtp_kinds) - 1
    return {
        "mtp.in_proj": "mtp.layers.0.eh_proj.weight",
        "mtp.embedding_norm": "mtp.layers.0.enorm.weight",
        "mtp.hidden_norm": "mtp.layers.0.hnorm.weight",
        "mtp.final_norm": f"mtp.layers.{last}.final_layernorm.weight",
    }[name]


_DELTA_INPUTS = tuple(f"delta.{x}_proj" for x in "qkvzba")


def _delta_input(
    sizes: GatedDeltaConfig, module: str, leaf: str, shape: Shape, tensors: Tensors
) -> Source:
    """Qwen3.5 keeps q | k | v, z, b and a; Qwen3-Next q | k | v | z and b | a by key head."""
    letter = leaf.removeprefix("delta.")[0]
    fused = f"{module}.in_proj_qkvz.weight" in tensors
    cols = shape[1]
    if letter in "ba":
        if not fused:
            return Source((f"{module}.in_proj_{letter}.weight",), shape)
        return key_head_part(f"{module}.in_proj_ba.weight", "ba", sizes, letter, cols)
    if fused:
        return key_head_part(f"{module}.in_proj_qkvz.weight", "qkvz", sizes, letter, cols)
    if letter == "z":
        return Source((f"{module}.in_proj_z.weight",), shape)
    return qkv_part(f"{module}.in_proj_qkv.weight", sizes, letter, cols)


def key_head_part(
    tensor: str, letters: str, sizes: GatedDeltaConfig, letter: str, cols: int
) -> Source:
    """One of the projections that a tensor holds one after the other for each key head."""
    per_key = sizes.num_value_heads // sizes.num_key_heads
    values = per_key * sizes.value_dim
    widths = {"q": sizes.key_dim, "k": sizes.key_dim, "v": values, "z": values}
    widths |= {"b": per_key, "a": per_key}
    start = sum(widths[x] for x in letters[: letters.index(letter)])
    total = sum(widths[x] for x in letters) * sizes.num_key_heads
    part = Part(sizes.num_key_heads, start, start + widths[letter])
    return Source((tensor,), (total, cols), part=part)


def qkv_part(tensor: str, sizes: GatedDeltaConfig, letter: str, cols: int) -> Source:
    """The rows of q, k or v in a tensor that stacks the three."""
    start = "qkv".index(letter) * sizes.key_size
    stop = start + (sizes.value_size if letter == "v" else sizes.key_size)
    return Source((tensor,), (sizes.conv_size, cols), part=Part(1, start, stop))
