"""Tensor names and layouts of GGUF files: those of llama.cpp's converter."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from atlas.architectures.families import family_named
from atlas.architectures.huggingface_names import gated_query, key_head_part, qkv_part
from atlas.architectures.weight_names import Shape, expected_weights, is_array
from atlas.architectures.weight_sources import Source, Tensors, Tiles, half, split_layer
from atlas.config import GatedDeltaConfig, ModelConfig

_GLOBAL = {
    "embedding": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "head": "output.weight",
}
_MTP = {  # in the first block behind the model's own
    "mtp.in_proj": "nextn.eh_proj.weight",
    "mtp.embedding_norm": "nextn.enorm.weight",
    "mtp.hidden_norm": "nextn.hnorm.weight",
    "mtp.final_norm": "nextn.shared_head_norm.weight",
}
_LAYER = {
    "attention_norm": "attn_norm.weight",
    "mixer_norm": "attn_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "q_gate_proj": "attn_q.weight",
    "q_gate_bias": "attn_q.bias",
    "post_attention_norm": "post_attention_norm.weight",
    "post_mlp_norm": "post_ffw_norm.weight",
    "router": "ffn_gate_inp.weight",
    "router_bias": "exp_probs_b.bias",
    "shared.router": "ffn_gate_inp_shexp.weight",
    "latent.in_proj": "ffn_latent_down.weight",
    "latent.out_proj": "ffn_latent_up.weight",
    **{f"{x}_proj": f"attn_{x}.weight" for x in "qkv"},
    **{f"{x}_bias": f"attn_{x}.bias" for x in "qkv"},
    "o_proj": "attn_output.weight",
    "o_bias": "attn_output.bias",
    **{f"{x}_proj": f"ffn_{x}.weight" for x in ("gate", "up", "down")},
    **{f"{x}_bias": f"ffn_{x}.bias" for x in ("gate", "up", "down")},
    **{f"experts.{x}_proj": f"ffn_{x}_exps.weight" for x in ("gate", "up", "down")},
    **{f"shared.{x}_proj": f"ffn_{x}_shexp.weight" for x in ("gate", "up", "down")},
    "mamba.in_proj": "ssm_in.weight",
    "mamba.in_bias": "ssm_in.bias",
    "mamba.out_bias": "ssm_out.bias",
    **{
        f"{kind}.{leaf}": name
        for kind in ("delta", "mamba")
        for leaf, name in {
            "conv": "ssm_conv1d.weight",
            "conv_bias": "ssm_conv1d.bias",
            "decay_log": "ssm_a",
            "d": "ssm_d",
            "dt_bias": "ssm_dt.bias",
            "gated_norm": "ssm_norm.weight",
            "out_proj": "ssm_out.weight",
        }.items()
    },
}
_DELTA_INPUTS = tuple(f"delta.{x}_proj" for x in "qkvzba")


def gguf_sources(config: ModelConfig, tensors: Tensors) -> dict[str, Source]:
    """The file's tensors behind every canonical weight."""
    return {
        name: _as_stored(name, shape, _source(config, name, shape, tensors), tensors)
        for name, shape in expected_weights(config).items()
    }


def _as_stored(name: str, shape: Shape, source: Source, tensors: Tensors) -> Source:
    """The converter drops or adds dimensions of size 1, and groups a norm's factors."""
    tensor = tensors.get(source.tensors[0])
    if tensor is None or tensor.shape == source.shape:
        return source
    reshaped = is_array(name, shape) or name.endswith("shared.router")
    if reshaped and prod(tensor.shape) == prod(source.shape) and source.part is None:
        return replace(source, shape=tensor.shape)
    return source


