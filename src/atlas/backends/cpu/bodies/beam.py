"""The k greatest logits of a row, kept sorted while the row is read once."""

# mypy: ignore-errors
from __future__ import annotations

import numpy as np

from atlas.backends.cpu.bodies import body
from atlas.backends.cpu.bodies.sampling import exp32
from atlas.backends.cpu.bodies.simd import (
    add,
    lanes_between,
    load_f32,
    load_first,
    load_i32,
    max_lane,
    maximum,
    select,
    splat,
    store,
    store_f32,
    store_i32,
    sub,
    sum_lanes,
    zeros,
)
from atlas.backends.cpu.bodies.vectors import device

_f = np.float32
LOWEST, ZERO, NAN = _f(-np.inf), _f(0.0), _f(np.nan)


@device
def is_banned(token, banned, count):
    found = False
    for i in range(count):
        found = found or load_i32(banned + i * 4) == token
    return found


@device
def insert(ids, values, held, k, token, value):
    """Put a candidate behind those that are as great; returns how many are held then."""
    at = min(held, k - 1)
    while at > 0 and load_f32(values + (at - 1) * 4) < value:
        store_f32(values + at * 4, load_f32(values + (at - 1) * 4))
        store_i32(ids + at * 4, load_i32(ids + (at - 1) * 4))
        at -= 1
    store_f32(values + at * 4, value)
    store_i32(ids + at * 4, token)
    return min(k, held + 1)


@device
def greatest_of(source, size):
    """The row's greatest logit, and 0 or NaN: whether all are finite."""
    greatest, not_finite = splat(LOWEST), zeros()
    for start in range(0, size, 16):
        count = min(16, size - start)
        value = load_first(source + start * 4, count)
        not_finite = add(not_finite, sub(value, value))
        greatest = maximum(select(lanes_between(0, count), value, splat(LOWEST)), greatest)
    return max_lane(greatest), sum_lanes(not_finite)


@device
def tree_sum(source, size, shift, lanes):
    """Σ exp32(logit − shift): 256 chains, 16 side by side, then the chains from left to right."""
    for first in range(0, 256, 16):
        total = zeros()
        for start in range(first, size, 256):
            count = min(16, size - start)
            weight = exp32(sub(load_first(source + start * 4, count), shift))
            total = add(total, select(lanes_between(0, count), weight, zeros()))
        store(lanes + first * 4, total)
    total = ZERO
    for lane in range(256):
        total = total + load_f32(lanes + lane * 4)
    return total


@body("beam.top_candidates")
def top_candidates(thread, num_threads, args):
    logits, row_stride, num_rows, size, k = args[0], args[1], args[2], args[3], args[4]
    banned, cu_banned, ids, ids_stride = args[5], args[6], args[7], args[8]
    values, values_stride, totals, lanes = args[9], args[10], args[11], args[12]
    for row in range(thread, num_rows, num_threads):
        source = logits + row * row_stride
        row_ids, row_values = ids + row * ids_stride, values + row * values_stride
        for i in range(k):
            store_i32(row_ids + i * 4, -1)
            store_f32(row_values + i * 4, LOWEST)
        top, not_finite = greatest_of(source, size)
        if not_finite != ZERO:
            store_f32(totals + row * 4, NAN)
            continue
        first_banned = load_i32(cu_banned + row * 4)
        num_banned = load_i32(cu_banned + (row + 1) * 4) - first_banned
        bans = banned + first_banned * 4
        shift = splat(top)
        held = 0
        least = LOWEST  # a candidate must be greater, once k are held
        for start in range(0, size, 16):
            count = min(16, size - start)
            inside = lanes_between(0, count)
            value = sub(load_first(source + start * 4, count), shift)
            if held < k or max_lane(select(inside, value, splat(LOWEST))) > least:
                for i in range(count):
                    logit = load_f32(source + (start + i) * 4) - top
                    # Until k are held even −∞ is one: a difference beyond float32.
                    better = held < k or logit > least
                    if better and not is_banned(start + i, bans, num_banned):
                        held = insert(row_ids, row_values, held, k, start + i, logit)
                        if held == k:
                            least = load_f32(row_values + (k - 1) * 4)
        store_f32(totals + row * 4, tree_sum(source, size, shift, lanes + row * 1024))
