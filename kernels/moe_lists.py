"""What the decode kernels of a mixture of experts read: experts, each once, and who chose them.

Loops here take their steps from ``lanes``, so that none is unrolled.
"""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import device, i32, i64
from atlas_kernels.moe_plan import MAX_PAIRS, DecodeTile
from atlas_kernels.ptx_math import popcount, quotient
from atlas_kernels.ptx_memory import (
    load_b32,
    load_shared_b32,
    load_shared_b32x4,
    store_shared_b32,
)
from atlas_kernels.ptx_warp import ballot, lane_id, lanes, shuffle_xor_b32, sync_threads, thread_x

IDS_AT = 0
"""Offset, in the shared memory of ``LIST_BYTES`` at ``base``, of the choices."""
_ENTRIES_AT = IDS_AT + 4 * MAX_PAIRS
_FIRSTS_AT = _ENTRIES_AT + 4 * (MAX_PAIRS + 4)
LIST_BYTES = _FIRSTS_AT + MAX_PAIRS // 8


@device
def _is_first(base, expert, pair, slots):
    """Whether no earlier row chose a pair's expert; of one row all choices differ."""
    earlier = i32(quotient(pair, slots) * slots)
    first, q, at, step = i32(1), i32(0), i32(base + IDS_AT), i32(lanes() >> 3)
    while q < earlier:
        others, left = load_shared_b32x4(at), i32(earlier - q)
        same = others[0] == expert or (others[1] == expert and left > 1)
        same = same or (others[2] == expert and left > 2)
        if same or (others[3] == expert and left > 3):
            first = i32(0)
        q, at = i32(q + step), i32(at + 16)
    return first


@device
def _list_many(base, ids, pairs, slots, shared_id):
    lane, p = lane_id(), thread_x()
    expert = i32(-1)
    if p < pairs:
        expert = load_b32(ids + i64(p) * 4)
        store_shared_b32(base + IDS_AT + p * 4, expert)
    sync_threads()
    is_first = i32(0)
    if expert >= 0 and expert != shared_id:
        is_first = _is_first(base, expert, p, slots)
    firsts = ballot(is_first)
    if lane == 0:
        store_shared_b32(base + _FIRSTS_AT + (p >> 5) * 4, firsts)
    shared = i32(1 if shared_id >= 0 else 0)
    if p == 0 and shared != 0:
        store_shared_b32(base + _ENTRIES_AT, shared_id)
    sync_threads()
    place, count, word, step = shared, shared, i32(0), i32(lanes() >> 5)
    while word * 32 < pairs:
        bits = popcount(load_shared_b32(base + _FIRSTS_AT + word * 4))
        place = i32(place + bits) if word < p >> 5 else place
        count, word = i32(count + bits), i32(word + step)
    if is_first != 0:
        place = i32(place + popcount(i32(firsts & i32((i64(1) << lane) - 1))))
        store_shared_b32(base + _ENTRIES_AT + place * 4, expert)
    sync_threads()
    return count


@device
def _key_of_many(base, entry, slots, shared_id):
    return load_shared_b32(base + _ENTRIES_AT + entry * 4)


@device
def _expert_of_many(ids, expert, slots, shared_id):
    return expert


@device
def _pair_of_many(base, expert, m, slots, lane):
    """The four lanes of a row search its slots."""
    row, s, found = i32(lane >> 2), i32(lane & 3), i32(-1)
    if row < m:
        first, step = i32(row * slots), i32(lanes() >> 3)
        while s < slots:
            if load_shared_b32(base + IDS_AT + (first + s) * 4) == expert:
                found = i32(first + s)
            s = i32(s + step)
    found = max(found, shuffle_xor_b32(found, i32(1)))
    return max(found, shuffle_xor_b32(found, i32(2)))


@device
def _list_one(base, ids, pairs, slots, shared_id):
    return slots


@device
def _key_of_one(base, entry, slots, shared_id):
    if shared_id < 0:
        return entry
    return i32(entry - 1 if entry > 0 else slots - 1)


@device
def _expert_of_one(ids, slot, slots, shared_id):
    if shared_id >= 0 and slot == slots - 1:
        return shared_id
    return max(load_b32(ids + i64(slot) * 4), i32(0))


@device
def _pair_of_one(base, slot, m, slots, lane):
    return slot if lane < 4 else i32(-1)


def lists(tile: DecodeTile) -> tuple[Any, Any, Any, Any]:
    """Four device functions.

    - (base, ids, pairs, slots, shared expert's id or −1) → number of entries; of several rows it
      lists them in shared memory, by all threads, and ends in a barrier;
    - (base, entry, slots, shared id) → its key: an expert's id, or of one row the slot;
    - (ids, key, slots, shared id) → the expert to read;
    - (base, key, m, slots, lane) → the pair with which row lane / 4 chose that entry, or −1.

    The shared expert comes first where there is one, then the others by their first pair. Of one
    row each choice is an entry and nothing is listed; where its id is −1, expert 0 is read, for
    nothing.
    """
    if tile.rows == 1:
        return _list_one, _key_of_one, _expert_of_one, _pair_of_one
    return _list_many, _key_of_many, _expert_of_many, _pair_of_many
