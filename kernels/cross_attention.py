"""Attention of a decoder over its sources: the rows of a source share one sweep over its keys.

``attention_decode`` where every row sees all keys of its source: the beams, or samples, of a
request are the rows of one sequence, so that a source's keys and values are read once for all of
them. The order is that of ``attention_decode`` at the source's last position.

Keys and values were stored by an earlier step, when the source was encoded: their copies begin
before the wait, and only the queries come from the kernel before.
"""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import device, f32, i32, i64
from atlas_kernels.attention_decode import VARIANTS
from atlas_kernels.attention_decode_body import attention_body
from atlas_kernels.attention_decode_layout import THREADS, resident_blocks, shared_bytes
from atlas_kernels.attention_fresh import stored_rows
from atlas_kernels.ptx_async import launch_dependents
from atlas_kernels.ptx_memory import load_b32
from atlas_kernels.registry import kernel


@device
def _source_end(lens, source, row):
    return load_b32(lens + i64(source) * 4) - 1


@kernel(
    "cross_attention",
    args="ptr ptr ptr ptr ptr ptr ptr ptr ptr ptr i32 i32 i32 i32 i32 i32 i64 i64 f32",
    threads=THREADS,
    min_blocks=resident_blocks,
    shared=shared_bytes,
    variants=VARIANTS,
)
def make_cross_attention(dim: int, tiles: int) -> Any:
    """q, out [T, H, K] over the pools [B, HK, 16, K], all bf16; any number of rows a source.

    Grid and arguments as in ``attention_decode``, with ``lens`` int32 [G], keys of each source and
    at least 1, in place of positions; a source may have no rows. ``rehearsal`` as in
    ``attention_step``.
    """
    attend = attention_body(dim, tiles, stored_rows(dim, are_old=True), _source_end)

    def cross_attention(
        q, k_pool, v_pool, out, tables, cu_rows, lens, partials, sums, counters,
        heads, kv_heads, max_rows, room, table_stride, rehearsal, q_stride, out_stride,
        scale,
    ):  # fmt: skip
        launch_dependents()
        attend(
            q, k_pool, v_pool, out, tables, cu_rows, lens, partials, sums, counters,
            heads, kv_heads, max_rows, room, i32(0), table_stride, q_stride, out_stride, scale,
            f32(0), i64(0), i64(0), rehearsal, (),
        )  # fmt: skip

    return cross_attention
