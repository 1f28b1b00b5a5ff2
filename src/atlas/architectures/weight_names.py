"""Canonical weight names: what the layers ask for, whatever file the model came from.

Global: ``embedding``, ``final_norm``, ``head`` (absent when tied). Layer i, under
``layers.{i}.``, by block:

attention
    ``attention_norm``, ``q_proj``, ``k_proj``, ``v_proj``, ``o_proj`` (and ``q_bias`` …),
    ``q_gate_proj``, ``q_norm``, ``k_norm``, ``post_attention_norm`` (Gemma)
gated delta
    ``mixer_norm``, ``delta.q_proj``, ``delta.k_proj``, ``delta.v_proj``, ``delta.z_proj``,
    ``delta.b_proj``, ``delta.a_proj``, ``delta.conv``, ``delta.decay_log``, ``delta.dt_bias``,
    ``delta.gated_norm``, ``delta.out_proj``
Mamba-2
    ``mixer_norm``, ``mamba.in_proj``, ``mamba.conv``, ``mamba.conv_bias``, ``mamba.decay_log``,
    ``mamba.d``, ``mamba.dt_bias``, ``mamba.gated_norm``, ``mamba.out_proj`` (and ``mamba.in_bias``,
    ``mamba.out_bias``)
MLP
    ``mlp_norm``, ``gate_proj``, ``up_proj``, ``down_proj`` (and biases), ``post_mlp_norm`` (Gemma)
experts
    ``mlp_norm``, ``router``, ``router_bias``, ``experts.gate_proj``, ``experts.up_proj``,
    ``experts.down_proj`` with the experts' rows stacked; ``shared.gate_proj`` …,
    ``shared.router``; ``latent.in_proj``, ``latent.out_proj``

The multi-token prediction head is ``mtp.in_proj``, ``mtp.embedding_norm``, ``mtp.hidden_norm``,
``mtp.final_norm`` and layers under ``mtp.layers.{i}.``. An MLP or experts of ReLU² have no gate.

Encoder-decoders: layers of the encoder lie under ``encoder_layers.{i}.``, before ``encoder_norm``;
every norm has a ``…_norm_bias``, MLPs have no gate, and a decoder's layer also has ``cross_norm``,
``cross_q_proj`` … ``cross_o_proj`` and their biases.
"""

from __future__ import annotations

from atlas.config import GatedDeltaConfig, LayerKind, Mamba2Config, ModelConfig, MoeConfig

Shape = tuple[int, ...]
Shapes = dict[str, Shape]


def expected_weights(config: ModelConfig) -> Shapes:
    """Canonical names of all weights of a model, in load order, with their shapes.

    Matrices are ``[out, in]`` (``y = W x``), stacked experts ``[E * out, in]``, convolutions
    ``[channels, taps]``, norms and biases ``[n]``.
    """
    if config.encoder is not None:
        return _encoder_decoder_weights(config)
    hidden = config.hidden_size
    shapes: Shapes = {"embedding": (config.vocab_size, hidden)}
    for i in range(config.num_layers):
        shapes |= _under(f"layers.{i}.", _layer_shapes(config, config.layer_blocks(i)))
    shapes["final_norm"] = (hidden,)
    if not config.tie_embeddings:
        shapes["head"] = (config.vocab_size, hidden)
    if config.mtp_kinds:
        shapes |= {
            "mtp.embedding_norm": (hidden,),
            "mtp.hidden_norm": (hidden,),
            "mtp.in_proj": (hidden, 2 * hidden),
        }
        for i in range(len(config.mtp_kinds)):
            shapes |= _under(f"mtp.layers.{i}.", _layer_shapes(config, config.mtp_blocks(i)))
        shapes["mtp.final_norm"] = (hidden,)
    return shapes


def is_array(name: str, shape: Shape) -> bool:
    """Whether a weight is a float32 array that ops read directly; the others are packed."""
    return len(shape) == 1 or name.endswith(".conv")


def is_sensitive(name: str) -> bool:
    """Whether a matrix stays in floats when a model is quantised at load.

    Routers choose; decays and write strengths are raised to the length of the text.
    """
    return name.endswith(("router", "delta.a_proj", "delta.b_proj"))


def _under(prefix: str, shapes: Shapes) -> Shapes:
    return {prefix + name: shape for name, shape in shapes.items()}


def _layer_shapes(config: ModelConfig, blocks: tuple[LayerKind, ...]) -> Shapes:
    shapes: Shapes = {}
    for block in blocks:
        if block == "attention":
            shapes |= _attention_shapes(config)
        elif block == "gated_delta" and config.gated_delta is not None:
            shapes |= _gated_delta_shapes(config.hidden_size, config.gated_delta)
        elif block == "mamba2" and config.mamba2 is not None:
            shapes |= _mamba2_shapes(config.hidden_size, config.mamba2)
        elif block == "moe" and config.moe is not None:
            shapes |= _moe_shapes(config, config.moe)
        else:
            shapes |= _mlp_shapes(config)
    return shapes


def _attention_shapes(config: ModelConfig) -> Shapes:
    hidden, head_dim = config.hidden_size, config.head_dim
    q_rows, kv_rows = config.num_heads * head_dim, config.num_kv_heads * head_dim
    shapes: Shapes = {
        "attention_norm": (hidden,),
        "q_proj": (q_rows, hidden),
        "k_proj": (kv_rows, hidden),
        "v_proj": (kv_rows, hidden),
        "o_proj": (hidden, q_rows),
    }
    if config.attention_gate:
        shapes["q_gate_proj"] = (q_rows, hidden)
    if config.qkv_bias:
        shapes |= {"q_bias": (q_rows,), "k_bias": (kv_rows,), "v_bias": (kv_rows,)}
        if config.attention_gate:
            shapes["q_gate_bias"] = (q_rows,)
    if config.output_bias:
        shapes["o_bias"] = (hidden,)
    if config.qk_norm:
        shapes |= {"q_norm": (head_dim,), "k_norm": (head_dim,)}
    if config.post_norms:
        shapes["post_attention_norm"] = (hidden,)
    return shapes


