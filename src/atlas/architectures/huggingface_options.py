"""Parts of config.json that every architecture has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atlas.architectures.families import family_in_wrapper, family_of_huggingface
from atlas.architectures.family import Family
from atlas.architectures.options import Options
from atlas.config import Activation
from atlas.errors import ModelFileError

MAX_LAYERS = 4096
MAX_EXPERTS = 4096
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
# Options that change what a model computes and that no supported architecture reads: absent or
# off, else refused. The message of quantization_config names its method.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "quantization_config": (),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "vision_config": (),
    "text_config": (),
    "audio_config": (),
    "num_nextn_predict_layers": (0,),
}
# Read by training code, by other tools or by nothing: no effect on inference.
HARMLESS = {
    "_name_or_path", "_attn_implementation", "_attn_implementation_autoset",
    "_sliding_window_pattern", "auto_map",
    "attention_dropout", "cache_implementation", "chunk_size_feed_forward", "dtype",
    "gradient_checkpointing", "hidden_act", "hidden_activation", "id2label",
    "initializer_range", "is_decoder", "label2id", "output_attentions",
    "output_hidden_states", "output_router_logits", "pad_token_id", "pretraining_tp",
    "problem_type", "return_dict", "router_aux_loss_coef", "task_specific_params",
    "torch_dtype", "transformers_version", "unk_token_id", "use_cache",
}  # fmt: skip
# Of a wrapper, what its text model does not need; the vision part is disclosed as not read.
_WRAPPER_HARMLESS = HARMLESS | {
    "architectures", "model_type", "text_config", "language_model_only", "image_token_id",
    "video_token_id", "vision_start_token_id", "vision_end_token_id",
}  # fmt: skip


def text_options(options: Options) -> tuple[Options, Family, list[str]]:
    """The options of the language model, its family, and options of a wrapper left unread.

    A multimodal model keeps them in ``text_config``; only whether the head is tied is said by the
    wrapper.
    """
    model_type, classes = options.text("model_type"), _class_names(options)
    family = family_in_wrapper(model_type, classes)
    if family is None:
        return options, family_of_huggingface(model_type, classes, options.origin), []
    section = options.raw("text_config")
    if not isinstance(section, Mapping):
        raise options.error("text_config", section, "a mapping")
    inner = dict(section)
    if (tied := options.raw("tie_word_embeddings")) is not None:
        inner["tie_word_embeddings"] = tied
    text = Options(inner, options.origin, "text_config.")
    text.choice("model_type", (family.model_type,), family.model_type)
    _class_names(text)
    _refuse_quantization(options)
    options.require_neutral({"quantization_config": ()})
    return text, family, [key for key in options.unread() if key not in _WRAPPER_HARMLESS]


def require_supported(options: Options, family: Family) -> None:
    """Refuse options that would change what the model computes."""
    _refuse_quantization(options)
    options.require_neutral(NEUTRAL | dict(family.neutral))


def _refuse_quantization(options: Options) -> None:
    method = options.raw("quantization_config")
    if isinstance(method, Mapping):
        raise options.unsupported(
            "quantization_config.quant_method", method.get("quant_method"), "absent"
        )


def unread(options: Options, family: Family) -> list[str]:
    """Options that nothing read, those known to be harmless left out."""
    return [key for key in options.unread() if key not in HARMLESS | family.harmless]


def _class_names(options: Options) -> list[str]:
    names = options.raw("architectures")
    if names is None:
        return []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise options.error("architectures", names, "a list of class names")
    return [name[:64] for name in names[:8]]


def read_head_dim(
    options: Options, key: str, default: int | None, hidden_size: int, num_heads: int
) -> int:
    """The even head size; absent, it is `default` or hidden_size / num_heads."""
    if num_heads < 1:
        raise ModelFileError(f"{options.origin}: {num_heads} attention heads; allowed: 1 or more")
    if default is None and not options.has(key) and hidden_size % num_heads:
        raise ModelFileError(
            f"{options.origin}: {key} is missing, and hidden size {hidden_size} is not a "
            f"multiple of {num_heads} heads"
        )
    head_dim = options.integer(key, default or hidden_size // num_heads, low=2, high=2**16)
    if head_dim % 2:
        raise options.unsupported(key, head_dim, "even sizes")
    return head_dim


def read_bos(options: Options, family: Family, vocab_size: int) -> int | None:
    """The token that begins a text, if the file or the model class names one."""
    if options.is_null("bos_token_id"):
        return None
    if options.has("bos_token_id"):
        return options.integer("bos_token_id", low=0, high=vocab_size - 1)
    default: int | None = family.defaults.get("bos_token_id")
    return default if default is not None and default < vocab_size else None


def read_eos(
    options: Options,
    family: Family,
    generation_config: Mapping[str, Any] | None,
    vocab_size: int,
) -> tuple[int, ...]:
    """The tokens that end a text by either file."""
    ids = list(options.integers("eos_token_id", high=vocab_size - 1))
    default = family.defaults.get("eos_token_id")
    if not ids and default is not None and not options.is_null("eos_token_id"):
        ids = [default] if default < vocab_size else []
    if generation_config is not None:
        generation = Options(generation_config, "generation_config.json")
        ids += generation.integers("eos_token_id", high=vocab_size - 1)
    return tuple(dict.fromkeys(ids))
