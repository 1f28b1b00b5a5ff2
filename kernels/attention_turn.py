"""Queries and new keys of 128 dimensions, normalised and rotated in registers on their way in.

A warp takes two heads at once, 4, 8, … heads apart: its lanes elements 2 l, 2 l + 1, 64 + 2 l and
65 + 2 l of each. What the first two need besides the heads themselves (norms, angles, addresses)
is in registers before the wait, so that after it one load of q, k and v, one tree of shuffles and
one barrier lie before attention. Same order and bits as ``rope_kv_store`` and
``norm_rope_kv_store``.
"""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import device, f32, i32, i64
from atlas_kernels.attention_decode_layout import WARPS, key_pitch, queries_at
from atlas_kernels.ptx_async import copy16_or_zero, copy_commit, copy_wait
from atlas_kernels.ptx_math import fast_rsqrt, pack_bf16, quotient, unpack_bf16
from atlas_kernels.ptx_memory import load_l2_b32, store_shared_b32
from atlas_kernels.ptx_warp import (
    lane_id,
    shuffle_f32,
    shuffle_xor_f32,
    sync_threads,
    sync_warp,
    thread_x,
)
from atlas_kernels.vector import access

DIM = 128
_PAIR = access("f32", 2)
_load_pair, _zero = _PAIR.load_constant, _PAIR.zero
_add, _mul, _scale, _squares = _PAIR.add, _PAIR.mul, _PAIR.scale, _PAIR.add_squares


@device
def _sums(a, b):
    """``warp_sum`` of two numbers, side by side."""
    a, b = a + shuffle_xor_f32(a, 16), b + shuffle_xor_f32(b, 16)
    a, b = a + shuffle_xor_f32(a, 8), b + shuffle_xor_f32(b, 8)
    a, b = a + shuffle_xor_f32(a, 4), b + shuffle_xor_f32(b, 4)
    a, b = a + shuffle_xor_f32(a, 2), b + shuffle_xor_f32(b, 2)
    return a + shuffle_xor_f32(a, 1), b + shuffle_xor_f32(b, 1)


@device
def _put(at, values):
    store_shared_b32(at, pack_bf16(values[0], values[1]))


@device
def _normed(head, factor, weights):
    return (
        _mul(_scale(head[0], factor), weights[0]),
        _mul(_scale(head[1], factor), weights[1]),
    )


@device
def _partners(head, half):
    """What a lane's first two elements are rotated with: its own last two, or another lane's."""
    low, high = head
    if half == DIM // 2:
        return high
    source = i32(lane_id() + (half >> 1)) & 31
    a, b = shuffle_f32(low[0], source), shuffle_f32(low[1], source)
    c, d = shuffle_f32(high[0], source), shuffle_f32(high[1], source)
    return (a, b) if 2 * lane_id() + half < DIM // 2 else (c, d)


@device
def _rotate(at, head, partners, angles, half):
    """Store a head in shared memory, its first 2 · half dimensions rotated."""
    lane = lane_id()
    low, high = head
    cos, sin = angles
    if lane >= half:
        _put(at + lane * 4, low)
    if DIM // 4 + lane >= half:
        _put(at + lane * 4 + DIM, high)
    if 2 * lane < half:
        _put(at + lane * 4, _add(_mul(low, cos), _scale(_mul(partners, sin), f32(-1))))
        _put(at + lane * 4 + half * 2, _add(_mul(partners, cos), _mul(low, sin)))


