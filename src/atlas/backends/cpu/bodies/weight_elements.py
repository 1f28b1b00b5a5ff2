"""One element of each packed format (``weight_blocks`` has the layouts), for embedding rows."""

# mypy: ignore-errors
from __future__ import annotations

import numpy as np

from atlas.backends.cpu.bodies.simd import (
    load_bf16_scalar,
    load_f16_scalar,
    load_f32,
    load_i8,
    load_u8,
)
from atlas.backends.cpu.bodies.vectors import device

_f = np.float32


@device
def byte_at(q, lane, column):
    """The byte of ``column`` (0 … 31) in a block of bytes."""
    return load_u8(q + (column // 4) * 64 + lane * 4 + column % 4)


@device
def nibble_at(q, lane, column):
    byte = load_u8(q + (column % 16 // 4) * 64 + lane * 4 + column % 4)
    return byte >> 4 if column >= 16 else byte & 15


@device
def q4_0(tile, k, lane, column):
    nb, b = k // 32, column // 32
    q = nibble_at(tile + nb * 32 + b * 256, lane, column % 32)
    return load_f16_scalar(tile + b * 32 + lane * 2) * _f(q - 8)


@device
def q4_1(tile, k, lane, column):
    nb, b = k // 32, column // 32
    q = nibble_at(tile + nb * 64 + b * 256, lane, column % 32)
    d, m = tile + b * 32 + lane * 2, tile + nb * 32 + b * 32 + lane * 2
    return load_f16_scalar(d) * _f(q) + load_f16_scalar(m)


@device
def q8_0(tile, k, lane, column):
    nb, b = k // 32, column // 32
    q = byte_at(tile + nb * 32 + b * 512, lane, column % 32)
    return load_f16_scalar(tile + b * 32 + lane * 2) * _f(q - 128)


@device
def q4_k(tile, k, lane, column):
    nb, b = k // 32, column // 32
    q = nibble_at(tile + nb * 40 + b * 256, lane, column % 32)
    d = load_f16_scalar(tile + (b // 8) * 32 + lane * 2)
    least = load_f16_scalar(tile + nb * 4 + (b // 8) * 32 + lane * 2)
    scale = d * _f(load_u8(tile + nb * 8 + b * 16 + lane))
    return scale * _f(q) + least * _f(load_u8(tile + nb * 24 + b * 16 + lane))


@device
def q6_k(tile, k, lane, column):
    nb, b, c = k // 32, column // 32, column % 32
    low = nibble_at(tile + nb * 36 + b * 256, lane, c)
    pairs = load_u8(tile + nb * 292 + b * 128 + (c // 16) * 64 + lane * 4 + c % 4)
    q = low | ((pairs >> (c % 16 // 4 * 2)) & 3) << 4
    scale = load_i8(tile + nb * 4 + b * 32 + (c // 16) * 16 + lane)
    return load_f16_scalar(tile + (b // 8) * 32 + lane * 2) * _f(scale) * _f(q - 32)


@device
def b8_32(tile, k, lane, column):
    nb, b = k // 32, column // 32
    q = byte_at(tile + nb * 128 + b * 512, lane, column % 32)
    at = tile + b * 64 + lane * 4
    return load_f32(at) * _f(q) + load_f32(at + nb * 64)


@device
def b8_16(tile, k, lane, column):
    nb, b = k // 32, column // 32
    q = byte_at(tile + nb * 256 + b * 512, lane, column % 32)
    at = tile + (column // 16) * 64 + lane * 4
    return load_f32(at) * _f(q) + load_f32(at + nb * 128)


@device
def f32(tile, k, lane, column):
    return load_f32(tile + column * 64 + lane * 4)


@device
def f16(tile, k, lane, column):
    return load_f16_scalar(tile + column * 32 + lane * 2)


@device
def bf16(tile, k, lane, column):
    return load_bf16_scalar(tile + column * 32 + lane * 2)


ELEMENTS = {
    "q4_0": q4_0,
    "q4_1": q4_1,
    "q8_0": q8_0,
    "q4_k": q4_k,
    "q6_k": q6_k,
    "b8_32": b8_32,
    "b8_16": b8_16,
    "f32": f32,
    "f16": f16,
    "bf16": bf16,
}
