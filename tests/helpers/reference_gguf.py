"""Writes a reference model as a GGUF file, with the names and keys of llama.cpp's converter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from tests.helpers import reference_gguf_hybrid as hybrid
from tests.helpers.reference import ReferenceModel

Floats = NDArray[np.float32]

_ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
}


def write_gguf(
    reference: ReferenceModel,
    path: str | Path,
    *,
    quantize: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    rope_freqs: Floats | None = None,
    mtp: dict[str, Floats] | None = None,
) -> Path:
    """Write `reference` to `path`.

    Matrices are stored as `quantize`, norms and biases in float32; `rope_freqs` takes the place
    of the tensor that llama3 models have; `mtp` are tensors of a multi-token prediction head.
    """
    path = Path(path)
    config = reference.model.config
    if config.model_type in hybrid.ARCHITECTURES:
        writer = gguf.GGUFWriter(str(path), hybrid.architecture(config))
        hybrid.add_metadata(writer, config, num_mtp=1 if mtp else 0)
        tensors = hybrid.tensors(config, reference.weights() | (mtp or {}))
    else:
        writer = gguf.GGUFWriter(str(path), _ARCHITECTURES[config.model_type])
        _add_metadata(writer, config)
        tensors = _tensors(reference)
    if rope_freqs is not None:
        tensors["rope_freqs.weight"] = rope_freqs
    for name, values in tensors.items():
        if values.ndim > 1 and "ssm_" not in name.partition(".ssm_out")[0]:
            writer.add_tensor(name, gguf.quantize(values, quantize), raw_dtype=quantize)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    head_dim = _head_dim(config)
    if head_dim * config.num_attention_heads != config.hidden_size:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    _add_rope(writer, config.rope_parameters)
    if config.model_type in ("llama", "mistral"):
        writer.add_vocab_size(config.vocab_size)
        writer.add_rope_dimension_count(head_dim)
    _add_windows(writer, config)
    if config.model_type == "qwen3_moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_weights_norm(config.norm_topk_prob)
    if config.model_type.startswith("gemma"):
        # The converter relies on head_dim here; these models differ from it.
        writer.add_float32(
            f"{writer.arch}.attention.scale", float(config.query_pre_attn_scalar) ** -0.5
        )
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _add_rope(writer: gguf.GGUFWriter, parameters: dict[str, Any]) -> None:
    if "sliding_attention" in parameters:
        writer.add_rope_freq_base_swa(parameters["sliding_attention"]["rope_theta"])
    rope = parameters.get("full_attention", parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _add_windows(writer: gguf.GGUFWriter, config: Any) -> None:
    window = getattr(config, "sliding_window", None)
    if window is None:
        return
    writer.add_sliding_window(window)
    types = getattr(config, "layer_types", None)
    if types is not None and config.model_type != "gemma2":
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in types])


def _head_dim(config: Any) -> int:
    head_dim = getattr(config, "head_dim", None)
    return int(head_dim or config.hidden_size // config.num_attention_heads)


_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "post_attention_layernorm": "ffn_norm",
}
_GEMMA_NAMES = _NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def _tensors(reference: ReferenceModel) -> dict[str, Floats]:
    config = reference.model.config
    is_gemma = config.model_type.startswith("gemma")
    names = _GEMMA_NAMES if is_gemma else _NAMES
    tensors: dict[str, Floats] = {}
    for name, parameter in reference.model.named_parameters():
        values = parameter.detach().numpy()
        if is_gemma and name.endswith("norm.weight"):
            values = values + np.float32(1)
        if name == "model.embed_tokens.weight":
            tensors["token_embd.weight"] = values
        elif name == "model.norm.weight":
            tensors["output_norm.weight"] = values
        elif name == "lm_head.weight":
            tensors["output.weight"] = values
        else:
            _, _, layer_idx, rest = name.split(".", 3)
            tensors |= _layer_tensors(config, f"blk.{layer_idx}", rest, values, names)
    rope = config.rope_parameters
    if rope.get("rope_type") == "llama3":
        tensors["rope_freqs.weight"] = _llama3_divisors(rope, _head_dim(config))
    return tensors


def _layer_tensors(
    config: Any, block: str, rest: str, values: Floats, names: dict[str, str]
) -> dict[str, Floats]:
    if rest == "mlp.experts.gate_up_proj":
        gate, up = np.split(values, 2, axis=1)
        return {
            f"{block}.ffn_gate_exps.weight": np.ascontiguousarray(gate),
            f"{block}.ffn_up_exps.weight": np.ascontiguousarray(up),
        }
    if rest == "mlp.experts.down_proj":
        return {f"{block}.ffn_down_exps.weight": values}
    module, _, kind = rest.rpartition(".")
    if config.model_type in ("llama", "mistral"):
        if module == "self_attn.q_proj":
            values = _interleave(values, config.num_attention_heads)
        elif module == "self_attn.k_proj":
            values = _interleave(values, config.num_key_value_heads)
    return {f"{block}.{names[module]}.{kind}": values}


def _interleave(values: Floats, num_heads: int) -> Floats:
    """Rows j and j + head_dim / 2 of every head, which RoPE rotates together, side by side."""
    halves = values.reshape(num_heads, 2, -1, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def _llama3_divisors(rope: dict[str, Any], head_dim: int) -> Floats:
    """What llama.cpp divides the frequencies by, as its converter computes it."""
    divisors = []
    for exponent in range(0, head_dim, 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (exponent / head_dim)
        turns = rope["original_max_position_embeddings"] / wavelength
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        keep = min(max((turns - low) / (high - low), 0.0), 1.0)
        divisors.append(1 / ((1 - keep) / rope["factor"] + keep))
    return np.array(divisors, dtype=np.float32)
