"""The op vocabulary. Each op's NumPy definition is its specification and its reference."""

from atlas.ops import (
    activation,
    argmax,
    attention,
    beam,
    conv,
    cross_attention,
    embedding,
    encoder_attention,
    gated_delta,
    linear,
    mamba2,
    moe,
    norm,
    norm_linear,
    rope,
)
from atlas.ops.spec import OPS

__all__ = [
    "OPS",
    "activation",
    "argmax",
    "attention",
    "beam",
    "conv",
    "cross_attention",
    "embedding",
    "encoder_attention",
    "gated_delta",
    "linear",
    "mamba2",
    "moe",
    "norm",
    "norm_linear",
    "rope",
]
