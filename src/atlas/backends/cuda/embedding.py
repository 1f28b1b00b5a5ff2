"""Token embedding, positions that are added to it, and row selection: launches."""

from __future__ import annotations

from atlas.backends.cuda.array import DeviceArray
from atlas.backends.cuda.check import activation_type, match, row_suffix
from atlas.backends.cuda.launch import Queue
from atlas.backends.cuda.pack import DeviceMatrix
from atlas.errors import ShapeError
from atlas.ops.check import match_dims

_THREADS, _WIDTH = 128, 8
_QUANT_WIDTH = 16  # weights that a thread of a quantised table takes


def embedding(
    queue: Queue, ids: DeviceArray, table: DeviceMatrix, scale: float, *, out: DeviceArray
) -> None:
    match("int32", "T", ids)
    rows, dim = len(ids), table.cols
    match_dims(f"{rows} {dim}", out)
    type = activation_type(out)
    if table.is_quantized:
        name, width = f"embedding_{table.format}_{type}", _QUANT_WIDTH
    else:
        suffix = row_suffix(dim, _WIDTH, out, table.values)
        name, width = f"embedding_bf16_{type}{suffix}", 1 if suffix else _WIDTH
    args = (ids, table.data, out, dim, table.layout.shape[1], out.strides[0], scale)
    queue.launch(name, (rows, -(-dim // (_THREADS * width))), args)


def add_positions(
    queue: Queue,
    x: DeviceArray,
    ids: DeviceArray,
    positions: DeviceArray,
    table: DeviceArray,
    padding_id: int,
    *,
    out: DeviceArray,
) -> None:
    rows, dim = match_dims("T D", x, "T D", out).values()
    match("int32", f"{rows}", ids, f"{rows}", positions)
    match("float32", f"P {dim}", table)
    if not table.is_contiguous:
        raise ShapeError(f"table {table} must be contiguous")
    type, suffix = activation_type(x, out), row_suffix(dim, _WIDTH, x, out, table)
    args = (x, ids, positions, table, out, dim, padding_id, x.strides[0], out.strides[0])
    grid = (rows, -(-dim // (_THREADS * (1 if suffix else _WIDTH))))
    queue.launch(f"add_positions_{type}{suffix}", grid, args)


def gather_rows(queue: Queue, x: DeviceArray, rows: DeviceArray, *, out: DeviceArray) -> None:
    match_dims("T D", x, f"{len(rows)} D", out)
    _move_rows(queue, "gather_rows", x, rows, out)


def scatter_rows(queue: Queue, x: DeviceArray, rows: DeviceArray, *, out: DeviceArray) -> None:
    match_dims(f"{len(rows)} D", x, "T D", out)
    _move_rows(queue, "scatter_rows", x, rows, out)


def _move_rows(
    queue: Queue, name: str, x: DeviceArray, rows: DeviceArray, out: DeviceArray
) -> None:
    match("int32", "L", rows)
    if x.dtype != out.dtype:
        raise ShapeError(f"x is {x.dtype}, out is {out.dtype}; allowed: one type")
    row_bytes = x.shape[1] * x.itemsize
    numbers = (x.address, out.address, x.strides[0], out.strides[0], row_bytes)
    piece = next((size for size in (16, 4, 2) if not any(n % size for n in numbers)), 0)
    if piece == 0:
        raise ShapeError(f"rows of {x} and {out} must lie at multiples of 2 bytes")
    args = (x, rows, out, row_bytes, x.strides[0], out.strides[0])
    grid = (len(rows), -(-row_bytes // (piece * _THREADS)))
    queue.launch(f"{name}_b{8 * piece}", grid, args)
