"""One architecture as a row of a table: what differs between it and the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from atlas.config import Activation

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
    wrapper_type, wrapper_class : str
        ``model_type`` and class of the multimodal model around it, whose ``text_config`` this is.
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
    recurrent : {"", "gated_delta", "mamba2"}
        The kind of its recurrent layers.
    rows_interleaved_in_gguf : bool
        GGUF stores the rows of q and k for interleaved RoPE.
    neutral : mapping of str to tuple
        Options that must be absent or hold one of these values.
    harmless : frozenset of str
        Options without effect on inference.
    """

    name: str
    huggingface_class: str
    gguf_name: str
    defaults: Mapping[str, Any]
    model_type: str = ""
    wrapper_type: str = ""
    wrapper_class: str = ""
    bias: Bias = "none"
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: Windows = "none"
    window_period: int = 0
    gemma: bool = False
    attention_softcap: bool = False
    moe: bool = False
    recurrent: Literal["", "gated_delta", "mamba2"] = ""
    rows_interleaved_in_gguf: bool = False
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    harmless: frozenset[str] = frozenset()

    @property
    def activation_key(self) -> str:
        """The option of config.json that names the activation."""
        return "hidden_activation" if self.gemma else "hidden_act"

    @property
    def activation(self) -> Activation:
        """The activation where the file does not say."""
        return "gelu_tanh" if self.gemma else "silu"
