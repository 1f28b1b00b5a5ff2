"""Elementary functions and sums whose bits are stated: the same on every backend.

A library's ``exp`` differs in its last bits between libraries, instruction sets and devices, and so
does a sum whose order is left to the compiler. Everything here is a fixed sequence of single IEEE
float32 operations (round to nearest even, **no** fused multiply-add, subnormals kept) and of exact
integer operations on the bits. A body that performs the same operations in the same order gives the
same bits, whether it is NumPy, Numba or a CUDA kernel compiled with contraction off.
"""

from __future__ import annotations

from typing import cast

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]

EXP_LOW = np.float32(-87.33)
"""exp32 is 0 below: exp(-87.33) is 1.0065 × 2**-126, so that no result is subnormal."""
EXP_HIGH = np.float32(88.72)
"""exp32 is inf above: exp(88.72) is 3.394e38, 0.3 % below the largest float32."""
LANES = 256
"""Chains of a tree sum; also the elements in one block of a prefix sum."""

_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)  # 355 / 512: its product with an exponent is exact
_LN2_LOW = np.float32(-2.1219444005469057e-4)  # ln 2 - 355 / 512
_ROUND = np.float32(12582912.0)  # 1.5 × 2**23: adding it leaves the nearest integer in the low bits
_ONE = np.float32(1.0)
_HALF = np.float32(0.5)
_EXP_Q = np.array(
    [0.0013814173871651292, 0.008368921466171741, 0.04166840761899948, 0.1666651964187622, 0.5],
    np.float32,
)
_LOG_P = np.array(
    [
        -0.07634493708610535,
        0.12761574983596802,
        -0.13160182535648346,
        0.14201758801937103,
        -0.16623356938362122,
        0.20001226663589478,
        -0.2500081956386566,
        0.3333333134651184,
    ],
    np.float32,
)
_PIECE = 16384  # elements at a time, so that the intermediate arrays stay in cache
_MANTISSA_BITS = np.uint32(23)
_SQRT_HALF_BITS = np.int32(0x3F3504F3)
_TINY = np.float32(2.0**-126)  # the smallest normal number


def exp32(x: F32) -> F32:
    """e to the x, elementwise.

    Parameters
    ----------
    x : float32, any shape
        NaN gives NaN, -inf gives 0.

    Returns
    -------
    float32, shape of ``x``
        0 for ``x < EXP_LOW``, inf for ``x > EXP_HIGH``, never subnormal. In between the error is at
        most 2 ulp (about 1 ulp in the tests) and ``exp32(0)`` is 1.

    Notes
    -----
    With n = round(x · log2 e), taken by adding and subtracting 1.5 · 2²³, and
    r = (x − n · 355/512) − n · (ln 2 − 355/512), the value is (q(r) · (r · r) + r) + 1 with n added
    to its exponent field; q, of degree 4, is in Horner form. Not monotone to the last bit.

    Source
    ------
    Range reduction: Cody and Waite, "Software Manual for the Elementary Functions" (1980). The
    coefficients are a minimax fit (Remez) of (e^r − 1 − r) / r² for the relative error of e^r.
    """
    flat = np.asarray(x, np.float32).reshape(-1)
    value = np.empty_like(flat)
    for start in range(0, flat.size, _PIECE):
        _exp_into(flat[start : start + _PIECE], value[start : start + _PIECE])
    return value.reshape(np.shape(x))


def _exp_into(x: F32, value: F32) -> None:
    low, high = x.min(), x.max()
    # The usual piece lies inside and needs no clamp; a NaN fails the comparison.
    inside = bool(low >= EXP_LOW and high <= EXP_HIGH)
    clamped = x if inside else np.minimum(np.maximum(x, EXP_LOW), EXP_HIGH)
    shifted = clamped * _LOG2_E
    shifted += _ROUND
    n = shifted - _ROUND
    r = n * _LN2_HIGH
    np.subtract(clamped, r, out=r)
    n *= _LN2_LOW
    r -= n
    _horner(_EXP_Q, r, value)
    value *= np.multiply(r, r, out=n)
    value += r
    value += _ONE
    # The low nine bits of `shifted` hold n; the shift drops the rest off the left end.
    exponent = shifted.view(np.uint32)
    exponent <<= _MANTISSA_BITS
    bits = value.view(np.uint32)
    bits += exponent
    if not inside:
        value *= x >= EXP_LOW
        value[x > EXP_HIGH] = np.inf
        value[np.isnan(x)] = np.nan


