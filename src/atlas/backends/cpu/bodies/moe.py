"""Mixture of experts: routing, grouping rows by expert, products and the weighted sum."""

# mypy: ignore-errors
from __future__ import annotations

import numpy as np

from atlas.backends.cpu.bodies import body
from atlas.backends.cpu.bodies.elementary import exp, sigmoid
from atlas.backends.cpu.bodies.linear import TILES, write
from atlas.backends.cpu.bodies.simd import (
    add,
    bits_f32,
    div,
    fma,
    lanes_between,
    load_f32,
    load_first,
    load_i32,
    max_lane,
    maximum,
    select,
    splat,
    store_f32,
    store_first,
    store_i32,
    sub,
    sum_lanes,
    zeros,
)
from atlas.backends.cpu.bodies.vectors import device

_f = np.float32
LOWEST, ZERO, ONE = _f(-np.inf), _f(0.0), _f(1.0)
SMALLEST = _f(1e-20)  # keeps the sum of probabilities that all underflow from dividing by 0


@device
def softmax_weights(source, count_all, out):
    """exp(score − greatest) of a row; returns their sum."""
    greatest = splat(LOWEST)
    for e in range(0, count_all, 16):
        count = min(16, count_all - e)
        value = load_first(source + e * 4, count)
        greatest = maximum(select(lanes_between(0, count), value, splat(LOWEST)), greatest)
    shift, total = splat(max_lane(greatest)), zeros()
    for e in range(0, count_all, 16):
        count = min(16, count_all - e)
        weight = exp(sub(load_first(source + e * 4, count), shift))
        weight = select(lanes_between(0, count), weight, zeros())
        total = add(total, weight)
        store_first(out + e * 4, weight, count)
    return sum_lanes(total)


@device
def sigmoid_weights(source, count_all, out):
    for e in range(0, count_all, 16):
        count = min(16, count_all - e)
        store_first(out + e * 4, sigmoid(load_first(source + e * 4, count)), count)
    return ONE


@device
def best_of(values, count):
    """Index of the greatest, the lowest on ties; it is marked as taken."""
    best, greatest = 0, LOWEST
    for i in range(count):
        value = load_f32(values + i * 4)
        if value > greatest:
            best, greatest = i, value
    store_f32(values + best * 4, LOWEST)
    return best


@device
def keep_groups(choice, num_experts, num_groups, top_groups, worth):
    """Take the experts of all but the best groups out of the choice."""
    size = num_experts // num_groups
    for g in range(num_groups):
        first, second = LOWEST, LOWEST
        for e in range(g * size, (g + 1) * size):
            value = load_f32(choice + e * 4)
            if value > first:
                first, second = value, first
            elif value > second:
                second = value
        store_f32(worth + g * 4, first if size == 1 else second + first)
    for _ in range(top_groups):
        best_of(worth, num_groups)  # marks the groups that stay
    for g in range(num_groups):
        if load_f32(worth + g * 4) != LOWEST:
            for e in range(g * size, (g + 1) * size):
                store_f32(choice + e * 4, LOWEST)


@body("moe.route")
def route(thread, num_threads, args):
    """Probabilities of a row, then top_k times the greatest that is left, lowest id on ties.

    A row of padding has no experts.
    """
    scores, num_rows, num_experts, top_k, normalize = args[0], args[1], args[2], args[3], args[4]
    ids, weights, scratch, use_sigmoid, bias = args[5], args[6], args[7], args[8], args[9]
    scale, num_groups, top_groups, slots = bits_f32(args[10]), args[11], args[12], args[13]
    for row in range(thread, num_rows, num_threads):
        if slots != 0 and load_i32(slots + row * 4) < 0:
            for j in range(top_k):
                store_i32(ids + (row * top_k + j) * 4, -1)
                store_f32(weights + (row * top_k + j) * 4, ZERO)
            continue
        source = scores + row * num_experts * 4
        probabilities = scratch + row * (2 * num_experts + num_groups) * 4
        choice = probabilities + num_experts * 4
        if use_sigmoid != 0:
            whole = sigmoid_weights(source, num_experts, probabilities)
        else:
            whole = softmax_weights(source, num_experts, probabilities)
        for e in range(0, num_experts, 16):
            count = min(16, num_experts - e)
            value = div(load_first(probabilities + e * 4, count), splat(whole))
            store_first(probabilities + e * 4, value, count)
            if bias != 0:
                value = add(value, load_first(bias + e * 4, count))
            store_first(choice + e * 4, value, count)
        if top_groups < num_groups:
            keep_groups(choice, num_experts, num_groups, top_groups, choice + num_experts * 4)
        chosen = ZERO
        for j in range(top_k):
            best = best_of(choice, num_experts)
            weight = load_f32(probabilities + best * 4)
            store_i32(ids + (row * top_k + j) * 4, best)
            store_f32(weights + (row * top_k + j) * 4, weight)
            chosen += weight
        divisor = chosen + SMALLEST if normalize else ONE
        for j in range(top_k):
            at = weights + (row * top_k + j) * 4
            store_f32(at, load_f32(at) / divisor * scale)


