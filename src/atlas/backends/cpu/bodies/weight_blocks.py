"""How each packed weight format is read: 16 rows ("a tile") and 32 columns ("a block") at a time.

A tile is contiguous: its scales first, then its integers; lane n of every vector belongs to row n.
Bytes hold four consecutive columns of one row in each 32-bit lane, the operand shape of ``dot4``;
a nibble byte holds columns c … c + 3 low and c + 16 … c + 19 high. ``pack`` writes these layouts.

For each format: ``unpack(tile, nb, b)`` gives eight byte vectors; ``finish(tile, nb, b, acc, low,
high, x, k)`` adds the block to the sums, given the integer dot products of its two halves and the
quantised activation row (see ``linear.quantize_rows``).
"""

# mypy: ignore-errors
from __future__ import annotations

from atlas.backends.cpu.bodies.simd import (
    fma,
    load,
    load_f16,
    load_f32,
    load_i32,
    mul,
    splat,
    to_f32,
)
from atlas.backends.cpu.bodies.simd_integer import (
    add_i32,
    bit_pair_0,
    bit_pair_2,
    bit_pair_4,
    bit_pair_6,
    high_nibbles,
    load_bytes,
    load_i8_lanes,
    load_u8_lanes,
    low_nibbles,
    mul_i32,
    or_bytes,
    splat_i32,
)
from atlas.backends.cpu.bodies.vectors import device


@device
def x_scale(x, k, b):
    """Scale of block b of a quantised activation row."""
    return splat(load_f32(x + k + b * 4))


