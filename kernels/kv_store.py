"""Keys and values into the paged pools, and the layout of the pools.

K and V of a layer are two pools ``[blocks, HK, 16, K]``, contiguous, in bf16 (or float32 beside
float32 activations): block, KV head, token of the block, dimension. One head of one block is then
one contiguous piece (4 KB at K = 128), which serves both readers:

- prefill attention: block and head fold into one linear index, so a TMA box ``[16, K]`` brings one
  piece; its rows are the rows of wgmma's K-major B for Q · Kᵀ, and V is read MN-major with the
  transpose bit. Eight pieces make a tile of 128 keys;
- decode attention: a warp reads a piece with 16-byte loads, one key a row, for ``mma.sync`` with
  ``ldmatrix`` (transposed for V). The query heads of a group share one sweep of it.

A token's slot is block · 16 + offset. A negative slot marks a padding row: nothing is written.

Source: Kwon et al., "PagedAttention" (2023), arXiv 2309.06180.
"""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import device, i32, i64
from atlas_kernels.ptx_async import launch_dependents, wait_prerequisites
from atlas_kernels.ptx_memory import load_b32
from atlas_kernels.ptx_warp import block_x, block_y, lane_id, thread_x
from atlas_kernels.registry import kernel
from atlas_kernels.tuples import each
from atlas_kernels.vector import Access, row_variants

BLOCK_LEN = 16
"""Tokens in a block of the pools."""
THREADS = 128  # four heads a thread block
WIDTH = 2  # a head of 64 elements fills the warp


@device
def pool_offset(slot, head, kv_heads, dim):
    """Elements before a token's head in a pool."""
    block, offset = i64(slot >> 4), slot & (BLOCK_LEN - 1)
    return ((block * kv_heads + head) * BLOCK_LEN + offset) * dim


def load_heads(rows: Access, count: int) -> Any:
    """A device function: (addresses, bytes from there) → a vector of each of ``count`` heads."""
    load = rows.load
    loads = each(count, device(lambda source, _, at: load(source + at)))
    return device(lambda sources, at: loads(sources, sources, at))


def store_heads(rows: Access, count: int) -> Any:
    """A device function: (addresses, vectors, bytes from there)."""
    store = rows.store

    @device
    def store_one(target, values, at):
        store(target + at, values)
        return 0

    return each(count, store_one)


def copy_heads(rows: Access, count: int) -> Any:
    """A device function: a warp copies ``count`` heads, two vectors a lane of each at a time."""
    load, store = load_heads(rows, count), store_heads(rows, count)
    item, width = rows.item_bytes, rows.width

    @device
    def copy(sources, targets, dim):
        i = i32(lane_id() * width)
        while i < dim:
            other = i32(i + 32 * width)
            other = i if other >= dim else other  # or the same once more
            first, second = load(sources, i * item), load(sources, other * item)
            store(targets, first, i * item)
            store(targets, second, other * item)
            i = i32(i + 64 * width)

    return copy


@kernel(
    "kv_store",
    args="ptr ptr ptr ptr ptr i32 i32 i64 i64",
    threads=THREADS,
    variants=row_variants(WIDTH),
)
def make_kv_store(rows: Access) -> Any:
    """k, v [T, HK, K], rows ``k_stride`` and ``v_stride`` bytes apart, into the pools.

    Grid (rows, ⌈HK / 4⌉).
    """
    item = rows.item_bytes
    copy = copy_heads(rows, 2)

    def kv_store(k, v, slots, k_pool, v_pool, kv_heads, dim, k_stride, v_stride):
        launch_dependents()
        wait_prerequisites()
        slot = load_b32(slots + block_x() * 4)
        head = block_y() * (THREADS // 32) + (thread_x() >> 5)
        if slot >= 0 and head < kv_heads:
            at = pool_offset(slot, head, kv_heads, dim) * item
            offset = i64(head) * dim * item
            sources = k + block_x() * k_stride + offset, v + block_x() * v_stride + offset
            copy(sources, (k_pool + at, v_pool + at), dim)

    return kv_store
