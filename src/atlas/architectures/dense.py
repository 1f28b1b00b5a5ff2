"""The dense family (and its MoE sibling) as a table: one row per architecture.

A row says what differs between the architectures: defaults of the options, which biases and
norms exist, which layers have a window. Everything else is one decoder. Defaults are those of
the Hugging Face config classes, since config.json may omit a value that equals its default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atlas.architectures.family import Family

_LLAMA_DEFAULTS = {
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_QWEN_DEFAULTS = {
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_GEMMA_DEFAULTS = {
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
_CAUSAL: Mapping[str, tuple[Any, ...]] = {"use_bidirectional_attention": (False,)}

DENSE: tuple[Family, ...] = (
    Family(
        "llama",
        "LlamaForCausalLM",
        "llama",
        _LLAMA_DEFAULTS,
        bias="option",
        mlp_bias=True,
        rows_interleaved_in_gguf=True,
    ),
    Family(
        "mistral",
        "MistralForCausalLM",
        "llama",
        _LLAMA_DEFAULTS
        | {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
        windows="every",
        rows_interleaved_in_gguf=True,
    ),
    Family(
        "qwen2",
        "Qwen2ForCausalLM",
        "qwen2",
        _QWEN_DEFAULTS,
        bias="qkv",
        windows="tail",
        neutral={"use_mrope": (False,)},
    ),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        "qwen3",
        _QWEN_DEFAULTS | {"head_dim": 128},
        bias="option",
        qk_norm=True,
        windows="tail",
    ),
    Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        "qwen3moe",
        _QWEN_DEFAULTS
        | {
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        bias="option",
        qk_norm=True,
        windows="every_if_enabled",
        moe=True,
    ),
    Family(
        "gemma2",
        "Gemma2ForCausalLM",
        "gemma2",
        _GEMMA_DEFAULTS | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        bias="option",
        windows="alternating",
        window_period=2,
        gemma=True,
        attention_softcap=True,
        neutral=_CAUSAL,
    ),
    Family(
        "gemma3",
        "Gemma3ForCausalLM",
        "gemma3",
        _GEMMA_DEFAULTS
        | {"max_position_embeddings": 131072, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
        model_type="gemma3_text",
        bias="option",
        qk_norm=True,
        windows="alternating",
        window_period=6,
        gemma=True,
        neutral={**_CAUSAL, "attn_logit_softcapping": ()},
    ),
)
