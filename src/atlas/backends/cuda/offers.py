"""Which layers the kernels take, and which ops they take together.

Layers are asked for before a weight is read, ops when a step is recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from atlas_kernels.attention_plan import STEP_DIMS
from atlas_kernels.gemm_norm_plan import norm_variant

from atlas.backends.cuda.candidates import MAX_CANDIDATES
from atlas.backends.cuda.check import require
from atlas.model.records import MAX_BEAMS

if TYPE_CHECKING:
    from atlas.config import EncoderConfig, GatedDeltaConfig, Mamba2Config, ModelConfig, MoeConfig

DELTA_DIMS = (64, 128)
STATE_SIZES = (64, 128, 256)
MAMBA_HEAD_DIM = 64
_WIDTH, _INNER_WIDTH = 128, 64  # what divides the experts' input and inner sizes


def require_support(config: ModelConfig) -> None:
    """Raise CapabilityError where no kernel takes a model's layers; which, in words."""
    if config.attention_layers:
        require(config.head_dim in STEP_DIMS, "head_dim", config.head_dim, _words(STEP_DIMS))
    kinds = set(config.layer_kinds)
    if "gated_delta" in kinds and config.gated_delta is not None:
        _require_delta(config.gated_delta)
    if "mamba2" in kinds and config.mamba2 is not None:
        _require_mamba(config.mamba2)
    if config.moe is not None:
        _require_experts(config, config.moe)
    if config.encoder is not None:
        _require_encoder(config, config.encoder)


def joins_shared_expert(config: ModelConfig, formats: Mapping[str, str]) -> bool:
    """Whether the shared expert has a gate and the shape of the others: it may be one of them."""
    moe = config.moe
    if moe is None or moe.shared_size != moe.intermediate_size:
        return False
    if not moe.shared_gate or moe.latent_size or moe.num_experts % 8:
        return False
    return {format for name, format in formats.items() if ".shared." in name} == {"bf16"}


def normed_product(arch: str, format: str, n: int, k: int, rows: int, *, gated: bool) -> str | None:
    """The tile with which a matrix [n, k] takes the norm of one row into its product.

    None where norm and product are two kernels, as for all other numbers of rows.
    """
    if arch != "sm_90a" or format != "bf16" or (gated and n % 8):
        return None
    name: str | None = norm_variant(n, k, rows, gated=gated)
    return name


def _require_delta(sizes: GatedDeltaConfig) -> None:
    for name, dim in (("key", sizes.key_dim), ("value", sizes.value_dim)):
        require(dim in DELTA_DIMS, f"a gated delta head's {name}_dim", dim, _words(DELTA_DIMS))
    dims = f"{sizes.key_dim} and {sizes.value_dim}"
    same = sizes.key_dim == sizes.value_dim
    require(same, "a gated delta head's key_dim and value_dim", dims, "equal ones")
    tiled = sizes.tiled_values and sizes.num_value_heads > sizes.num_key_heads
    require(not tiled, "the order of gated delta value heads", "tiled, as in GGUF files", "plain")


def _require_mamba(sizes: Mamba2Config) -> None:
    dim, size = sizes.head_dim, sizes.state_size
    require(dim == MAMBA_HEAD_DIM, "a Mamba-2 head_dim", dim, str(MAMBA_HEAD_DIM))
    require(size in STATE_SIZES, "a Mamba-2 state_size", size, _words(STATE_SIZES))


def _require_experts(config: ModelConfig, moe: MoeConfig) -> None:
    require(config.activation == "silu", "the experts' activation", config.activation, "silu")
    groups = f"{moe.top_groups} of {moe.num_groups}"
    require(moe.top_groups == moe.num_groups, "groups of experts", groups, "all")
    plain = moe.scoring == "sigmoid" or not moe.selection_bias
    require(plain, "the scoring beside a selection bias", moe.scoring, "sigmoid")
    width, inner = moe.latent_size or config.hidden_size, moe.intermediate_size
    require(width % _WIDTH == 0, "the experts' input size", width, f"multiples of {_WIDTH}")
    require(inner % _INNER_WIDTH == 0, "an expert's inner size", inner, "multiples of 64")


def _require_encoder(config: ModelConfig, encoder: EncoderConfig) -> None:
    dim, ends = config.hidden_size // encoder.num_heads, len(config.eos_token_ids)
    require(dim in STEP_DIMS, "the encoder's head_dim", dim, _words(STEP_DIMS))
    most = MAX_CANDIDATES // MAX_BEAMS - 1
    require(ends <= most, "the number of end tokens", ends, f"up to {most}, for wide searches")


def _words(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))
