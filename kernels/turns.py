"""Turns: a kernel of a graph goes on when all thread blocks of the one before say so.

``wait_prerequisites`` waits until the kernel before has ended and its memory has been flushed,
which takes 0.7 to 1.4 µs on an H200. Here every thread block counts at the end of its work, and the
next kernel, which is on the GPU already, looks at the counter: about 0.4 µs.

A kernel takes two more arguments, last: ``before``, the counter of the launch before it, and
``own``, its own; 0 where there is none, and then it waits as kernels do. A counter is never reset.
Its lower 16 bits count thread blocks; what the first one adds makes them overflow when all have
counted, so the 48 bits above count launches. All counters of a graph stand at the same launch when
it begins, so a kernel knows from its own what that of the one before will show.

The thread blocks that are waited for have all begun: a kernel starts early only when each of the
one before has called ``launch_dependents``. And as each waits for its own turn, whoever has seen a
kernel's turn end may read what any kernel before it wrote.
"""

from __future__ import annotations

from atlas_kernels._cuda import device, i32, i64
from atlas_kernels.ptx import instruction
from atlas_kernels.ptx_async import wait_prerequisites
from atlas_kernels.ptx_memory import load_b64
from atlas_kernels.ptx_warp import (
    block_x,
    block_y,
    num_blocks_x,
    num_blocks_y,
    sync_threads,
    thread_x,
)
from atlas_kernels.turn_counters import FULL_ROUND

_count = instruction("", "l l", "fence.acq_rel.gpu; red.relaxed.gpu.global.add.u64 [$0], $1;")
_wait = instruction(
    "",
    "l l",
    "{ .reg .pred p; .reg .b64 v; WAIT: ld.acquire.gpu.global.b64 v, [$0]; setp.ge.u64 p, v, $1;"
    " @p bra DONE; bra WAIT; DONE: }",
)
proxy_fence = instruction("", "", "fence.proxy.async.global;")
"""Between writes to global memory and TMA that reads them, on both sides of a turn."""


@device
def wait_for_turn(before, own):
    """By one thread: until all thread blocks of the launch before have ended their turn."""
    _wait(before, i64(((load_b64(own) >> 16) + i64(1)) << 16))
    proxy_fence()


@device
def await_turn(before, own):
    """By all threads of the block, in place of ``wait_prerequisites``."""
    if before == 0:
        wait_prerequisites()
    else:
        if thread_x() == 0:
            wait_for_turn(before, own)
        sync_threads()


@device
def end_turn(own):
    """By all threads of the block, when they have written all that they will."""
    if own != 0:
        proxy_fence()
        sync_threads()
        if thread_x() == 0:
            added = i32(1)
            if block_x() + block_y() == 0:
                added = i32(FULL_ROUND + 1 - num_blocks_x() * num_blocks_y())
            _count(own, i64(added))
