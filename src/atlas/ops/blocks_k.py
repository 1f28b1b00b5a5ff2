"""Unpack ggml's super-blocks of 256 weights: Q2_K … Q6_K and IQ4_XS.

A super-block holds one or two float16 scales and small integers that multiply them, one per
sub-block of 16 or 32 weights. Every function here takes ``uint8 [n, block_bytes]`` and returns
one :class:`BlockCodes` whose rows are the sub-blocks in the order of the weights.
The layouts are those of ggml's ``block_q*_K`` structures (little endian).
"""

from __future__ import annotations

import numpy as np

from atlas.ops.blocks_32 import (
    CODEBOOK_OFFSET,
    IQ4_CODEBOOK,
    BlockCodes,
    Bytes,
    Floats,
    float16_column,
)

_BIT, _CRUMB, _NIBBLE, _SIX_BITS = np.uint8(1), np.uint8(3), np.uint8(15), np.uint8(63)
_CRUMB_SHIFTS = np.array([0, 2, 4, 6], dtype=np.uint8)
_NIBBLE_SHIFTS = np.array([0, 4], dtype=np.uint8)
_BIT_SHIFTS = np.arange(8, dtype=np.uint8)


def unpack_q2_k(blocks: Bytes) -> BlockCodes:
    """84 bytes: scale and minimum nibbles [16], 2-bit codes [64], d, d_min. Sub-blocks of 16."""
    packed = blocks[:, :16]
    scale = float16_column(blocks, 80) * (packed & _NIBBLE)
    minimum = float16_column(blocks, 82) * (packed >> 4)
    codes = _crumbs(blocks[:, 16:80])
    return _sub_blocks(codes, 16, 0, scale, -minimum)


def unpack_q3_k(blocks: Bytes) -> BlockCodes:
    """110 bytes: third bits [32], low 2 bits [64], 6-bit scales [12], d. Sub-blocks of 16."""
    codes = _crumbs(blocks[:, 32:96])
    third_bits = (blocks[:, None, :32] >> _BIT_SHIFTS[:, None]) & _BIT
    codes |= third_bits.reshape(codes.shape) << 2

    low, high = blocks[:, 96:104], blocks[:, 104:108]
    low = (low[:, None, :] >> _NIBBLE_SHIFTS[:, None]) & _NIBBLE
    high = (high[:, None, :] >> _CRUMB_SHIFTS[:, None]) & _CRUMB
    multiplier = low.reshape(-1, 16) | (high.reshape(-1, 16) << 4)
    scale = float16_column(blocks, 108) * (multiplier - np.float32(32))
    return _sub_blocks(codes, 16, 4, scale, None)


def unpack_q4_k(blocks: Bytes) -> BlockCodes:
    """144 bytes: d, d_min, 6-bit scales and minima [12], nibbles [128]. Sub-blocks of 32."""
    scale, minimum = _scale_and_minimum(blocks)
    codes = (blocks[:, 16:].reshape(-1, 4, 1, 32) >> _NIBBLE_SHIFTS[:, None]) & _NIBBLE
    return _sub_blocks(codes, 32, 0, scale, minimum)


def unpack_q5_k(blocks: Bytes) -> BlockCodes:
    """176 bytes: as Q4_K with the fifth bits [32] before the nibbles. Sub-blocks of 32."""
    scale, minimum = _scale_and_minimum(blocks)
    codes = (blocks[:, 48:].reshape(-1, 4, 1, 32) >> _NIBBLE_SHIFTS[:, None]) & _NIBBLE
    fifth_bits = (blocks[:, None, 16:48] >> _BIT_SHIFTS[:, None]) & _BIT
    codes |= fifth_bits.reshape(codes.shape) << 4
    return _sub_blocks(codes, 32, 0, scale, minimum)


def unpack_q6_k(blocks: Bytes) -> BlockCodes:
    """210 bytes: nibbles [128], high 2 bits [64], int8 scales [16], d. Sub-blocks of 16."""
    codes = (blocks[:, :128].reshape(-1, 2, 1, 64) >> _NIBBLE_SHIFTS[:, None]) & _NIBBLE
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> _CRUMB_SHIFTS[:, None]) & _CRUMB
    codes |= high.reshape(codes.shape) << 4
    scale = float16_column(blocks, 208) * blocks[:, 192:208].view(np.int8)
    return _sub_blocks(codes, 16, 32, scale, None)


def unpack_iq4_xs(blocks: Bytes) -> BlockCodes:
    """136 bytes: d, high scale bits [2], low scale nibbles [4], nibbles [128]. Sub-blocks of 32."""
    low = (blocks[:, 4:8, None] >> _NIBBLE_SHIFTS) & _NIBBLE
    high = (blocks[:, 2:4, None] >> _CRUMB_SHIFTS) & _CRUMB
    multiplier = low.reshape(-1, 8) | (high.reshape(-1, 8) << 4)
    scale = float16_column(blocks, 0) * (multiplier - np.float32(32))
    nibbles = (blocks[:, 8:].reshape(-1, 8, 1, 16) >> _NIBBLE_SHIFTS[:, None]) & _NIBBLE
    return _sub_blocks(IQ4_CODEBOOK.take(nibbles), 32, CODEBOOK_OFFSET, scale, None)


def _crumbs(packed: Bytes) -> Bytes:
    """2-bit codes of two halves of 128 weights, each in 32 bytes: uint8 [n, 2, 4, 32]."""
    return (packed.reshape(-1, 2, 1, 32) >> _CRUMB_SHIFTS[:, None]) & _CRUMB


def _scale_and_minimum(blocks: Bytes) -> tuple[Floats, Floats]:
    """The eight scales and eight (negated) minima of a Q4_K or Q5_K super-block.

    Of the 12 bytes at 4, the first four hold scales 0–3 and the next four minima 0–3 in their
    low six bits; the last four hold the low nibbles of scales and minima 4–7, whose upper two
    bits are the top bits of the first eight.
    """
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([first & _SIX_BITS, (third & _NIBBLE) | (first >> 6 << 4)], axis=1)
    minima = np.concatenate([second & _SIX_BITS, (third >> 4) | (second >> 6 << 4)], axis=1)
    return float16_column(blocks, 0) * scales, -(float16_column(blocks, 2) * minima)


def _sub_blocks(
    codes: Bytes, block_len: int, offset: int, scale: Floats, minimum: Floats | None
) -> BlockCodes:
    return BlockCodes(
        codes.reshape(-1, block_len),
        offset,
        scale.reshape(-1, 1),
        None if minimum is None else minimum.reshape(-1, 1),
    )
