"""Mixture of experts: routing, the experts' products, and their weighted sum."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from atlas.ops.activation import sigmoid
from atlas.ops.blocks import HostMatrix
from atlas.ops.linear import product
from atlas.ops.spec import op

Float = NDArray[np.float32]
Int = NDArray[np.int32]
Scoring = Literal["softmax", "sigmoid"]
SCORINGS: tuple[Scoring, ...] = get_args(Scoring)


@op
def moe_route(
    scores: Float,
    normalize: bool,
    scoring: Scoring = "softmax",
    bias: Float | None = None,
    scale: float = 1.0,
    num_groups: int = 1,
    top_groups: int = 1,
    *,
    ids: Int,
    weights: Float,
) -> None:
    """Choose each row's experts and weigh them by their probabilities.

    Parameters
    ----------
    scores : float32 [T, E]
        Router logits.
    normalize : bool
        Divide the chosen probabilities by their sum (plus 1e-20).
    scoring : str
        "softmax" over the experts, or "sigmoid" of each score.
    bias : float32 [E], optional
        Added to the probabilities for the choice only; weights come without it.
    scale : float
        Multiplies the weights.
    num_groups, top_groups : int
        Only experts of the ``top_groups`` best of ``num_groups`` equal groups may be chosen. A
        group's worth is the sum of its two greatest (biased) probabilities; lower group on ties.
    ids : int32 [T, X]
        Written: the X experts of greatest (biased) probability, greatest first, lower id first on
        ties.
    weights : float32 [T, X]
        Written.

    Source
    ------
    Shazeer et al., "Outrageously Large Neural Networks" (2017), arXiv 1701.06538; DeepSeek-AI,
    "DeepSeek-V3" (2024), arXiv 2412.19437, section 2.1.2.
    """
    if scoring == "softmax":
        exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
        probabilities = exponentials / exponentials.sum(axis=-1, keepdims=True)
    else:
        probabilities = sigmoid(scores)
    choice = probabilities if bias is None else probabilities + bias
    if top_groups < num_groups:
        groups = choice.reshape(len(choice), num_groups, -1)
        worth = np.sort(groups, axis=-1)[..., -2:].sum(axis=-1)
        best = np.argsort(-worth, axis=-1, kind="stable")[:, :top_groups]
        allowed = np.zeros(worth.shape, np.bool_)
        np.put_along_axis(allowed, best, True, axis=-1)
        choice = np.where(allowed[..., None], groups, -np.inf).reshape(choice.shape)
    ids[...] = np.argsort(-choice, axis=-1, kind="stable")[:, : ids.shape[1]]
    chosen = np.take_along_axis(probabilities, ids.astype(np.int64), axis=-1)
    if normalize:
        chosen = chosen / (chosen.sum(axis=-1, keepdims=True) + np.float32(1e-20))
    weights[...] = chosen * np.float32(scale)


@op
def moe_linear(x: Float, weight: HostMatrix, ids: Int, *, out: Float) -> None:
    """out[t, j] = x[t, j] · W[ids[t, j]]ᵀ.

    Parameters
    ----------
    x : float32 [T, 1, K] or [T, X, K]
        One input for all of a row's experts, or one for each.
    weight : matrix [E · N, K]
        The experts' matrices, one under the other.
    ids : int32 [T, X]
    out : float32 [T, X, N]
        Written. Each (row, expert) product is summed in the order of ``linear``.
    """
    rows = out.shape[2]
    for t in range(ids.shape[0]):
        for j in range(ids.shape[1]):
            expert = weight.row_slice(ids[t, j] * rows, (ids[t, j] + 1) * rows)
            out[t, j] = product(x[t, min(j, x.shape[1] - 1)][None], expert)[0]


@op
def moe_combine(y: Float, weights: Float, *, out: Float) -> None:
    """out[t] += Σⱼ weights[t, j] · y[t, j], j ascending from 0, then into the residual.

    y float32 [T, X, D], weights float32 [T, X], out float32 [T, D] (updated).
    """
    total = np.zeros_like(out)
    for j in range(y.shape[1]):
        total += weights[:, j, None] * y[:, j]
    out += total
