"""config.json of architectures with recurrent layers turned into ModelConfig."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from atlas.architectures.family import Family
from atlas.architectures.huggingface_options import (
    MAX_EXPERTS,
    MAX_LAYERS,
    read_bos,
    read_eos,
    read_head_dim,
)
from atlas.architectures.options import Options
from atlas.architectures.rope_options import partial_rope_from_huggingface
from atlas.config import GatedDeltaConfig, LayerKind, Mamba2Config, ModelConfig, MoeConfig

Generation = Mapping[str, Any] | None

_ATTENTION: tuple[LayerKind, ...] = ("attention",)
_MAMBA2: tuple[LayerKind, ...] = ("mamba2",)
_UNLIMITED_SEQ_LEN = 2**20  # what llama.cpp writes for models without position embedding
_LAYER_TYPES: dict[str, LayerKind] = {
    "linear_attention": "gated_delta",
    "full_attention": "attention",
}
_NEMOTRON_TYPES: dict[str, LayerKind] = {
    "linear_attention": "mamba2",
    "mamba": "mamba2",
    "full_attention": "attention",
    "attention": "attention",
    "mlp": "mlp",
    "moe": "moe",
}
_NEMOTRON_LETTERS: dict[str, LayerKind] = {
    "M": "mamba2",
    "*": "attention",
    "-": "mlp",
    "E": "moe",
}
_NEMOTRON_MOE = (
    "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob",
    "routed_scaling_factor", "n_group", "topk_group", "moe_shared_expert_intermediate_size",
    "moe_latent_size",
)  # fmt: skip


def read_gated_delta(options: Options, family: Family, generation: Generation) -> ModelConfig:
    """Qwen3-Next and Qwen3.5: gated delta layers, gated attention with partial RoPE, MLP or MoE."""
    defaults = family.defaults
    hidden_size, vocab_size = options.integer("hidden_size"), options.integer("vocab_size")
    num_layers = options.integer("num_hidden_layers", high=MAX_LAYERS)
    num_heads = options.integer("num_attention_heads")
    max_seq_len = options.integer("max_position_embeddings", defaults["max_position_embeddings"])
    head_dim = read_head_dim(options, "head_dim", defaults["head_dim"], hidden_size, num_heads)
    _require_silu(options, "hidden_act")
    has_bias = options.flag("attention_bias", False)
    num_mtp = options.integer("mtp_num_hidden_layers", 1, low=0, high=MAX_LAYERS)
    dense_size = None if family.name == "qwen3_next" else 0  # Qwen3-Next may have dense layers
    return ModelConfig(
        architecture=family.name,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=options.integer("num_key_value_heads", defaults["num_key_value_heads"]),
        head_dim=head_dim,
        intermediate_size=options.integer(
            "intermediate_size", dense_size if family.moe else None, low=0
        ),
        norm_eps=options.number("rms_norm_eps", 1e-6, high=1.0),
        max_seq_len=max_seq_len,
        rope=partial_rope_from_huggingface(
            options, max_seq_len, head_dim, defaults["partial_rotary_factor"]
        ),
        tie_embeddings=options.flag("tie_word_embeddings", defaults["tie_word_embeddings"]),
        qkv_bias=has_bias,
        output_bias=has_bias,
        qk_norm=True,
        attention_gate=True,
        norm_offset=True,
        moe=_qwen_moe(options, family, num_layers) if family.moe else None,
        layer_kinds=_qwen_kinds(options, family, num_layers),
        gated_delta=GatedDeltaConfig(
            num_key_heads=_size(options, family, "linear_num_key_heads"),
            num_value_heads=_size(options, family, "linear_num_value_heads"),
            key_dim=_size(options, family, "linear_key_head_dim"),
            value_dim=_size(options, family, "linear_value_head_dim"),
            conv_width=_size(options, family, "linear_conv_kernel_dim"),
        ),
        mtp_kinds=_ATTENTION * num_mtp,
        bos_token_id=read_bos(options, family, vocab_size),
        eos_token_ids=read_eos(options, family, generation, vocab_size),
    )


def _size(options: Options, family: Family, key: str) -> int:
    return options.integer(key, family.defaults[key], high=2**20)


def _qwen_kinds(options: Options, family: Family, num_layers: int) -> tuple[LayerKind, ...]:
    types = options.per_layer("layer_types", num_layers)
    if types is None:
        period = options.integer(
            "full_attention_interval", family.defaults["full_attention_interval"], high=MAX_LAYERS
        )
        return tuple("gated_delta" if (i + 1) % period else "attention" for i in range(num_layers))
    return _kinds_of(options, "layer_types", types, _LAYER_TYPES)


def _kinds_of(
    options: Options, key: str, names: list[Any], kinds: Mapping[str, LayerKind]
) -> tuple[LayerKind, ...]:
    for name in names:
        if not isinstance(name, str) or name not in kinds:
            raise options.unsupported(key, name, ", ".join(kinds))
    return tuple(kinds[name] for name in names)


def _qwen_moe(options: Options, family: Family, num_layers: int) -> MoeConfig:
    num_experts = options.integer("num_experts", family.defaults["num_experts"], high=MAX_EXPERTS)
    step, dense = (
        options.integer("decoder_sparse_step", 1),
        set(options.integers("mlp_only_layers")),
    )
    return MoeConfig(
        num_experts=num_experts,
        top_k=options.integer(
            "num_experts_per_tok", family.defaults["num_experts_per_tok"], high=num_experts
        ),
        intermediate_size=_size(options, family, "moe_intermediate_size"),
        normalize_top_k=options.flag("norm_topk_prob", True),
        sparse_layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers)),
        shared_size=_size(options, family, "shared_expert_intermediate_size"),
        shared_gate=True,
    )


def read_mamba2(options: Options, family: Family, generation: Generation) -> ModelConfig:
    """Mamba-2 on its own: every layer is one mixer."""
    hidden_size, vocab_size = options.integer("hidden_size"), options.integer("vocab_size")
    num_layers = options.integer("num_hidden_layers", high=MAX_LAYERS)
    _require_silu(options, "hidden_act")
    mamba2 = Mamba2Config(
        num_heads=_size(options, family, "num_heads"),
        head_dim=_size(options, family, "head_dim"),
        state_size=_size(options, family, "state_size"),
        num_groups=_size(options, family, "n_groups"),
        conv_width=_size(options, family, "conv_kernel"),
        conv_bias=options.flag("use_conv_bias", True),
        projection_bias=options.flag("use_bias", False),
        **_step_bounds(options),
    )
    _require_expansion(options, "expand", hidden_size, mamba2)
    return ModelConfig(
        architecture=family.name,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=0,
        num_kv_heads=0,
        head_dim=0,
        intermediate_size=0,
        norm_eps=options.number("layer_norm_epsilon", 1e-5, high=1.0),
        max_seq_len=_UNLIMITED_SEQ_LEN,
        tie_embeddings=options.flag("tie_word_embeddings", False),
        rotary=False,
        layer_kinds=_MAMBA2 * num_layers,
        mixer_only=True,
        mamba2=mamba2,
        bos_token_id=read_bos(options, family, vocab_size),
        eos_token_ids=read_eos(options, family, generation, vocab_size),
    )


def read_bamba(options: Options, family: Family, generation: Generation) -> ModelConfig:
    """Bamba: Mamba-2 or attention, each followed by an MLP."""
    defaults = family.defaults
    hidden_size, vocab_size = options.integer("hidden_size"), options.integer("vocab_size")
    num_layers = options.integer("num_hidden_layers", high=MAX_LAYERS)
    num_heads = options.integer("num_attention_heads")
    max_seq_len = options.integer("max_position_embeddings", defaults["max_position_embeddings"])
    head_dim = read_head_dim(options, "head_dim", None, hidden_size, num_heads)
    rope = partial_rope_from_huggingface(
        options, max_seq_len, head_dim, defaults["partial_rotary_factor"]
    )
    options.require_neutral({"attn_rotary_emb": (rope.rotary_dim,)})
    _require_silu(options, "hidden_act")
    has_bias = options.flag("attention_bias", False)
    heads = _size(options, family, "mamba_n_heads")
    expand = options.integer("mamba_expand", 2, high=64)
    if options.raw("mamba_d_head") == "auto":
        per_head = max(1, expand * hidden_size // heads)
    else:
        per_head = options.integer("mamba_d_head", max(1, expand * hidden_size // heads))
    mamba2 = Mamba2Config(
        num_heads=heads,
        head_dim=per_head,
        state_size=_size(options, family, "mamba_d_state"),
        num_groups=_size(options, family, "mamba_n_groups"),
        conv_width=_size(options, family, "mamba_d_conv"),
        conv_bias=options.flag("mamba_conv_bias", True),
        projection_bias=options.flag("mamba_proj_bias", False),
        **_step_bounds(options),
    )
    _require_expansion(options, "mamba_expand", hidden_size, mamba2)
    attends = set(options.integers("attn_layer_indices", high=num_layers - 1))
    kinds: list[LayerKind] = ["attention" if i in attends else "mamba2" for i in range(num_layers)]
    return ModelConfig(
        architecture=family.name,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=options.integer("num_key_value_heads", defaults["num_key_value_heads"]),
        head_dim=head_dim,
        intermediate_size=options.integer("intermediate_size"),
        norm_eps=options.number("rms_norm_eps", 1e-5, high=1.0),
        max_seq_len=max_seq_len,
        rope=rope,
        tie_embeddings=options.flag("tie_word_embeddings", False),
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=options.flag("mlp_bias", False),
        layer_kinds=tuple(kinds),
        mamba2=mamba2,
        bos_token_id=read_bos(options, family, vocab_size),
        eos_token_ids=read_eos(options, family, generation, vocab_size),
    )


def read_nemotron_h(options: Options, family: Family, generation: Generation) -> ModelConfig:
    """Nemotron-H: a layer is Mamba-2, attention without RoPE, a ReLU² MLP, or experts."""
    defaults = family.defaults
    hidden_size, vocab_size = options.integer("hidden_size"), options.integer("vocab_size")
    kinds = _nemotron_kinds(options)
    _require_silu(options, "mamba_hidden_act")
    options.choice("mlp_hidden_act", ("relu2",), "relu2")
    head_key = "attention_head_dim" if options.has("attention_head_dim") else "head_dim"
    mlp_bias = options.flag("mlp_bias", False)
    options.raw("intermediate_size")
    if mlp_bias and "moe" in kinds:
        raise options.unsupported("mlp_bias", mlp_bias, "false beside experts")
    mtp = _letters(options, "mtp_hybrid_override_pattern") or ("attention", "moe")
    num_mtp = options.integer("num_nextn_predict_layers", 0, low=0)
    return ModelConfig(
        architecture=family.name,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=len(kinds),
        num_heads=options.integer("num_attention_heads"),
        num_kv_heads=options.integer("num_key_value_heads", defaults["num_key_value_heads"]),
        head_dim=read_head_dim(options, head_key, defaults["head_dim"], 0, 1),
        intermediate_size=options.integer("intermediate_size", 21504) if "mlp" in kinds else 0,
        norm_eps=options.number("layer_norm_epsilon", 1e-5, high=1.0),
        max_seq_len=options.integer("max_position_embeddings", defaults["max_position_embeddings"]),
        activation="relu_squared",
        tie_embeddings=options.flag("tie_word_embeddings", False),
        mlp_bias=mlp_bias,
        rotary=False,
        moe=_nemotron_moe(options, family, kinds),
        layer_kinds=kinds,
        mixer_only=True,
        mamba2=Mamba2Config(
            num_heads=_size(options, family, "mamba_num_heads"),
            head_dim=_size(options, family, "mamba_head_dim"),
            state_size=_size(options, family, "ssm_state_size"),
            num_groups=_size(options, family, "n_groups"),
            conv_width=_size(options, family, "conv_kernel"),
            conv_bias=options.flag("use_conv_bias", True),
            projection_bias=options.flag("use_bias", False),
            dt_min=options.number("time_step_min", defaults["time_step_min"], high=1e6),
        ),
        mtp_kinds=mtp if num_mtp else (),
        bos_token_id=read_bos(options, family, vocab_size),
        eos_token_ids=read_eos(options, family, generation, vocab_size),
    )


def _nemotron_kinds(options: Options) -> tuple[LayerKind, ...]:
    names = options.raw("layers_block_type")
    if names is None:
        kinds = _letters(options, "hybrid_override_pattern")
        if not kinds:
            raise options.error("layers_block_type", None, "a list of layer types")
        return kinds
    if not isinstance(names, list) or not 0 < len(names) <= MAX_LAYERS:
        raise options.error("layers_block_type", names, f"a list of 1 to {MAX_LAYERS} layer types")
    options.raw("hybrid_override_pattern")
    return _kinds_of(options, "layers_block_type", names, _NEMOTRON_TYPES)


def _letters(options: Options, key: str) -> tuple[LayerKind, ...]:
    """Layer kinds from letters such as ``M-M*``; empty if the option is absent."""
    pattern = options.text(key, "")[: MAX_LAYERS + 1] if options.has(key) else ""
    if len(pattern) > MAX_LAYERS:
        raise options.error(key, pattern, f"up to {MAX_LAYERS} letters")
    return _kinds_of(options, key, list(pattern), _NEMOTRON_LETTERS)


def _nemotron_moe(
    options: Options, family: Family, kinds: tuple[LayerKind, ...]
) -> MoeConfig | None:
    if "moe" not in kinds:
        for key in _NEMOTRON_MOE:  # written by transformers all the same
            options.raw(key)
        return None
    defaults = family.defaults
    num_experts = options.integer("n_routed_experts", defaults["num_experts"], high=MAX_EXPERTS)
    num_groups = options.integer("n_group", 1, high=num_experts)
    return MoeConfig(
        num_experts=num_experts,
        top_k=options.integer(
            "num_experts_per_tok", defaults["num_experts_per_tok"], high=num_experts
        ),
        intermediate_size=_size(options, family, "moe_intermediate_size"),
        normalize_top_k=options.flag("norm_topk_prob", True),
        sparse_layers=tuple(kind == "moe" for kind in kinds),
        scoring="sigmoid",
        selection_bias=True,
        scale=options.number("routed_scaling_factor", 1.0, high=1e6),
        num_groups=num_groups,
        top_groups=options.integer("topk_group", 1, high=num_groups),
        shared_size=_size(options, family, "moe_shared_expert_intermediate_size"),
        latent_size=options.optional_integer("moe_latent_size") or 0,
    )


def _require_silu(options: Options, key: str) -> None:
    options.choice(key, ("silu", "swish"), "silu")


def _require_expansion(options: Options, key: str, hidden_size: int, mamba2: Mamba2Config) -> None:
    expand = options.number(key, 2, high=64)
    if int(expand * hidden_size) != mamba2.inner_size:
        raise options.error(key, expand, f"{mamba2.inner_size} / {hidden_size}: heads × head size")


def _step_bounds(options: Options) -> dict[str, float]:
    """``time_step_limit`` as ``dt_min`` and ``dt_max``; infinity may be spelt as a mapping."""
    limit = options.raw("time_step_limit")
    if limit is None:
        return {}
    if isinstance(limit, list | tuple) and len(limit) == 2:
        low, high = (math.inf if bound == {"__float__": "Infinity"} else bound for bound in limit)
        numbers = all(isinstance(b, int | float) and not isinstance(b, bool) for b in (low, high))
        if numbers and 0 <= low < high:
            return {"dt_min": float(low), "dt_max": float(high)}
    raise options.error("time_step_limit", limit, "two rising numbers from 0 on")


READERS: dict[str, Callable[[Options, Family, Generation], ModelConfig]] = {
    "qwen3_next": read_gated_delta,
    "qwen3_5": read_gated_delta,
    "qwen3_5_moe": read_gated_delta,
    "mamba2": read_mamba2,
    "nemotron_h": read_nemotron_h,
    "bamba": read_bamba,
}
