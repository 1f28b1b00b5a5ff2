"""GGUF metadata of architectures with recurrent layers, turned into ModelConfig.

What a layer is, the files tell by its tensors.
"""

from __future__ import annotations

from collections.abc import Callable

from atlas.architectures.family import Family
from atlas.architectures.huggingface_options import MAX_EXPERTS, MAX_LAYERS, read_head_dim
from atlas.architectures.options import Options
from atlas.architectures.rope_options import partial_rope_from_gguf
from atlas.architectures.weight_sources import Tensors
from atlas.config import GatedDeltaConfig, LayerKind, Mamba2Config, ModelConfig, MoeConfig
from atlas.errors import ModelFileError

_KINDS: tuple[tuple[str, LayerKind], ...] = (  # by the first of these tensors that a block has
    ("ssm_ba.weight", "gated_delta"),
    ("ssm_beta.weight", "gated_delta"),
    ("ssm_in.weight", "mamba2"),
    ("attn_q.weight", "attention"),
    ("ffn_gate_inp.weight", "moe"),
    ("ffn_up.weight", "mlp"),
)


def read_gated_delta(
    options: Options, family: Family, tensors: Tensors, vocab_size: int
) -> ModelConfig:
    """Qwen3-Next and Qwen3.5."""
    num_layers, num_mtp = _layer_counts(options)
    hidden_size = options.integer("embedding_length")
    num_heads, max_seq_len = (
        _one(options, "attention.head_count"),
        options.integer("context_length"),
    )
    head_dim = read_head_dim(options, "attention.key_length", None, hidden_size, num_heads)
    options.require_neutral({"attention.value_length": (head_dim,)})
    options.raw("full_attention_interval")
    key_heads, value_heads = options.integer("ssm.group_count"), _ssm(options, "time_step_rank")
    gated_delta = GatedDeltaConfig(
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_dim=_ssm(options, "state_size"),
        value_dim=_per_head(options, value_heads),
        conv_width=_ssm(options, "conv_kernel"),
        tiled_values=family.gguf_name != "qwen3next" and key_heads != value_heads,
    )
    return ModelConfig(
        architecture=family.name,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_one(options, "attention.head_count_kv", num_heads),
        head_dim=head_dim,
        intermediate_size=_one(options, "feed_forward_length", 0 if family.moe else None),
        norm_eps=options.number("attention.layer_norm_rms_epsilon", high=1.0),
        max_seq_len=max_seq_len,
        rope=partial_rope_from_gguf(options, head_dim, max_seq_len),
        tie_embeddings="output.weight" not in tensors,
        qkv_bias=_any(tensors, num_layers, "attn_q.bias"),
        output_bias=_any(tensors, num_layers, "attn_output.bias"),
        qk_norm=True,
        attention_gate=True,
        moe=_moe(options, tensors, num_layers, shared_gate=True) if family.moe else None,
        layer_kinds=_kinds(options, tensors, num_layers),
        gated_delta=gated_delta,
        mtp_kinds=_attention(num_mtp),
    )


def read_mamba2(options: Options, family: Family, tensors: Tensors, vocab_size: int) -> ModelConfig:
    """Mamba-2 on its own."""
    num_layers, _ = _layer_counts(options)
    options.require_neutral({"attention.head_count": (0,), "feed_forward_length": (0,)})
    return ModelConfig(
        architecture=family.name,
        vocab_size=vocab_size,
        hidden_size=options.integer("embedding_length"),
        num_layers=num_layers,
        num_heads=0,
        num_kv_heads=0,
        head_dim=0,
        intermediate_size=0,
        norm_eps=options.number("attention.layer_norm_rms_epsilon", high=1.0),
        max_seq_len=options.integer("context_length"),
        tie_embeddings="output.weight" not in tensors,
        rotary=False,
        layer_kinds=_kinds(options, tensors, num_layers),
        mixer_only=True,
        mamba2=_mamba2(options, tensors, num_layers),
    )