def _gated_delta_shapes(hidden: int, sizes: GatedDeltaConfig) -> Shapes:
    heads = sizes.num_value_heads
    return {
        "mixer_norm": (hidden,),
        "delta.q_proj": (sizes.key_size, hidden),
        "delta.k_proj": (sizes.key_size, hidden),
        "delta.v_proj": (sizes.value_size, hidden),
        "delta.z_proj": (sizes.value_size, hidden),
        "delta.b_proj": (heads, hidden),
        "delta.a_proj": (heads, hidden),
        "delta.conv": (sizes.conv_size, sizes.conv_width),
        "delta.decay_log": (heads,),
        "delta.dt_bias": (heads,),
        "delta.gated_norm": (sizes.value_dim,),
        "delta.out_proj": (hidden, sizes.value_size),
    }


def _mamba2_shapes(hidden: int, sizes: Mamba2Config) -> Shapes:
    heads, inner = sizes.num_heads, sizes.inner_size
    rows = inner + sizes.conv_size + heads
    shapes: Shapes = {
        "mixer_norm": (hidden,),
        "mamba.in_proj": (rows, hidden),
        "mamba.conv": (sizes.conv_size, sizes.conv_width),
        "mamba.decay_log": (heads,),
        "mamba.d": (heads,),
        "mamba.dt_bias": (heads,),
        "mamba.gated_norm": (inner,),
        "mamba.out_proj": (hidden, inner),
    }
    if sizes.conv_bias:
        shapes["mamba.conv_bias"] = (sizes.conv_size,)
    if sizes.projection_bias:
        shapes |= {"mamba.in_bias": (rows,), "mamba.out_bias": (hidden,)}
    return shapes


def _mlp_shapes(config: ModelConfig) -> Shapes:
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: Shapes = {"mlp_norm": (hidden,)}
    shapes |= _gated_shapes(config, "", inner, hidden)
    if config.mlp_bias:
        shapes |= {"up_bias": (inner,), "down_bias": (hidden,)}
        if config.has_mlp_gate:
            shapes["gate_bias"] = (inner,)
    if config.post_norms:
        shapes["post_mlp_norm"] = (hidden,)
    return shapes


def _moe_shapes(config: ModelConfig, moe: MoeConfig) -> Shapes:
    hidden = config.hidden_size
    shapes: Shapes = {"mlp_norm": (hidden,), "router": (moe.num_experts, hidden)}
    if moe.selection_bias:
        shapes["router_bias"] = (moe.num_experts,)
    width = moe.latent_size or hidden
    each = _gated_shapes(config, "experts.", moe.intermediate_size, width)
    shapes |= {name: (moe.num_experts * rows, cols) for name, (rows, cols) in each.items()}
    if moe.shared_size:
        shapes |= _gated_shapes(config, "shared.", moe.shared_size, hidden)
    if moe.shared_gate:
        shapes["shared.router"] = (1, hidden)
    if moe.latent_size:
        shapes |= {
            "latent.in_proj": (moe.latent_size, hidden),
            "latent.out_proj": (hidden, moe.latent_size),
        }
    if config.post_norms:
        shapes["post_mlp_norm"] = (hidden,)
    return shapes


def _gated_shapes(
    config: ModelConfig, prefix: str, inner: int, outer: int
) -> dict[str, tuple[int, int]]:
    """Projections of one feed-forward of width ``inner`` between vectors of ``outer``."""
    names = ("gate_proj", "up_proj") if config.has_mlp_gate else ("up_proj",)
    shapes = {prefix + name: (inner, outer) for name in names}
    return shapes | {prefix + "down_proj": (outer, inner)}


def _encoder_decoder_weights(config: ModelConfig) -> Shapes:
    assert config.encoder is not None
    hidden = config.hidden_size
    shapes: Shapes = {"embedding": (config.vocab_size, hidden)}
    for i in range(config.encoder.num_layers):
        layer = _projections(hidden, "") | _plain_mlp_shapes(
            hidden, config.encoder.intermediate_size
        )
        shapes |= _under(f"encoder_layers.{i}.", layer)
    shapes |= {"encoder_norm": (hidden,), "encoder_norm_bias": (hidden,)}
    for i in range(config.num_layers):
        layer = _projections(hidden, "") | _projections(hidden, "cross_")
        layer |= _plain_mlp_shapes(hidden, config.intermediate_size)
        shapes |= _under(f"layers.{i}.", layer)
    shapes |= {"final_norm": (hidden,), "final_norm_bias": (hidden,)}
    if not config.tie_embeddings:
        shapes["head"] = (config.vocab_size, hidden)
    return shapes


def _projections(hidden: int, prefix: str) -> Shapes:
    norm = prefix + "norm" if prefix else "attention_norm"
    shapes: Shapes = {norm: (hidden,), f"{norm}_bias": (hidden,)}
    for x in "qkvo":
        shapes |= {f"{prefix}{x}_proj": (hidden, hidden), f"{prefix}{x}_bias": (hidden,)}
    return shapes


def _plain_mlp_shapes(hidden: int, inner: int) -> Shapes:
    return {
        "mlp_norm": (hidden,),
        "mlp_norm_bias": (hidden,),
        "up_proj": (inner, hidden),
        "up_bias": (inner,),
        "down_proj": (hidden, inner),
        "down_bias": (hidden,),
    }
