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


def script_environment(**variables: str) -> dict[str, str]:
    """The environment of a test's own Python process."""
    root = Path(__file__).parents[2]
    paths = [str(root), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))} | variables
