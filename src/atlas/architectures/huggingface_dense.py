"""config.json of the dense family and its MoE sibling turned into ModelConfig."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atlas.architectures.family import Family
from atlas.architectures.huggingface_options import (
    ACTIVATIONS,
    MAX_EXPERTS,
    MAX_LAYERS,
    read_bos,
    read_eos,
    read_head_dim,
)
from atlas.architectures.options import Options
from atlas.architectures.rope_options import rope_from_huggingface, rope_per_layer_type
from atlas.config import ModelConfig, MoeConfig, RopeConfig


def read_dense(
    options: Options, family: Family, generation: Mapping[str, Any] | None
) -> ModelConfig:
    """A decoder whose layers all attend."""
    defaults = family.defaults
    hidden_size = options.integer("hidden_size")
    num_layers = options.integer("num_hidden_layers", high=MAX_LAYERS)
    num_heads = options.integer("num_attention_heads")
    max_seq_len = options.integer("max_position_embeddings", defaults["max_position_embeddings"])
    vocab_size = options.integer("vocab_size")
    head_dim = read_head_dim(options, "head_dim", defaults.get("head_dim"), hidden_size, num_heads)
    windows = _windows(options, family, num_layers)
    rope, rope_local = _rope(options, family, max_seq_len)
    has_bias = family.bias == "option" and options.flag("attention_bias", False)
    return ModelConfig(
        architecture=family.name,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=options.integer(
            "num_key_value_heads", defaults.get("num_key_value_heads", num_heads)
        ),
        head_dim=head_dim,
        intermediate_size=options.integer("intermediate_size"),
        norm_eps=options.number("rms_norm_eps", 1e-6, high=1.0),
        max_seq_len=max_seq_len,
        rope=rope,
        rope_local=rope_local,
        windows=windows,
        activation=ACTIVATIONS[
            options.choice(
                family.activation_key,
                ACTIVATIONS,
                "gelu_pytorch_tanh" if family.gemma else "silu",
            )
        ],
        attention_scale=_attention_scale(options, family),
        attention_softcap=(
            _softcap(options, family, "attn_logit_softcapping")
            if family.attention_softcap
            else None
        ),
        final_softcap=(
            _softcap(options, family, "final_logit_softcapping") if family.gemma else None
        ),
        embedding_scale=hidden_size**0.5 if family.gemma else 1.0,
        tie_embeddings=options.flag("tie_word_embeddings", defaults["tie_word_embeddings"]),
        qkv_bias=has_bias or family.bias == "qkv",
        output_bias=has_bias,
        mlp_bias=family.mlp_bias and options.flag("mlp_bias", False),
        qk_norm=family.qk_norm,
        post_norms=family.gemma,
        norm_offset=family.gemma,
        moe=_moe(options, family, num_layers) if family.moe else None,
        bos_token_id=read_bos(options, family, vocab_size),
        eos_token_ids=read_eos(options, family, generation, vocab_size),
    )


def _windows(options: Options, family: Family, num_layers: int) -> tuple[int | None, ...]:
    window = None
    if family.windows != "none" and not options.is_null("sliding_window"):
        window = options.integer("sliding_window", family.defaults["sliding_window"])
    is_optional = family.windows in ("tail", "every_if_enabled")
    if is_optional and not options.flag("use_sliding_window", False):
        window = None

    if family.windows == "tail":
        first = options.integer(
            "max_window_layers", family.defaults["max_window_layers"], low=0, high=MAX_LAYERS
        )
        has_window = [window is not None and i >= first for i in range(num_layers)]
    elif family.windows == "alternating":
        period = options.integer("sliding_window_pattern", family.window_period, high=MAX_LAYERS)
        has_window = [bool((i + 1) % period) for i in range(num_layers)]
    else:
        has_window = [window is not None] * num_layers

    types = options.per_layer("layer_types", num_layers)
    if types is not None:
        for kind in types:
            if kind not in ("full_attention", "sliding_attention"):
                raise options.unsupported("layer_types", kind, "full_attention, sliding_attention")
        declared = [kind == "sliding_attention" for kind in types]
        if family.windows not in ("tail", "alternating") and declared != has_window:
            kind = "sliding_attention" if window is not None else "full_attention"
            raise options.unsupported("layer_types", types, f"{kind} in every layer")
        has_window = declared
    if any(has_window) and window is None:
        raise options.error("sliding_window", None, "a number where layers have a window")
    return tuple(window if flag else None for flag in has_window)


def _rope(
    options: Options, family: Family, max_seq_len: int
) -> tuple[RopeConfig, RopeConfig | None]:
    if "rope_local_base_freq" in family.defaults:
        return rope_per_layer_type(
            options,
            max_seq_len,
            theta=family.defaults["rope_theta"],
            local_theta=family.defaults["rope_local_base_freq"],
        )
    return rope_from_huggingface(options, max_seq_len), None


def _attention_scale(options: Options, family: Family) -> float:
    if not family.gemma:
        return 0.0  # ModelConfig: head_dim ** -0.5
    scalar = options.number(
        "query_pre_attn_scalar", family.defaults["query_pre_attn_scalar"], low=1e-6, high=1e6
    )
    return float(scalar**-0.5)


def _softcap(options: Options, family: Family, key: str) -> float | None:
    if options.is_null(key):
        return None
    default = family.defaults.get(key)
    if default is None:
        return options.optional_number(key, low=1e-3, high=1e6)
    return options.number(key, default, low=1e-3, high=1e6)


def _moe(options: Options, family: Family, num_layers: int) -> MoeConfig:
    # transformers 5 writes num_local_experts, older versions num_experts.
    key = "num_local_experts" if options.has("num_local_experts") else "num_experts"
    num_experts = options.integer(key, family.defaults["num_experts"], high=MAX_EXPERTS)
    step = options.integer("decoder_sparse_step", 1)
    dense = set(options.integers("mlp_only_layers"))
    return MoeConfig(
        num_experts=num_experts,
        top_k=options.integer(
            "num_experts_per_tok", family.defaults["num_experts_per_tok"], high=num_experts
        ),
        intermediate_size=options.integer(
            "moe_intermediate_size", family.defaults["moe_intermediate_size"]
        ),
        normalize_top_k=options.flag("norm_topk_prob", False),
        sparse_layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers)),
    )
