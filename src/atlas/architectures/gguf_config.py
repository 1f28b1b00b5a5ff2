"""GGUF metadata turned into ModelConfig.

Keys and defaults are those of llama.cpp's converter and loader. What the metadata leaves to the
tensors (vocabulary size, optional biases, which layers are sparse) is read off their names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from atlas.architectures.families import family_of_gguf
from atlas.architectures.family import Family
from atlas.architectures.gguf_hybrid import GGUF_READERS
from atlas.architectures.huggingface_options import MAX_EXPERTS, MAX_LAYERS, read_head_dim
from atlas.architectures.options import Options
from atlas.architectures.rope_options import rope_from_gguf
from atlas.architectures.weight_sources import Tensors
from atlas.config import ModelConfig, MoeConfig, RopeConfig
from atlas.errors import ModelFileError

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.temperature_scale": (0.0,),
    "attention.output_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "pooling_type": (0,),
}
_NEUTRAL_DENSE: dict[str, tuple[Any, ...]] = {
    "expert_shared_count": (0,),
    "expert_gating_func": (0, 1),  # softmax
    "expert_weights_scale": (0.0, 1.0),
    "expert_group_count": (0, 1),
    "nextn_predict_layers": (0,),
}
_HARMLESS = {
    "vocab_size", "tensor_data_layout", "use_parallel_residual", "rope.scaling.finetuned",
    "expert_group_used_count",
}  # fmt: skip
# The converter writes these for models whose attention does not rotate, and for dense ones.
_HARMLESS_HYBRID = {
    "rope.dimension_count", "rope.freq_base", "rope.scaling.type", "expert_used_count",
    "expert_count", "expert_shared_count",
}  # fmt: skip
# Layer counts of the 27B models, whose attention scale is the mean head size, not head_dim.
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}


def config_from_gguf(
    metadata: Mapping[str, Any], tensors: Tensors, *, origin: str
) -> tuple[ModelConfig, tuple[str, ...]]:
    """Read the metadata of a GGUF file.

    Parameters
    ----------
    metadata : mapping
        All keys of the file.
    tensors : mapping of str to Shaped
        All tensors of the file.
    origin : str
        Names the file in errors.

    Returns
    -------
    config : ModelConfig
        ``rope.divisors`` is still None: it is a tensor.
    ignored : tuple of str
        Keys of the architecture that nothing here reads, for the user to see.

    Raises
    ------
    ModelFileError
        A key is missing or malformed.
    UnsupportedModelError
        An architecture or option without support.
    """
    general = Options(metadata, origin)
    general.require_neutral({"general.type": ("model",), "split.count": (0, 1)})
    name = general.text("general.architecture")
    family = family_of_gguf(name, origin)
    options = Options(
        {key[len(name) + 1 :]: value for key, value in metadata.items() if _is_of(key, name)},
        origin,
        f"{name}.",
    )
    options.require_neutral(_NEUTRAL)
    vocab_size = _vocab_size(tensors, options)
    read = GGUF_READERS.get(family.name, _read_dense)
    config = replace(
        read(options, family, tensors, vocab_size),
        bos_token_id=general.optional_integer(
            "tokenizer.ggml.bos_token_id", low=0, high=vocab_size - 1
        ),
        eos_token_ids=_eos(general, vocab_size),
    )
    harmless = _HARMLESS | (_HARMLESS_HYBRID if family.recurrent else set())
    return config, tuple(f"{name}.{key}" for key in options.unread() if key not in harmless)


def _read_dense(options: Options, family: Family, tensors: Tensors, vocab_size: int) -> ModelConfig:
    """A decoder whose layers all attend."""
    options.require_neutral(_NEUTRAL_DENSE)
    if not family.moe:
        options.require_neutral({"expert_count": (0,), "expert_used_count": (0,)})

    hidden_size = options.integer("embedding_length")
    num_layers = options.integer("block_count", high=MAX_LAYERS)
    num_heads = options.integer("attention.head_count")
    max_seq_len = options.integer("context_length")
    head_dim = read_head_dim(options, "attention.key_length", None, hidden_size, num_heads)
    options.require_neutral({"attention.value_length": (head_dim,)})
    window = options.optional_integer("attention.sliding_window", low=0) or None
    rope = rope_from_gguf(options, head_dim, max_seq_len)
    return ModelConfig(
        architecture=family.name,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=options.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        intermediate_size=_intermediate_size(options, family),
        norm_eps=options.number("attention.layer_norm_rms_epsilon", high=1.0),
        max_seq_len=max_seq_len,
        rope=rope,
        rope_local=_rope_local(options, family, rope, window),
        windows=_windows(options, family, window, num_layers),
        activation=family.activation,
        attention_scale=_attention_scale(options, family, num_layers, hidden_size // num_heads),
        attention_softcap=_softcap(options, family, "attn_logit_softcapping"),
        final_softcap=_softcap(options, family, "final_logit_softcapping"),
        embedding_scale=hidden_size**0.5 if family.gemma else 1.0,
        tie_embeddings="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_down.bias" in tensors,
        qk_norm=family.qk_norm,
        post_norms=family.gemma,
        norm_offset=False,  # the converter has added the 1
        moe=_moe(options, tensors, num_layers) if family.moe else None,
    )


def with_rope_divisors(config: ModelConfig, divisors: tuple[float, ...]) -> ModelConfig:
    """`config` with the divisors of the ``rope_freqs.weight`` tensor of llama3 files."""
    return replace(config, rope=replace(config.rope, divisors=divisors))


def _is_of(key: str, name: str) -> bool:
    return key.startswith(name) and key[len(name) : len(name) + 1] == "."


def _vocab_size(tensors: Tensors, options: Options) -> int:
    if "token_embd.weight" not in tensors:
        raise ModelFileError(f"{options.origin}: tensor token_embd.weight is missing")
    shape = tensors["token_embd.weight"].shape
    if len(shape) != 2:
        raise ModelFileError(
            f"{options.origin}: token_embd.weight has shape {list(shape)}; allowed: 2 dimensions"
        )
    return options.integer("vocab_size", shape[0], low=shape[0], high=shape[0])


def _intermediate_size(options: Options, family: Family) -> int:
    # Files without a dense layer may leave the dense size out.
    default = options.optional_integer("expert_feed_forward_length") if family.moe else None
    return options.integer("feed_forward_length", default)


def _windows(
    options: Options, family: Family, window: int | None, num_layers: int
) -> tuple[int | None, ...]:
    """Which layers have the window: a pattern in the file, else the architecture's."""
    if family.name == "gemma2" and not options.has("attention.sliding_window"):
        window = family.defaults["sliding_window"]
    pattern = options.raw("attention.sliding_window_pattern")
    if isinstance(pattern, int) and not isinstance(pattern, bool):
        period = options.integer("attention.sliding_window_pattern", high=MAX_LAYERS)
        has_window = [bool((i + 1) % period) for i in range(num_layers)]
    elif pattern is not None:
        entries = options.per_layer("attention.sliding_window_pattern", num_layers) or []
        if any(entry not in (False, True) for entry in entries):
            raise options.error("attention.sliding_window_pattern", pattern, "booleans")
        has_window = [bool(entry) for entry in entries]
    elif family.window_period:
        has_window = [bool((i + 1) % family.window_period) for i in range(num_layers)]
    else:
        has_window = [True] * num_layers
    return tuple(window if flag else None for flag in has_window)


