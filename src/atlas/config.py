"""What a model is: frozen, complete and validated, whatever file it was read from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from atlas.errors import UnsupportedModelError

Activation = Literal["silu", "gelu_tanh", "relu"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding of one kind of layer (rotate-half pairing).

    ``scaling`` is ``none``, ``linear`` (positions divided by ``factor``), ``llama3`` or ``yarn``;
    the remaining fields are read by the kinds that need them. ``divisors``, one per frequency,
    come on top: GGUF files carry llama3 scaling in this form.
    """

    theta: float = 10000.0
    rotary_dim: int | None = None  # None: the whole head
    scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    factor: float = 1.0
    original_max_seq_len: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float = 1.0  # yarn: multiplies cos and sin
    truncate: bool = True  # yarn: correction range rounded outwards to whole dimensions
    divisors: tuple[float, ...] | None = None  # rotary_dim / 2 of them, or none


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Sparse feed-forward: softmax routing to ``top_k`` of ``num_experts`` experts."""

    num_experts: int
    top_k: int
    intermediate_size: int
    normalize_top_k: bool
    sparse_layers: tuple[bool, ...] = ()  # one per layer; False: a dense MLP


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """The encoder in front of a decoder, and what a translation begins and is padded with.

    Its hidden size, vocabulary and embedding are the decoder's.
    """

    num_layers: int
    num_heads: int
    intermediate_size: int
    max_source_len: int  # language tag and end token included
    padding_token_id: int
    start_token_id: int  # the decoder's first input

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_heads", "intermediate_size", "max_source_len"):
            value = getattr(self, name)
            if not 0 < value < 2**31:
                raise UnsupportedModelError(f"encoder {name} is {value}; allowed: 1 … 2**31 - 1")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shapes and switches of a decoder: dense, MoE, or behind an encoder.

    Sizes count elements.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    max_seq_len: int
    rope: RopeConfig = field(default_factory=RopeConfig)
    rope_local: RopeConfig | None = None  # layers with a window, where it differs (Gemma 3)
    windows: tuple[int | None, ...] = ()  # per layer; a window counts the token itself
    activation: Activation = "silu"
    attention_scale: float = 0.0  # 0: head_dim ** -0.5
    attention_softcap: float | None = None
    final_softcap: float | None = None
    embedding_scale: float = 1.0
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # per-head RMSNorm of q and k
    post_norms: bool = False  # RMSNorm after attention and after the MLP (Gemma)
    norm_offset: bool = False  # file stores w where the norm multiplies by 1 + w
    moe: MoeConfig | None = None
    encoder: EncoderConfig | None = None  # translation models
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "intermediate_size",
            "max_seq_len",
        ):
            value = getattr(self, name)
            if not 0 < value < 2**31:
                raise UnsupportedModelError(f"{name} is {value}; allowed: 1 … 2**31 - 1")
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModelError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if not self.windows:
            object.__setattr__(self, "windows", (None,) * self.num_layers)
        if len(self.windows) != self.num_layers:
            raise UnsupportedModelError(
                f"{len(self.windows)} window entries for {self.num_layers} layers"
            )
        if not self.attention_scale:
            object.__setattr__(self, "attention_scale", self.head_dim**-0.5)
        if self.moe is not None and not self.moe.sparse_layers:
            raise UnsupportedModelError("moe.sparse_layers must have one entry per layer")
