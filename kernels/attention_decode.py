"""Paged attention of the step: the last rows of a sequence share one sweep over its keys.

A thread block takes a sequence, a KV head and up to 16 · tiles query rows: the head's group of
query heads, row after row of the sequence. It walks splits of ``SPLIT`` keys at absolute multiples
of that position. In a split, warp w takes the blocks w, w + 4, … of 16 keys: K and V of a block
come by ``cp.async`` into buffers of the warp's own, so that warps never wait for each other.

Order, which depends on a row's position alone: within a warp the blocks ascending, with the running
maximum of the online softmax; the four warps of a split ascending; the splits ascending. Keys that
a row does not see leave its bits as they are, whoever shares the sweep. With more than one worker
the splits' results go through memory, and the thread block that finishes last combines them. P is
rounded to bf16 before P · V; the sum of P is not.

Source: Dao et al., "Flash-Decoding" (2023); Kwon et al., "PagedAttention" (2023), arXiv 2309.06180.
"""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import i64
from atlas_kernels.attention_decode_body import attention_body
from atlas_kernels.attention_decode_layout import THREADS, resident_blocks, shared_bytes
from atlas_kernels.attention_fresh import stored_rows
from atlas_kernels.attention_plan import STEP_DIMS, step_tiles
from atlas_kernels.ptx_async import launch_dependents
from atlas_kernels.registry import kernel

VARIANTS = {
    f"d{dim}_r{16 * tiles}": (dim, tiles)
    for dim in STEP_DIMS
    for tiles in range(1, step_tiles(dim) + 1)
}


@kernel(
    "attention_decode",
    args="ptr ptr ptr ptr ptr ptr ptr ptr ptr ptr i32 i32 i32 i32 i32 i32 i64 i64 f32 f32",
    threads=THREADS,
    min_blocks=resident_blocks,
    shared=shared_bytes,
    variants=VARIANTS,
)
def make_attention_decode(dim: int, tiles: int) -> Any:
    """q, out [T, H, K] over the pools [B, HK, 16, K], all bf16; any number of rows a sequence.

    Grid (N · HK · ⌈max_rows · group / (16 · tiles)⌉, workers). Any number of workers gives the same
    bits: worker y takes the splits y, y + workers, … of what its rows see.

    - ``tables`` int32 [N, ``table_stride``], ``cu_rows`` int32 [N + 1], ``positions`` int32 [T]:
      as in the op ``attention``; a sequence may have no rows;
    - ``partials`` float32 [N, room, HK, max_rows · group, K] and ``sums`` float32 [the same, 2]:
      scratch, with the maximum (base 2) and the sum of a row; ``room`` for the splits that a
      sequence's rows see, or for two with one worker;
    - ``counters`` int32, one for each x of the grid: zero, and zero again afterwards;
    - ``window`` 0 and ``softcap`` 0 mean none; ``q_stride``, ``out_stride`` in bytes.
    """
    attend = attention_body(dim, tiles, stored_rows(dim))

    def attention_decode(
        q, k_pool, v_pool, out, tables, cu_rows, positions, partials, sums, counters,
        heads, kv_heads, max_rows, room, window, table_stride, q_stride, out_stride, scale, softcap,
    ):  # fmt: skip
        launch_dependents()
        attend(
            q, k_pool, v_pool, out, tables, cu_rows, positions, partials, sums, counters,
            heads, kv_heads, max_rows, room, window, table_stride, q_stride, out_stride, scale,
            softcap, i64(0), i64(0), 0, (),
        )  # fmt: skip

    return attention_decode
