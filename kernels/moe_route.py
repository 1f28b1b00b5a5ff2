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
from atlas_kernels.ptx_memory import (
    load_b32,
    load_f32,
    load_shared_b32,
    shared_buffer,
    store_b32,
    store_f32,
    store_shared_b32,
)
from atlas_kernels.ptx_warp import (
    ballot,
    block_x,
    lane_id,
    lanes,
    reduce_add_s32,
    reduce_max_s32,
    shuffle_f32,
    sync_warp,
    warp_sum,
)
from atlas_kernels.registry import kernel
from atlas_kernels.sorted_lists import list_heads, pop_list, sort_lists

THREADS = 32
_LEAST = -(1 << 31)
_MAGNITUDE = 0x7FFFFFFF
_LOWEST = float("-inf")
_CHOICES = shared_buffer("atlas_choices", 32 * 4)
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
def _order_of(value):
    """An int32 that orders as the values do, NaN above all; its own inverse, of the bits."""
    bits = float_bits(value + f32(0))
    return i32(bits ^ ((bits >> 31) & _MAGNITUDE))


@device
def _value_of(order):
    return bits_float(i32(order ^ ((order >> 31) & _MAGNITUDE)))


@device
def _order(value, e, _, experts):
    """What is no expert comes below all."""
    order = _order_of(value)
    return order if e < experts else i32(_LEAST)


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


def each_numbered(count: int, function: Any) -> Any:
    """(values, e, p, q) → function(value, its expert, p, q) of each value; the first's is e.

    Straight-line code: ``count``, a power of two, is halved until one value is left.
    """
    if count == 1:

        @device
        def one(values, e, p, q):
            return (function(values[0], i32(e), p, q),)

        return one
    half = count // 2
    part = each_numbered(half, function)

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


def _select(count: int) -> Any:
    """(orders, top_k, place), by a warp → choice ``lane`` and its order.

    Where orders are equal it is the lowest expert. ``place`` is shared memory for a word a lane.

    Each round finds the warp's greatest order; whose it is pops it and stores the expert, for which
    nobody waits. That two lanes had it shows when more was popped than was chosen: then all begins
    again, slowly.
    """
    sort, head_of, pop = sort_lists(count), list_heads(count), pop_list(count)
    best_of, remove = _greatest(count), each_numbered(count, _without)

    @device
    def select(orders, top_k, place):
        lane, order, popped = lane_id(), i32(0), i32(0)
        lists, numbers = sort(orders)
        j, step = i32(0), i32(lanes() >> 5)
        while j < top_k:
            best, number = head_of(lists, numbers)
            first = reduce_max_s32(best)
            is_mine = best == first
            mine = ballot(i32(1 if is_mine else 0))
            if mine & -mine == i32(1 << lane):  # one of those that have it
                store_shared_b32(place + j * 4, i32(lane + 32 * number))
            lists, numbers = pop(lists, numbers, number, is_mine)
            popped = i32(popped + is_mine)
            order = first if lane == j else order
            j = i32(j + step)
        sync_warp()
        own = load_shared_b32(place + min(lane, i32(top_k - 1)) * 4)
        if reduce_add_s32(popped) != top_k:
            j = i32(0)
            while j < top_k:
                best, expert = best_of(orders, lane)
                first = reduce_max_s32(best)
                winner = i32(-reduce_max_s32(i32(-expert) if best == first else i32(_LEAST)))
                orders = remove(orders, lane, winner, i32(0))
                if lane == j:
                    own, order = winner, first
                j = i32(j + step)
        return own, order

    return select


