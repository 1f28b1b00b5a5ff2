"""Mixture of experts: which experts a row goes to, and with what weight.

A warp takes a row, and lane l has experts l, l + 32, … in registers. Softmax: w = exp32(score −
maximum), summed by each lane as a balanced tree, then by ``warp_sum``; a probability is w / sum.
Sigmoid: 1 / (1 + exp32(−score)). Quotients are those of ``divide``, which calls nothing. Selection
is by w, or with a bias by sigmoid + bias; greatest first, lowest id on ties. Chosen weights are
summed in that order. ``moe_router`` does the same with the scores of its own products.

Source: Shazeer et al. (2017), arXiv 1701.06538; DeepSeek-AI, "DeepSeek-V3" (2024), arXiv
2412.19437, equations 13 to 16, without groups.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from atlas_kernels._cuda import device, f32, i32, i64
from atlas_kernels.elementary import exp32
from atlas_kernels.moe_plan import ROUTE_VARIANTS
from atlas_kernels.ptx_async import launch_dependents, wait_prerequisites
from atlas_kernels.ptx_math import bits_float, divide, float_bits, maximum
from atlas_kernels.ptx_memory import load_b32, load_f32, store_b32, store_f32
from atlas_kernels.ptx_warp import (
    block_x,
    lane_id,
    lanes,
    reduce_max_s32,
    shuffle_f32,
    warp_max,
    warp_sum,
)
from atlas_kernels.registry import kernel

THREADS = 32
_LEAST = -(1 << 31)
_MAGNITUDE = 0x7FFFFFFF
_LOWEST = float("-inf")
_GREATEST_DIVISOR = np.float32(2.0**126)


@device
def _inverse(power):
    """1 / (1 + e^−x) of e^−x; 0 where that is subnormal."""
    below = f32(1) + power
    value = divide(f32(1), below)
    value = f32(0) if below > _GREATEST_DIVISOR else value
    return value if power == power else power


def _score(load: Any) -> Any:
    """The loads of a lane do not wait for each other: none stands in a branch."""

    @device
    def score(_, e, source, experts):
        value = load(source + min(e, i32(experts - 1)) * 4)
        return value if e < experts else f32(_LOWEST)

    return score


@device
def _shifted(score, _, greatest, __):
    return score - greatest


@device
def _negated(score, _, __, ___):
    return -score


@device
def _exponential(exponent, e, _, experts):
    power = exp32(exponent)  # outside of the choice, which then is no branch
    return power if e < experts else f32(0)


@device
def _sigmoid(power, e, _, experts):
    value = _inverse(power)
    return value if e < experts else f32(0)


@device
def _biased(value, e, bias, experts):
    return value + load_f32(bias + min(e, i32(experts - 1)) * 4)


@device
def _order(value, e, _, experts):
    """An int32 that orders as the values do; NaN above all, what is no expert below."""
    bits = float_bits(value + f32(0))
    order = bits ^ ((bits >> 31) & _MAGNITUDE)
    return i32(order) if e < experts else i32(_LEAST)


def _greatest(count: int) -> Any:
    """(orders, e) → a lane's greatest order and the lowest of the experts that have it."""
    if count == 1:

        @device
        def only(orders, e):
            return orders[0], i32(e)

        return only
    half = count // 2
    part = _greatest(half)

    @device
    def greatest(orders, e):
        low, high = part(orders[:half], e), part(orders[half:], i32(e + 32 * half))
        is_low = low[0] >= high[0]
        return (low[0] if is_low else high[0]), (low[1] if is_low else high[1])

    return greatest


@device
def _without(order, e, winner, _):
    return i32(_LEAST) if e == winner else order


@device
def _add(a, b):
    return a + b


def each(count: int, function: Any) -> Any:
    """(values, e, p, q) → function(value, its expert, p, q) of each value; the first's is e.

    Straight-line code: ``count``, a power of two, is halved until one value is left.
    """
    if count == 1:

        @device
        def one(values, e, p, q):
            return (function(values[0], i32(e), p, q),)

        return one
    half = count // 2
    part = each(half, function)

    @device
    def all_of_them(values, e, p, q):
        return part(values[:half], e, p, q) + part(values[half:], i32(e + 32 * half), p, q)

    return all_of_them


def _tree(count: int, combine: Any) -> Any:
    """(values) → all of them combined, by halves."""
    if count == 1:

        @device
        def one(values):
            return values[0]

        return one
    half = count // 2
    part = _tree(half, combine)

    @device
    def tree(values):
        return combine(part(values[:half]), part(values[half:]))

    return tree