@body("moe.group")
def group(thread, num_threads, args):
    """Counting sort of (row, choice) pairs by expert: starts int32 [E + 1], order int32 [T · X].

    Pairs without an expert are left out.
    """
    ids, num_pairs, num_experts, starts, order = args[0], args[1], args[2], args[3], args[4]
    if thread != 0:
        return
    for e in range(num_experts + 1):
        store_i32(starts + e * 4, 0)
    for pair in range(num_pairs):
        expert = load_i32(ids + pair * 4)
        if expert >= 0:
            at = starts + (expert + 1) * 4
            store_i32(at, load_i32(at) + 1)
    for e in range(num_experts):
        at = starts + e * 4
        store_i32(at + 4, load_i32(at + 4) + load_i32(at))
    for pair in range(num_pairs):
        expert = load_i32(ids + pair * 4)
        if expert >= 0:
            at = starts + expert * 4
            store_i32(order + load_i32(at) * 4, pair)
            store_i32(at, load_i32(at) + 1)
    for e in range(num_experts, 0, -1):
        store_i32(starts + e * 4, load_i32(starts + (e - 1) * 4))
    store_i32(starts, 0)


def _moe_linear(tile_1, tile_4, tiles_1, _):
    def moe_linear(thread, num_threads, args):
        x, x_stride, k, top_k, inputs_a_row = args[0], args[1], args[2], args[3], args[4]
        weight, tile_bytes, num_outputs, num_experts = args[5], args[6], args[7], args[8]
        starts, order, out = args[9], args[10], args[11]
        tiles_each = (num_outputs + 15) // 16
        # A pair's input row: its own, or the one its row's experts share.
        share = top_k if inputs_a_row == 1 else 1
        item = num_experts * tiles_each * thread // num_threads
        last = num_experts * tiles_each * (thread + 1) // num_threads
        while item < last:
            e, t = item // tiles_each, item % tiles_each
            start, stop = load_i32(starts + e * 4), load_i32(starts + (e + 1) * 4)
            tile = weight + item * tile_bytes
            count = min(16, num_outputs - t * 16)
            target = out + t * 64
            if start == stop:  # on to the next expert
                item += tiles_each - t
                continue
            if stop - start == 1 and t + 4 <= tiles_each and item + 4 <= last:
                p0 = load_i32(order + start * 4)
                a = tiles_1(tile, tile_bytes, k, x + p0 // share * x_stride)
                target += p0 * num_outputs * 4
                write(target, a[0], 16, 0, 0)
                write(target + 64, a[1], 16, 0, 0)
                write(target + 128, a[2], 16, 0, 0)
                write(target + 192, a[3], min(16, num_outputs - (t + 3) * 16), 0, 0)
                item += 4
                continue
            for i in range(start, stop, 4):
                p0 = load_i32(order + i * 4)
                if stop - start == 1:
                    acc = tile_1(tile, k, x + p0 // share * x_stride)
                    write(target + p0 * num_outputs * 4, acc, count, 0, 0)
                    continue
                p1 = load_i32(order + min(i + 1, stop - 1) * 4)
                p2 = load_i32(order + min(i + 2, stop - 1) * 4)
                p3 = load_i32(order + min(i + 3, stop - 1) * 4)
                a = tile_4(
                    tile,
                    k,
                    (
                        x + p0 // share * x_stride,
                        x + p1 // share * x_stride,
                        x + p2 // share * x_stride,
                        x + p3 // share * x_stride,
                    ),
                    i == start,
                )
                # Past the end a pair repeats the last one and writes the same bits again.
                write(target + p0 * num_outputs * 4, a[0], count, 0, 0)
                write(target + p1 * num_outputs * 4, a[1], count, 0, 0)
                write(target + p2 * num_outputs * 4, a[2], count, 0, 0)
                write(target + p3 * num_outputs * 4, a[3], count, 0, 0)
            item += 1

    return moe_linear


for _name, _tiles in TILES.items():
    body(f"moe.linear_{_name}")(_moe_linear(*_tiles))


@body("moe.combine")
def combine(thread, num_threads, args):
    y, weights, num_rows, top_k, size, out, out_stride, ids = (
        args[0],
        args[1],
        args[2],
        args[3],
        args[4],
        args[5],
        args[6],
        args[7],
    )
    for row in range(thread, num_rows, num_threads):
        for start in range(0, size, 16):
            count = min(16, size - start)
            total = zeros()
            for j in range(top_k):
                pair = row * top_k + j
                if load_i32(ids + pair * 4) >= 0:
                    value = load_first(y + (pair * size + start) * 4, count)
                    total = fma(splat(load_f32(weights + pair * 4)), value, total)
            at = out + row * out_stride + start * 4
            store_first(at, add(load_first(at, count), total), count)
