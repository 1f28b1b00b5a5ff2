"""What the decode kernels of a mixture of experts share: the list of experts, a warp's ring."""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import device, i32, i64
from atlas_kernels.moe_plan import MAX_PAIRS, DecodeTile
from atlas_kernels.ptx import instruction
from atlas_kernels.ptx_async import EVICT_FIRST, barrier_expect, copy16, copy_commit
from atlas_kernels.ptx_math import popcount, quotient, remainder
from atlas_kernels.ptx_memory import load_b32, load_shared_b32, store_shared_b32
from atlas_kernels.ptx_mma import ldmatrix_x4, mma_bf16
from atlas_kernels.ptx_warp import ballot, lane_id, sync_warp, thread_x

BARRIERS_AT = 0  # 8 bytes a stage of every warp
MAX_STAGES = 8  # of a warp
COUNT_AT = 1024 - 16
IDS_AT = 1024
ENTRIES_AT = IDS_AT + 4 * MAX_PAIRS

load_weights = instruction(
    "",
    "r l r r",
    f"{{ .reg .b64 h; mov.b64 h, {EVICT_FIRST}; cp.async.bulk.shared::cluster.global"
    ".mbarrier::complete_tx::bytes.L2::cache_hint [$0], [$1], $3, [$2], h; }",
)
"""``bulk_load`` of what is read once: (shared, global, barrier, bytes)."""


@device
def list_experts(base, ids, pairs, slots, shared_id):
    """By one warp: the choices, and each expert among them once, into shared memory.

    The shared expert comes first where there is one (``shared_id`` ≥ 0), then the others by their
    first pair. Entries are ids, their number lies at ``COUNT_AT``.
    """
    lane = lane_id()
    for p in range(lane, pairs, 32):
        store_shared_b32(base + IDS_AT + p * 4, load_b32(ids + i64(p) * 4))
    sync_warp()
    count = i32(0)
    if shared_id >= 0:
        count = i32(1)
        if lane == 0:
            store_shared_b32(base + ENTRIES_AT, shared_id)
    below = i32((i64(1) << lane) - 1)
    rounds = quotient(i32(pairs + 31), 32)
    for i in range(rounds):
        p = i32(i * 32 + lane)
        last = i32(min(p, i32(pairs - 1)))
        expert = load_shared_b32(base + IDS_AT + last * 4)
        is_first = i32(1 if p < pairs and expert >= 0 and expert != shared_id else 0)
        # A row's choices differ, so only earlier rows can have made this one.
        earlier = i32(quotient(last, slots) * slots)
        for q in range(earlier):
            if load_shared_b32(base + IDS_AT + q * 4) == expert:
                is_first = i32(0)
        firsts = ballot(is_first)
        if is_first != 0:
            place = count + popcount(i32(firsts & below))
            store_shared_b32(base + ENTRIES_AT + place * 4, expert)
        count = i32(count + popcount(firsts))
    if lane == 0:
        store_shared_b32(base + COUNT_AT, count)
    sync_warp()


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
def copy_rows(target, source, stride, rows, row_bytes, num_threads):
    """Start copying rows to shared memory, ``row_bytes + 16`` apart, and close the group."""
    pieces = quotient(i32(row_bytes), 16)
    for i in range(thread_x(), rows * pieces, num_threads):
        row, piece = quotient(i32(i), pieces), remainder(i32(i), pieces)
        copy16(target + row * (row_bytes + 16) + piece * 16, source + row * stride + piece * 16)
    copy_commit()


def ask_chunk(tile: DecodeTile) -> Any:
    """Ask for a stage: (stage, its barrier, this lane's row from its chunk on, bytes of a row).

    Lanes 0 … 7 have a row each.
    """
    pitch = tile.pitch

    @device
    def ask(at, barrier, source, num_bytes):
        lane = lane_id()
        if lane == 0:
            barrier_expect(barrier, i32(8 * num_bytes))
        sync_warp()
        if lane < 8:
            load_weights(i32(at + lane * pitch), source, barrier, num_bytes)

    return ask


def multiply_chunk(tile: DecodeTile) -> Any:
    """(sums, stage, activations, k64 steps) → sums + 8 rows of activations · 8 rows of weights.

    ``stage`` is the int32 address of (row lane % 8, bytes 16 · (lane / 8)) of the weights,
    ``activations`` that of the same place of the activations. The lower 8 rows of the tensor core's
    A are zeros.
    """

    @device
    def multiply(total, stage, rows, steps):
        zero = i32(0)
        for step in range(steps):
            at = i32(step * 128)
            a, b = ldmatrix_x4(rows + at), ldmatrix_x4(stage + at)
            c, d = ldmatrix_x4(rows + at + 64), ldmatrix_x4(stage + at + 64)
            total = mma_bf16(total, (a[0], zero, a[1], zero), (b[0], b[1]))
            total = mma_bf16(total, (a[2], zero, a[3], zero), (b[2], b[3]))
            total = mma_bf16(total, (c[0], zero, c[1], zero), (d[0], d[1]))
            total = mma_bf16(total, (c[2], zero, c[3], zero), (d[2], d[3]))
        return total

    return multiply
