"""``exp32`` and ``log32`` with the bits of ``atlas.ops.elementary``.

Each is the same sequence of single IEEE float32 operations as the NumPy definition, none fused, and
of integer operations on the bits. Division and square root are the correctly rounded ones.

Source: Cody and Waite, "Software Manual for the Elementary Functions" (1980).
"""

from __future__ import annotations

import numpy as np
from atlas_kernels._cuda import device, f32, i32
from atlas_kernels.ptx import instruction
from atlas_kernels.ptx_math import bits_float, float_bits, maximum, minimum

EXP_LOW, EXP_HIGH = np.float32(-87.33), np.float32(88.72)
_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.1219444005469057e-4)
_ROUND = np.float32(12582912.0)
_ONE, _HALF = np.float32(1.0), np.float32(0.5)
_INFINITY, _ZERO = np.float32(np.inf), np.float32(0.0)
_Q0, _Q1 = np.float32(0.0013814173871651292), np.float32(0.008368921466171741)
_Q2, _Q3 = np.float32(0.04166840761899948), np.float32(0.1666651964187622)
_P0, _P1 = np.float32(-0.07634493708610535), np.float32(0.12761574983596802)
_P2, _P3 = np.float32(-0.13160182535648346), np.float32(0.14201758801937103)
_P4, _P5 = np.float32(-0.16623356938362122), np.float32(0.20001226663589478)
_P6, _P7 = np.float32(-0.2500081956386566), np.float32(0.3333333134651184)
_SQRT_HALF_BITS = 0x3F3504F3
_TINY, _SCALE = np.float32(2.0**-126), np.float32(2.0**23)

square_root = instruction("f", "f", "sqrt.rn.f32 $0, $1;", ordered=False)
"""√x, rounded to nearest."""


@device
def exp32(x):
    """e to the x; 0 below ``EXP_LOW``, infinite above ``EXP_HIGH``, NaN for NaN."""
    clamped = minimum(maximum(x, EXP_LOW), EXP_HIGH)
    shifted = f32(clamped * _LOG2_E) + _ROUND
    n = shifted - _ROUND
    r = f32(clamped - n * _LN2_HIGH) - n * _LN2_LOW
    q = _Q0 * r + _Q1
    q = q * r + _Q2
    q = q * r + _Q3
    q = q * r + _HALF
    value = (q * (r * r) + r) + _ONE
    value = bits_float(i32(float_bits(value) + (float_bits(shifted) << 23)))
    if x < EXP_LOW:
        value = _ZERO
    if x > EXP_HIGH:
        value = _INFINITY
    return value if x == x else x


@device
def exp32_falling(x):
    """``exp32`` where x ≤ 0 is known, without the tests that only other numbers need."""
    clamped = maximum(x, EXP_LOW)
    shifted = f32(clamped * _LOG2_E) + _ROUND
    n = shifted - _ROUND
    r = f32(clamped - n * _LN2_HIGH) - n * _LN2_LOW
    q = _Q0 * r + _Q1
    q = q * r + _Q2
    q = q * r + _Q3
    q = q * r + _HALF
    value = (q * (r * r) + r) + _ONE
    value = bits_float(i32(float_bits(value) + (float_bits(shifted) << 23)))
    return _ZERO if x < EXP_LOW else value


@device
def log32(x):
    """Natural logarithm of x > 0, subnormal or infinite too."""
    subnormal = x < _TINY
    scaled = x * _SCALE if subnormal else x
    bits = float_bits(scaled)
    exponent = i32(i32(bits - _SQRT_HALF_BITS) >> 23)
    f = bits_float(i32(bits - (exponent << 23))) - _ONE
    e = f32(i32(exponent - 23) if subnormal else exponent)
    square = f * f
    p = _P0 * f + _P1
    p = p * f + _P2
    p = p * f + _P3
    p = p * f + _P4
    p = p * f + _P5
    p = p * f + _P6
    p = p * f + _P7
    value = p * (square * f)
    value = value - square * _HALF
    value = value + e * _LN2_LOW
    value = value + f
    value = value + e * _LN2_HIGH
    return value if x < _INFINITY else x
