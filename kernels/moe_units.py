"""Units of ``moe_gate_up``: how they are dealt out to thread blocks, and whose they are.

A list of experts has the shared one first, where there is one, then the chosen ones; an expert has
a unit for every 8 columns, and units are counted through the list. The shared expert's are known
before the choice: they are dealt out one by one, ``each`` to a thread block, the first ``extra``
one more. Then a thread block has a range of the others, so long that all have as many in all, or
one more.

Of a single row the list needs no making: an entry is a slot. So its units are dealt out before the
wait, and after it one load gives the first address.
"""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import device, i32, i64
from atlas_kernels.moe_lists import entries_at, pair_of
from atlas_kernels.moe_plan import DecodeTile
from atlas_kernels.ptx_math import quotient
from atlas_kernels.ptx_memory import load_b32, load_shared_b32
from atlas_kernels.ptx_warp import block_x, num_blocks_x


@device
def _others_before(block, units, each, extra):
    """Units that thread blocks before one have of other experts than the shared one."""
    known = i32(each * block + min(block, extra))
    return i32(max(quotient(i32(units * block), num_blocks_x()) - known, i32(0)))


@device
def deal(units, known, each, extra, far):
    """How many units this thread block takes, and what is added to the numbers of others.

    Its first ``far`` are the shared expert's, as are the first ``known`` of all.
    """
    begin = _others_before(block_x(), units, each, extra)
    end = _others_before(i32(block_x() + 1), units, each, extra)
    return i32(far + end - begin), i32(known + begin - far)


@device
def place_of(index, far, first, inner):
    """Entry and first column of this thread block's unit ``index``."""
    unit = i32(block_x() + index * num_blocks_x()) if index < far else i32(first + index)
    entry = quotient(unit, inner >> 3)
    return entry, i32(unit * 8 - entry * inner)


@device
def _slot_of(entry, slots, w_shared):
    """Of a single row: the slot that is an entry. The shared expert's is the last."""
    if w_shared == 0:
        return entry
    return i32(entry - 1 if entry > 0 else slots - 1)


def whose(tile: DecodeTile) -> tuple[Any, Any]:
    """Two device functions.

    - (base, ids, w, w_shared, entry, column, slots, dim, inner) → where a unit begins;
    - (base, ids, row, entry, m, slots, w_shared) → the pair of a row and an entry, or −1.
    """
    entries, is_single = entries_at(tile), tile.rows == 1

    @device
    def expert_of(base, ids, entry, slots, w_shared):
        if is_single:
            return load_b32(ids + i64(_slot_of(entry, slots, w_shared)) * 4)
        return load_shared_b32(base + entries + entry * 4)

    @device
    def start_of(base, ids, w, w_shared, entry, column, slots, dim, inner):
        start = w_shared
        if entry > 0 or w_shared == 0:
            # An id of −1 reads expert 0, and the result is dropped.
            expert = i32(max(expert_of(base, ids, entry, slots, w_shared), i32(0)))
            start = w + i64(expert) * (i64(inner) * dim * 4)
        return start + i64(column) * dim * 2

    @device
    def find_pair(base, ids, row, entry, m, slots, w_shared):
        expert = expert_of(base, ids, entry, slots, w_shared)
        if is_single:
            return _slot_of(entry, slots, w_shared) if row == 0 and expert >= 0 else i32(-1)
        return pair_of(base, row, expert, m, slots)

    return start_of, find_pair
