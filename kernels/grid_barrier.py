"""A barrier of all thread blocks of a cooperative kernel, at counters in device memory.

A counter is never reset. Its lower 16 bits count thread blocks; what the first one adds makes them
overflow when all have arrived, so the 48 bits above count launches. A launch waits for the next
round (``grid_goal``), which is the same at all counters of a kernel.

What a thread block wrote before it arrived is visible to who has waited. TMA, which is another
proxy, sees it if the writers and the one that asks both pass ``global_fence``.
"""

from __future__ import annotations

from atlas_kernels._cuda import device, i32, i64
from atlas_kernels.ptx import instruction
from atlas_kernels.ptx_memory import load_b64
from atlas_kernels.ptx_warp import block_x, num_blocks_x

COUNTER_BYTES = 128
"""From one counter to the next: a cache line, lest arrivals at one slow down waits at another."""
_ROUND = 1 << 16

_arrive = instruction("", "l l", "fence.acq_rel.gpu; red.relaxed.gpu.global.add.u64 [$0], $1;")
grid_wait = instruction(
    "",
    "l l",
    "{ .reg .pred p; .reg .b64 v; WAIT: ld.acquire.gpu.global.b64 v, [$0]; setp.ge.u64 p, v, $1;"
    " @p bra DONE; bra WAIT; DONE: }",
)
"""(counter, goal): until all thread blocks have arrived; by one thread, or by a warp that goes on
together."""
global_fence = instruction("", "", "fence.proxy.async.global;")
"""Between writes to global memory and TMA that reads them, on either side of a barrier."""


@device
def grid_goal(counter):
    """What any counter of the kernel will show when all have arrived, at least.

    Read by one thread of each thread block before it arrives anywhere.
    """
    return i64(((load_b64(counter) >> 16) + i64(1)) << 16)


@device
def grid_arrive(counter):
    """By one thread of each thread block, after a barrier of those that wrote."""
    own = i32(1)
    if block_x() == 0:
        own = i32(_ROUND - (num_blocks_x() - 1))
    _arrive(counter, i64(own))
