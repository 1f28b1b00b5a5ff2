"""Greedy choice over a large vocabulary, in two kernels.

A logit and its id become one int64 that orders as the choice does: the float's bits made monotone
in the high half, the id's complement in the low half. The greatest key is the greatest logit with
the lowest id, in whatever order keys are compared; a value that is not finite becomes the greatest
key of all. −0 counts as 0.
"""

from __future__ import annotations

from atlas_kernels._cuda import device, f32, i32, i64
from atlas_kernels.ptx_async import launch_dependents, wait_prerequisites
from atlas_kernels.ptx_math import float_bits
from atlas_kernels.ptx_memory import load_b64, load_f32, store_b32, store_b64
from atlas_kernels.ptx_warp import (
    block_max_i64,
    block_x,
    block_y,
    lane_id,
    num_blocks_x,
    thread_x,
    warp_max_i64,
)
from atlas_kernels.registry import kernel

PARTIAL_THREADS = 256
FINAL_THREADS = 32
PER_THREAD = 4  # loads in flight

NOT_FINITE = (1 << 63) - 1
"""The key of a row with a NaN or an infinity: its result is −1."""
LEAST = -(1 << 63)
_LOW = 0xFFFFFFFF
_EXPONENT = 0x7F800000
_MAGNITUDE = 0x7FFFFFFF


@device
def logit_key(value, index):
    """The int64 key of a logit."""
    bits = float_bits(value + f32(0))  # −0 + 0 is +0
    if (bits & _EXPONENT) == _EXPONENT:
        return i64(NOT_FINITE)
    order = bits ^ ((bits >> 31) & _MAGNITUDE)
    return i64((i64(order) << 32) | (_LOW - i64(index)))


@kernel("argmax_partial", args="ptr ptr i32 i32 i64", threads=PARTIAL_THREADS)
def argmax_partial(logits, keys, size, part_len, logits_stride):
    """keys[row, part] = the greatest key of ``part_len`` logits; grid (parts, rows).

    ``logits`` is float32 [L, C], rows a stride in bytes apart; ``keys`` int64 [L, parts].
    """
    launch_dependents()
    wait_prerequisites()
    start = block_x() * part_len
    end = min(i64(size), start + part_len)
    row = logits + block_y() * logits_stride
    best = i64(LEAST)
    for first in range(start + thread_x(), end, PER_THREAD * PARTIAL_THREADS):
        # The last index again where the range ends: its key is the same, and changes nothing.
        b = min(first + PARTIAL_THREADS, end - 1)
        c = min(first + 2 * PARTIAL_THREADS, end - 1)
        d = min(first + 3 * PARTIAL_THREADS, end - 1)
        value_a, value_b = load_f32(row + first * 4), load_f32(row + b * 4)
        value_c, value_d = load_f32(row + c * 4), load_f32(row + d * 4)
        left = max(logit_key(value_a, first), logit_key(value_b, b))
        right = max(logit_key(value_c, c), logit_key(value_d, d))
        best = max(best, max(left, right))
    best = block_max_i64(best, LEAST)
    if thread_x() == 0:
        store_b64(keys + (i64(block_y()) * num_blocks_x() + block_x()) * 8, best)


@kernel("argmax_final", args="ptr ptr i32", threads=FINAL_THREADS)
def argmax_final(keys, out, parts):
    """out[row] = the id of the row's greatest key, or −1; grid (rows). ``out`` is int32 [L]."""
    launch_dependents()
    wait_prerequisites()
    best = i64(LEAST)
    for part in range(lane_id(), parts, 32):
        best = max(best, load_b64(keys + (i64(block_x()) * parts + part) * 8))
    best = warp_max_i64(best)
    if lane_id() == 0:
        chosen = i32(-1)
        if best != NOT_FINITE:
            chosen = i32(_LOW - (best & _LOW))
        store_b32(out + block_x() * 4, chosen)
