"""Threads among threads: indices, barriers, shuffles and reductions in a stated order."""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import device, f32, i32, i64
from atlas_kernels.ptx import instruction
from atlas_kernels.ptx_memory import (
    load_shared_b64,
    load_shared_f32,
    shared_buffer,
    store_shared_b64,
    store_shared_f32,
)
from atlas_kernels.tuples import each


def _register(name: str) -> Any:
    return instruction("r", "", f"mov.u32 $0, %{name};", ordered=False)


thread_x = _register("tid.x")
block_x, block_y, block_z = _register("ctaid.x"), _register("ctaid.y"), _register("ctaid.z")
num_threads_x = _register("ntid.x")
num_blocks_x, num_blocks_y = _register("nctaid.x"), _register("nctaid.y")
"""Indices within the thread block and the grid, and their extents; kernels use blocks of (x, 1, 1).
"""
lane_id = _register("laneid")
"""0 … 31 within the warp."""
lanes = instruction("r", "", "mov.u32 $0, WARP_SZ;", ordered=False)
"""32, unknown to the compiler: a loop with this step is not unrolled, which keeps code short where
an SM finds none of it in its instruction cache."""


def _collective(outs: str, ins: str, text: str) -> Any:
    return instruction(outs, ins, text, collective=True)


sync_threads = _collective("", "", "bar.sync 0;")
"""Barrier of the thread block; shared and global writes before it are visible after it."""
sync_warp = _collective("", "", "bar.warp.sync 0xffffffff;")
"""Barrier of the warp."""
sync_named = _collective("", "r r", "bar.sync $0, $1;")
arrive_named = _collective("", "r r", "bar.arrive $0, $1;")
"""Barrier 1 … 15 for a number of threads (a multiple of 32): wait at it, or only arrive."""

_ALL = "0xffffffff"
shuffle_xor_f32 = _collective("f", "f r", f"shfl.sync.bfly.b32 $0, $1, $2, 31, {_ALL};")
shuffle_xor_b32 = _collective("r", "r r", f"shfl.sync.bfly.b32 $0, $1, $2, 31, {_ALL};")
"""The value of lane (own lane xor mask): (value, mask). Every lane of the warp takes part."""
shuffle_f32 = _collective("f", "f r", f"shfl.sync.idx.b32 $0, $1, $2, 31, {_ALL};")
shuffle_b32 = _collective("r", "r r", f"shfl.sync.idx.b32 $0, $1, $2, 31, {_ALL};")
"""The value of a lane: (value, lane)."""
quad_values = tuple(
    _collective("f", "f", f"shfl.sync.idx.b32 $0, $1, {i}, 0x1C1F, {_ALL};") for i in range(4)
)
"""The value of the first, second, third and fourth lane of one's own four."""
shuffle_down_f32 = _collective("f", "f r", f"shfl.sync.down.b32 $0, $1, $2, 31, {_ALL};")
"""The value of lane (own lane + delta), or one's own at the end: (value, delta)."""
shuffle_xor_b64 = _collective(
    "l",
    "l r",
    "{ .reg .b32 low, high; mov.b64 {low, high}, $1;"
    f" shfl.sync.bfly.b32 low, low, $2, 31, {_ALL};"
    f" shfl.sync.bfly.b32 high, high, $2, 31, {_ALL};"
    " mov.b64 $0, {low, high}; }",
)
"""``shuffle_xor_b32`` for 64 bits."""
ballot = _collective(
    "r",
    "r",
    "{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.ballot.b32 $0, p, " + _ALL + "; }",
)
"""A bit for each lane whose argument is not 0."""

reduce_max_s32 = _collective("r", "r", f"redux.sync.max.s32 $0, $1, {_ALL};")
reduce_add_s32 = _collective("r", "r", f"redux.sync.add.s32 $0, $1, {_ALL};")
"""Greatest int32 of the warp, or their sum, in every lane: one instruction."""

_FLOATS = shared_buffer("atlas_warp_floats", 32 * 4)
_KEYS = shared_buffer("atlas_warp_keys", 32 * 8)


@device
def warp_sum(value):
    """Sum over the warp, in every lane: a butterfly of distances 16, 8, 4, 2, 1.

    Each lane adds the same pairs, if in another order of operands, so all lanes get the same bits.
    """
    value = value + shuffle_xor_f32(value, 16)
    value = value + shuffle_xor_f32(value, 8)
    value = value + shuffle_xor_f32(value, 4)
    value = value + shuffle_xor_f32(value, 2)
    return value + shuffle_xor_f32(value, 1)


@device
def _kept(low, high, is_high):
    return high if is_high else low


@device
def _added(kept, sent, distance):
    return kept + shuffle_xor_f32(sent, distance)


def warp_sums(count: int, distance: int = 16) -> Any:
    """A device function: ``count`` numbers, a power of two → in lane l the ``warp_sum`` of number
    l · count / 32.

    A lane sends the half of its numbers that it will not have, so the shuffles become fewer; each
    number's pairs, and so its bits, are those of ``warp_sum``.
    """
    if distance == 0:
        return device(lambda values: values[0])
    half = max(count // 2, 1)
    rest, add = warp_sums(half, distance // 2), each(half, _added)
    if count == 1:
        return device(lambda values: rest(add(values, values, distance)))
    keep = each(half, _kept)

    @device
    def sums(values):
        low, high, is_high = values[:half], values[half:], (lane_id() & distance) != 0
        return rest(add(keep(low, high, is_high), keep(high, low, is_high), distance))

    return sums


@device
def warp_max(value):
    """Greatest float32 of the warp, in every lane; NaNs are passed over."""
    for step in range(5):
        other = shuffle_xor_f32(value, i32(16 >> step))
        value = other if other > value else value
    return value


@device
def warp_max_i64(value):
    """Greatest int64 of the warp, in every lane."""
    for step in range(5):
        value = max(value, shuffle_xor_b64(value, i32(16 >> step)))
    return value


@device
def block_sum(value):
    """Sum over the thread block, in every thread: each warp as ``warp_sum``, then the warps' sums.

    The second round is ``warp_sum`` with warp w's sum in lane w and zeros after the last, so the
    order depends on the number of threads alone. The thread block has whole warps.
    """
    lane, warp, num_warps = lane_id(), thread_x() >> 5, num_threads_x() >> 5
    value = warp_sum(value)
    if lane == 0:
        store_shared_f32(_FLOATS() + warp * 4, value)
    sync_threads()
    total = f32(0)
    if lane < num_warps:
        total = load_shared_f32(_FLOATS() + lane * 4)
    total = warp_sum(total)
    sync_threads()  # the buffer may be used again
    return total


@device
def block_max_i64(value, least):
    """Greatest int64 of the thread block, in every thread; ``least`` is below or equal to all."""
    lane, warp, num_warps = lane_id(), thread_x() >> 5, num_threads_x() >> 5
    value = warp_max_i64(value)
    if lane == 0:
        store_shared_b64(_KEYS() + warp * 8, value)
    sync_threads()
    greatest = i64(least)
    if lane < num_warps:
        greatest = load_shared_b64(_KEYS() + lane * 8)
    greatest = warp_max_i64(greatest)
    sync_threads()
    return greatest
