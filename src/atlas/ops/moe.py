"""Mixture of experts: routing, and the experts' products with their weighted sum."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from atlas.ops.activation import gelu_tanh_and_mul, relu_squared, sigmoid, silu_and_mul
from atlas.ops.blocks import HostMatrix
from atlas.ops.linear import linear, product
from atlas.ops.norm import rmsnorm
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
    shared: Float | None = None,
    slots: Int | None = None,
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
    shared : float32 [T, 1], optional
        With it the last of the X choices is the shared expert, of id E, and its weight the sigmoid
        of this; the others are chosen as without it.
    slots : int32 [T], optional
        Where ``kv_store`` keeps each row; a negative slot marks a row of padding, which gets no
        experts: ids −1 and weights 0.
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
    top_k = ids.shape[1]
    if shared is not None:
        top_k -= 1
        ids[:, top_k], weights[:, top_k:] = scores.shape[1], sigmoid(shared)
    best = np.argsort(-choice, axis=-1, kind="stable")[:, :top_k]
    chosen = np.take_along_axis(probabilities, best, axis=-1)
    if normalize:
        chosen = chosen / (chosen.sum(axis=-1, keepdims=True) + np.float32(1e-20))
    ids[:, :top_k], weights[:, :top_k] = best, chosen * np.float32(scale)
    if slots is not None:
        ids[slots < 0], weights[slots < 0] = -1, 0


@op
def moe_router(
    x: Float,
    norm: Float,
    norm_eps: float,
    router: HostMatrix,
    num_experts: int,
    normalize: bool,
    scoring: Scoring = "softmax",
    bias: Float | None = None,
    scale: float = 1.0,
    num_groups: int = 1,
    top_groups: int = 1,
    slots: Int | None = None,
    *,
    normed: Float,
    scores: Float,
    ids: Int,
    weights: Float,
) -> None:
    """What lies before a block's experts: its norm, the router's product, the choice.

    :func:`~atlas.ops.norm.rmsnorm`, :func:`~atlas.ops.linear.linear`, :func:`moe_route`, with the
    bits of these three.

    Parameters
    ----------
    x : float32 [T, D]
        The residual stream.
    norm : float32 [D]
    norm_eps : float
    router : matrix [N, D]
    num_experts : int
        E, at most N. Where N is greater, score E is that of a shared expert which joins the others.
    normed : float32 [T, D]
        Written: what the experts read.
    scores : float32 [T, N]
        Written.

    The others are those of :func:`moe_route`.
    """
    rmsnorm(x, norm, norm_eps, out=normed)
    linear(normed, router, out=scores)
    moe_route(
        scores[:, :num_experts], normalize, scoring, bias, scale, num_groups, top_groups,
        _shared_score(scores, num_experts), slots, ids=ids, weights=weights,
    )  # fmt: skip


def router_in_parts(
    functions: Mapping[str, Callable[..., None]],
    queue: Any,
    x: Any,
    norm: Any,
    norm_eps: float,
    router: Any,
    num_experts: int,
    normalize: bool,
    scoring: Scoring = "softmax",
    bias: Any = None,
    scale: float = 1.0,
    num_groups: int = 1,
    top_groups: int = 1,
    slots: Any = None,
    *,
    normed: Any,
    scores: Any,
    ids: Any,
    weights: Any,
) -> None:
    """A backend's :func:`moe_router` as calls of the ops that it stands for."""
    functions["rmsnorm"](queue, x, norm, norm_eps, out=normed)
    functions["linear"](queue, normed, router, out=scores)
    functions["moe_route"](
        queue, scores[:, :num_experts], normalize, scoring, bias, scale, num_groups, top_groups,
        _shared_score(scores, num_experts), slots, ids=ids, weights=weights,
    )  # fmt: skip


def _shared_score(scores: Any, num_experts: int) -> Any:
    """Of scores [T, N] those of the shared expert, [T, 1], or None where it does not join."""
    return scores[:, num_experts : num_experts + 1] if scores.shape[1] > num_experts else None


@op
def moe_experts(
    x: Float,
    gate_up: HostMatrix,
    down: HostMatrix,
    ids: Int,
    weights: Float,
    activation: str,
    shared_gate_up: HostMatrix | None = None,
    shared_down: HostMatrix | None = None,
    *,
    expert_gate_up: Float,
    expert_activated: Float,
    expert_out: Float,
    out: Float,
) -> None:
    """out[t] += Σⱼ weights[t, j] · down_e(act(gate_e(x[t])) · up_e(x[t])) with e = ids[t, j].

    Parameters
    ----------
    x : float32 [T, D]
    gate_up : matrix [E · 2F, D]
        The gate's rows of expert 0, then its ``up``'s, then those of expert 1, …
    down : matrix [E · D, F]
        The experts' matrices, one under the other.
    ids, weights : int32 and float32 [T, X]
        As :func:`moe_route` leaves them; an id of −1 is no expert, and adds nothing.
    activation : {"silu", "gelu_tanh", "relu_squared"}
        With ``relu_squared`` the experts have no gate: ``gate_up`` [E · F, D] holds their ``up``.
    shared_gate_up, shared_down : matrix [2F, D] and [D, F], optional
        The expert of id E.
    expert_gate_up, expert_activated, expert_out : float32 [T, X, 2F], [T, X, F], [T, X, D]
        Scratch.
    out : float32 [T, D]
        The residual stream, updated: experts are added in the order of j, then into it.

    Notes
    -----
    Each (row, expert) product is summed in the order of ``linear``.
    """
    rows, top_k, inner = expert_activated.shape
    pairs = rows * top_k
    activated = expert_activated.reshape(pairs, inner)
    if activation == "relu_squared":
        moe_linear(x[:, None], gate_up, ids, shared_gate_up, out=expert_activated)
        relu_squared(activated, out=activated)
    else:
        gate = silu_and_mul if activation == "silu" else gelu_tanh_and_mul
        moe_linear(x[:, None], gate_up, ids, shared_gate_up, out=expert_gate_up)
        gate(expert_gate_up.reshape(pairs, -1), out=activated)
    moe_linear(expert_activated, down, ids, shared_down, out=expert_out)
    moe_combine(expert_out, ids, weights, out=out)


