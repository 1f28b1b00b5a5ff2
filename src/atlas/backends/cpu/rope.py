"""Rotary position embedding: launches."""

from __future__ import annotations

from atlas.backends.cpu.device import Args, Array, Queue, address
from atlas.errors import ShapeError
from atlas.ops.check import match_dims
from atlas.ops.rope import pair_axes


def rope(
    queue: Queue,
    x: Array,
    positions: Array,
    table: Array,
    sections: tuple[int, int, int] | None = None,
) -> None:
    sizes = match_dims("T H K", x, "P 2 R", table, dtype="float32")
    match_dims(f"{'' if sections is None else '3 '}{sizes['T']}", positions, dtype="int32")
    half = table.shape[2]
    if 2 * half > sizes["K"]:
        raise ShapeError(f"table rotates {2 * half} dimensions; allowed: up to {sizes['K']}")
    args: Args = (address(x), x.strides[0], x.strides[1], sizes["T"], sizes["H"])
    if sections is None:
        args += (address(positions), address(table), half)
        queue.launch("rope.rope", args, (x, positions, table))
        return
    if sum(sections) != half:
        raise ShapeError(f"sections are {sections}; allowed: {half} pairs in all")
    axes = pair_axes(sections, half)
    scratch = queue.device.scratch(queue.device.threads * half * 8)
    args += (address(positions), positions.strides[0], address(table), half, address(axes))
    queue.launch("rope.axes", (*args, address(scratch)), (x, positions, table, axes, scratch))