def read_bamba(options: Options, family: Family, tensors: Tensors, vocab_size: int) -> ModelConfig:
    """Bamba, which shares its name in GGUF with Granite hybrids; those do not rotate."""
    # The converter tells the two apart by this key alone.
    if not options.flag("rope.scaling.finetuned", False):
        raise options.unsupported("rope.scaling.finetuned", False, "true: a Bamba model")
    num_layers, _ = _layer_counts(options)
    hidden_size, num_heads = (
        options.integer("embedding_length"),
        _one(options, "attention.head_count"),
    )
    max_seq_len = options.integer("context_length")
    head_dim = read_head_dim(options, "attention.key_length", None, hidden_size, num_heads)
    options.require_neutral({"attention.value_length": (head_dim,)})
    return ModelConfig(
        architecture=family.name,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_one(options, "attention.head_count_kv", num_heads),
        head_dim=head_dim,
        intermediate_size=_one(options, "feed_forward_length"),
        norm_eps=options.number("attention.layer_norm_rms_epsilon", high=1.0),
        max_seq_len=max_seq_len,
        rope=partial_rope_from_gguf(options, head_dim, max_seq_len),
        tie_embeddings="output.weight" not in tensors,
        qkv_bias=_any(tensors, num_layers, "attn_q.bias"),
        output_bias=_any(tensors, num_layers, "attn_output.bias"),
        mlp_bias=_any(tensors, num_layers, "ffn_down.bias"),
        layer_kinds=_kinds(options, tensors, num_layers),
        mamba2=_mamba2(options, tensors, num_layers),
    )


def read_nemotron_h(
    options: Options, family: Family, tensors: Tensors, vocab_size: int
) -> ModelConfig:
    """Nemotron-H, with or without experts."""
    num_layers, num_mtp = _layer_counts(options)
    if num_mtp > 1:
        raise options.unsupported("nextn_predict_layers", num_mtp, "0, 1")
    kinds = _kinds(options, tensors, num_layers)
    head_dim = read_head_dim(options, "attention.key_length", None, 0, 1)
    options.require_neutral({"attention.value_length": (head_dim,)})
    mtp: tuple[LayerKind, ...] = ("attention", "moe")
    return ModelConfig(
        architecture=family.name,
        vocab_size=vocab_size,
        hidden_size=options.integer("embedding_length"),
        num_layers=num_layers,
        num_heads=_one(options, "attention.head_count"),
        num_kv_heads=_one(options, "attention.head_count_kv"),
        head_dim=head_dim,
        intermediate_size=_mlp_size(options, tensors, kinds),
        norm_eps=options.number("attention.layer_norm_rms_epsilon", high=1.0),
        max_seq_len=options.integer("context_length"),
        activation="relu_squared",
        tie_embeddings="output.weight" not in tensors,
        mlp_bias=_any(tensors, num_layers, "ffn_down.bias"),
        rotary=False,
        moe=_moe(options, tensors, num_layers, sigmoid=True) if "moe" in kinds else None,
        layer_kinds=kinds,
        mixer_only=True,
        mamba2=_mamba2(options, tensors, num_layers, dt_min=family.defaults["time_step_min"]),
        mtp_kinds=mtp if num_mtp else (),
    )


def _layer_counts(options: Options) -> tuple[int, int]:
    """The model's layers, and those of the multi-token prediction head behind them."""
    blocks = options.integer("block_count", high=MAX_LAYERS)
    num_mtp = options.integer("nextn_predict_layers", 0, low=0, high=MAX_LAYERS)
    if num_mtp >= blocks:
        raise options.error("nextn_predict_layers", num_mtp, f"less than block_count {blocks}")
    return blocks - num_mtp, num_mtp


def _attention(count: int) -> tuple[LayerKind, ...]:
    kinds: list[LayerKind] = ["attention"] * count
    return tuple(kinds)


def _kinds(options: Options, tensors: Tensors, num_layers: int) -> tuple[LayerKind, ...]:
    kinds: list[LayerKind] = []
    for i in range(num_layers):
        kind = next((kind for name, kind in _KINDS if f"blk.{i}.{name}" in tensors), None)
        if kind is None:
            names = ", ".join(name for name, _ in _KINDS)
            raise ModelFileError(f"{options.origin}: blk.{i} has none of the tensors {names}")
        kinds.append(kind)
    return tuple(kinds)


