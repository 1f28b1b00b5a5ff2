"""Token embedding and row selection."""

from __future__ import annotations

from typing import Any

from atlas_kernels import ptx_memory as memory
from atlas_kernels._cuda import f32, i64
from atlas_kernels.ptx_async import launch_dependents, wait_prerequisites
from atlas_kernels.ptx_warp import block_x, block_y, thread_x
from atlas_kernels.registry import kernel
from atlas_kernels.vector import Access, access

THREADS = 128


def _table_variants() -> dict[str, tuple[Any, ...]]:
    return {
        f"{table}_{out}{suffix}": (access(table, width), access(out, width))
        for table in ("bf16", "f16", "f32")
        for out in ("bf16", "f32")
        for width, suffix in ((8, ""), (1, "_scalar"))
    }


@kernel(
    "embedding",
    args="ptr ptr ptr i32 i64 i64 f32",
    threads=THREADS,
    variants=_table_variants(),
)
def make_embedding(table_rows: Access, rows: Access) -> Any:
    """out[t] = table[ids[t]] · scale, in float32, rounded once; grid (rows, ⌈D / (128 · width)⌉).

    A negative id gives zeros: a padding row, or one whose logits were not finite.
    """
    load, table_item = table_rows.load_constant, table_rows.item_bytes
    store, zero, scale_by, item = rows.store, rows.zero, rows.scale, rows.item_bytes
    width = rows.width

    def embedding(ids, table, out, dim, table_stride, out_stride, scale):
        launch_dependents()
        wait_prerequisites()
        at = (block_y() * THREADS + thread_x()) * width
        if at < dim:
            token = i64(memory.load_b32(ids + block_x() * 4))
            values = zero()
            if token >= 0:
                values = scale_by(load(table + token * table_stride + at * table_item), f32(scale))
            store(out + block_x() * out_stride + at * item, values)

    return embedding


@kernel(
    "gather_rows",
    args="ptr ptr ptr i32 i64 i64",
    threads=THREADS,
    variants={
        "b128": (memory.load_b32x4, memory.store_b32x4, 16),
        "b32": (memory.load_b32, memory.store_b32, 4),
        "b16": (memory.load_b16, memory.store_b16, 2),
    },
)
def make_gather_rows(load: Any, store: Any, num_bytes: int) -> Any:
    """out[i] = x[rows[i]], of any type: ``row_bytes`` in pieces of 16, 4 or 2 bytes.

    Grid (rows, ⌈pieces / 128⌉). A negative row is padding and leaves ``out`` as it was.
    """

    def gather_rows(x, rows, out, row_bytes, x_stride, out_stride):
        launch_dependents()
        wait_prerequisites()
        at = (block_y() * THREADS + thread_x()) * num_bytes
        if at < row_bytes:
            row = i64(memory.load_b32(rows + block_x() * 4))
            if row >= 0:
                store(out + block_x() * out_stride + at, load(x + row * x_stride + at))

    return gather_rows
