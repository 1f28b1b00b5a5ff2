"""Folders of hybrids and of a translator with the least sizes that the CUDA kernels take."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from atlas.architectures.huggingface_config import config_from_huggingface
from atlas.architectures.huggingface_names import huggingface_sources
from atlas.architectures.m2m100 import config_from_m2m100, m2m100_sources
from tests.kernels.launches import rounded

_DELTA = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "partial_rotary_factor": 0.5,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "mtp_num_hidden_layers": 0,
    "max_position_embeddings": 512,
}
_SHAPES = {
    "qwen3_5": _DELTA | {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"},
    "small_heads": _DELTA
    | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    },
    "qwen3_5_moe": _DELTA
    | {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "mtp_num_hidden_layers": 1,
    },
    "qwen3_5_moe_apart": _DELTA
    | {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 128,
    },
    "bamba": {
        "architectures": ["BambaForCausalLM"],
        "model_type": "bamba",
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 3,
        "attn_layer_indices": [1],
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "mamba_n_heads": 4,
        "mamba_d_head": 64,
        "mamba_n_groups": 2,
        "mamba_d_state": 64,
        "mamba_d_conv": 4,
        "max_position_embeddings": 512,
    },
}


def write_cuda_hybrid(folder: Path, family: str) -> Path:
    """A model with random weights whose states last for dozens of tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    mapping = _SHAPES[family] | {"vocab_size": 203, "eos_token_id": 2, "bos_token_id": 1}
    (folder / "config.json").write_text(json.dumps(mapping))
    rng = np.random.default_rng(0)
    tensors = {}
    config, _ = config_from_huggingface(mapping)
    for source in huggingface_sources(config, {}).values():
        for name in source.tensors:
            values = rng.standard_normal(source.shape)
            if name.endswith("A_log"):
                values = 0.5 * values - 3.0
            elif "norm" in name:
                values = values + (name.endswith("linear_attn.norm.weight") or family == "bamba")
            else:
                values = (0.5 if "conv" in name else 0.15) * values
            tensors[name] = values.astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    return folder


_TRANSLATOR = {
    "architectures": ["M2M100ForConditionalGeneration"],
    "model_type": "m2m_100",
    "vocab_size": 5003,
    "d_model": 128,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 192,
    "decoder_ffn_dim": 136,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}


def write_cuda_translator(folder: Path, **changes: object) -> Path:
    """An M2M100 with random weights whose translations vary, and whose choices are clear."""
    folder.mkdir(parents=True, exist_ok=True)
    mapping = _TRANSLATOR | changes
    (folder / "config.json").write_text(json.dumps(mapping))
    rng = np.random.default_rng(3)
    config, _ = config_from_m2m100(mapping)
    tensors = {}
    for name, source in m2m100_sources(config, ()).items():
        values = rng.standard_normal(source.shape)
        if name == "final_norm":
            values = 3.0 + values
        elif name.endswith("_norm"):
            values = 1.0 + 0.2 * values
        elif name == "embedding":
            values = 0.1 * values
        else:
            values = 0.15 * values
        tensors[source.tensors[0]] = rounded(values, "bf16")  # as the GPU has them
    save_file(tensors, folder / "model.safetensors")
    return folder
