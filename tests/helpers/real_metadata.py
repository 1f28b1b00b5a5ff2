"""GGUF metadata of real models as llama.cpp's converter writes it, without the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
METADATA = {
    "smollm2": SMOLLM2,
    "qwen3_moe": QWEN3_MOE,
    "gemma2": GEMMA2_27B,
    "gemma3": GEMMA3_4B,
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
    if f"{name}.expert_count" in metadata:
        for i in range(metadata[f"{name}.block_count"]):
            table[f"blk.{i}.ffn_gate_inp.weight"] = Entry((1, hidden))
    return table | {tensor: Entry((1,)) for tensor in extra}