def row_choice(count: int, load: Any) -> Any:
    """By a warp: a row's choices, as ``moe_route`` says; ``load`` reads scores.

    (place, active, scores, last, bias, experts, top_k, slots, use_sigmoid) → (id, …): ``place`` is
    shared memory for a word a lane, ``active`` the row's number, ``scores`` the address of its
    scores, ``last`` that of the shared expert's, or 0. Lane j has the id of slot j, below top_k at
    least, and what ``row_weight`` takes besides.
    """
    scores_of, select = each_numbered(count, _score(load)), _select(count)
    orders_of, add_bias = each_numbered(count, _order), each_numbered(count, _biased)
    shift, negate = each_numbered(count, _shifted), each_numbered(count, _negated)
    exponentials, sigmoids = each_numbered(count, _exponential), each_numbered(count, _sigmoid)
    greatest_of, sum_of = _tree(count, maximum), _tree(count, _add)
    nothing = (0,) * count

    @device
    def choose(place, active, scores, last, bias, experts, top_k, slots, use_sigmoid):
        lane = lane_id()
        own, order, greatest, part, shared = i32(-1), i32(0), f32(0), f32(0), f32(0)
        if active >= 0:
            values = scores_of(nothing, lane, scores, experts)
            if last != 0:
                shared = load(last)
            greatest = maximum(greatest_of(values), f32(_LOWEST))
            greatest = _value_of(reduce_max_s32(_order_of(greatest)))
            if use_sigmoid != 0:
                values = negate(values, lane, greatest, experts)
            else:
                values = shift(values, lane, greatest, experts)
            values = exponentials(values, lane, greatest, experts)
            if use_sigmoid != 0:
                values = sigmoids(values, lane, greatest, experts)
            part = sum_of(values)
            if bias != 0:
                values = add_bias(values, lane, bias, experts)
            own, order = select(orders_of(values, lane, i32(0), experts), top_k, place)
            if slots > top_k and lane == top_k:
                own = i32(experts)
        return own, order, greatest, part, shared

    return choose


def row_weight(load: Any) -> Any:
    """By a warp: the weight of slot ``lane``, of what ``row_choice`` returned."""

    @device
    def weigh(
        chosen, active, scores, last, bias, experts, top_k, slots, use_sigmoid, normalize, epsilon,
        scaling,
    ):  # fmt: skip
        own, order, greatest, part, shared = chosen
        lane, weight = lane_id(), f32(0)
        if active >= 0:
            total = warp_sum(part)
            weight = _value_of(order)  # the value itself
            if bias != 0:  # which the bias is part of
                score = load(scores + min(max(own, i32(0)), i32(experts - 1)) * 4)
                weight = exp32(-score if use_sigmoid != 0 else score - greatest)
                if use_sigmoid != 0:
                    weight = _inverse(weight)
            if use_sigmoid == 0:
                weight = divide(weight, total)
            chosen_sum, j, step = f32(0), i32(0), i32(lanes() >> 5)
            while j < top_k:
                chosen_sum += shuffle_f32(weight, j)
                j = i32(j + step)
            if normalize != 0:
                weight = divide(weight, chosen_sum + epsilon)
            weight = weight * scaling
            if slots > top_k and lane == top_k:
                weight = f32(1)
                if last != 0:
                    weight = _inverse(exp32(-shared))
        return weight

    return weigh


def row_route(count: int, load: Any) -> Any:
    """By a warp: a row's choices and their weights, stored; arguments as of its two parts.

    (place, row, active, scores, last, …): the others are the kernel's own arguments.
    """
    choose, weigh = row_choice(count, load), row_weight(load)

    @device
    def route(
        place, row, active, scores, last, bias, ids, weights, experts, top_k, slots, use_sigmoid,
        normalize, epsilon, scaling,
    ):  # fmt: skip
        lane = lane_id()
        chosen = choose(place, active, scores, last, bias, experts, top_k, slots, use_sigmoid)
        weight = weigh(
            chosen, active, scores, last, bias, experts, top_k, slots, use_sigmoid, normalize,
            epsilon, scaling,
        )  # fmt: skip
        if lane < slots:
            store_b32(ids + (row * slots + lane) * 4, chosen[0])
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
            _CHOICES(), row, is_active, scores + row * scores_stride, last, bias, ids, weights,
            experts, top_k, slots, use_sigmoid, normalize, epsilon, scaling,
        )  # fmt: skip

    return moe_route