def row_route(count: int, load: Any) -> Any:
    """By a warp: a row's choices and their weights, as ``moe_route`` says; ``load`` reads scores.

    (row, active, scores, last, …): ``active`` is the row's number, ``scores`` the address of its
    scores, ``last`` that of the shared expert's, or 0; the others are the kernel's own arguments.
    """
    scores_of, remove = each(count, _score(load)), each(count, _without)
    orders_of, best_of = each(count, _order), _greatest(count)
    shift, negate = each(count, _shifted), each(count, _negated)
    exponentials, sigmoids = each(count, _exponential), each(count, _sigmoid)
    add_bias = each(count, _biased)
    greatest_of, sum_of = _tree(count, maximum), _tree(count, _add)
    nothing = (0,) * count

    @device
    def route(
        row, active, scores, last, bias, ids, weights, experts, top_k, slots, use_sigmoid,
        normalize, epsilon, scaling,
    ):  # fmt: skip
        lane = lane_id()
        own = i32(-1)
        weight = f32(0)
        if active >= 0:
            values = scores_of(nothing, lane, scores, experts)
            shared = f32(0)
            if last != 0:
                shared = load(last)
            greatest = warp_max(maximum(greatest_of(values), f32(_LOWEST)))
            if use_sigmoid != 0:
                values = negate(values, lane, greatest, experts)
            else:
                values = shift(values, lane, greatest, experts)
            values = exponentials(values, lane, greatest, experts)
            if use_sigmoid != 0:
                values = sigmoids(values, lane, greatest, experts)
            total = warp_sum(sum_of(values))
            if bias != 0:
                values = add_bias(values, lane, bias, experts)
            orders = orders_of(values, lane, i32(0), experts)
            order, j, step = i32(0), i32(0), i32(lanes() >> 5)
            while j < top_k:
                best, expert = best_of(orders, lane)
                first = reduce_max_s32(best)
                winner = i32(-reduce_max_s32(i32(-expert) if best == first else i32(_LEAST)))
                orders = remove(orders, lane, winner, i32(0))
                if lane == j:
                    own, order = winner, first
                j = i32(j + step)
            weight = bits_float(i32(order ^ ((order >> 31) & _MAGNITUDE)))  # the value itself
            if bias != 0:  # which the bias is part of
                score = load(scores + max(own, i32(0)) * 4)
                weight = exp32(-score if use_sigmoid != 0 else score - greatest)
                if use_sigmoid != 0:
                    weight = _inverse(weight)
            if use_sigmoid == 0:
                weight = divide(weight, total)
            chosen = f32(0)
            j = i32(0)
            while j < top_k:
                chosen += shuffle_f32(weight, j)
                j = i32(j + step)
            if normalize != 0:
                weight = divide(weight, chosen + epsilon)
            weight = weight * scaling
            if slots > top_k and lane == top_k:
                own, weight = experts, f32(1)
                if last != 0:
                    weight = _inverse(exp32(-shared))
        if lane < slots:
            store_b32(ids + (row * slots + lane) * 4, own)
            store_f32(weights + (row * slots + lane) * 4, weight)

    return route


@kernel(
    "moe_route",
    args="ptr ptr ptr ptr ptr ptr i32 i32 i32 i32 i32 f32 f32 i64 i64",
    threads=THREADS,
    variants={name: (count,) for name, count in ROUTE_VARIANTS.items()},
)
def make_moe_route(count: int) -> Any:
    """ids int32 and weights float32 [T, slots] from scores float32 [T, E]; grid (T).

    Up to 32 · ``count`` experts and 31 choices. ``bias`` float32 [E] or 0; with ``slots`` = top_k +
    1 the last slot is the shared expert, id E, of weight sigmoid(``shared``[t]), or 1 where
    ``shared`` is 0. ``active`` int32 [T] or 0: a row whose number is negative, as the slot of a row
    of padding is, gets ids −1 and weights 0. With ``normalize`` weights are divided by (their sum +
    epsilon); then they are multiplied by ``scaling``. Strides in bytes.
    """
    route = row_route(count, load_f32)

    def moe_route(
        scores, bias, shared, active, ids, weights, experts, top_k, slots, use_sigmoid, normalize,
        epsilon, scaling, scores_stride, shared_stride,
    ):  # fmt: skip
        launch_dependents()
        wait_prerequisites()
        row = block_x()
        is_active = i32(0)
        if active != 0:
            is_active = load_b32(active + row * 4)
        last = i64(0)
        if shared != 0:
            last = i64(shared + row * shared_stride)
        route(
            row, is_active, scores + row * scores_stride, last, bias, ids, weights, experts, top_k,
            slots, use_sigmoid, normalize, epsilon, scaling,
        )  # fmt: skip

    return moe_route
