"""What the decode kernels of a mixture of experts share: the list of experts, the activations."""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import device, i32, i64
from atlas_kernels.moe_plan import NOT_YET, DecodeTile
from atlas_kernels.ptx_async import (
    barrier_expect,
    barrier_init,
    barrier_init_fence,
    bulk_load,
)
from atlas_kernels.ptx_math import popcount, quotient
from atlas_kernels.ptx_memory import (
    load_b32,
    load_device_b32,
    load_shared_b32,
    load_shared_b32x4,
    store_shared_b32,
)
from atlas_kernels.ptx_warp import (
    ballot,
    lane_id,
    lanes,
    sync_threads,
    sync_warp,
    thread_x,
)

BARRIER_AT = 0
COUNT_AT = 8
FIRSTS_AT = 16  # a word of bits for every 32 pairs, 8 in all
IDS_AT = 64


def weights_at(tile: DecodeTile) -> int:
    """Offset of the weights of the choices, after their ids."""
    return IDS_AT + 4 * tile.max_pairs


def entries_at(tile: DecodeTile) -> int:
    """Offset of the list of experts to read."""
    return IDS_AT + 8 * tile.max_pairs


def list_experts(tile: DecodeTile) -> Any:
    """(base, expert, m, slots, shared expert's id or −1): list what is to be read; how much.

    Each expert among the choices once, into shared memory. The choices lie at ``IDS_AT``, and of a
    tile of one row are the first warp's ``expert``; each is an entry then: a row's choices differ.
    The shared expert comes first where there is one, then the others by their first pair. Entries
    are ids.
    """
    entries = entries_at(tile)

    @device
    def list_row(base, expert, m, slots, shared_id):
        p, shared = thread_x(), i32(1 if shared_id >= 0 else 0)
        if p == 0 and shared != 0:
            store_shared_b32(base + entries, shared_id)
        if p < slots - shared:  # an id of −1 reads expert 0, and the result is dropped
            store_shared_b32(base + entries + (p + shared) * 4, max(expert, i32(0)))
        sync_threads()
        return i32(slots)

    @device
    def list_rows(base, expert, m, slots, shared_id):
        p, lane = thread_x(), lane_id()
        pairs, shared = i32(m * slots), i32(1 if shared_id >= 0 else 0)
        if p == 0 and shared != 0:
            store_shared_b32(base + entries, shared_id)
        sync_threads()
        expert = load_shared_b32(base + IDS_AT + min(p, i32(pairs - 1)) * 4)
        expert = expert if p < pairs else i32(-1)
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

    return list_row if tile.rows == 1 else list_rows


@device
def row_number(active, m):
    """By a warp: what ``row_choice`` takes for its row; −1 where it has none."""
    row, number = i32(thread_x() >> 5), i32(-1)
    if row < m:
        number = i32(0)
        if active != 0:
            number = load_b32(active + row * 4)
    return number


@device
def given_choices(base, ids, m, slots):
    """Bring the choices to ``IDS_AT``; each thread's one."""
    p, expert = thread_x(), i32(-1)
    if p < m * slots:
        expert = load_b32(ids + i64(p) * 4)
        store_shared_b32(base + IDS_AT + p * 4, expert)
    return expert


@device
def awaited_choice(ids, pair, expert, is_awaited):
    """A choice that the kernel before this one may be about to write: first found ``NOT_YET``."""
    while expert == NOT_YET and is_awaited != 0:
        expert = load_device_b32(ids + i64(pair) * 4)
    return expert


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
    row, step = lane, lanes()  # not unrolled
    while row < rows:
        bulk_load(i32(target + row * (row_bytes + 16)), source + row * stride, barrier, row_bytes)
        row = i32(row + step)
