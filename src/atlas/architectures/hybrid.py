"""Architectures with recurrent layers as a table; the columns are those of the dense table.

What the options of config.json mean is read by ``huggingface_hybrid``; defaults are those of the
Hugging Face config classes.
"""

from __future__ import annotations

from typing import Any

from atlas.architectures.family import Family

_GATED_DELTA_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_QWEN_MOE_DEFAULTS: dict[str, Any] = {
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
_QWEN_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attn_output_gate": (True,),
    "output_gate_type": ("swish", "silu"),  # of the gated delta layers' z
    "mtp_use_dedicated_embeddings": (False,),
    "use_sliding_window": (False,),
    "sliding_window": (),
}
_QWEN_HARMLESS = frozenset({"mamba_ssm_dtype", "full_attention_interval", "mlp_only_layers"})
_MAMBA_HARMLESS = frozenset(
    {"chunk_size", "mamba_chunk_size", "num_logits_to_keep", "rescale_prenorm_residual",
     "residual_in_fp32", "time_step_floor", "time_step_max", "time_step_min", "time_step_rank",
     "z_loss_coefficient"}
)  # fmt: skip

HYBRID: tuple[Family, ...] = (
    Family(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        "qwen3next",
        _GATED_DELTA_DEFAULTS
        | _QWEN_MOE_DEFAULTS
        | {"num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True},
        bias="option",
        qk_norm=True,
        moe=True,
        recurrent="gated_delta",
        neutral=_QWEN_NEUTRAL,
        harmless=_QWEN_HARMLESS,
    ),
    Family(
        "qwen3_5",
        "Qwen3_5ForCausalLM",
        "qwen35",
        _GATED_DELTA_DEFAULTS | {"num_key_value_heads": 4},
        model_type="qwen3_5_text",
        wrapper_type="qwen3_5",
        wrapper_class="Qwen3_5ForConditionalGeneration",
        bias="option",
        qk_norm=True,
        recurrent="gated_delta",
        neutral=_QWEN_NEUTRAL,
        harmless=_QWEN_HARMLESS,
    ),
    Family(
        "qwen3_5_moe",
        "Qwen3_5MoeForCausalLM",
        "qwen35moe",
        _GATED_DELTA_DEFAULTS | _QWEN_MOE_DEFAULTS,
        model_type="qwen3_5_moe_text",
        wrapper_type="qwen3_5_moe",
        wrapper_class="Qwen3_5MoeForConditionalGeneration",
        bias="option",
        qk_norm=True,
        moe=True,
        recurrent="gated_delta",
        neutral=_QWEN_NEUTRAL | {"norm_topk_prob": (True,)},
        harmless=_QWEN_HARMLESS,
    ),
    Family(
        "mamba2",
        "Mamba2ForCausalLM",
        "mamba2",
        {
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 2,
            "num_heads": 128,
            "head_dim": 64,
            "state_size": 128,
            "n_groups": 8,
            "conv_kernel": 4,
        },
        recurrent="mamba2",
        harmless=_MAMBA_HARMLESS,
    ),
    Family(  # in GGUF q and k are permuted alike: without RoPE their products are the same
        "nemotron_h",
        "NemotronHForCausalLM",
        "nemotron_h",
        {
            "max_position_embeddings": 4096,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "ssm_state_size": 128,
            "n_groups": 8,
            "conv_kernel": 4,
            "time_step_min": 0.001,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 7688,
            "moe_shared_expert_intermediate_size": 7688,
        },
        mlp_bias=True,
        recurrent="mamba2",
        neutral={
            "sliding_window": (),
            "attention_bias": (False,),
            "mamba_proj_bias": (False,),
            "n_shared_experts": (1,),
            "num_nextn_predict_layers": (0, 1),
        },
        harmless=_MAMBA_HARMLESS
        | {"expand", "hidden_dropout", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap",
           "time_step_limit", "use_mamba_kernels", "num_hidden_layers", "mtp_layers_block_type",
           "mtp_hybrid_override_pattern", "rope_theta", "partial_rotary_factor"},
    ),
    Family(
        "bamba",
        "BambaForCausalLM",
        "granitehybrid",
        {
            "max_position_embeddings": 262144,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "num_key_value_heads": 8,
            "partial_rotary_factor": 0.5,
            "mamba_n_heads": 128,
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "mamba_d_conv": 4,
        },
        bias="option",
        mlp_bias=True,
        recurrent="mamba2",
        rows_interleaved_in_gguf=True,
        harmless=_MAMBA_HARMLESS,
    ),
)  # fmt: skip
