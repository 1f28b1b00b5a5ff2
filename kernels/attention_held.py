"""A block of keys or values that a warp holds in registers until its shared memory is free.

A lane holds the 16-byte pieces lane, lane + 32, … of the block's 16 rows, as ``copy_block`` of
decode attention would copy them.
"""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import device, i32, i64
from atlas_kernels.attention_decode_layout import key_pitch
from atlas_kernels.attention_plan import SPLIT
from atlas_kernels.kv_store import BLOCK_LEN
from atlas_kernels.ptx_math import quotient
from atlas_kernels.ptx_memory import load_l2_b32x4_or_zero, store_shared_b32x4
from atlas_kernels.ptx_warp import lane_id, shuffle_b32

NOT_HELD = (
    device(lambda pools, entry, block, high, head, kv_heads, known: (i32(0), i32(0))),
    device(lambda target, block: None),
)
"""``held_blocks`` of nothing."""


def held_blocks(dim: int) -> tuple[Any, Any]:
    """Device functions for heads of 64 or 128 dimensions.

    - (pools, entry, block, high, head, kv_heads, known) → a block's keys and values, zeros from the
      position ``known`` on; ``entry`` is the lane's of the split's blocks, of which ``high`` is the
      last: what lies behind it is anything;
    - (target, keys or values): to shared memory.
    """
    chunks, pitch = dim // 8, key_pitch(dim)
    rows = 32 // chunks  # of a piece of all lanes
    pieces = BLOCK_LEN // rows

    @device
    def load(source, seen, i):
        row = i32(quotient(lane_id(), chunks) + i * rows)
        return load_l2_b32x4_or_zero(source + (lane_id() + 32 * i) * 16, i32(row < seen))

    @device
    def store(target, words, i):
        at = i32(target + (quotient(lane_id(), chunks) + lane_id()) * 16)
        store_shared_b32x4(i32(at + i * rows * pitch), words)

    @device
    def load_four(source, seen, i):
        first, second = load(source, seen, i), load(source, seen, i + 1)
        return first, second, load(source, seen, i + 2), load(source, seen, i + 3)

    @device
    def store_four(target, words, i):
        store(target, words[0], i)
        store(target, words[1], i + 1)
        store(target, words[2], i + 2)
        store(target, words[3], i + 3)

    if pieces == 4:
        load_block = device(lambda source, seen: load_four(source, seen, 0))
        store_block = device(lambda target, block: store_four(target, block, 0))
    else:

        @device
        def load_block(source, seen):
            return load_four(source, seen, 0), load_four(source, seen, 4)

        @device
        def store_block(target, block):
            store_four(target, block[0], 0)
            store_four(target, block[1], 4)

    @device
    def hold(pools, entry, block, high, head, kv_heads, known):
        number = shuffle_b32(entry, i32(min(block, high)) & (SPLIT // BLOCK_LEN - 1))
        offset = (i64(number) * kv_heads + head) * (BLOCK_LEN * dim * 2)
        seen = i32(known - block * BLOCK_LEN)
        return load_block(pools[0] + offset, seen), load_block(pools[1] + offset, seen)

    return hold, store_block
