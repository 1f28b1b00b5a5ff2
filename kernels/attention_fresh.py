"""What decode attention does with its queries, and with keys and values that are not stored yet.

``attention_decode`` copies queries as they are and has no keys apart, since a kernel before it
stored them; ``attention_step`` turns queries and keys on the way in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from atlas_kernels._cuda import device, i32, i64
from atlas_kernels.attention_decode_layout import queries_at
from atlas_kernels.ptx_async import copy16_if, copy_commit, copy_wait
from atlas_kernels.ptx_math import quotient, quotient_by
from atlas_kernels.ptx_warp import num_threads_x, sync_threads, thread_x


@dataclass(frozen=True, slots=True)
class FreshRows:
    """Device functions. ``place`` is what tells of a thread block's rows: (first row of the
    sequence, first position that is not in the pools, first query row, count of query rows, heads
    of a group, KV head, count of keys that are not in the pools, ``reciprocal_for`` a group).

    Attributes
    ----------
    are_apart : bool
        Whether all that the pools are asked for is older than the step.
    first : (latest, first_row, positions) → the first position that is not in the pools
    ask : (base, q, q_stride, fresh, place) → a tuple
        Before the wait: ask for constants.
    bring : (base, q, q_stride, fresh, place, asked, is_real)
        Queries and keys to shared memory, as attention wants them, for all threads. Unless
        ``is_real``, q is not there yet: go through the code only.
    store : (base, fresh, kv_heads, place, split, pools, wanted)
        A warp writes the new keys and values of the thread block's own rows, in a split, into the
        pools; unless ``wanted``, it goes through the code only.
    patch : (base, at, block, place, which)
        A warp puts a block's new ones into the copy ``at`` of its keys (0) or values (1).
    """

    are_apart: bool
    first: Any
    ask: Any
    bring: Any
    store: Any
    patch: Any


@device
def token_of(place, index):
    """Which of its sequence's rows a query row belongs to."""
    return quotient_by(index, place[7])


def queries_copy(dim: int) -> Any:
    """A device function of (base, q, q_stride, place, is_real): start copying the query rows, if
    ``is_real``."""
    chunks, q_at = dim // 8, queries_at(dim)

    @device
    def copy(base, q, q_stride, place, is_real):
        first_row, begin, count, group, head = place[0], place[2], place[3], place[4], place[5]
        chunk, end = thread_x(), i32(count * chunks)
        wanted = i32(1) if is_real else i32(0)
        while chunk < end:
            row = quotient(chunk, chunks)
            index = i32(begin + row)
            token = token_of(place, index)
            source = q + i64(first_row + token) * q_stride
            source += i64(head * group + index - token * group) * (2 * dim)
            source += (chunk - row * chunks) * 16
            copy16_if(base + q_at + (chunk + row) * 16, source, wanted)
            chunk = i32(chunk + num_threads_x())

    return copy


def stored_rows(dim: int, *, are_old: bool = False) -> FreshRows:
    """No key is apart; ``are_old``: nor has any been stored by this step."""
    copy, copied = queries_copy(dim), copy_wait(0)

    @device
    def bring(base, q, q_stride, fresh, place, asked, is_real):
        copy(base, q, q_stride, place, is_real)
        copy_commit()
        if is_real:
            copied()
        sync_threads()

    return FreshRows(
        are_old,
        device(lambda latest, first_row, positions: i32(latest + 1)),
        device(lambda base, q, q_stride, fresh, place: ()),
        bring,
        device(lambda base, fresh, kv_heads, place, split, pools, wanted: None),
        device(lambda base, at, block, place, which: None),
    )