def log32(x: F32 | np.float32) -> F32:
    """Natural logarithm, elementwise.

    Parameters
    ----------
    x : float32, any shape
        Subnormal numbers count; 0 gives -inf, inf gives inf, negative numbers and NaN give NaN.

    Returns
    -------
    float32, shape of ``x``
        Error at most 2 ulp (below 1 ulp in the tests); ``log32(1)`` is 0.

    Notes
    -----
    With x = 2^e · (1 + f), 1 + f in [√½, √2): (f + ((f³ · p(f) − f² / 2) + e · (ln 2 − 355/512)))
    + e · 355/512, where p, of degree 7, is in Horner form and f³ is (f · f) · f.

    Source
    ------
    Reduction as in Cody and Waite (1980); the coefficients are a minimax fit (Remez) of
    (log(1 + f) − f + f²/2) / f³ for the relative error of log(1 + f).
    """
    flat = np.asarray(x, np.float32).reshape(-1)
    subnormal = (flat > 0.0) & (flat < _TINY)
    regular = (flat > 0.0) & (flat < np.inf)
    scaled = np.where(regular, flat, _ONE)
    scaled[subnormal] *= np.float32(2.0**23)
    bits = scaled.view(np.int32)
    exponent = (bits - _SQRT_HALF_BITS) >> np.int32(23)
    f = (bits - (exponent << np.int32(23))).view(np.float32) - _ONE
    e = np.where(subnormal, exponent - np.int32(23), exponent).astype(np.float32)
    square = f * f
    value = np.empty_like(f)
    _horner(_LOG_P, f, value)
    value *= square * f
    value -= square * _HALF
    value += e * _LN2_LOW
    value += f
    value += e * _LN2_HIGH
    value[flat == 0.0] = -np.inf
    value[flat == np.inf] = np.inf
    value[~(flat >= 0.0)] = np.nan
    return cast(F32, value.reshape(np.shape(x)))


def _horner(coefficients: F32, x: F32, value: F32) -> None:
    """The polynomial with the highest coefficient first; one multiply and one add a degree."""
    np.multiply(x, coefficients[0], out=value)
    value += coefficients[1]
    for coefficient in coefficients[2:]:
        value *= x
        value += coefficient


def lane_sums(x: F32) -> F32:
    """Sums of the ``LANES`` interleaved chains of a row.

    Parameters
    ----------
    x : float32 [N]

    Returns
    -------
    float32 [min(N, LANES)]
        Lane j is x[j] + x[j + LANES] + x[j + 2 · LANES] + …, added from left to right. The order
        depends on N alone, never on a number of threads.
    """
    if x.size <= LANES:
        return x
    num_rows = x.size // LANES
    # Along the slow axis NumPy adds whole rows in sequence (pairwise only along the fast axis).
    lanes: F32 = np.add.reduce(x[: num_rows * LANES].reshape(num_rows, LANES), axis=0)
    rest = x[num_rows * LANES :]
    lanes[: rest.size] += rest
    return lanes


def tree_sum(x: F32) -> np.float32:
    """The sum of a row in a stated order: its lanes, then the lanes from left to right.

    Parameters
    ----------
    x : float32 [N]

    Returns
    -------
    float32
        0 for an empty row. For non-negative x the relative error is below
        (N / LANES + LANES) · 2**-24.
    """
    if x.size == 0:
        return np.float32(0.0)
    total: np.float32 = np.add.accumulate(lane_sums(x))[-1]
    return total


def prefix_sum(x: F32) -> F32:
    """Inclusive prefix sums of a row in a stated order.

    Parameters
    ----------
    x : float32 [N]

    Returns
    -------
    float32 [N]
        Element i is (the sum of the whole blocks of ``LANES`` before i, added from left to right)
        + (the sum within the block, added from left to right). It depends on x[: i + 1] alone, and
        it never falls where x is not negative.
    """
    if x.size <= LANES:
        return cast(F32, np.add.accumulate(x))
    num_blocks = -(-x.size // LANES)
    padded = np.zeros(num_blocks * LANES, np.float32)
    padded[: x.size] = x
    within = np.add.accumulate(padded.reshape(num_blocks, LANES), axis=1)
    before = np.add.accumulate(within[:-1, -1])
    within[1:] += before[:, None]
    return cast(F32, within.reshape(-1)[: x.size])
