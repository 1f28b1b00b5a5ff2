"""Results of parts of a row's keys, and their sum: maximum, Σ p, Σ p · v.

A part is what one warp made of a split, or what all made of it. Parts are added one after the
other, with the running maximum of the online softmax: ``add_part`` is the one order of decode
attention above the warp.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), arXiv
1805.02867.
"""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import device, f32, i32, i64
from atlas_kernels.attention_decode_layout import WARPS
from atlas_kernels.gates import sigmoid_gated
from atlas_kernels.ptx_math import fast_exp2, fast_reciprocal, fma, opaque, pack_bf16, unpack_bf16
from atlas_kernels.ptx_memory import (
    load_b32x2,
    load_l2_f32x2,
    load_l2_f32x4,
    load_shared_b32,
    load_shared_f32x2,
    load_shared_f32x4,
    store_b32x2,
    store_shared_f32,
)
from atlas_kernels.ptx_tile import MASKED
from atlas_kernels.ptx_warp import lane_id


def row_words(tiles: int) -> Any:
    """A device function: the int32 of a lane's rows, 8 rows apart, 8 bytes a row."""
    if tiles == 1:
        return device(lambda at: (load_shared_b32(at), load_shared_b32(at + 64)))

    @device
    def words(at):
        first, second = load_shared_b32(at), load_shared_b32(at + 64)
        return first, second, load_shared_b32(at + 128), load_shared_b32(at + 192)

    return words


def store_rows(tiles: int) -> Any:
    """A device function: the float32 of a lane's rows to shared memory, 8 bytes a row."""
    if tiles == 1:

        @device
        def store(at, values):
            store_shared_f32(at, values[0])
            store_shared_f32(at + 64, values[1])

    else:

        @device
        def store(at, values):
            store_shared_f32(at, values[0])
            store_shared_f32(at + 64, values[1])
            store_shared_f32(at + 128, values[2])
            store_shared_f32(at + 192, values[3])

    return store


@device
def fold(old, new, part, total):
    """old · total + new · part, four columns."""
    return (
        fma(new, part[0], old * total[0]),
        fma(new, part[1], old * total[1]),
        fma(new, part[2], old * total[2]),
        fma(new, part[3], old * total[3]),
    )


@device
def add_part(state, part, values):
    """Add a part's (maximum, sum) and four columns to a row's (maximum, sum, columns)."""
    before, total, columns = state
    after = part[0] if part[0] > before else before
    old, new = fast_exp2(before - after), fast_exp2(part[0] - after)
    return after, fma(new, part[1], old * total), fold(old, new, values, columns)


@device
def empty_row():
    """The state of a row before its first part."""
    return f32(MASKED), f32(0), (f32(0), f32(0), f32(0), f32(0))


@device
def output_words(values, total):
    """Four columns divided by the row's sum, as bf16 in two words."""
    share = fast_reciprocal(total)
    low = pack_bf16(values[0] * share, values[1] * share)
    return low, pack_bf16(values[2] * share, values[3] * share)


@device
def _gated_word(word, gate):
    values, gates = unpack_bf16(word), unpack_bf16(gate)
    return pack_bf16(sigmoid_gated(values[0], gates[0]), sigmoid_gated(values[1], gates[1]))


@device
def gated_words(words, gates):
    """``sigmoid_gate`` of four columns, which are rounded already, and of their gates."""
    return _gated_word(words[0], gates[0]), _gated_word(words[1], gates[1])


@device
def first_part(sequence, head, begin, rows, kv_heads, room):
    """Where the partial results of a thread block's first row lie, of its first split. Computed
    where they are needed: few rows have any, and registers are short."""
    of_sequence = i64(opaque(sequence)) * room * kv_heads
    return (of_sequence + head) * rows + begin


def merge_parts(part_pitch: int, sums_at: int, rows: int) -> Any:
    """A device function of (base, row, column): four columns of a row, the warps' parts ascending.

    In shared memory, ``rows`` rows a warp: results ``part_pitch`` bytes apart, and from ``sums_at``
    on their maxima and sums.
    """

    @device
    def merge(base, row, column):
        state, at = empty_row(), base + sums_at + row * 8
        source = base + row * part_pitch + column * 4
        for warp in range(WARPS):
            part = load_shared_f32x2(at + warp * rows * 8)
            state = add_part(state, part, load_shared_f32x4(source + warp * rows * part_pitch))
        return state

    return merge


def combine_splits(dim: int) -> Any:
    """A device function: a warp adds up the partial results of a row, splits ascending.

    ``step`` is the distance, in rows, from a split's partial result to the next one's; ``gate``
    the address of the row's gates, or 0.
    """

    @device
    def combine(partials, sums, row, step, num_splits, out, gate):
        for column in range(lane_id() * 4, dim, 128):
            gates = i32(0), i32(0)
            if gate != 0:
                gates = load_b32x2(gate + column * 2)
            state = empty_row()
            source, pair = partials + (row * dim + column) * 4, sums + row * 8
            left = num_splits
            while left >= 8:  # eight loads in flight
                s0, p0 = load_l2_f32x2(pair), load_l2_f32x4(source)
                pair, source = pair + step * 8, source + step * (dim * 4)
                s1, p1 = load_l2_f32x2(pair), load_l2_f32x4(source)
                pair, source = pair + step * 8, source + step * (dim * 4)
                s2, p2 = load_l2_f32x2(pair), load_l2_f32x4(source)
                pair, source = pair + step * 8, source + step * (dim * 4)
                s3, p3 = load_l2_f32x2(pair), load_l2_f32x4(source)
                pair, source = pair + step * 8, source + step * (dim * 4)
                s4, p4 = load_l2_f32x2(pair), load_l2_f32x4(source)
                pair, source = pair + step * 8, source + step * (dim * 4)
                s5, p5 = load_l2_f32x2(pair), load_l2_f32x4(source)
                pair, source = pair + step * 8, source + step * (dim * 4)
                s6, p6 = load_l2_f32x2(pair), load_l2_f32x4(source)
                pair, source = pair + step * 8, source + step * (dim * 4)
                s7, p7 = load_l2_f32x2(pair), load_l2_f32x4(source)
                pair, source = pair + step * 8, source + step * (dim * 4)
                state = add_part(add_part(state, s0, p0), s1, p1)
                state = add_part(add_part(state, s2, p2), s3, p3)
                state = add_part(add_part(state, s4, p4), s5, p5)
                state = add_part(add_part(state, s6, p6), s7, p7)
                left -= 8
            while left > 0:
                state = add_part(state, load_l2_f32x2(pair), load_l2_f32x4(source))
                pair, source, left = pair + step * 8, source + step * (dim * 4), left - 1
            words = output_words(state[2], state[1])
            if gate != 0:
                words = gated_words(words, gates)
            store_b32x2(out + column * 2, words)

    return combine
