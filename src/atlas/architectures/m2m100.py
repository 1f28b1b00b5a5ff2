"""M2M100 and NLLB-200: config.json, and what their tensors are called.

Pre-norm Transformer encoder and decoder with biased LayerNorm, ReLU, sinusoidal positions and one
embedding for source, target and output.

Source
------
Fan et al., "Beyond English-Centric Multilingual Machine Translation" (2020), arXiv 2010.11125;
NLLB Team, "No Language Left Behind" (2022), arXiv 2207.04672.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from atlas.architectures.options import Options
from atlas.architectures.weight_names import expected_weights
from atlas.architectures.weight_sources import Source
from atlas.config import EncoderConfig, ModelConfig
from atlas.errors import ModelFileError

MODEL_TYPE = "m2m_100"
HUGGINGFACE_CLASS = "M2M100ForConditionalGeneration"
_MAX_LAYERS = 4096
_NORM_EPS = 1e-5  # PyTorch's default, which no file states
_EMBEDDINGS = (
    "model.shared.weight",
    "model.encoder.embed_tokens.weight",
    "model.decoder.embed_tokens.weight",
)
_HEAD = "lm_head.weight"
# Options without effect on inference, beside those that generate() reads.
_HARMLESS = {
    "_name_or_path", "activation_dropout", "architectures", "attention_dropout",
    "classifier_dropout", "decoder_layerdrop", "dropout", "dtype", "early_stopping",
    "encoder_layerdrop", "forced_bos_token_id", "gradient_checkpointing", "init_std",
    "length_penalty", "max_length", "no_repeat_ngram_size", "num_beams", "num_hidden_layers",
    "output_past", "tokenizer_class", "torch_dtype", "transformers_version", "use_cache",
    "vocab_file", "is_encoder_decoder", "attn_implementation",
}  # fmt: skip
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "quantization_config": (),
    "layernorm_embedding": (False,),
    "normalize_before": (True,),
    "normalize_embedding": (False,),
    "add_final_layer_norm": (True,),
    "add_bias_logits": (False,),
    "static_position_embeddings": (True,),
}


def config_from_m2m100(
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any] | None = None,
    *,
    origin: str = "config.json",
) -> tuple[ModelConfig, tuple[str, ...]]:
    """Read config.json of an M2M100 or NLLB folder; as ``config_from_huggingface`` does.

    Raises
    ------
    ModelFileError
        An option is missing or malformed.
    UnsupportedModelError
        Another class than the one that translates, or an option without support.
    """
    options = Options(config, origin)
    options.raw("model_type")
    classes = options.raw("architectures")
    if classes is not None and classes != [HUGGINGFACE_CLASS]:
        raise options.unsupported("architectures", classes, HUGGINGFACE_CLASS)
    options.require_neutral(_NEUTRAL)
    hidden = options.integer("d_model")
    vocab = options.integer("vocab_size")
    heads = _heads(options, "decoder_attention_heads", hidden)
    positions = options.integer("max_position_embeddings", 1024, high=2**20)
    options.choice("activation_function", ("relu",), "relu")
    encoder = EncoderConfig(
        num_layers=options.integer("encoder_layers", high=_MAX_LAYERS),
        num_heads=_heads(options, "encoder_attention_heads", hidden),
        intermediate_size=options.integer("encoder_ffn_dim"),
        max_source_len=positions,
        padding_token_id=options.integer("pad_token_id", 1, low=0, high=vocab - 1),
        start_token_id=options.integer("decoder_start_token_id", 2, low=0, high=vocab - 1),
    )
    ends = list(options.integers("eos_token_id", high=vocab - 1))
    if not ends and not options.is_null("eos_token_id"):
        ends = [2]
    if generation_config is not None:
        generation = Options(generation_config, "generation_config.json")
        ends += generation.integers("eos_token_id", high=vocab - 1)
    if not ends:
        raise ModelFileError(f"{origin}: eos_token_id is missing; a source needs an end token")
    result = ModelConfig(
        architecture=MODEL_TYPE,
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=options.integer("decoder_layers", high=_MAX_LAYERS),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        intermediate_size=options.integer("decoder_ffn_dim"),
        norm_eps=_NORM_EPS,
        max_seq_len=positions,
        activation="relu",
        embedding_scale=hidden**0.5 if options.flag("scale_embedding", True) else 1.0,
        tie_embeddings=options.flag("tie_word_embeddings", True),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        encoder=encoder,
        bos_token_id=options.optional_integer("bos_token_id", low=0, high=vocab - 1),
        eos_token_ids=tuple(dict.fromkeys(ends)),
    )
    return result, tuple(key for key in options.unread() if key not in _HARMLESS)


def _heads(options: Options, key: str, hidden: int) -> int:
    heads = options.integer(key)
    if hidden % heads:
        raise ModelFileError(
            f"{options.origin}: {key} is {heads}; allowed: a divisor of d_model {hidden}"
        )
    return heads


# -- weights ----------------------------------------------------------------------------------

_LEAVES = {
    "attention_norm": "self_attn_layer_norm.weight",
    "attention_norm_bias": "self_attn_layer_norm.bias",
    "cross_norm": "encoder_attn_layer_norm.weight",
    "cross_norm_bias": "encoder_attn_layer_norm.bias",
    "mlp_norm": "final_layer_norm.weight",
    "mlp_norm_bias": "final_layer_norm.bias",
    "o_proj": "self_attn.out_proj.weight",
    "o_bias": "self_attn.out_proj.bias",
    "cross_o_proj": "encoder_attn.out_proj.weight",
    "cross_o_bias": "encoder_attn.out_proj.bias",
    "up_proj": "fc1.weight",
    "up_bias": "fc1.bias",
    "down_proj": "fc2.weight",
    "down_bias": "fc2.bias",
    **{f"{x}_proj": f"self_attn.{x}_proj.weight" for x in "qkv"},
    **{f"{x}_bias": f"self_attn.{x}_proj.bias" for x in "qkv"},
    **{f"cross_{x}_proj": f"encoder_attn.{x}_proj.weight" for x in "qkv"},
    **{f"cross_{x}_bias": f"encoder_attn.{x}_proj.bias" for x in "qkv"},
}
_STACKS = {"encoder_layers": "model.encoder.layers", "layers": "model.decoder.layers"}
_GLOBAL = {
    "encoder_norm": "model.encoder.layer_norm.weight",
    "encoder_norm_bias": "model.encoder.layer_norm.bias",
    "final_norm": "model.decoder.layer_norm.weight",
    "final_norm_bias": "model.decoder.layer_norm.bias",
    "head": _HEAD,
}


def m2m100_sources(config: ModelConfig, names: Container[str]) -> dict[str, Source]:
    """The folder's tensors behind every canonical weight."""
    return {
        name: Source((tensor_name(config, name, names),), shape)
        for name, shape in expected_weights(config).items()
    }


def tensor_name(config: ModelConfig, name: str, names: Container[str]) -> str:
    """The file's tensor behind a canonical weight; of tied ones a file may keep any."""
    if name == "embedding":
        allowed = (*_EMBEDDINGS, _HEAD) if config.tie_embeddings else _EMBEDDINGS
        return next((tensor for tensor in allowed if tensor in names), _EMBEDDINGS[0])
    if name in _GLOBAL:
        return _GLOBAL[name]
    stack, layer_idx, leaf = name.split(".", 2)
    return f"{_STACKS[stack]}.{layer_idx}.{_LEAVES[leaf]}"


def tied_copies(config: ModelConfig, names: Container[str]) -> list[str]:
    """Tensors that must equal the embedding, where the file has them beside it."""
    first = tensor_name(config, "embedding", names)
    tied = (*_EMBEDDINGS, _HEAD) if config.tie_embeddings else _EMBEDDINGS
    return [tensor for tensor in tied if tensor in names and tensor != first]


def is_position_table(name: str) -> bool:
    """Old checkpoints kept the sinusoidal positions as a buffer; they follow from the config."""
    return name.endswith(".embed_positions.weights")
