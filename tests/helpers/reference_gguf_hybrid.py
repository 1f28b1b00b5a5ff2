"""Hybrid reference models in GGUF: keys, names and layouts of llama.cpp's converter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

ARCHITECTURES = {
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "mamba2": "mamba2",
    "nemotron_h": "nemotron_h",
    "bamba": "granitehybrid",
}
_MIXER = {
    "in_proj": "ssm_in",
    "conv1d": "ssm_conv1d",
    "out_proj": "ssm_out",
    "norm": "ssm_norm",
}
_ATTENTION = {
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
}
_FEED_FORWARD = {
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
    "gate": "ffn_gate_inp",
    "shared_expert_gate": "ffn_gate_inp_shexp",
    "fc1_latent_proj": "ffn_latent_down",
    "fc2_latent_proj": "ffn_latent_up",
}
_MTP = {
    "mtp.fc.weight": "nextn.eh_proj.weight",
    "mtp.pre_fc_norm_embedding.weight": "nextn.enorm.weight",
    "mtp.pre_fc_norm_hidden.weight": "nextn.hnorm.weight",
    "mtp.norm.weight": "nextn.shared_head_norm.weight",
}
_NORMS = {
    "input_layernorm.weight": "attn_norm.weight",
    "norm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_ff_layernorm.weight": "ffn_norm.weight",
}
_PER_HEAD = {
    "A_log": "ssm_a",
    "D": "ssm_d",
    "dt_bias": "ssm_dt.bias",
    "e_score_correction_bias": "exp_probs_b.bias",
}


def architecture(config: Any) -> str:
    """``general.architecture`` of a model."""
    name = ARCHITECTURES[config.model_type]
    return f"{name}_moe" if name == "nemotron_h" and "moe" in config.layers_block_type else name


def add_metadata(writer: gguf.GGUFWriter, config: Any, num_mtp: int = 0) -> None:
    """Every key of the architecture."""
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers + num_mtp)
    if num_mtp:
        writer.add_nextn_predict_layers(num_mtp)
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    {
        "mamba2": _mamba2_metadata,
        "nemotron_h": _nemotron_metadata,
        "bamba": _bamba_metadata,
    }.get(config.model_type, _qwen_metadata)(writer, config)


def _qwen_metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if hasattr(config, "intermediate_size"):
        writer.add_feed_forward_length(config.intermediate_size)
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    writer.add_full_attention_interval(4)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(config.head_dim * rope["partial_rotary_factor"]))
    if config.model_type != "qwen3_next":
        writer.add_rope_dimension_sections([*rope.get("mrope_section", [11, 11, 10]), 0])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if hasattr(config, "num_experts"):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def _mamba2_metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_context_length(2**20)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    _add_ssm(
        writer, config.conv_kernel, config.state_size, config.n_groups, config.num_heads,
        config.head_dim,
    )  # fmt: skip


def _nemotron_metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    kinds = config.layers_block_type
    writer.add_context_length(config.max_position_embeddings)
    writer.add_head_count(config.num_attention_heads)
    kv_heads = config.num_key_value_heads
    writer.add_head_count_kv([kv_heads if kind == "full_attention" else 0 for kind in kinds])
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    writer.add_rope_scaling_finetuned(False)
    writer.add_rope_dimension_count(config.head_dim)
    _add_ssm(
        writer, config.conv_kernel, config.ssm_state_size, config.n_groups,
        config.mamba_num_heads, config.mamba_head_dim,
    )  # fmt: skip
    if "moe" not in kinds:
        width = config.intermediate_size
        writer.add_feed_forward_length([width if kind == "mlp" else 0 for kind in kinds])
        return
    width = config.moe_intermediate_size
    writer.add_feed_forward_length([width if kind == "moe" else 0 for kind in kinds])
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(width)
    writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_group_count(config.n_group)
    writer.add_expert_group_used_count(config.topk_group)
    if config.moe_latent_size:
        writer.add_moe_latent_size(config.moe_latent_size)


def _bamba_metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    attends = config.attn_layer_indices
    kv_heads, layers = config.num_key_value_heads, range(config.num_hidden_layers)
    head_dim = config.hidden_size // config.num_attention_heads
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv([kv_heads if i in attends else 0 for i in layers])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(head_dim // 2)
    writer.add_rope_scaling_finetuned(True)
    _add_ssm(
        writer, config.mamba_d_conv, config.mamba_d_state, config.mamba_n_groups,
        config.mamba_n_heads, config.mamba_d_head,
    )  # fmt: skip


def _add_ssm(
    writer: gguf.GGUFWriter, taps: int, state: int, groups: int, heads: int, head_dim: int
) -> None:
    writer.add_ssm_conv_kernel(taps)
    writer.add_ssm_state_size(state)
    writer.add_ssm_group_count(groups)
    writer.add_ssm_inner_size(heads * head_dim)
    writer.add_ssm_time_step_rank(heads)


def tensors(config: Any, weights: dict[str, Floats]) -> dict[str, Floats]:
    """The file's tensors for a model's parameters and buffers, by their names in transformers."""
    found: dict[str, Floats] = {}
    for name, values in weights.items():
        if name in _MTP:
            block = f"blk.{config.num_hidden_layers}"
            found[f"{block}.{_MTP[name]}"] = values + _one_plus(config, name)
            continue
        name = name.replace("mtp.layers.0.", f"model.layers.{config.num_hidden_layers}.")
        leaf = name.removesuffix(".weight").rpartition(".")[2]
        if leaf in ("embed_tokens", "embeddings"):
            found["token_embd.weight"] = values
        elif name == "lm_head.weight":
            found["output.weight"] = values
        elif ".layers." not in name:
            found["output_norm.weight"] = values + _one_plus(config, name)
        else:
            _, _, rest = name.partition(".layers.")
            layer_idx, _, path = rest.partition(".")
            for tensor, stored in _layer(config, path, values):
                found[f"blk.{layer_idx}.{tensor}"] = np.ascontiguousarray(stored, np.float32)
    return found


def _one_plus(config: Any, name: str) -> float:
    # The converter names the head's norms enorm and hnorm before it adds the 1.
    is_norm = name.endswith("norm.weight") or name.startswith("mtp.pre_fc_norm")
    is_qwen = config.model_type.startswith("qwen3")
    return float(is_qwen and is_norm and not name.endswith("linear_attn.norm.weight"))


def _layer(config: Any, path: str, values: Floats) -> Iterator[tuple[str, Floats]]:
    module, _, leaf = path.rpartition(".")
    if leaf in ("weight", "bias"):
        part = module.rpartition(".")[2]
    else:
        part, leaf = leaf, "weight"
    if path in _NORMS:
        yield _NORMS[path], values + _one_plus(config, path)
    elif part in _PER_HEAD:
        yield _PER_HEAD[part], _heads(config, part, values)
    elif "experts" in module or "shared_expert." in module:
        yield from _experts(module, part, values)
    elif "linear_attn" in module:
        yield from _linear_attention(config, part, values)
    elif part in _MIXER:
        yield f"{_MIXER[part]}.{leaf}", _mixer(config, part, leaf, values)
    elif part in _ATTENTION:
        yield f"{_ATTENTION[part]}.{leaf}", _attention(config, part, values)
    else:
        yield f"{_FEED_FORWARD[part]}.{leaf}", values


def _experts(module: str, part: str, values: Floats) -> Iterator[tuple[str, Floats]]:
    if "shared" in module:
        yield f"{_FEED_FORWARD[part]}_shexp.weight", values
    elif part == "gate_up_proj":
        gate, up = np.split(values, 2, axis=1)
        yield "ffn_gate_exps.weight", gate
        yield "ffn_up_exps.weight", up
    else:
        yield f"{_FEED_FORWARD[part]}_exps.weight", values


def _mixer(config: Any, part: str, leaf: str, values: Floats) -> Floats:
    if part == "conv1d" and leaf == "weight":
        return values[:, 0]
    if part == "norm":
        groups = getattr(config, "n_groups", None) or config.mamba_n_groups
        return values.reshape(groups, -1)
    return values


def _attention(config: Any, part: str, values: Floats) -> Floats:
    if part.endswith("_norm"):
        return values + 1
    if config.model_type == "bamba" and part in ("q_proj", "k_proj"):
        is_query = part == "q_proj"
        heads = config.num_attention_heads if is_query else config.num_key_value_heads
        halves = values.reshape(heads, 2, -1, *values.shape[1:])
        return halves.swapaxes(1, 2).reshape(values.shape)
    return values


def _heads(config: Any, part: str, values: Floats) -> Floats:
    """A number a head: one column for Mamba-2, in tiles for Qwen3.5."""
    if part == "A_log":
        values = -np.exp(values)
    if hasattr(config, "linear_num_key_heads"):
        return _tile(config, 1)(values)
    return values[:, None] if part in ("A_log", "D") else values


def _tile(config: Any, size: int) -> Callable[[Floats], Floats]:
    """Value heads of each key head to value head j of every key head in turn, along axis 0."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads

    def tile(stored: Floats) -> Floats:
        if config.model_type == "qwen3_next":
            return stored
        heads = stored.reshape(keys, values // keys, size, *stored.shape[1:])
        return heads.swapaxes(0, 1).reshape(stored.shape)

    return tile


def _linear_attention(config: Any, part: str, values: Floats) -> Iterator[tuple[str, Floats]]:
    value_dim, keys = config.linear_value_head_dim, config.linear_num_key_heads
    key_size = keys * config.linear_key_head_dim
    tile, tile_heads = _tile(config, value_dim), _tile(config, 1)
    if part == "conv1d":
        taps = values[:, 0]
        yield (
            "ssm_conv1d.weight",
            np.concatenate([taps[: 2 * key_size], tile(taps[2 * key_size :])]),
        )
    elif part == "norm":
        yield "ssm_norm.weight", values
    elif part == "out_proj":
        yield "ssm_out.weight", tile(values.T).T
    elif part == "in_proj_qkv":
        split = 2 * key_size
        yield "attn_qkv.weight", np.concatenate([values[:split], tile(values[split:])])
    elif part == "in_proj_z":
        yield "attn_gate.weight", tile(values)
    elif part in ("in_proj_b", "in_proj_a"):
        yield f"ssm_{'beta' if part[-1] == 'b' else 'alpha'}.weight", tile_heads(values)
    elif part == "in_proj_ba":
        yield "ssm_ba.weight", values
    else:  # in_proj_qkvz: q | k | v | z of each key head
        width = config.linear_num_value_heads // keys * value_dim
        key_dim = config.linear_key_head_dim
        groups = values.reshape(keys, -1, values.shape[1])
        ends = [key_dim, 2 * key_dim, 2 * key_dim + width]
        q, k, v, z = (
            group.reshape(-1, values.shape[1]) for group in np.split(groups, ends, axis=1)
        )
        yield "attn_qkv.weight", np.concatenate([q, k, v])
        yield "attn_gate.weight", z
