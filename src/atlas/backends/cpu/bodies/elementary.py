"""exp, tanh and softplus of 16 lanes, accurate to about 2 ulp, the same bits for every caller.

exp is range reduction by ln 2 in two parts and a polynomial of degree 5 in the remainder; tanh is
an odd polynomial below 0.625 and exp above. Coefficients: Moshier, Cephes Mathematical Library
(single precision), 1992. softplus is the Taylor series of 2·atanh, whose argument is at most 1/3.
"""

# mypy: ignore-errors
from __future__ import annotations

import numpy as np

from atlas.backends.cpu.bodies.simd import (
    absolute,
    add,
    div,
    first_lane,
    fma,
    less,
    maximum,
    minimum,
    mul,
    power_of_two,
    rint,
    select,
    splat,
    sub,
    to_i32,
    zeros,
)
from atlas.backends.cpu.bodies.vectors import device

_f = np.float32
LOWEST = _f(-87.0)  # below, exp is 0: results stay clear of subnormals
HIGHEST = _f(88.0)
LOG2_E = _f(1.44269504088896341)
LN2_HIGH = _f(-0.693359375)
LN2_LOW = _f(2.12194440e-4)
E0, E1, E2 = _f(1.9875691500e-4), _f(1.3981999507e-3), _f(8.3334519073e-3)
E3, E4, E5 = _f(4.1665795894e-2), _f(1.6666665459e-1), _f(5.0000001201e-1)
T0, T1, T2 = _f(-5.70498872745e-3), _f(2.06390887954e-2), _f(-5.37397155531e-2)
T3, T4 = _f(1.33314422036e-1), _f(-3.33332819422e-1)
ONE, TWO, SMALL = _f(1.0), _f(2.0), _f(0.625)
L7, L6, L5 = _f(2 / 15), _f(2 / 13), _f(2 / 11)
L4, L3, L2, L1 = _f(2 / 9), _f(2 / 7), _f(2 / 5), _f(2 / 3)


@device
def exp(x):
    """e^x by lane; 0 below −87, x clamped to 88 above; NaN stays NaN."""
    bounded = minimum(splat(HIGHEST), maximum(splat(LOWEST), x))  # in this order NaN passes
    n = rint(mul(bounded, splat(LOG2_E)))
    r = fma(n, splat(LN2_LOW), fma(n, splat(LN2_HIGH), bounded))
    p = fma(splat(E0), r, splat(E1))
    p = fma(p, r, splat(E2))
    p = fma(p, r, splat(E3))
    p = fma(p, r, splat(E4))
    p = fma(p, r, splat(E5))
    p = fma(p, mul(r, r), add(r, splat(ONE)))
    scaled = mul(p, power_of_two(to_i32(n)))
    return select(less(x, splat(LOWEST)), zeros(), scaled)


@device
def exp_scalar(x):
    return first_lane(exp(splat(x)))


@device
def tanh(x):
    size = absolute(x)
    square = mul(x, x)
    p = fma(splat(T0), square, splat(T1))
    p = fma(p, square, splat(T2))
    p = fma(p, square, splat(T3))
    p = fma(p, square, splat(T4))
    near = fma(mul(p, square), x, x)
    e = exp(mul(splat(TWO), size))
    far = sub(splat(ONE), div(splat(TWO), add(e, splat(ONE))))
    signed = select(less(x, zeros()), sub(zeros(), far), far)
    return select(less(size, splat(SMALL)), near, signed)


@device
def softplus(x):
    """log(1 + e^x) as max(x, 0) + log(1 + u), u = e^−|x|; log(1 + u) = 2·atanh(u / (2 + u))."""
    u = exp(sub(zeros(), absolute(x)))
    s = div(u, add(splat(TWO), u))
    square = mul(s, s)
    p = fma(splat(L7), square, splat(L6))
    p = fma(p, square, splat(L5))
    p = fma(p, square, splat(L4))
    p = fma(p, square, splat(L3))
    p = fma(p, square, splat(L2))
    p = fma(p, square, splat(L1))
    return add(maximum(zeros(), x), fma(mul(p, square), s, add(s, s)))


@device
def sigmoid(x):
    return div(splat(ONE), add(splat(ONE), exp(sub(zeros(), x))))


@device
def softplus_scalar(x):
    return first_lane(softplus(splat(x)))


@device
def sigmoid_scalar(x):
    return first_lane(sigmoid(splat(x)))
