"""The dense family (and its MoE sibling) as a table: one row per architecture.

A row says what differs between the architectures: defaults of the options, which biases and
norms exist, which layers have a window. Everything else is one decoder. Defaults are those of
the Hugging Face config classes, since config.json may omit a value that equals its default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from atlas.config import Activation
from atlas.errors import UnsupportedModelError

Bias = Literal["none", "qkv", "option"]
Windows = Literal["none", "every", "every_if_enabled", "tail", "alternating"]


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture.

    Parameters
    ----------
    name : str
        Our name of it, ``ModelConfig.architecture``; also ``model_type`` in config.json unless
        `model_type` says otherwise.
    huggingface_class : str
        The entry of ``architectures`` in config.json.
    gguf_name : str
        ``general.architecture`` in a GGUF file. Mistral files say ``llama``.
    defaults : mapping
        Defaults of config.json's options.
    bias : {"none", "qkv", "option"}
        Biases of the attention projections: never, always on q, k and v, or on all four where
        ``attention_bias`` is set.
    mlp_bias : bool
        Whether ``mlp_bias`` is an option.
    qk_norm : bool
        RMSNorm of every query and key head.
    windows : str
        Which layers have a sliding window: ``none``; ``every``; ``every_if_enabled`` by
        ``use_sliding_window``; ``tail``: from ``max_window_layers`` on, if enabled;
        ``alternating``: all but every n-th layer. ``layer_types`` overrides the last two.
    window_period : int
        ``alternating``: the n above, unless the file says otherwise.
    gemma : bool
        Norms multiply by 1 + w and also follow attention and MLP; embeddings are scaled by
        sqrt(hidden_size); the attention scale is an option; gelu.
    attention_softcap : bool
        Whether the architecture caps attention scores.
    moe : bool
        Sparse feed-forward layers.
    rows_interleaved_in_gguf : bool
        GGUF stores the rows of q and k for interleaved RoPE.
    neutral : mapping of str to tuple
        Options that must be absent or hold one of these values.
    """

    name: str
    huggingface_class: str
    gguf_name: str
    defaults: Mapping[str, Any]
    model_type: str = ""
    bias: Bias = "none"
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: Windows = "none"
    window_period: int = 0
    gemma: bool = False
    attention_softcap: bool = False
    moe: bool = False
    rows_interleaved_in_gguf: bool = False
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    @property
    def activation_key(self) -> str:
        """The option of config.json that names the activation."""
        return "hidden_activation" if self.gemma else "hidden_act"

    @property
    def activation(self) -> Activation:
        """The activation where the file does not say."""
        return "gelu_tanh" if self.gemma else "silu"


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

FAMILIES: tuple[Family, ...] = (
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

_BY_MODEL_TYPE = {family.model_type or family.name: family for family in FAMILIES}
# The first of a GGUF name: Mistral files say llama.
_BY_GGUF_NAME = {family.gguf_name: family for family in reversed(FAMILIES)}
_BY_NAME = {family.name: family for family in FAMILIES}


def supported() -> tuple[str, ...]:
    """Names of the supported architectures."""
    return tuple(_BY_NAME)


def family_named(name: str) -> Family:
    """The row of a ModelConfig's ``architecture``."""
    return _BY_NAME[name]


def family_of_huggingface(model_type: str, classes: list[str], origin: str) -> Family:
    """The row for config.json's ``model_type`` and ``architectures``.

    Raises
    ------
    UnsupportedModelError
        Neither is known, or the class is not the one that generates text (a classifier, a
        multimodal model).
    """
    family = _BY_MODEL_TYPE.get(model_type)
    if family is None or (classes and family.huggingface_class not in classes):
        kinds = ", ".join(f"{row.huggingface_class} ({key})" for key, row in _BY_MODEL_TYPE.items())
        raise UnsupportedModelError(
            f"{origin}: architecture {', '.join(classes) or 'unnamed'} (model_type "
            f"{model_type[:64]!r}) is not supported; supported: {kinds}"
        )
    return family


def family_of_gguf(name: str, origin: str) -> Family:
    """The row for ``general.architecture``; UnsupportedModelError if there is none."""
    family = _BY_GGUF_NAME.get(name)
    if family is None:
        raise UnsupportedModelError(
            f"{origin}: general.architecture {name[:64]!r} is not supported; "
            f"supported: {', '.join(sorted(_BY_GGUF_NAME))}"
        )
    return family
