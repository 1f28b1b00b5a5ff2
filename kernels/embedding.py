"""Token embedding, also of quantised tables, and row selection."""

from __future__ import annotations

from typing import Any

import numpy as np
from atlas_kernels import ptx_memory as memory
from atlas_kernels._cuda import device, f32, i32, i64
from atlas_kernels.gemm_step_plan import LINE_BYTES
from atlas_kernels.ptx_async import launch_dependents, wait_prerequisites
from atlas_kernels.ptx_math import from_f16
from atlas_kernels.ptx_warp import block_x, block_y, thread_x
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


_ZERO = np.float32(0)


def _block(type: str, rows: Access) -> Any:
    """(block, out, scale): 32 elements of a quantised row, d · q (+ m), times ``scale``."""
    store, item = rows.store, rows.item_bytes
    has_bytes, has_minimum = type == "q8_0", type == "q4_1"
    offset = i32({"q8_0": 0, "q4_0": 8, "q4_1": 0}[type])
    first, words = 4 if has_minimum else 2, 16 if has_bytes else 8
    load_half = memory.load_constant_b16

    @device
    def value(integer, d, m, scale):
        weight = d * f32(integer - offset)
        if has_minimum:
            weight = weight + m
        return weight * scale

    @device
    def write(block, out, scale):
        d, m = from_f16(load_half(block)), _ZERO
        if has_minimum:
            m = from_f16(load_half(block + 2))
        for i in range(words):
            word = i32(load_half(block + first + 2 * i))
            if has_bytes:
                low, high = i32(word << 24) >> 24, word >> 8
                pair = (value(low, d, m, scale), value(high, d, m, scale))
                store(out + 2 * i * item, pair)
            else:
                low = (value(word & 15, d, m, scale), value((word >> 8) & 15, d, m, scale))
                high = (value((word >> 4) & 15, d, m, scale), value((word >> 12) & 15, d, m, scale))
                store(out + 2 * i * item, low)
                store(out + (2 * i + 16) * item, high)

    return write


@kernel(
    "embedding",
    args="ptr ptr ptr i32 i64 i64 f32",
    threads=THREADS,
    variants={
        f"{table}_{out}": (table, access(out, 2)) for table in LINE_BYTES for out in ("bf16", "f32")
    },
)
def make_embedding_blocks(type: str, rows: Access) -> Any:
    """``embedding`` of blocks as GGUF stores them; grid (rows, ⌈D / 4096⌉).

    Without ids (0) row t is the table's row t: with a scale of 1 the matrix, dequantised.
    """
    write, zero, store, item = _block(type, rows), rows.zero, rows.store, rows.item_bytes
    block_bytes = LINE_BYTES[type] // 2

    def embedding_blocks(ids, table, out, dim, table_stride, out_stride, scale):
        launch_dependents()
        wait_prerequisites()
        at = (block_y() * THREADS + thread_x()) * 32
        if at < dim:
            token = i64(block_x())
            if ids != 0:
                token = i64(memory.load_b32(ids + token * 4))
            target = out + block_x() * out_stride + at * item
            if token >= 0:
                block = table + token * table_stride + (at >> 5) * block_bytes
                write(block, target, f32(scale))
            else:
                for i in range(16):
                    store(target + 2 * i * item, zero())

    return embedding_blocks


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
