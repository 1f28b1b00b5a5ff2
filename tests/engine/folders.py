"""Tiny random model folders, made with NumPy alone, with or without a tokenizer."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from atlas.architectures.huggingface_config import config_from_huggingface
from atlas.architectures.huggingface_names import huggingface_sources
from tests.text.vocabularies import write_folder

VOCAB_SIZE = 203
EOS = 2
HEAD_DIM = 64 if os.environ.get("ATLAS_DEVICE") == "cuda" else 16  # the least that kernels take
_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "hidden_act": "silu",
}


def weights(vocab_size: int, seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Weights large enough that greedy text varies."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> NDArray[np.float32]:
        return (rng.standard_normal(shape) * 0.15).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": normal(vocab_size, 64),
        "model.norm.weight": 1 + normal(64),
        "lm_head.weight": normal(vocab_size, 64),
    }
    for i in range(2):
        prefix = f"model.layers.{i}."
        for name, shape in {
            "self_attn.q_proj": (4 * HEAD_DIM, 64),
            "self_attn.k_proj": (2 * HEAD_DIM, 64),
            "self_attn.v_proj": (2 * HEAD_DIM, 64),
            "self_attn.o_proj": (64, 4 * HEAD_DIM),
            "mlp.gate_proj": (96, 64),
            "mlp.up_proj": (96, 64),
            "mlp.down_proj": (64, 96),
        }.items():
            tensors[f"{prefix}{name}.weight"] = normal(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = 1 + normal(64)
    return tensors


def write_model(
    folder: Path,
    *,
    vocab_size: int = VOCAB_SIZE,
    eos: int = EOS,
    seed: int = 0,
    replaced: Mapping[str, NDArray[np.float32]] | None = None,
    library: Tokenizer | None = None,
    **tokenizer_config: object,
) -> Path:
    """Write a model to ``folder``; ``replaced`` tensors stand in for the random ones."""
    folder.mkdir(parents=True, exist_ok=True)
    config = _CONFIG | {"vocab_size": vocab_size, "eos_token_id": eos}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights(vocab_size, seed) | dict(replaced or {}), folder / "model.safetensors")
    if library is not None:
        write_folder(folder, library, **tokenizer_config)
    return folder


_HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "partial_rotary_factor": 0.5,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 20,
        "linear_value_head_dim": 28,
        "linear_conv_kernel_dim": 4,
        "mtp_num_hidden_layers": 0,
        "max_position_embeddings": 512,
    },
    "bamba": {
        "architectures": ["BambaForCausalLM"],
        "model_type": "bamba",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "attn_layer_indices": [1],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_n_groups": 2,
        "mamba_d_state": 20,
        "mamba_d_conv": 3,
        "max_position_embeddings": 512,
    },
}


def write_hybrid(
    folder: Path,
    family: str = "qwen3_5",
    *,
    vocab_size: int = VOCAB_SIZE,
    eos: int = EOS,
    seed: int = 0,
    library: Tokenizer | None = None,
    **tokenizer_config: object,
) -> Path:
    """A model with recurrent layers, whose states last for dozens of tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    mapping = _HYBRIDS[family] | {"vocab_size": vocab_size, "eos_token_id": eos, "bos_token_id": 1}
    (folder / "config.json").write_text(json.dumps(mapping))
    rng = np.random.default_rng(seed)
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
    if library is not None:
        write_folder(folder, library, **tokenizer_config)
    return folder


def script_environment(**variables: str) -> dict[str, str]:
    """The environment of a test's own Python process."""
    root = Path(__file__).parents[2]
    paths = [str(root), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))} | variables
