"""Folders of hybrid models with the least sizes that the CUDA kernels take."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

from tests.engine import folders

_DELTA = {
    "vocab_size": 203,
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
    """A model of ``family`` whose states last for dozens of tokens."""
    with mock.patch.dict(folders._HYBRIDS, _SHAPES):
        return folders.write_hybrid(folder, family)
