"""Rotary position embedding: launch."""

from __future__ import annotations

from atlas.backends.cpu.device import Array, Queue, address
from atlas.errors import ShapeError
from atlas.ops.check import match_dims


def rope(queue: Queue, x: Array, positions: Array, table: Array) -> None:
    match_dims("T", positions, dtype="int32")
    match_dims(f"{len(positions)} H K", x, "P 2 R", table, dtype="float32")
    half = table.shape[2]
    if 2 * half > x.shape[2]:
        raise ShapeError(f"table rotates {2 * half} dimensions; allowed: up to {x.shape[2]}")
    args = (address(x), x.strides[0], x.strides[1], x.shape[0], x.shape[1])
    queue.launch(
        "rope.rope", (*args, address(positions), address(table), half), (x, positions, table)
    )