@op
def moe_block(
    x: Float,
    norm: Float,
    norm_eps: float,
    router: HostMatrix,
    num_experts: int,
    normalize: bool,
    scoring: Scoring,
    bias: Float | None,
    scale: float,
    num_groups: int,
    top_groups: int,
    slots: Int | None,
    gate_up: HostMatrix,
    down: HostMatrix,
    activation: str,
    shared_gate_up: HostMatrix | None = None,
    shared_down: HostMatrix | None = None,
    *,
    normed: Float,
    scores: Float,
    ids: Int,
    weights: Float,
    expert_gate_up: Float,
    expert_activated: Float,
    expert_out: Float,
    out: Float,
) -> None:
    """A block of experts: :func:`moe_router`, then :func:`moe_experts` of what it normalised.

    With the bits of these two. Parameters are theirs; ``out`` may be ``x``, and is read and updated
    after it.
    """
    moe_router(
        x, norm, norm_eps, router, num_experts, normalize, scoring, bias, scale, num_groups,
        top_groups, slots, normed=normed, scores=scores, ids=ids, weights=weights,
    )  # fmt: skip
    moe_experts(
        normed, gate_up, down, ids, weights, activation, shared_gate_up, shared_down,
        expert_gate_up=expert_gate_up, expert_activated=expert_activated, expert_out=expert_out,
        out=out,
    )  # fmt: skip


def block_in_parts(
    functions: Mapping[str, Callable[..., None]],
    queue: Any,
    x: Any,
    norm: Any,
    norm_eps: float,
    router: Any,
    num_experts: int,
    normalize: bool,
    scoring: Scoring,
    bias: Any,
    scale: float,
    num_groups: int,
    top_groups: int,
    slots: Any,
    gate_up: Any,
    down: Any,
    activation: str,
    shared_gate_up: Any = None,
    shared_down: Any = None,
    *,
    normed: Any,
    scores: Any,
    ids: Any,
    weights: Any,
    expert_gate_up: Any,
    expert_activated: Any,
    expert_out: Any,
    out: Any,
) -> None:
    """A backend's :func:`moe_block` as calls of the ops that it stands for."""
    functions["moe_router"](
        queue, x, norm, norm_eps, router, num_experts, normalize, scoring, bias, scale, num_groups,
        top_groups, slots, normed=normed, scores=scores, ids=ids, weights=weights,
    )  # fmt: skip
    functions["moe_experts"](
        queue, normed, gate_up, down, ids, weights, activation, shared_gate_up, shared_down,
        expert_gate_up=expert_gate_up, expert_activated=expert_activated, expert_out=expert_out,
        out=out,
    )  # fmt: skip


def moe_linear(
    x: Float, weight: HostMatrix, ids: Int, shared: HostMatrix | None = None, *, out: Float
) -> None:
    """out[t, j] = x[t, j] · W[ids[t, j]]ᵀ, W[E] = ``shared``.

    Parameters
    ----------
    x : float32 [T, 1, K] or [T, X, K]
        One input for all of a row's experts, or one for each.
    weight : matrix [E · N, K]
        The experts' matrices, one under the other.
    ids : int32 [T, X]
    out : float32 [T, X, N]
        Written where there is an expert. Each (row, expert) product is summed in the order of
        ``linear``.
    """
    rows = out.shape[2]
    for t, j in np.argwhere(ids >= 0):
        if shared is not None and ids[t, j] * rows == weight.rows:
            expert = shared
        else:
            expert = weight.row_slice(ids[t, j] * rows, (ids[t, j] + 1) * rows)
        out[t, j] = product(x[t, min(j, x.shape[1] - 1)][None], expert)[0]


def moe_combine(y: Float, ids: Int, weights: Float, *, out: Float) -> None:
    """out[t] += Σⱼ weights[t, j] · y[t, j], j ascending from 0, then into the residual.

    y float32 [T, X, D], ids int32 and weights float32 [T, X], out float32 [T, D] (updated). Choices
    of id −1 are left out.
    """
    total = np.zeros_like(out)
    for j in range(y.shape[1]):
        total += np.where(ids[:, j, None] >= 0, weights[:, j, None] * y[:, j], np.float32(0))
    out += total
