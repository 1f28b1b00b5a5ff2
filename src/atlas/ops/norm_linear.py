"""A norm and the matrix product that reads it alone: ops that a backend may do in one kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atlas.ops.blocks import HostMatrix
from atlas.ops.linear import linear, linear_gated
from atlas.ops.norm import rmsnorm
from atlas.ops.spec import op

Float = NDArray[np.float32]

PRODUCTS = {"rmsnorm_linear": "linear", "rmsnorm_linear_gated": "linear_gated"}
"""What each op does behind ``rmsnorm``, with x in its place: they take x, norm, eps, then the
product's other arguments, and ``normed``, which ``rmsnorm`` writes and the product reads."""


def norm_then(
    product: str,
    functions: Mapping[str, Callable[..., None]],
    queue: object,
    x: Any,
    norm: Any,
    eps: float,
    *others: Any,
    normed: Any,
    **outs: Any,
) -> None:
    """A fused op as calls of ``rmsnorm`` and of its product, among a backend's ``functions``."""
    functions["rmsnorm"](queue, x, norm, eps, out=normed)
    functions[product](queue, normed, *others, **outs)


@op
def rmsnorm_linear(
    x: Float,
    norm: Float,
    eps: float,
    weight: HostMatrix,
    bias: Float | None = None,
    *,
    normed: Float,
    out: Float,
) -> None:
    """out = rmsnorm(x) · weightᵀ + bias.

    Parameters
    ----------
    x : float32 [T, K]
        Rows may be strided.
    norm : float32 [K]
        The norm's weight.
    eps : float
        Added to the mean of squares.
    weight : matrix [N, K]
    bias : float32 [N], optional
    normed : float32 [T, K]
        Scratch: a backend that does not fuse the two leaves the normalised rows there.
    out : float32 [T, N]
        Written: the bits of ``rmsnorm`` followed by ``linear``; rows may be strided.
    """
    rmsnorm(x, norm, eps, out=normed)
    linear(normed, weight, bias, out=out)


@op
def rmsnorm_linear_gated(
    x: Float,
    norm: Float,
    eps: float,
    weight: HostMatrix,
    bias: Float | None,
    activation: str,
    *,
    normed: Float,
    gate_up: Float,
    out: Float,
) -> None:
    """out = act(gate) · up, where [gate; up] = rmsnorm(x) · weightᵀ + bias.

    Parameters
    ----------
    x, norm, eps, normed
        As in :func:`rmsnorm_linear`.
    weight, bias, activation, gate_up
        As in ``linear_gated``.
    out : float32 [T, F]
        Written: the bits of ``rmsnorm`` followed by ``linear_gated``.
    """
    rmsnorm(x, norm, eps, out=normed)
    linear_gated(normed, weight, bias, activation, gate_up=gate_up, out=out)