def turned_rows(keys_at: int, values_at: int) -> tuple[Any, Any]:
    """``ask`` and ``bring`` of ``FreshRows``; ``fresh`` as ``attention_step`` has it."""
    pitch, q_at, copied = key_pitch(DIM), queries_at(DIM), copy_wait(0)

    @device
    def item_of(q, q_stride, fresh, place, item):
        """(source, angles) of a head."""
        first_row, position, begin, count, group, head, _ = place
        half = fresh[6]
        if item < count:
            index = i32(begin + item)
            token = quotient(index, group)
            column = i32(head * group + index - token * group)
            source = q + i64(first_row + token) * q_stride + i64(column) * (2 * DIM)
        else:
            token = i32(item - count)
            source = fresh[0] + i64(first_row + token) * fresh[7] + i64(head) * (2 * DIM)
        angles, cos, sin = fresh[4] + i64(position + token) * half * 8, _zero(), _zero()
        if 2 * lane_id() < half:
            cos = _load_pair(angles + lane_id() * 8)
            sin = _load_pair(angles + lane_id() * 8 + i64(half) * 4)
        return source, (cos, sin)

    @device
    def target_of(base, item, count):
        """Where a head goes in shared memory."""
        if item < count:
            return i32(base + q_at + item * pitch)
        return i32(base + keys_at + (item - count) * pitch)

    @device
    def weights_of(norm):
        return _load_pair(norm + lane_id() * 8), _load_pair(norm + lane_id() * 8 + 2 * DIM)

    @device
    def both_items(q, q_stride, fresh, place, item):
        """A warp's next two heads; the last stands in for one that is not there."""
        last = i32(place[3] + place[6] - 1)
        first = item_of(q, q_stride, fresh, place, i32(min(item, last)))
        other = item_of(q, q_stride, fresh, place, i32(min(item + WARPS, last)))
        return first, other

    @device
    def ask(base, q, q_stride, fresh, place):
        q_weights = k_weights = _zero(), _zero()
        if fresh[2] != 0:
            q_weights, k_weights = weights_of(fresh[2]), weights_of(fresh[3])
        return (
            both_items(q, q_stride, fresh, place, i32(thread_x() >> 5)),
            q_weights,
            k_weights,
        )

    @device
    def head_at(source):
        return (
            unpack_bf16(load_l2_b32(source + lane_id() * 4)),
            unpack_bf16(load_l2_b32(source + lane_id() * 4 + DIM)),
        )

    @device
    def copy_values(base, fresh, place, item):
        row = i32(item - place[3])
        if row >= 0 and row < place[6] and lane_id() < DIM // 8:
            source = fresh[1] + i64(place[0] + row) * fresh[8] + i64(place[5]) * (2 * DIM)
            at = i32(base + values_at + row * (2 * DIM) + lane_id() * 16)
            copy16_or_zero(at, source + lane_id() * 16, i32(16))

    @device
    def bring(base, q, q_stride, fresh, place, asked, is_real):
        items, q_weights, k_weights = asked
        half, count = fresh[6], place[3]
        item, end = i32(thread_x() >> 5), i32(count + place[6])
        while item < end:
            one, other = items
            first = second = _zero(), _zero()
            if is_real:
                first, second = head_at(one[0]), head_at(other[0])
                copy_values(base, fresh, place, item)
                copy_values(base, fresh, place, i32(item + WARPS))
            if fresh[2] != 0:
                a = _squares(_squares(f32(0), first[0]), first[1])
                b = _squares(_squares(f32(0), second[0]), second[1])
                a, b = _sums(a, b)
                weights = q_weights if item < count else k_weights
                first = _normed(first, fast_rsqrt(a / f32(DIM) + fresh[9]), weights)
                weights = q_weights if item + WARPS < count else k_weights
                second = _normed(second, fast_rsqrt(b / f32(DIM) + fresh[9]), weights)
            partners, more = _partners(first, half), _partners(second, half)
            _rotate(target_of(base, item, count), first, partners, one[1], half)
            if item + WARPS < end:
                at = target_of(base, i32(item + WARPS), count)
                _rotate(at, second, more, other[1], half)
            item = i32(item + 2 * WARPS)
            if item < end:
                items = both_items(q, q_stride, fresh, place, item)
            sync_warp()
        copy_commit()
        copied()
        sync_threads()

    return ask, bring
