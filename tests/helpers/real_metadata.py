"""GGUF metadata of real models as llama.cpp's converter writes it, without the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

SMOLLM2: dict[str, Any] = {
    "general.architecture": "llama",
    "general.type": "model",
    "general.name": "Smollm2 135M",
    "llama.block_count": 30,
    "llama.context_length": 8192,
    "llama.embedding_length": 576,
    "llama.feed_forward_length": 1536,
    "llama.attention.head_count": 9,
    "llama.attention.head_count_kv": 3,
    "llama.rope.freq_base": 100000.0,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.vocab_size": 49152,
    "llama.rope.dimension_count": 64,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}
QWEN3_MOE: dict[str, Any] = {
    "general.architecture": "qwen3moe",
    "qwen3moe.block_count": 48,
    "qwen3moe.context_length": 40960,
    "qwen3moe.embedding_length": 2048,
    "qwen3moe.feed_forward_length": 6144,
    "qwen3moe.attention.head_count": 32,
    "qwen3moe.attention.head_count_kv": 4,
    "qwen3moe.attention.key_length": 128,
    "qwen3moe.attention.value_length": 128,
    "qwen3moe.rope.freq_base": 1000000.0,
    "qwen3moe.attention.layer_norm_rms_epsilon": 1e-6,
    "qwen3moe.expert_count": 128,
    "qwen3moe.expert_used_count": 8,
    "qwen3moe.expert_feed_forward_length": 768,
    "tokenizer.ggml.bos_token_id": 11,
    "tokenizer.ggml.eos_token_id": 12,
}
GEMMA2_27B: dict[str, Any] = {
    "general.architecture": "gemma2",
    "gemma2.block_count": 46,
    "gemma2.context_length": 8192,
    "gemma2.embedding_length": 4608,
    "gemma2.feed_forward_length": 36864,
    "gemma2.attention.head_count": 32,
    "gemma2.attention.head_count_kv": 16,
    "gemma2.attention.key_length": 128,
    "gemma2.attention.value_length": 128,
    "gemma2.attention.layer_norm_rms_epsilon": 1e-6,
    "gemma2.attn_logit_softcapping": 50.0,
    "gemma2.final_logit_softcapping": 30.0,
    "gemma2.attention.sliding_window": 4096,
    "tokenizer.ggml.bos_token_id": 2,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.ggml.eot_token_id": 107,
}
GEMMA3_4B: dict[str, Any] = {
    "general.architecture": "gemma3",
    "gemma3.block_count": 34,
    "gemma3.context_length": 131072,
    "gemma3.embedding_length": 2560,
    "gemma3.feed_forward_length": 10240,
    "gemma3.attention.head_count": 8,
    "gemma3.attention.head_count_kv": 4,
    "gemma3.attention.key_length": 256,
    "gemma3.attention.value_length": 256,
    "gemma3.attention.layer_norm_rms_epsilon": 1e-6,
    "gemma3.attention.sliding_window": 1024,
    "gemma3.rope.freq_base": 1000000.0,
    "gemma3.rope.scaling.type": "linear",
    "gemma3.rope.scaling.factor": 8.0,
    "tokenizer.ggml.bos_token_id": 2,
    "tokenizer.ggml.eos_token_id": 1,
}
QWEN35_MOE: dict[str, Any] = {
    "general.architecture": "qwen35moe",
    "general.type": "model",
    "qwen35moe.block_count": 41,
    "qwen35moe.nextn_predict_layers": 1,
    "qwen35moe.context_length": 262144,
    "qwen35moe.embedding_length": 2048,
    "qwen35moe.attention.head_count": 16,
    "qwen35moe.attention.head_count_kv": 2,
    "qwen35moe.attention.key_length": 256,
    "qwen35moe.attention.value_length": 256,
    "qwen35moe.attention.layer_norm_rms_epsilon": 1e-6,
    "qwen35moe.rope.freq_base": 1e7,
    "qwen35moe.rope.dimension_count": 64,
    "qwen35moe.rope.dimension_sections": np.array([11, 11, 10, 0], np.int32),
    "qwen35moe.expert_count": 256,
    "qwen35moe.expert_used_count": 8,
    "qwen35moe.expert_feed_forward_length": 512,
    "qwen35moe.expert_shared_feed_forward_length": 512,
    "qwen35moe.ssm.conv_kernel": 4,
    "qwen35moe.ssm.state_size": 128,
    "qwen35moe.ssm.group_count": 16,
    "qwen35moe.ssm.time_step_rank": 32,
    "qwen35moe.ssm.inner_size": 4096,
    "qwen35moe.full_attention_interval": 4,
    "tokenizer.ggml.eos_token_id": 1000,
}
MAMBA2: dict[str, Any] = {
    "general.architecture": "mamba2",
    "mamba2.block_count": 64,
    "mamba2.context_length": 1048576,
    "mamba2.embedding_length": 4096,
    "mamba2.feed_forward_length": 0,
    "mamba2.attention.head_count": 0,
    "mamba2.attention.layer_norm_rms_epsilon": 1e-5,
    "mamba2.ssm.conv_kernel": 4,
    "mamba2.ssm.inner_size": 8192,
    "mamba2.ssm.state_size": 128,
    "mamba2.ssm.time_step_rank": 128,
    "mamba2.ssm.group_count": 8,
}
NEMOTRON_H_MOE: dict[str, Any] = {
    "general.architecture": "nemotron_h_moe",
    "nemotron_h_moe.block_count": 6,
    "nemotron_h_moe.context_length": 262144,
    "nemotron_h_moe.embedding_length": 2688,
    "nemotron_h_moe.feed_forward_length": np.array([0, 1856, 0, 1856, 0, 1856], np.int32),
    "nemotron_h_moe.attention.head_count": 32,
    "nemotron_h_moe.attention.head_count_kv": np.array([0, 0, 2, 0, 0, 0], np.int32),
    "nemotron_h_moe.attention.key_length": 128,
    "nemotron_h_moe.attention.value_length": 128,
    "nemotron_h_moe.attention.layer_norm_rms_epsilon": 1e-5,
    "nemotron_h_moe.ssm.conv_kernel": 4,
    "nemotron_h_moe.ssm.inner_size": 4096,
    "nemotron_h_moe.ssm.state_size": 128,
    "nemotron_h_moe.ssm.time_step_rank": 64,
    "nemotron_h_moe.ssm.group_count": 8,
    "nemotron_h_moe.expert_count": 128,
    "nemotron_h_moe.expert_used_count": 6,
    "nemotron_h_moe.expert_feed_forward_length": 1856,
    "nemotron_h_moe.expert_shared_feed_forward_length": 3712,
    "nemotron_h_moe.expert_shared_count": 1,
    "nemotron_h_moe.expert_weights_norm": True,
    "nemotron_h_moe.expert_weights_scale": 2.5,
    "nemotron_h_moe.expert_group_count": 1,
    "nemotron_h_moe.rope.scaling.finetuned": False,
}
METADATA = {
    "smollm2": SMOLLM2,
    "qwen3_moe": QWEN3_MOE,
    "gemma2": GEMMA2_27B,
    "gemma3": GEMMA3_4B,
    "qwen35moe": QWEN35_MOE,
    "mamba2": MAMBA2,
    "nemotron_h_moe": NEMOTRON_H_MOE,
}
_MIXERS: dict[str, tuple[str, ...]] = {  # a tensor of each layer that says what it is, repeated
    "qwen35moe": ("ssm_beta", "ssm_beta", "ssm_beta", "attn_q"),
    "mamba2": ("ssm_in",),
    "nemotron_h_moe": ("ssm_in", "ffn_gate_inp", "attn_q", "ffn_gate_inp", "ssm_in", "ffn_up"),
}


@dataclass(frozen=True)
class Entry:
    """A line of a file's tensor table."""

    shape: tuple[int, ...]


def tensors_for(metadata: dict[str, Any], *extra: str) -> dict[str, Entry]:
    """As much of a tensor table as the configuration looks at; `extra` names are added."""
    name = metadata["general.architecture"]
    hidden = metadata[f"{name}.embedding_length"]
    table = {"token_embd.weight": Entry((metadata.get(f"{name}.vocab_size", 2000), hidden))}
    mixers = _MIXERS.get(name)
    for i in range(metadata[f"{name}.block_count"]):
        if mixers is not None:
            table[f"blk.{i}.{mixers[i % len(mixers)]}.weight"] = Entry((96, hidden))
        if f"{name}.expert_count" in metadata and name != "nemotron_h_moe":
            table[f"blk.{i}.ffn_gate_inp.weight"] = Entry((1, hidden))
    return table | {tensor: Entry((1,)) for tensor in extra}