def _source(config: ModelConfig, name: str, shape: Shape, tensors: Tensors) -> Source:
    if name in _GLOBAL:
        return Source((_GLOBAL[name],), shape)
    if name in _MTP:
        return Source((f"blk.{config.num_layers}.{_MTP[name]}",), shape)
    stem, layer_idx, leaf = split_layer(name)
    if stem.startswith("mtp."):
        # Nemotron-H's mixers of the head lie in one block, those of others in a block a layer.
        layer_idx = config.num_layers + (0 if config.mixer_only else layer_idx)
    block = f"blk.{layer_idx}"
    if leaf == "mlp_norm":
        return Source((_mlp_norm(config, block, stem, tensors),), shape)
    if config.gated_delta is not None and leaf.startswith("delta."):
        return _delta(config.gated_delta, block, leaf, shape, tensors)
    tensor = f"{block}.{_LAYER[leaf]}"
    if config.moe is not None and leaf.startswith("experts."):
        return _experts(config.moe.num_experts, block, leaf, shape, tensors)
    if config.attention_gate and leaf in ("q_proj", "q_bias", "q_gate_proj", "q_gate_bias"):
        return gated_query(config, tensor, leaf, shape)
    heads = 0
    if family_named(config.architecture).rows_interleaved_in_gguf:
        if leaf in ("q_proj", "q_bias"):
            heads = config.num_heads
        elif leaf in ("k_proj", "k_bias"):
            heads = config.num_kv_heads
    return Source(
        (tensor,), shape, interleaved_heads=heads, is_negated_exp=leaf.endswith("decay_log")
    )


def _mlp_norm(config: ModelConfig, block: str, stem: str, tensors: Tensors) -> str:
    if config.mixer_only and stem == "layers":
        return f"{block}.attn_norm.weight"
    after = f"{block}.post_attention_norm.weight"
    if not config.post_norms and after in tensors:
        return after
    return f"{block}.ffn_norm.weight"


def _experts(num_experts: int, block: str, leaf: str, shape: Shape, tensors: Tensors) -> Source:
    rows, cols = shape[0] // num_experts, shape[1]
    fused = f"{block}.ffn_gate_up_exps.weight"
    projection = leaf.removeprefix("experts.")
    if projection != "down_proj" and fused in tensors:
        part = half(num_experts, rows, projection)
        return Source((fused,), (num_experts, 2 * rows, cols), part=part)
    return Source((f"{block}.{_LAYER[leaf]}",), (num_experts, rows, cols))


def _delta(
    sizes: GatedDeltaConfig, block: str, leaf: str, shape: Shape, tensors: Tensors
) -> Source:
    """Gated delta layers; Qwen3.5's value heads lie in tiles, the output's columns excepted."""
    tiles = None
    if sizes.tiled_values:
        tiles = Tiles(sizes.num_value_heads // sizes.num_key_heads, sizes.num_key_heads)
    if leaf in _DELTA_INPUTS:
        return _delta_input(sizes, tiles, block, leaf, shape, tensors)
    source = Source((f"{block}.{_LAYER[leaf]}",), shape)
    if leaf == "delta.conv" and tiles is not None:
        return replace(source, tiles=replace(tiles, first=2 * sizes.key_size))
    if leaf == "delta.decay_log":
        return replace(source, tiles=tiles, is_negated_exp=True)
    return replace(source, tiles=tiles) if leaf == "delta.dt_bias" else source


def _delta_input(
    sizes: GatedDeltaConfig,
    tiles: Tiles | None,
    block: str,
    leaf: str,
    shape: Shape,
    tensors: Tensors,
) -> Source:
    letter, cols = leaf.removeprefix("delta.")[0], shape[1]
    if letter in "ba":
        fused = f"{block}.ssm_ba.weight"
        if fused in tensors:
            return key_head_part(fused, "ba", sizes, letter, cols)
        name = "ssm_beta" if letter == "b" else "ssm_alpha"
        return Source((f"{block}.{name}.weight",), shape, tiles=tiles)
    fused = f"{block}.ssm_in.weight"  # as files of Qwen3-Next's first weeks have it
    if fused in tensors:
        return key_head_part(fused, "qkvz", sizes, letter, cols)
    if letter == "z":
        return Source((f"{block}.attn_gate.weight",), shape, tiles=tiles)
    source = qkv_part(f"{block}.attn_qkv.weight", sizes, letter, cols)
    return replace(source, tiles=tiles) if letter == "v" else source
