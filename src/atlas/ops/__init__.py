"""The op vocabulary. Each op's NumPy definition is its specification and its reference."""

from atlas.ops import (
    activation,
    argmax,
    attention,
    beam,
    cross_attention,
    embedding,
    encoder_attention,
    linear,
    moe,
    norm,
    rope,
)
from atlas.ops.spec import OPS

__all__ = [
    "OPS",
    "activation",
    "argmax",
    "attention",
    "beam",
    "cross_attention",
    "embedding",
    "encoder_attention",
    "linear",
    "moe",
    "norm",
    "rope",
]
