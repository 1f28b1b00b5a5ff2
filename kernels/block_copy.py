"""KV blocks copied within their pools, many at once: all layers, K and V, in one launch."""

from __future__ import annotations

from atlas_kernels._cuda import i32, i64
from atlas_kernels.ptx_async import launch_dependents, wait_prerequisites
from atlas_kernels.ptx_memory import load_b32, load_b32x4, store_b32x4
from atlas_kernels.ptx_warp import block_x, block_y, thread_x
from atlas_kernels.registry import kernel

THREADS = 256
_PIECE = 16


@kernel("copy_blocks", args="ptr ptr i64 i32", threads=THREADS)
def copy_blocks(pools, pairs, pool_bytes, block_bytes):
    """pool[target] = pool[source] for every pair; grid (pairs, pools).

    ``pools`` is the first pool's address, the others follow ``pool_bytes`` apart. ``pairs`` int32
    [n, 2]: source and target; no block is the target of two pairs, or of one and another's source.
    ``block_bytes`` is a multiple of 16.
    """
    launch_dependents()
    wait_prerequisites()
    pair, pool = pairs + block_x() * 8, pools + block_y() * pool_bytes
    source = pool + i64(load_b32(pair)) * block_bytes
    target = pool + i64(load_b32(pair + 4)) * block_bytes
    at = i32(thread_x() * _PIECE)
    while at < block_bytes:
        store_b32x4(target + at, load_b32x4(source + at))
        at = i32(at + THREADS * _PIECE)
