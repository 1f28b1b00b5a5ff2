"""Mixture of experts: which experts a row goes to, and with what weight.

A warp takes a row. Softmax: w = exp32(score − maximum), summed by each lane over its experts
(l, l + 32, …), then by ``warp_sum``; a probability is w / sum. Sigmoid: 1 / (1 + exp32(−score)).
Selection is by w, or with a bias by sigmoid + bias; greatest first, lowest id on ties. Chosen
weights are summed in that order.

Source: Shazeer et al. (2017), arXiv 1701.06538; DeepSeek-AI, "DeepSeek-V3" (2024), arXiv
2412.19437, equations 13 to 16, without groups.
"""

from __future__ import annotations

from atlas_kernels._cuda import device, f32, i32, i64
from atlas_kernels.elementary import exp32
from atlas_kernels.ptx_async import launch_dependents, wait_prerequisites
from atlas_kernels.ptx_math import float_bits
from atlas_kernels.ptx_memory import (
    load_b32,
    load_f32,
    load_shared_b32,
    load_shared_f32,
    shared_buffer,
    store_b32,
    store_f32,
    store_shared_b32,
    store_shared_f32,
)
from atlas_kernels.ptx_warp import (
    block_x,
    lane_id,
    sync_warp,
    warp_max,
    warp_max_i64,
    warp_sum,
)
from atlas_kernels.registry import kernel

MAX_EXPERTS = 1024
THREADS = 32
_TAKEN = -1  # bits that no arithmetic result has
_LEAST = -(1 << 63)
_LOW = 0xFFFFFFFF
_MAGNITUDE = 0x7FFFFFFF
_LOWEST = float("-inf")

_weight_buffer = shared_buffer("atlas_route_weights", 4 * MAX_EXPERTS)
_order_buffer = shared_buffer("atlas_route_order", 4 * MAX_EXPERTS)


@device
def _key(bits, expert):
    """An int64 that orders by a float32's bits, then by id, ascending; NaN above all."""
    order = bits ^ ((bits >> 31) & _MAGNITUDE)
    return i64((i64(order) << 32) | (_LOW - i64(expert)))


@device
def _best_of_lane(order, experts):
    """The greatest key among the lane's experts that are left."""
    best = i64(_LEAST)
    for e in range(lane_id(), experts, 32):
        bits = load_shared_b32(order + e * 4)
        if bits != _TAKEN:
            best = max(best, _key(bits, e))
    return best


@device
def sigmoid(x):
    """1 / (1 + e^−x)."""
    return f32(1) / (f32(1) + exp32(-x))


@kernel(
    "moe_route",
    args="ptr ptr ptr ptr ptr ptr i32 i32 i32 i32 i32 f32 f32 i64 i64",
    threads=THREADS,
)
def moe_route(
    scores, bias, shared, active, ids, weights, experts, top_k, slots, use_sigmoid, normalize,
    epsilon, scaling, scores_stride, shared_stride,
):  # fmt: skip
    """ids int32 and weights float32 [T, slots] from scores float32 [T, E]; grid (T).

    Up to 1,024 experts and 31 choices. ``bias`` float32 [E] or 0; with ``slots`` = top_k + 1 the
    last slot is the shared expert, id E, of weight sigmoid(``shared``[t]), or 1 where ``shared`` is
    0. ``active`` int32 [T] or 0: a row whose number is negative gets ids −1 and weights 0. With
    ``normalize`` weights are divided by (their sum + epsilon); then they are multiplied by
    ``scaling``. Strides in bytes.
    """
    launch_dependents()
    wait_prerequisites()
    lane, row = lane_id(), block_x()
    own = i32(-1)
    weight = f32(0)
    is_active = i32(0)
    if active != 0:
        is_active = load_b32(active + row * 4)
    if is_active >= 0:
        source, values, order = scores + row * scores_stride, _weight_buffer(), _order_buffer()
        greatest = f32(_LOWEST)
        for e in range(lane, experts, 32):
            score = load_f32(source + e * 4)
            store_shared_f32(values + e * 4, score)
            greatest = score if score > greatest else greatest
        greatest = warp_max(greatest)
        total = f32(0)
        for e in range(lane, experts, 32):
            score = load_shared_f32(values + e * 4)
            value = sigmoid(score) if use_sigmoid != 0 else exp32(score - greatest)
            total += value
            store_shared_f32(values + e * 4, value)
            if bias != 0:
                value = value + load_f32(bias + e * 4)
            store_shared_b32(order + e * 4, float_bits(value + f32(0)))
        total = warp_sum(total)
        best = _best_of_lane(order, experts)
        chosen = f32(0)
        for j in range(top_k):
            winner = warp_max_i64(best)
            expert = i32(_LOW - (winner & _LOW))
            sync_warp()
            if (expert & 31) == lane:
                store_shared_b32(order + expert * 4, i32(_TAKEN))
                best = _best_of_lane(order, experts)
            value = load_shared_f32(values + expert * 4)
            if use_sigmoid == 0:
                value = value / total
            chosen += value
            if lane == j:
                own, weight = expert, value
        if normalize != 0:
            weight = weight / (chosen + epsilon)
        weight = weight * scaling
        if slots > top_k and lane == top_k:
            own, weight = experts, f32(1)
            if shared != 0:
                weight = sigmoid(load_f32(shared + row * shared_stride))
    if lane < slots:
        store_b32(ids + (row * slots + lane) * 4, own)
        store_f32(weights + (row * slots + lane) * 4, weight)
