"""Canonical weight names: what the layers ask for, whatever file the model came from.

Global: ``embedding``, ``final_norm``, ``head`` (absent when tied). Layer i, under
``layers.{i}.``: ``attention_norm``, ``q_proj``, ``k_proj``, ``v_proj``, ``o_proj`` (and
``q_bias`` …), ``q_norm``, ``k_norm``, ``post_attention_norm`` and ``post_mlp_norm`` (Gemma),
``mlp_norm``, ``gate_proj``, ``up_proj``, ``down_proj`` (and biases), or ``router``,
``experts.gate_proj``, ``experts.up_proj``, ``experts.down_proj`` with the experts' rows stacked.

Encoder-decoders: layers of the encoder lie under ``encoder_layers.{i}.``, before ``encoder_norm``;
every norm has a ``…_norm_bias``, MLPs have no gate, and a decoder's layer also has ``cross_norm``,
``cross_q_proj`` … ``cross_o_proj`` and their biases.
"""

from __future__ import annotations

from atlas.config import ModelConfig

Shape = tuple[int, ...]


def expected_weights(config: ModelConfig) -> dict[str, Shape]:
    """Canonical names of all weights of a model, in load order, with their shapes.

    Matrices are ``[out, in]`` (``y = W x``), stacked experts ``[E * out, in]``, norms and biases
    ``[n]``.
    """
    if config.encoder is not None:
        return _encoder_decoder_weights(config)
    shapes: dict[str, Shape] = {"embedding": (config.vocab_size, config.hidden_size)}
    for i in range(config.num_layers):
        layer = attention_shapes(config) | mlp_shapes(config, is_sparse(config, i))
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes["final_norm"] = (config.hidden_size,)
    if not config.tie_embeddings:
        shapes["head"] = (config.vocab_size, config.hidden_size)
    return shapes


def is_sparse(config: ModelConfig, layer_idx: int) -> bool:
    """Whether a layer has experts in place of the dense MLP."""
    return config.moe is not None and config.moe.sparse_layers[layer_idx]


def attention_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Weights of a layer's attention and of the norms around it."""
    hidden, head_dim = config.hidden_size, config.head_dim
    q_rows, kv_rows = config.num_heads * head_dim, config.num_kv_heads * head_dim
    shapes: dict[str, Shape] = {
        "attention_norm": (hidden,),
        "q_proj": (q_rows, hidden),
        "k_proj": (kv_rows, hidden),
        "v_proj": (kv_rows, hidden),
        "o_proj": (hidden, q_rows),
    }
    if config.qkv_bias:
        shapes |= {"q_bias": (q_rows,), "k_bias": (kv_rows,), "v_bias": (kv_rows,)}
    if config.output_bias:
        shapes["o_bias"] = (hidden,)
    if config.qk_norm:
        shapes |= {"q_norm": (head_dim,), "k_norm": (head_dim,)}
    if config.post_norms:
        shapes["post_attention_norm"] = (hidden,)
    return shapes


def mlp_shapes(config: ModelConfig, sparse: bool) -> dict[str, Shape]:
    """Weights of a layer's MLP, dense or sparse, and of the norms around it."""
    hidden, moe = config.hidden_size, config.moe
    shapes: dict[str, Shape] = {"mlp_norm": (hidden,)}
    if moe is not None and sparse:
        rows = moe.num_experts * moe.intermediate_size
        shapes |= {
            "router": (moe.num_experts, hidden),
            "experts.gate_proj": (rows, hidden),
            "experts.up_proj": (rows, hidden),
            "experts.down_proj": (moe.num_experts * hidden, moe.intermediate_size),
        }
    else:
        inner = config.intermediate_size
        shapes |= {
            "gate_proj": (inner, hidden),
            "up_proj": (inner, hidden),
            "down_proj": (hidden, inner),
        }
        if config.mlp_bias:
            shapes |= {"gate_bias": (inner,), "up_bias": (inner,), "down_bias": (hidden,)}
    if config.post_norms:
        shapes["post_mlp_norm"] = (hidden,)
    return shapes


def _encoder_decoder_weights(config: ModelConfig) -> dict[str, Shape]:
    assert config.encoder is not None
    hidden = config.hidden_size
    shapes: dict[str, Shape] = {"embedding": (config.vocab_size, hidden)}
    for i in range(config.encoder.num_layers):
        layer = _projections(hidden, "") | _plain_mlp_shapes(
            hidden, config.encoder.intermediate_size
        )
        shapes |= {f"encoder_layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes |= {"encoder_norm": (hidden,), "encoder_norm_bias": (hidden,)}
    for i in range(config.num_layers):
        layer = _projections(hidden, "") | _projections(hidden, "cross_")
        layer |= _plain_mlp_shapes(hidden, config.intermediate_size)
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes |= {"final_norm": (hidden,), "final_norm_bias": (hidden,)}
    if not config.tie_embeddings:
        shapes["head"] = (config.vocab_size, hidden)
    return shapes


def _projections(hidden: int, prefix: str) -> dict[str, Shape]:
    norm = prefix + "norm" if prefix else "attention_norm"
    shapes: dict[str, Shape] = {norm: (hidden,), f"{norm}_bias": (hidden,)}
    for x in "qkvo":
        shapes |= {f"{prefix}{x}_proj": (hidden, hidden), f"{prefix}{x}_bias": (hidden,)}
    return shapes


def _plain_mlp_shapes(hidden: int, inner: int) -> dict[str, Shape]:
    return {
        "mlp_norm": (hidden,),
        "mlp_norm_bias": (hidden,),
        "up_proj": (inner, hidden),
        "up_bias": (inner,),
        "down_proj": (hidden, inner),
        "down_bias": (hidden,),
    }