def _rope_local(
    options: Options, family: Family, rope: RopeConfig, window: int | None
) -> RopeConfig | None:
    """Gemma 3 rotates windowed layers by a base of their own, without scaling."""
    local_theta = family.defaults.get("rope_local_base_freq")
    if local_theta is None:
        options.require_neutral({"rope.freq_base_swa": (rope.theta,)})
        return None
    if window is None:
        return None
    return RopeConfig(theta=options.number("rope.freq_base_swa", local_theta, low=1.0, high=1e18))


def _attention_scale(
    options: Options, family: Family, num_layers: int, mean_head_size: int
) -> float:
    """0 stands for head_dim ** -0.5, in ModelConfig as in the ``attention.scale`` key."""
    default = 0.0
    if _LAYERS_OF_27B.get(family.name) == num_layers:
        default = float(mean_head_size) ** -0.5
    return options.number("attention.scale", default, high=1e3) or default


def _softcap(options: Options, family: Family, key: str) -> float | None:
    if not family.gemma or (key == "attn_logit_softcapping" and not family.attention_softcap):
        options.require_neutral({key: (0.0,)})
        return None
    cap = options.optional_number(key, high=1e6)
    if cap is None:
        cap = family.defaults.get(key)
    return cap or None


def _moe(options: Options, tensors: Tensors, num_layers: int) -> MoeConfig:
    num_experts = options.integer("expert_count", high=MAX_EXPERTS)
    return MoeConfig(
        num_experts=num_experts,
        top_k=options.integer("expert_used_count", high=num_experts),
        intermediate_size=options.integer("expert_feed_forward_length"),
        normalize_top_k=options.flag("expert_weights_norm", True),
        sparse_layers=tuple(f"blk.{i}.ffn_gate_inp.weight" in tensors for i in range(num_layers)),
    )


def _eos(general: Options, vocab_size: int) -> tuple[int, ...]:
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = (
        general.optional_integer(f"tokenizer.ggml.{key}", low=0, high=vocab_size - 1)
        for key in keys
    )
    return tuple(dict.fromkeys(token for token in ids if token is not None))
