"""Unpack and pack ggml's blocks of 32 weights: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 and IQ4_NL.

A block is a float16 scale, a float16 minimum in the ``_1`` formats, the fifth bits of the codes
in the five-bit formats, and the codes. Two codes share a byte: code i is in the low half of
byte i, code i + 16 in the high half. Unpacking takes ``uint8 [n, block_bytes]`` and returns one
:class:`BlockCodes`; packing takes ``float32 [n, 32]``. Layouts are those of ggml's
``block_q*`` structures (little endian).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

# The 16 values of IQ4_NL and IQ4_XS, moved up by 128 so that they fit an unsigned byte.
CODEBOOK_OFFSET = 128
IQ4_CODEBOOK: Bytes = np.frombuffer(
    bytes(
        value + CODEBOOK_OFFSET
        for value in (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
    ),
    dtype=np.uint8,
)

_NIBBLE, _FOUR, _SIGN_BIT = np.uint8(15), np.uint8(4), np.uint8(0x80)


class BlockCodes(NamedTuple):
    """Blocks taken apart: ``weight = scale * (code - offset) + minimum``.

    Parameters
    ----------
    codes : uint8 [n, block_len]
    offset : int
        What was added to make the codes unsigned; a power of two, or 0.
    scale : float32 [n, 1]
    minimum : float32 [n, 1] or None
        None where the format has none: adding +0.0 would change the sign of a negative zero.
    """

    codes: Bytes
    offset: int
    scale: Floats
    minimum: Floats | None


def float16_column(blocks: Bytes, start: int) -> Floats:
    """The little-endian float16 at byte `start` of every block, as float32 [n, 1]."""
    return blocks[:, start : start + 2].view("<f2").astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """32 codes from 16 bytes: the low halves first, then the high halves."""
    return np.concatenate([packed & _NIBBLE, packed >> _FOUR], axis=1)


def _fifth_bits(packed: Bytes) -> Bytes:
    """Bit i of four bytes, moved to the place of code i's fifth bit."""
    return np.unpackbits(packed, axis=1, bitorder="little") << _FOUR


def unpack_q4_0(blocks: Bytes) -> BlockCodes:
    """18 bytes: d, codes [16]; ``w = d * (code - 8)``."""
    return BlockCodes(_nibbles(blocks[:, 2:]), 8, float16_column(blocks, 0), None)


def unpack_q4_1(blocks: Bytes) -> BlockCodes:
    """20 bytes: d, minimum, codes [16]; ``w = d * code + minimum``."""
    scale, minimum = float16_column(blocks, 0), float16_column(blocks, 2)
    return BlockCodes(_nibbles(blocks[:, 4:]), 0, scale, minimum)


def unpack_q5_0(blocks: Bytes) -> BlockCodes:
    """22 bytes: d, fifth bits [4], codes [16]; ``w = d * (code - 16)``."""
    codes = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return BlockCodes(codes, 16, float16_column(blocks, 0), None)


def unpack_q5_1(blocks: Bytes) -> BlockCodes:
    """24 bytes: d, minimum, fifth bits [4], codes [16]; ``w = d * code + minimum``."""
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return BlockCodes(codes, 0, float16_column(blocks, 0), float16_column(blocks, 2))


def unpack_q8_0(blocks: Bytes) -> BlockCodes:
    """34 bytes: d, int8 codes [32]; ``w = d * code``."""
    # Flipping the top bit of a two's complement byte adds 128.
    return BlockCodes(blocks[:, 2:] ^ _SIGN_BIT, 128, float16_column(blocks, 0), None)


def unpack_iq4_nl(blocks: Bytes) -> BlockCodes:
    """18 bytes: d, codes [16]; ``w = d * codebook[code]``."""
    codes = IQ4_CODEBOOK.take(_nibbles(blocks[:, 2:]))
    return BlockCodes(codes, CODEBOOK_OFFSET, float16_column(blocks, 0), None)


def pack_q8_0(weights: Floats) -> Bytes:
    """``d = max|w| / 127``, ``code = round(w / d)``: uint8 [n, 34]."""
    scale = np.abs(weights).max(axis=1, keepdims=True) / np.float32(127)
    scaled = weights * _reciprocal(scale)
    # C's roundf: halves away from zero. Adding ±0.5 first would round 0.49999997 up.
    whole = np.trunc(scaled)
    whole += np.trunc(2 * (scaled - whole))
    return _join(scale, whole.astype(np.int8).view(np.uint8))


def pack_q4_0(weights: Floats) -> Bytes:
    """``d = w_max / -8``, ``code = floor(w / d + 8.5)`` at most 15: uint8 [n, 18].

    `w_max` is the weight of largest magnitude with its sign, so it becomes -8 exactly.
    """
    at = np.abs(weights).argmax(axis=1, keepdims=True)
    scale = np.take_along_axis(weights, at, axis=1) / np.float32(-8)
    shifted = weights * _reciprocal(scale) + np.float32(8.5)
    codes = np.minimum(shifted, np.float32(15)).astype(np.uint8)
    return _join(scale, codes[:, :16] | (codes[:, 16:] << _FOUR))


def _reciprocal(scale: Floats) -> Floats:
    """1 / scale, and 0 where that is infinite: a scale so small is 0 in float16 anyway."""
    inverse = np.float32(1) / scale
    return np.where(np.isinf(inverse), np.float32(0), inverse)


def _join(scale: Floats, codes: Bytes) -> Bytes:
    return np.concatenate([scale.astype("<f2").view(np.uint8), codes], axis=1)
