"""What the decode kernels of a mixture of experts share: the list of experts, a warp's ring."""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import device, i32, i64
from atlas_kernels.moe_plan import DecodeTile
from atlas_kernels.ptx import instruction
from atlas_kernels.ptx_async import (
    barrier_expect,
    barrier_init,
    barrier_init_fence,
    bulk_load,
)
from atlas_kernels.ptx_math import popcount, quotient
from atlas_kernels.ptx_memory import (
    load_b32,
    load_shared_b32,
    load_shared_b32x4,
    store_shared_b32,
)
from atlas_kernels.ptx_mma import ldmatrix_x4, mma_bf16
from atlas_kernels.ptx_warp import ballot, lane_id, sync_threads, sync_warp, thread_x

BARRIER_AT = 0
COUNT_AT = 8
FIRSTS_AT = 16  # a word of bits for every 32 pairs, 8 in all
IDS_AT = 64

copy_weights = instruction("", "r l", "cp.async.cg.shared.global.L2::256B [$0], [$1], 16;")
"""``copy16`` of what is read once, from end to end: L2 fetches 256 bytes at a time."""


def weights_at(tile: DecodeTile) -> int:
    """Offset of the weights of the choices, after their ids."""
    return IDS_AT + 4 * tile.max_pairs


def entries_at(tile: DecodeTile) -> int:
    """Offset of the list of experts to read."""
    return IDS_AT + 8 * tile.max_pairs


def list_experts(tile: DecodeTile) -> Any:
    """(base, ids, m, slots, shared expert's id or −1): list what is to be read; how much.

    The choices, and each expert among them once, into shared memory. The shared expert comes first
    where there is one, then the others by their first pair. Entries are ids; their number lies at
    ``COUNT_AT``. Of one row each choice is an entry: it made them all differ.
    """
    entries = entries_at(tile)

    @device
    def list_them(base, ids, m, slots, shared_id):
        p, lane = thread_x(), lane_id()
        pairs, shared, count = i32(m * slots), i32(1 if shared_id >= 0 else 0), i32(slots)
        expert = i32(-1)
        if p < pairs:
            expert = load_b32(ids + i64(p) * 4)
            store_shared_b32(base + IDS_AT + p * 4, expert)
        if p == 0 and shared != 0:
            store_shared_b32(base + entries, shared_id)
        if m == 1:
            if p < slots - shared:  # an id of −1 reads expert 0, and the result is dropped
                store_shared_b32(base + entries + (p + shared) * 4, max(expert, i32(0)))
        else:
            sync_threads()
            is_first = i32(1 if expert >= 0 and expert != shared_id else 0)
            # A row's choices differ, so only earlier rows can have made this one.
            earlier = i32(quotient(min(p, i32(pairs - 1)), slots) * slots)
            for q in range(0, earlier, 4):
                others = load_shared_b32x4(base + IDS_AT + q * 4)
                left = i32(earlier - q)
                same = others[0] == expert or (others[1] == expert and left > 1)
                same = same or (others[2] == expert and left > 2)
                if same or (others[3] == expert and left > 3):
                    is_first = i32(0)
            sync_warp()
            firsts = ballot(is_first)
            if lane == 0 and p < 256:
                store_shared_b32(base + FIRSTS_AT + (p >> 5) * 4, firsts)
            sync_threads()
            place, count = shared, shared
            for word in range(quotient(i32(pairs + 31), 32)):
                bits = popcount(load_shared_b32(base + FIRSTS_AT + word * 4))
                place = i32(place + bits) if word < p >> 5 else place
                count = i32(count + bits)
            place = i32(place + popcount(i32(firsts & i32((i64(1) << lane) - 1))))
            if is_first != 0:
                store_shared_b32(base + entries + place * 4, expert)
        if p == 0:
            store_shared_b32(base + COUNT_AT, count)
        sync_threads()
        return i32(load_shared_b32(base + COUNT_AT))

    return list_them


@device
def pair_of(base, row, expert, m, slots):
    """The pair with which a row chose an expert, or −1."""
    found = i32(-1)
    if row < m:
        first = i32(row * slots)
        for s in range(slots):
            if load_shared_b32(base + IDS_AT + (first + s) * 4) == expert:
                found = i32(first + s)
    return found


@device
def begin(base):
    """Make the barrier of the activations; another barrier of all threads follows."""
    if thread_x() == 0:
        barrier_init(i32(base + BARRIER_AT), 1)
        barrier_init_fence()


@device
def ask_rows(base, target, source, stride, rows, row_bytes):
    """By one warp: ask for rows of activations, ``row_bytes + 16`` apart in shared memory."""
    lane, barrier = lane_id(), i32(base + BARRIER_AT)
    if lane == 0:
        barrier_expect(barrier, i32(rows * row_bytes))
    sync_warp()
    for row in range(lane, rows, 32):
        bulk_load(i32(target + row * (row_bytes + 16)), source + row * stride, barrier, row_bytes)


def ask_chunk(tile: DecodeTile) -> Any:
    """Ask for a stage: (stage, row 0 of the chunk, bytes from row to row, to row 4, of a row).

    Every 8, 16 or 32 lanes copy a row from end to end.
    """
    pitch, lanes = tile.pitch, tile.chunk // 8
    shift, rows = lanes.bit_length() - 1, 32 // lanes

    @device
    def ask(place, source, row_bytes, half_bytes, num_bytes):
        row, piece = i32(lane_id() >> shift), i32((lane_id() & (lanes - 1)) * 16)
        if piece < num_bytes:
            target = i32(place + row * pitch + piece)
            start = source + i64(row) * row_bytes + piece
            for i in range(0, 8, rows):
                skip = i64(i & 3) * row_bytes + i64(i >> 2) * half_bytes
                copy_weights(i32(target + i * pitch), start + skip)

    return ask


def multiply_chunk(tile: DecodeTile) -> Any:
    """(sums, stage, activations, k64 steps) → sums + 8 rows of activations · 8 rows of weights.

    ``stage`` is the int32 address of (row lane % 8, bytes 16 · (lane / 8)) of the weights,
    ``activations`` that of the same place of the activations. The lower 8 rows of the tensor core's
    A are zeros.
    """
    most = tile.chunk // 64

    @device
    def multiply_64(total, stage, rows):
        zero = i32(0)
        a, b = ldmatrix_x4(rows), ldmatrix_x4(stage)
        c, d = ldmatrix_x4(i32(rows + 64)), ldmatrix_x4(i32(stage + 64))
        total = mma_bf16(total, (a[0], zero, a[1], zero), (b[0], b[1]))
        total = mma_bf16(total, (a[2], zero, a[3], zero), (b[2], b[3]))
        total = mma_bf16(total, (c[0], zero, c[1], zero), (d[0], d[1]))
        return mma_bf16(total, (c[2], zero, c[3], zero), (d[2], d[3]))

    @device
    def multiply(total, stage, rows, steps):
        if steps == most:  # unrolled, so that loads run ahead of the products
            for step in range(most):
                at = i32(step * 128)
                total = multiply_64(total, i32(stage + at), i32(rows + at))
        else:
            for step in range(steps):
                at = i32(step * 128)
                total = multiply_64(total, i32(stage + at), i32(rows + at))
        return total

    return multiply
