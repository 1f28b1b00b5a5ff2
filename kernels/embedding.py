"""Token embedding, also of quantised tables, and row selection."""

from __future__ import annotations

from typing import Any

from atlas_kernels import ptx_memory as memory
from atlas_kernels._cuda import device, f32, i32, i64
from atlas_kernels.ptx_async import launch_dependents, wait_prerequisites
from atlas_kernels.ptx_math import vector_scale, vector_zero
from atlas_kernels.ptx_warp import block_x, block_y, thread_x
from atlas_kernels.quant_decode import GLOBAL, decoder
from atlas_kernels.quant_plan import CELLS
from atlas_kernels.registry import kernel
from atlas_kernels.vector import Access, access, row_variants

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
    "embedding",
    args="ptr ptr ptr i32 i64 i64 f32",
    threads=THREADS,
    variants={
        f"{table}_{out}": (table, access(out, 2)) for table in CELLS for out in ("bf16", "f32")
    },
)
def make_embedding_cells(type: str, rows: Access) -> Any:
    """``embedding`` of quantised rows in cells (``quant_plan``); grid (rows, ⌈D / 2048⌉).

    ``table_stride`` is a unit's. Without ids (0) row t is the table's row t: with a scale of 1 the
    matrix, dequantised. Four threads share 64 weights.
    """
    found = decoder(type, GLOBAL, as_words=False)
    load, scales, decode = found.load, found.scales, found.decode
    cell_bytes = CELLS[type].nbytes
    store, item, scaled = rows.store, rows.item_bytes, vector_scale(16)

    @device
    def write(target, values, first):
        """Eight weights of a block, which lie in pairs 8 apart."""
        store(target, (values[first], values[first + 1]))
        store(target + 8 * item, (values[first + 2], values[first + 3]))
        store(target + 16 * item, (values[first + 4], values[first + 5]))
        store(target + 24 * item, (values[first + 6], values[first + 7]))

    zeros = vector_zero(16)

    def embedding_cells(ids, table, out, dim, table_stride, out_stride, scale):
        launch_dependents()
        wait_prerequisites()
        at = i32(block_y() * THREADS + thread_x())
        half, own = i32(at >> 2), i32(at & 3)
        if half * 64 < dim:
            token = i64(block_x())
            if ids != 0:
                token = i64(memory.load_b32(ids + token * 4))
            values = zeros()
            if token >= 0:
                cell = table + (token >> 5) * table_stride + i64(half >> 1) * cell_bytes
                thread = i32((i32(token) & 31) * 4 + own)
                which = i32(half & 1)
                weights = decode(load(cell, thread, which), scales(cell, thread, which))
                values = scaled(weights, f32(scale))
            target = out + block_x() * out_stride + i64(half * 64 + 2 * own) * item
            write(target, values, 0)
            if half * 64 + 32 < dim:
                write(target + 32 * item, values, 8)

    return embedding_cells


@kernel(
    "add_positions",
    args="ptr ptr ptr ptr ptr i32 i32 i64 i64",
    threads=THREADS,
    variants=row_variants(),
)
def make_add_positions(rows: Access) -> Any:
    """out[t] = x[t] + table[positions[t]], or x[t] where the id is ``padding_id``; [T, D].

    Grid (rows, ⌈D / (128 · width)⌉). ``table`` is float32 [P, D]; ``out`` may be ``x``.
    """
    load, store, add, width, item = rows.load, rows.store, rows.add, rows.width, rows.item_bytes
    load_table = access("f32", width).load_constant

    def add_positions(x, ids, positions, table, out, dim, padding_id, x_stride, out_stride):
        launch_dependents()
        wait_prerequisites()
        at = (block_y() * THREADS + thread_x()) * width
        if at < dim:
            value = load(x + block_x() * x_stride + at * item)
            if memory.load_b32(ids + block_x() * 4) != padding_id:
                position = i64(memory.load_b32(positions + block_x() * 4))
                value = add(value, load_table(table + (position * dim + at) * 4))
            store(out + block_x() * out_stride + at * item, value)

    return add_positions


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


@kernel(
    "scatter_rows",
    args="ptr ptr ptr i32 i64 i64",
    threads=THREADS,
    variants={
        "b128": (memory.load_b32x4, memory.store_b32x4, 16),
        "b32": (memory.load_b32, memory.store_b32, 4),
        "b16": (memory.load_b16, memory.store_b16, 2),
    },
)
def make_scatter_rows(load: Any, store: Any, num_bytes: int) -> Any:
    """out[rows[i]] = x[i], of any type: ``row_bytes`` in pieces of 16, 4 or 2 bytes.

    Grid (rows, ⌈pieces / 128⌉). A row whose number is negative goes nowhere.
    """

    def scatter_rows(x, rows, out, row_bytes, x_stride, out_stride):
        launch_dependents()
        wait_prerequisites()
        at = (block_y() * THREADS + thread_x()) * num_bytes
        if at < row_bytes:
            row = i64(memory.load_b32(rows + block_x() * 4))
            if row >= 0:
                store(out + row * out_stride + at, load(x + block_x() * x_stride + at))

    return scatter_rows
