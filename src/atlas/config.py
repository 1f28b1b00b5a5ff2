"""What a model is: frozen, complete and validated, whatever file it was read from."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from atlas.errors import UnsupportedModelError

Activation = Literal["silu", "gelu_tanh", "relu", "relu_squared"]
LayerKind = Literal["attention", "gated_delta", "mamba2", "mlp", "moe"]
"""What a layer is: its mixer, which an MLP or experts may follow, or only one of the latter."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding of one kind of layer (rotate-half pairing).

    ``scaling`` is ``none``, ``linear`` (positions divided by ``factor``), ``llama3`` or ``yarn``;
    the remaining fields are read by the kinds that need them. ``divisors``, one per frequency,
    come on top: GGUF files carry llama3 scaling in this form.
    """

    theta: float = 10000.0
    rotary_dim: int | None = None  # None: the whole head
    sections: tuple[int, int, int] | None = None  # pairs turned by time, height and width
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
    """Sparse feed-forward: routing to ``top_k`` of ``num_experts`` experts."""

    num_experts: int
    top_k: int
    intermediate_size: int
    normalize_top_k: bool
    sparse_layers: tuple[bool, ...] = ()  # one per layer; False: a dense MLP
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    selection_bias: bool = False  # added to the scores for the choice of experts only
    scale: float = 1.0  # multiplies the experts' weights
    num_groups: int = 1  # experts are chosen within the top_groups best of num_groups groups
    top_groups: int = 1
    shared_size: int = 0  # width of the expert that sees every row; 0: there is none
    shared_gate: bool = False  # its output is multiplied by the sigmoid of a projection
    latent_size: int = 0  # width in which the routed experts work; 0: hidden_size

    def __post_init__(self) -> None:
        if not 0 < self.top_k <= self.num_experts:
            raise UnsupportedModelError(
                f"moe.top_k is {self.top_k}; allowed: 1 … {self.num_experts} experts"
            )
        if self.num_groups < 1 or self.num_experts % self.num_groups:
            raise UnsupportedModelError(
                f"moe.num_groups is {self.num_groups}; allowed: divisors of "
                f"{self.num_experts} experts"
            )
        reachable = self.top_groups * (self.num_experts // self.num_groups)
        if not 0 < self.top_groups <= self.num_groups or reachable < self.top_k:
            raise UnsupportedModelError(
                f"moe.top_groups is {self.top_groups}; allowed: 1 … {self.num_groups} groups, "
                f"with {self.top_k} experts in them"
            )


@dataclass(frozen=True, slots=True)
class GatedDeltaConfig:
    """Gated delta layers: key heads of ``key_dim`` serve a whole number of value heads each."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int  # taps of the causal convolution of q, k and v
    tiled_values: bool = False  # the file's output projection reads value head j of every key
    # head in turn, instead of the value heads of each key head (GGUF)

    def __post_init__(self) -> None:
        _require_positive(self, "gated_delta", ("num_key_heads", "num_value_heads"))
        _require_positive(self, "gated_delta", ("key_dim", "value_dim"))
        _require_taps(self.conv_width)
        if self.num_value_heads % self.num_key_heads:
            raise UnsupportedModelError(
                f"{self.num_value_heads} value heads are not a multiple of "
                f"{self.num_key_heads} key heads"
            )

    @property
    def key_size(self) -> int:
        """Width of q, and of k."""
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Width of v, of the gate z and of the output."""
        return self.num_value_heads * self.value_dim

    @property
    def output_size(self) -> int:
        """Width of the output, as of a Mamba-2 layer's."""
        return self.value_size

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: q, k and v."""
        return 2 * self.key_size + self.value_size

    @property
    def input_size(self) -> int:
        """Width of all projected inputs: those of the convolution, z, b and a."""
        return self.conv_size + self.value_size + 2 * self.num_value_heads

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """A sequence's state in one layer: [HV, K, V]."""
        return self.num_value_heads, self.key_dim, self.value_dim


@dataclass(frozen=True, slots=True)
class Mamba2Config:
    """Mamba-2 layers: ``num_groups`` groups of heads share b and c of ``state_size``."""

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    conv_width: int  # taps of the causal convolution of x, b and c
    conv_bias: bool = True
    projection_bias: bool = False
    dt_min: float = 0.0  # bounds of the step after softplus
    dt_max: float = math.inf

    def __post_init__(self) -> None:
        _require_positive(self, "mamba2", ("num_heads", "head_dim", "state_size", "num_groups"))
        _require_taps(self.conv_width)
        if self.num_heads % self.num_groups:
            raise UnsupportedModelError(
                f"{self.num_heads} Mamba-2 heads are not a multiple of {self.num_groups} groups"
            )
        if not 0 <= self.dt_min < self.dt_max:
            raise UnsupportedModelError(
                f"Mamba-2 steps from {self.dt_min} to {self.dt_max}; allowed: 0 <= least < greatest"
            )

    @property
    def inner_size(self) -> int:
        """Width of x, of the gate and of the output."""
        return self.num_heads * self.head_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: x, b and c."""
        return self.inner_size + 2 * self.num_groups * self.state_size

    @property
    def input_size(self) -> int:
        """Width of all projected inputs: the gate, those of the convolution, and dt."""
        return self.inner_size + self.conv_size + self.num_heads

    @property
    def output_size(self) -> int:
        """Width of the output, as of a gated delta layer's."""
        return self.inner_size

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """A sequence's state in one layer: [H, P, N]."""
        return self.num_heads, self.head_dim, self.state_size