def _one(options: Options, key: str, default: int | None = None) -> int:
    """A number, or a list with one number for the layers that have such a thing, else 0."""
    value = options.raw(key)
    if value is None or isinstance(value, int):
        return options.integer(key, default, low=0)
    counts = set(options.integers(key)) - {0}
    if len(counts) > 1:
        raise options.unsupported(key, value, "one number for all layers that have it")
    return counts.pop() if counts else 0


def _mlp_size(options: Options, tensors: Tensors, kinds: tuple[LayerKind, ...]) -> int:
    """Width of the MLPs, by their tensors: the key holds that of the experts, where there are."""
    options.raw("feed_forward_length")
    if "mlp" not in kinds:
        return 0
    name = f"blk.{kinds.index('mlp')}.ffn_up.weight"
    shape = tensors[name].shape
    if len(shape) != 2:
        raise ModelFileError(
            f"{options.origin}: {name} has shape {list(shape)}; needs 2 dimensions"
        )
    return shape[0]


def _any(tensors: Tensors, num_layers: int, name: str) -> bool:
    return any(f"blk.{i}.{name}" in tensors for i in range(num_layers))


def _ssm(options: Options, key: str) -> int:
    return options.integer(f"ssm.{key}", high=2**20)


def _per_head(options: Options, num_heads: int) -> int:
    inner = options.integer("ssm.inner_size", high=2**24)
    if inner % num_heads:
        raise options.error("ssm.inner_size", inner, f"a multiple of {num_heads} heads")
    return inner // num_heads


def _mamba2(
    options: Options, tensors: Tensors, num_layers: int, dt_min: float = 0.0
) -> Mamba2Config:
    options.require_neutral({"ssm.dt_b_c_rms": (False,)})
    heads = _ssm(options, "time_step_rank")
    return Mamba2Config(
        num_heads=heads,
        head_dim=_per_head(options, heads),
        state_size=_ssm(options, "state_size"),
        num_groups=_ssm(options, "group_count"),
        conv_width=_ssm(options, "conv_kernel"),
        conv_bias=_any(tensors, num_layers, "ssm_conv1d.bias"),
        projection_bias=_any(tensors, num_layers, "ssm_in.bias"),
        dt_min=dt_min,  # no key holds it: the architecture's own
    )


def _moe(
    options: Options,
    tensors: Tensors,
    num_layers: int,
    *,
    shared_gate: bool = False,
    sigmoid: bool = False,
) -> MoeConfig:
    num_experts = options.integer("expert_count", high=MAX_EXPERTS)
    num_groups = options.integer("expert_group_count", 1, high=num_experts)
    options.require_neutral({"expert_gating_func": (0, 2) if sigmoid else (0, 1)})
    options.require_neutral({"expert_shared_count": (0, 1)})
    return MoeConfig(
        num_experts=num_experts,
        top_k=options.integer("expert_used_count", high=num_experts),
        intermediate_size=options.integer("expert_feed_forward_length", high=2**24),
        normalize_top_k=options.flag("expert_weights_norm", True),
        sparse_layers=tuple(f"blk.{i}.ffn_gate_inp.weight" in tensors for i in range(num_layers)),
        scoring="sigmoid" if sigmoid else "softmax",
        selection_bias=sigmoid,
        scale=options.number("expert_weights_scale", 1.0, high=1e6) or 1.0,
        num_groups=num_groups,
        top_groups=options.integer("expert_group_used_count", 1, high=num_groups),
        shared_size=options.integer("expert_shared_feed_forward_length", high=2**24),
        shared_gate=shared_gate,
        latent_size=options.integer("moe_latent_size", 0, low=0, high=2**24),
    )


GGUF_READERS: dict[str, Callable[[Options, Family, Tensors, int], ModelConfig]] = {
    "qwen3_next": read_gated_delta,
    "qwen3_5": read_gated_delta,
    "qwen3_5_moe": read_gated_delta,
    "mamba2": read_mamba2,
    "nemotron_h": read_nemotron_h,
    "bamba": read_bamba,
}
