"""Queries and new keys of 128 or 256 dimensions, turned in registers on their way in: normalised
and rotated.

A warp takes two heads at once, 4, 8, … heads apart: its lanes elements 2 l and 2 l + 1 of every 64
of each. Addresses are known before the wait, and with 128 dimensions norms and angles are in
registers as well; wider heads find them in L1. So after the wait one load of q, k and v, one tree
of shuffles and one barrier lie before attention. Same order and bits as ``rope_kv_store`` and
``norm_rope_kv_store``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from atlas_kernels._cuda import device, f32, i32, i64
from atlas_kernels.attention_decode_layout import WARPS, key_pitch, queries_at
from atlas_kernels.attention_fresh import token_of
from atlas_kernels.ptx_async import copy16_if, copy_commit, copy_wait
from atlas_kernels.ptx_math import fast_rsqrt, pack_bf16, unpack_bf16
from atlas_kernels.ptx_memory import load_l2_b32_or_zero, store_shared_b32
from atlas_kernels.ptx_warp import (
    lane_id,
    shuffle_f32,
    shuffle_xor_f32,
    sync_threads,
    sync_warp,
    thread_x,
)
from atlas_kernels.vector import access

DIMS = (128, 256)
_load_pair = access("f32", 2).load_constant


@dataclass(frozen=True, slots=True)
class _Part:
    """Device functions for half a head: a lane's pairs of its first or last dim / 2 elements.

    Attributes
    ----------
    load : (address, is_real) → the words of both halves in memory, bf16; else zeros
    unpack : (words) → two parts
    floats : (address) → a part, of float32 constants
    angles : (address, half) → a part, zeros where no first element of a pair is
    put : (address, part, first)
        To shared memory as bf16, from the element ``first`` on.
    put_rotated : (address, part, half)
        The same where first elements of pairs are.
    others : (head, half) → what the first part is rotated with, from other lanes
    """

    load: Any
    unpack: Any
    floats: Any
    angles: Any
    put: Any
    put_rotated: Any
    others: Any


@device
def _load_angles(address, is_there):
    return _load_pair(address) if is_there else (f32(0), f32(0))


@device
def _put_pair(at, a, b):
    store_shared_b32(at, pack_bf16(a, b))


def _narrow_part() -> _Part:
    """One pair: elements 2 l and 2 l + 1 of 64."""

    @device
    def load(source, is_real):
        at, wanted = source + lane_id() * 4, i32(1) if is_real else i32(0)
        return load_l2_b32_or_zero(at, wanted), load_l2_b32_or_zero(at + 128, wanted)

    @device
    def unpack(words):
        return unpack_bf16(words[0]), unpack_bf16(words[1])

    @device
    def floats(source):
        return _load_pair(source + lane_id() * 8)

    @device
    def angles(source, half):
        return _load_angles(source + lane_id() * 8, 2 * lane_id() < half)

    @device
    def put(at, part, first):
        if 2 * lane_id() >= first:
            _put_pair(at + lane_id() * 4, part[0], part[1])

    @device
    def put_rotated(at, part, half):
        if 2 * lane_id() < half:
            _put_pair(at + lane_id() * 4, part[0], part[1])

    @device
    def others(head, half):
        low, high = head
        source = i32(lane_id() + (half >> 1)) & 31
        a, b = shuffle_f32(low[0], source), shuffle_f32(low[1], source)
        c, d = shuffle_f32(high[0], source), shuffle_f32(high[1], source)
        return (a, b) if 2 * lane_id() + half < 64 else (c, d)

    return _Part(load, unpack, floats, angles, put, put_rotated, others)


def _wide_part() -> _Part:
    """Two pairs: elements 2 l, 2 l + 1, 64 + 2 l and 65 + 2 l of 128."""

    @device
    def load(source, is_real):
        at, wanted = source + lane_id() * 4, i32(1) if is_real else i32(0)
        first, second = load_l2_b32_or_zero(at, wanted), load_l2_b32_or_zero(at + 128, wanted)
        third = load_l2_b32_or_zero(at + 256, wanted)
        return first, second, third, load_l2_b32_or_zero(at + 384, wanted)

    @device
    def unpack(words):
        a, b = unpack_bf16(words[0])
        c, d = unpack_bf16(words[1])
        e, f = unpack_bf16(words[2])
        g, h = unpack_bf16(words[3])
        return (a, b, c, d), (e, f, g, h)

    @device
    def floats(source):
        a, b = _load_pair(source + lane_id() * 8)
        c, d = _load_pair(source + lane_id() * 8 + 256)
        return a, b, c, d

    @device
    def angles(source, half):
        a, b = _load_angles(source + lane_id() * 8, 2 * lane_id() < half)
        c, d = _load_angles(source + lane_id() * 8 + 256, 2 * lane_id() + 64 < half)
        return a, b, c, d

    @device
    def put(at, part, first):
        if 2 * lane_id() >= first:
            _put_pair(at + lane_id() * 4, part[0], part[1])
        if 2 * lane_id() + 64 >= first:
            _put_pair(at + lane_id() * 4 + 128, part[2], part[3])

    @device
    def put_rotated(at, part, half):
        if 2 * lane_id() < half:
            _put_pair(at + lane_id() * 4, part[0], part[1])
        if 2 * lane_id() + 64 < half:
            _put_pair(at + lane_id() * 4 + 128, part[2], part[3])

    @device
    def others(head, half):
        low, high = head
        source = i32(lane_id() + (half >> 1)) & 31
        a, b = shuffle_f32(low[0], source), shuffle_f32(low[1], source)
        c, d = shuffle_f32(low[2], source), shuffle_f32(low[3], source)
        e, f = shuffle_f32(high[0], source), shuffle_f32(high[1], source)
        g, h = shuffle_f32(high[2], source), shuffle_f32(high[3], source)
        first = 2 * lane_id() + half  # of what the lane's first pair is rotated with
        if first < 64:
            return a, b, c, d
        return (c, d, e, f) if first < 128 else (e, f, g, h)

    return _Part(load, unpack, floats, angles, put, put_rotated, others)


@device
def _sums(a, b):
    """``warp_sum`` of two numbers, side by side."""
    a, b = a + shuffle_xor_f32(a, 16), b + shuffle_xor_f32(b, 16)
    a, b = a + shuffle_xor_f32(a, 8), b + shuffle_xor_f32(b, 8)
    a, b = a + shuffle_xor_f32(a, 4), b + shuffle_xor_f32(b, 4)
    a, b = a + shuffle_xor_f32(a, 2), b + shuffle_xor_f32(b, 2)
    return a + shuffle_xor_f32(a, 1), b + shuffle_xor_f32(b, 1)


def turned_rows(dim: int, keys_at: int, values_at: int) -> tuple[Any, Any]:
    """``ask`` and ``bring`` of ``FreshRows``; ``fresh`` as ``attention_step`` has it."""
    pitch, q_at, copied = key_pitch(dim), queries_at(dim), copy_wait(0)
    part, vector = _narrow_part() if dim == 128 else _wide_part(), access("f32", dim // 64)
    load, unpack, floats_of, angles_of = part.load, part.unpack, part.floats, part.angles
    put, put_rotated, others = part.put, part.put_rotated, part.others
    add, mul, scale, squares = vector.add, vector.mul, vector.scale, vector.add_squares

    @device
    def load_weights(norm):
        return floats_of(norm), floats_of(norm + 2 * dim)

    @device
    def load_angles(address, half):
        return angles_of(address, half), angles_of(address + i64(half) * 4, half)

    if dim == 128:  # constants are in registers before the wait
        keep_weights, keep_angles, zero = load_weights, load_angles, vector.zero
        no_weights = device(lambda: (zero(), zero()))
        weights_of = device(lambda kept: kept)
        pair_angles = device(lambda kept, half: kept)
    else:
        keep_weights, no_weights = device(lambda norm: norm), device(lambda: i64(0))
        keep_angles = device(lambda address, half: address)
        weights_of, pair_angles = load_weights, load_angles

    @device
    def item_of(q, q_stride, fresh, place, item):
        """(source, angles) of a head."""
        first_row, position, begin, count, group, head = place[:6]
        half = fresh[6]
        if item < count:
            index = i32(begin + item)
            token = token_of(place, index)
            column = i32(head * group + index - token * group)
            source = q + i64(first_row + token) * q_stride + i64(column) * (2 * dim)
        else:
            token = i32(item - count)
            source = fresh[0] + i64(first_row + token) * fresh[7] + i64(head) * (2 * dim)
        return source, keep_angles(fresh[4] + i64(position + token) * half * 8, half)

    @device
    def both_items(q, q_stride, fresh, place, item):
        """A warp's next two heads; the last stands in for one that is not there."""
        last = i32(place[3] + place[6] - 1)
        first = item_of(q, q_stride, fresh, place, i32(min(item, last)))
        other = item_of(q, q_stride, fresh, place, i32(min(item + WARPS, last)))
        return first, other

    @device
    def load_both(items, is_real):
        return load(items[0][0], is_real), load(items[1][0], is_real)

    @device
    def target_of(base, item, count):
        """Where a head goes in shared memory."""
        if item < count:
            return i32(base + q_at + item * pitch)
        return i32(base + keys_at + (item - count) * pitch)

    @device
    def normed(head, factor, weights):
        return mul(scale(head[0], factor), weights[0]), mul(scale(head[1], factor), weights[1])

    @device
    def partners(head, half):
        """What a lane's first part is rotated with: its own last one, or other lanes'."""
        if half == dim // 2:
            return head[1]
        return others(head, half)

    @device
    def rotate(at, head, partner, angles, half):
        """Store a head in shared memory, its first 2 · half dimensions rotated."""
        cos, sin = angles
        put(at, head[0], 2 * half)
        put(at + dim, head[1], 2 * half - dim // 2)
        first = add(mul(head[0], cos), scale(mul(partner, sin), f32(-1)))
        put_rotated(at, first, half)
        put_rotated(at + half * 2, add(mul(partner, cos), mul(head[0], sin)), half)

    @device
    def ask(base, q, q_stride, fresh, place):
        items = both_items(q, q_stride, fresh, place, i32(thread_x() >> 5))
        q_weights = k_weights = no_weights()
        if fresh[2] != 0:
            q_weights, k_weights = keep_weights(fresh[2]), keep_weights(fresh[3])
        return items, q_weights, k_weights

    @device
    def copy_values(base, fresh, place, item, is_real):
        row = i32(item - place[3])
        if row >= 0 and row < place[6] and lane_id() < dim // 8:
            source = fresh[1] + i64(place[0] + row) * fresh[8] + i64(place[5]) * (2 * dim)
            at = i32(base + values_at + row * (2 * dim) + lane_id() * 16)
            copy16_if(at, source + lane_id() * 16, i32(1) if is_real else i32(0))

    @device
    def bring(base, q, q_stride, fresh, place, asked, is_real):
        items, q_weights, k_weights = asked
        half, count = fresh[6], place[3]
        item, end = i32(thread_x() >> 5), i32(count + place[6])
        words = load_both(items, is_real)
        while item < end:
            copy_values(base, fresh, place, item, is_real)
            copy_values(base, fresh, place, i32(item + WARPS), is_real)
            later, behind, later_words = items, i32(item + 2 * WARPS), words
            if behind < end:  # on their way while these two are turned
                later = both_items(q, q_stride, fresh, place, behind)
                later_words = load_both(later, is_real)
            angles, more = pair_angles(items[0][1], half), pair_angles(items[1][1], half)
            if fresh[2] != 0:
                one = weights_of(q_weights if item < count else k_weights)
                two = weights_of(q_weights if item + WARPS < count else k_weights)
                first, second = unpack(words[0]), unpack(words[1])
                a = squares(squares(f32(0), first[0]), first[1])
                b = squares(squares(f32(0), second[0]), second[1])
                a, b = _sums(a, b)
                first = normed(first, fast_rsqrt(a / f32(dim) + fresh[9]), one)
                second = normed(second, fast_rsqrt(b / f32(dim) + fresh[9]), two)
            else:
                first, second = unpack(words[0]), unpack(words[1])
            partner, other = partners(first, half), partners(second, half)
            rotate(target_of(base, item, count), first, partner, angles, half)
            if item + WARPS < end:
                rotate(target_of(base, i32(item + WARPS), count), second, other, more, half)
            item, items, words = behind, later, later_words
            sync_warp()
        copy_commit()
        if is_real:
            copied()
        sync_threads()

    return ask, bring
