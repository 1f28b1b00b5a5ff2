"""Token embedding and row selection: launches."""

from __future__ import annotations

from atlas.backends.cpu.device import Args, Array, Queue, address, float_bits
from atlas.backends.cpu.pack import PackedMatrix
from atlas.ops.check import match_dims


def embedding(queue: Queue, ids: Array, table: PackedMatrix, scale: float, *, out: Array) -> None:
    match_dims("T", ids, dtype="int32")
    match_dims(f"{len(ids)} {table.cols}", out, dtype="float32")
    args: Args = (address(ids), len(ids), address(table.data), table.tile_bytes, table.cols)
    args += (float_bits(scale), address(out), out.strides[0])
    queue.launch(f"embedding.{table.format}", args, (ids, table, out))


def gather_rows(queue: Queue, x: Array, rows: Array, *, out: Array) -> None:
    match_dims("L", rows, dtype="int32")
    sizes = match_dims("T D", x, f"{len(rows)} D", out, dtype="float32")
    args: Args = (address(x), x.strides[0], address(rows), len(rows), sizes["D"])
    args += (address(out), out.strides[0])
    queue.launch("embedding.gather_rows", args, (x, rows, out))


def scatter_rows(queue: Queue, x: Array, rows: Array, *, out: Array) -> None:
    match_dims("L", rows, dtype="int32")
    sizes = match_dims(f"{len(rows)} D", x, "T D", out, dtype="float32")
    args: Args = (address(x), x.strides[0], address(rows), len(rows), sizes["D"])
    args += (address(out), out.strides[0])
    queue.launch("embedding.scatter_rows", args, (x, rows, out))
