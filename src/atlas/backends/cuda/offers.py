"""Which layers the kernels take: asked before a model is loaded, without a CUDA library."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atlas.config import GatedDeltaConfig, Mamba2Config, ModelConfig, MoeConfig

HEAD_DIMS = (64, 80, 96, 128, 256)
DELTA_DIMS = (64, 128)
STATE_SIZES = (64, 128, 256)
MAMBA_HEAD_DIM = 64
MOST_EXPERTS, MOST_CHOICES = 1024, 31
WIDTH, INNER_WIDTH = 128, 64
"""What divides the experts' input and inner sizes."""


def refusal(config: ModelConfig) -> str:
    """Why a model's layers do not run here, in words; empty where they do."""
    return "; ".join(_reasons(config))


def joins_shared_expert(config: ModelConfig, formats: Mapping[str, str]) -> bool:
    """Whether the shared expert has a gate and the shape of the others: it may be one of them."""
    moe = config.moe
    if moe is None or moe.shared_size != moe.intermediate_size:
        return False
    if not moe.shared_gate or moe.latent_size or moe.num_experts % 4:
        return False
    return {format for name, format in formats.items() if ".shared." in name} == {"bf16"}


def _reasons(config: ModelConfig) -> Iterator[str]:
    if config.attention_layers and config.head_dim not in HEAD_DIMS:
        yield f"head_dim is {config.head_dim}, allowed: {_words(HEAD_DIMS)}"
    kinds = set(config.layer_kinds)
    if "gated_delta" in kinds and config.gated_delta is not None:
        yield from _delta_reasons(config.gated_delta)
    if "mamba2" in kinds and config.mamba2 is not None:
        yield from _mamba_reasons(config.mamba2)
    if config.moe is not None:
        yield from _moe_reasons(config, config.moe)


def _delta_reasons(sizes: GatedDeltaConfig) -> Iterator[str]:
    dims = sizes.key_dim, sizes.value_dim
    if dims[0] != dims[1] or dims[0] not in DELTA_DIMS:
        yield (
            f"gated delta heads have keys of {dims[0]} and values of {dims[1]}, "
            f"allowed: {_words(DELTA_DIMS)} for both"
        )
    if sizes.tiled_values and sizes.num_value_heads > sizes.num_key_heads:
        yield "gated delta layers have value heads in tiles, as GGUF files keep them"


def _mamba_reasons(sizes: Mamba2Config) -> Iterator[str]:
    if sizes.head_dim != MAMBA_HEAD_DIM:
        yield f"Mamba-2 heads have {sizes.head_dim} channels, allowed: {MAMBA_HEAD_DIM}"
    if sizes.state_size not in STATE_SIZES:
        yield f"a Mamba-2 state has {sizes.state_size} elements, allowed: {_words(STATE_SIZES)}"


def _moe_reasons(config: ModelConfig, moe: MoeConfig) -> Iterator[str]:
    if config.activation != "silu":
        yield f"experts use {config.activation}, allowed: silu"
    if moe.num_experts > MOST_EXPERTS or moe.top_k > MOST_CHOICES:
        yield (
            f"{moe.top_k} of {moe.num_experts} experts a row, "
            f"allowed: up to {MOST_CHOICES} of {MOST_EXPERTS}"
        )
    if moe.top_groups != moe.num_groups:
        yield f"experts of {moe.top_groups} of {moe.num_groups} groups, allowed: of all"
    if moe.selection_bias and moe.scoring != "sigmoid":
        yield f"a selection bias beside {moe.scoring} scores, allowed: beside sigmoid"
    width = moe.latent_size or config.hidden_size
    if width % WIDTH or moe.intermediate_size % INNER_WIDTH:
        yield (
            f"experts from {width} to {moe.intermediate_size}, "
            f"allowed: multiples of {WIDTH} and {INNER_WIDTH}"
        )


def _words(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))
