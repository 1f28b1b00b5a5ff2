"""A slot of recurrent state copied to another, or zeroed: all layers in one launch."""

from __future__ import annotations

from atlas_kernels._cuda import i32, i64
from atlas_kernels.ptx_async import launch_dependents, wait_prerequisites
from atlas_kernels.ptx_memory import load_b32x4, load_b64, store_b32x4
from atlas_kernels.ptx_warp import block_x, block_y, num_blocks_y, thread_x
from atlas_kernels.registry import kernel

THREADS = 256
_PIECE = 16


@kernel("copy_slot", args="ptr i32 i32", threads=THREADS)
def copy_slot(pools, source, target):
    """pool[target] = pool[source] of every pool, or 0 where ``source`` is −1; grid (pools, any).

    ``pools`` int64 [P, 2]: a pool's address, and the bytes of a slot, multiples of 16.
    """
    launch_dependents()
    wait_prerequisites()
    address, size = load_b64(pools + block_x() * 16), load_b64(pools + block_x() * 16 + 8)
    at = i64(block_y() * THREADS + thread_x()) * _PIECE
    step = i64(num_blocks_y()) * (THREADS * _PIECE)
    zero = i32(0)
    while at < size:
        words = (zero, zero, zero, zero)
        if source >= 0:
            words = load_b32x4(address + source * size + at)
        store_b32x4(address + target * size + at, words)
        at = i64(at + step)
