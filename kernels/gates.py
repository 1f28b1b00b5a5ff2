"""Gates of layers: softplus, sigmoid and silu of float32, and a recurrent head's decay."""

from __future__ import annotations

import math

import numpy as np
from atlas_kernels._cuda import device, f32
from atlas_kernels.ptx_math import add, divide, fma, maximum, minimum, mul

_ONE, _TWO, _LARGE = np.float32(1), np.float32(2), np.float32(2.0**126)
_LN_1P = [np.float32(2 / n) for n in (15, 13, 11, 9, 7, 5, 3)]
_L7, _L6, _L5, _L4, _L3, _L2, _L1 = _LN_1P


@device
def softplus(x):
    """log(1 + e^x) as max(x, 0) + log(1 + u), u = e^−|x|; log(1 + u) = 2·atanh(u / (2 + u)).

    The series of atanh, whose argument is at most 1/3, to 2 ulp for small u too.
    """
    u = f32(math.exp(-maximum(x, -x)))
    s = divide(u, _TWO + u)
    square = mul(s, s)
    p = fma(_L7, square, _L6)
    p = fma(p, square, _L5)
    p = fma(p, square, _L4)
    p = fma(p, square, _L3)
    p = fma(p, square, _L2)
    p = fma(p, square, _L1)
    return add(maximum(x, f32(0)), fma(mul(p, square), s, add(s, s)))


@device
def sigmoid(x):
    """1 / (1 + e^−x)."""
    return divide(_ONE, minimum(_ONE + f32(math.exp(-x)), _LARGE))


@device
def sigmoid_gated(value, gate):
    """value · σ(gate)."""
    return value * sigmoid(gate)


@device
def silu(x):
    """x / (1 + e^−x)."""
    return divide(x, minimum(_ONE + f32(math.exp(-x)), _LARGE))


@device
def log_decay(time, decay_log, bias):
    """−exp(decay_log) · softplus(time + bias): the logarithm of a row's decay."""
    return -mul(f32(math.exp(decay_log)), softplus(add(time, bias)))


@device
def exponential(x):
    """e^x."""
    return f32(math.exp(x))