def _require_positive(config: object, kind: str, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(config, name)
        if not 0 < value < 2**24:
            raise UnsupportedModelError(f"{kind}.{name} is {value}; allowed: 1 … 2**24 - 1")


def _require_taps(conv_width: int) -> None:
    if not 2 <= conv_width <= 64:
        raise UnsupportedModelError(f"a convolution of {conv_width} taps; allowed: 2 … 64")


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
    """Shapes and switches of a decoder, alone or behind an encoder. Sizes count elements.

    The attention sizes are 0 where no layer attends, ``intermediate_size`` where no MLP is dense.
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
    rotary: bool = True  # False: attention without position embedding (Nemotron-H)
    attention_gate: bool = False  # attention's output is multiplied by the sigmoid of a projection
    post_norms: bool = False  # RMSNorm after attention and after the MLP (Gemma)
    norm_offset: bool = False  # file stores w where the norm multiplies by 1 + w
    moe: MoeConfig | None = None
    layer_kinds: tuple[LayerKind, ...] = ()  # per layer; default: attention everywhere
    mixer_only: bool = False  # a layer is its mixer alone, or a feed-forward alone (Nemotron-H)
    gated_delta: GatedDeltaConfig | None = None
    mamba2: Mamba2Config | None = None
    mtp_kinds: tuple[LayerKind, ...] = ()  # layers of the multi-token prediction head, if any
    encoder: EncoderConfig | None = None  # translation models
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_layers", "max_seq_len"):
            self._require_size(name, 1)
        if not self.layer_kinds:
            object.__setattr__(self, "layer_kinds", ("attention",) * self.num_layers)
        self._require_kinds()
        attends = "attention" in self.layer_kinds + self.mtp_kinds
        for name in ("num_heads", "num_kv_heads", "head_dim"):
            self._require_size(name, 1 if attends else 0)
        blocks = {block for i in range(self.num_layers) for block in self.layer_blocks(i)}
        blocks |= {block for i in range(len(self.mtp_kinds)) for block in self.mtp_blocks(i)}
        self._require_size("intermediate_size", 1 if "mlp" in blocks else 0)
        if attends and self.num_heads % self.num_kv_heads:
            raise UnsupportedModelError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if not self.windows:
            object.__setattr__(self, "windows", (None,) * self.num_layers)
        if len(self.windows) != self.num_layers:
            raise UnsupportedModelError(
                f"{len(self.windows)} window entries for {self.num_layers} layers"
            )
        if not self.attention_scale and attends:
            object.__setattr__(self, "attention_scale", self.head_dim**-0.5)

    def _require_size(self, name: str, low: int) -> None:
        value = getattr(self, name)
        if not low <= value < 2**31:
            raise UnsupportedModelError(f"{name} is {value}; allowed: {low} … 2**31 - 1")

    def _require_kinds(self) -> None:
        kinds = set(self.layer_kinds + self.mtp_kinds)
        if len(self.layer_kinds) != self.num_layers:
            raise UnsupportedModelError(
                f"{len(self.layer_kinds)} layer kinds for {self.num_layers} layers"
            )
        if kinds & {"mlp", "moe"} and not self.mixer_only:
            raise UnsupportedModelError("layers of a feed-forward alone need mixer_only")
        for kind in ("gated_delta", "mamba2", "moe"):
            if kind in kinds and getattr(self, kind) is None:
                raise UnsupportedModelError(f"a {kind} layer without {kind} sizes")
        if self.moe is not None and len(self.moe.sparse_layers) != self.num_layers:
            raise UnsupportedModelError("moe.sparse_layers must have one entry per layer")

    def layer_blocks(self, layer_idx: int) -> tuple[LayerKind, ...]:
        """The blocks of a layer in order, each with a norm before and a residual around it."""
        kind = self.layer_kinds[layer_idx]
        if self.mixer_only:
            return (kind,)
        sparse = self.moe is not None and self.moe.sparse_layers[layer_idx]
        return kind, "moe" if sparse else "mlp"

    def mtp_blocks(self, layer_idx: int) -> tuple[LayerKind, ...]:
        """The blocks of a layer of the multi-token prediction head."""
        kind = self.mtp_kinds[layer_idx]
        if self.mixer_only:
            return (kind,)
        return kind, "mlp" if self.moe is None else "moe"

    @property
    def has_mlp_gate(self) -> bool:
        """Whether feed-forward blocks multiply by a gate; those of ReLU and ReLU² do not."""
        return self.activation not in ("relu", "relu_squared")

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Layers with a KV cache."""
        return tuple(i for i, kind in enumerate(self.layer_kinds) if kind == "attention")

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """Layers with a state and a convolution tail per sequence."""
        recurrent = ("gated_delta", "mamba2")
        return tuple(i for i, kind in enumerate(self.layer_kinds) if kind in recurrent)

    def recurrent(self, layer_idx: int) -> GatedDeltaConfig | Mamba2Config:
        """The sizes of a recurrent layer."""
        sizes = self.gated_delta if self.layer_kinds[layer_idx] == "gated_delta" else self.mamba2
        if sizes is None:
            raise ValueError(f"layer {layer_idx} is not recurrent")
        return sizes
