"""Rotary position embedding: launch."""

from __future__ import annotations

from atlas.backends.cuda.array import DeviceArray
from atlas.backends.cuda.check import (
    activation_type,
    match,
    require,
    require_contiguous_rows,
    row_suffix,
)
from atlas.backends.cuda.launch import Queue
from atlas.errors import ShapeError

WARPS_PER_BLOCK = 4
HEADS_PER_WARP = 4  # where keys and values are stored as well; else one
WIDTH = 2


def rope(
    queue: Queue,
    x: DeviceArray,
    positions: DeviceArray,
    table: DeviceArray,
    sections: tuple[int, int, int] | None = None,
) -> None:
    require(sections is None, "rope's sections of several axes", sections, "None: one axis")
    rows, heads, dim = x.shape
    match("int32", f"{rows}", positions)
    half = match("float32", "P 2 R", table)["R"]
    require_rotation(table, dim)
    require_contiguous_rows(x=x)
    variant = activation_type(x) + row_suffix(half, WIDTH, x, table)
    args = (x, positions, table, heads, dim, half, x.strides[0])
    queue.launch(f"rope_{variant}", (rows, -(-heads // WARPS_PER_BLOCK)), args)


def require_rotation(table: DeviceArray, dim: int) -> None:
    """The table's dimensions fit into a head."""
    if 2 * table.shape[2] > dim:
        raise ShapeError(f"table rotates {2 * table.shape[2]} dimensions; allowed: up to {dim}")
