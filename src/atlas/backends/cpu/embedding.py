"""Token embedding, absolute positions and row selection: launches."""

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


def add_positions(
    queue: Queue,
    x: Array,
    ids: Array,
    positions: Array,
    table: Array,
    padding_id: int,
    *,
    out: Array,
) -> None:
    sizes = match_dims("T D", x, "P D", table, "T D", out, dtype="float32")
    match_dims(f"{sizes['T']}", ids, f"{sizes['T']}", positions, dtype="int32")
    args: Args = (address(x), x.strides[0], address(ids), address(positions), sizes["T"])
    args += (sizes["D"], address(table), table.strides[0], padding_id, address(out), out.strides[0])
    queue.launch("embedding.add_positions", args, (x, ids, positions, table, out))


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