@device
def x_scaled_sum(x, k, b):
    """scale · Σ q of block b."""
    return splat(load_f32(x + k + (k // 32 + b) * 4))


@device
def x_sum(x, k, half):
    """Σ q of the 16 columns of a half block, an integer."""
    return load_i32(x + k + (k // 16) * 4 + half * 4)


@device
def nibbles(q):
    a = load_bytes(q)
    b = load_bytes(q + 64)
    c = load_bytes(q + 128)
    d = load_bytes(q + 192)
    return (
        low_nibbles(a),
        low_nibbles(b),
        low_nibbles(c),
        low_nibbles(d),
        high_nibbles(a),
        high_nibbles(b),
        high_nibbles(c),
        high_nibbles(d),
    )


@device
def eight_bytes(q):
    return (
        load_bytes(q),
        load_bytes(q + 64),
        load_bytes(q + 128),
        load_bytes(q + 192),
        load_bytes(q + 256),
        load_bytes(q + 320),
        load_bytes(q + 384),
        load_bytes(q + 448),
    )


# q4_0: d f16 [nb, 16], nibbles [nb, 256]; w = d · (q − 8)


@device
def unpack_q4_0(tile, nb, b):
    return nibbles(tile + nb * 32 + b * 256)


@device
def finish_q4_0(tile, nb, b, acc, low, high, x, k):
    offset = splat_i32(-8 * (x_sum(x, k, 2 * b) + x_sum(x, k, 2 * b + 1)))
    dot = to_f32(add_i32(add_i32(low, high), offset))
    return fma(dot, mul(load_f16(tile + b * 32), x_scale(x, k, b)), acc)


# q4_1: d f16 [nb, 16], m f16 [nb, 16], nibbles [nb, 256]; w = d · q + m


@device
def unpack_q4_1(tile, nb, b):
    return nibbles(tile + nb * 64 + b * 256)


@device
def finish_q4_1(tile, nb, b, acc, low, high, x, k):
    dot = to_f32(add_i32(low, high))
    acc = fma(dot, mul(load_f16(tile + b * 32), x_scale(x, k, b)), acc)
    return fma(load_f16(tile + nb * 32 + b * 32), x_scaled_sum(x, k, b), acc)


# q8_0: d f16 [nb, 16], bytes [nb, 512]; w = d · (q − 128)


@device
def unpack_q8_0(tile, nb, b):
    return eight_bytes(tile + nb * 32 + b * 512)


@device
def finish_q8_0(tile, nb, b, acc, low, high, x, k):
    offset = splat_i32(-128 * (x_sum(x, k, 2 * b) + x_sum(x, k, 2 * b + 1)))
    dot = to_f32(add_i32(add_i32(low, high), offset))
    return fma(dot, mul(load_f16(tile + b * 32), x_scale(x, k, b)), acc)


@device
def finish_q8_0_less_128(tile, nb, b, acc, low, high, x, k):
    """The same of integers from which 128 is taken off already."""
    dot = to_f32(add_i32(low, high))
    return fma(dot, mul(load_f16(tile + b * 32), x_scale(x, k, b)), acc)


# q4_k: d, −dmin f16 [nb/8, 16], scales, minima u8 [nb, 16], nibbles [nb, 256];
# w = (d · scale) · q − dmin · minimum


@device
def unpack_q4_k(tile, nb, b):
    return nibbles(tile + nb * 40 + b * 256)


@device
def finish_q4_k(tile, nb, b, acc, low, high, x, k):
    dot = to_f32(add_i32(low, high))
    scale = mul(load_f16(tile + (b // 8) * 32), to_f32(load_u8_lanes(tile + nb * 8 + b * 16)))
    acc = fma(dot, mul(scale, x_scale(x, k, b)), acc)
    least = mul(
        load_f16(tile + nb * 4 + (b // 8) * 32), to_f32(load_u8_lanes(tile + nb * 24 + b * 16))
    )
    return fma(least, x_scaled_sum(x, k, b), acc)


# q6_k: d f16 [nb/8, 16], scales i8 [2 nb, 16], nibbles [nb, 256], bit pairs [nb, 128];
# w = d · scale · (q − 32)


@device
def unpack_q6_k(tile, nb, b):
    w = nibbles(tile + nb * 36 + b * 256)
    low = load_bytes(tile + nb * 292 + b * 128)
    high = load_bytes(tile + nb * 292 + b * 128 + 64)
    return (
        or_bytes(w[0], bit_pair_0(low)),
        or_bytes(w[1], bit_pair_2(low)),
        or_bytes(w[2], bit_pair_4(low)),
        or_bytes(w[3], bit_pair_6(low)),
        or_bytes(w[4], bit_pair_0(high)),
        or_bytes(w[5], bit_pair_2(high)),
        or_bytes(w[6], bit_pair_4(high)),
        or_bytes(w[7], bit_pair_6(high)),
    )


@device
def finish_q6_k(tile, nb, b, acc, low, high, x, k):
    low = add_i32(low, splat_i32(-32 * x_sum(x, k, 2 * b)))
    high = add_i32(high, splat_i32(-32 * x_sum(x, k, 2 * b + 1)))
    scales = tile + nb * 4 + b * 32
    dot = to_f32(
        add_i32(mul_i32(low, load_i8_lanes(scales)), mul_i32(high, load_i8_lanes(scales + 16)))
    )
    return fma(dot, mul(load_f16(tile + (b // 8) * 32), x_scale(x, k, b)), acc)


# b8_32: scale, minimum f32 [nb, 16], bytes [nb, 512]; w = scale · q + minimum


@device
def unpack_b8_32(tile, nb, b):
    return eight_bytes(tile + nb * 128 + b * 512)


@device
def finish_b8_32(tile, nb, b, acc, low, high, x, k):
    dot = to_f32(add_i32(low, high))
    acc = fma(dot, mul(load(tile + b * 64), x_scale(x, k, b)), acc)
    return fma(load(tile + nb * 64 + b * 64), x_scaled_sum(x, k, b), acc)


# b8_16: the same with a scale and a minimum for each half block


@device
def unpack_b8_16(tile, nb, b):
    return eight_bytes(tile + nb * 256 + b * 512)


@device
def finish_b8_16(tile, nb, b, acc, low, high, x, k):
    scale = x_scale(x, k, b)
    first, second = tile + b * 128, tile + b * 128 + 64
    acc = fma(to_f32(low), mul(load(first), scale), acc)
    acc = fma(load(first + nb * 128), mul(scale, to_f32(splat_i32(x_sum(x, k, 2 * b)))), acc)
    acc = fma(to_f32(high), mul(load(second), scale), acc)
    return fma(load(second + nb * 128), mul(scale, to_f32(splat_i32(x_sum(x, k, 2 * b + 1)))), acc)


FORMATS = {
    "q4_0": (unpack_q4_0, finish_q4_0, 288),
    "q4_1": (unpack_q4_1, finish_q4_1, 320),
    "q8_0": (unpack_q8_0, finish_q8_0, 544),
    "q4_k": (unpack_q4_k, finish_q4_k, 296),
    "q6_k": (unpack_q6_k, finish_q6_k, 420),
    "b8_32": (unpack_b8_32, finish_b8_32, 640),
    "b8_16": (unpack_b8_16, finish_b8_16, 768),
}
