"""RMS and layer normalisation: launches."""

from __future__ import annotations

from atlas_kernels.recurrence_shapes import NORM_HEADS, NORM_THREADS

from atlas.backends.cuda.array import DeviceArray
from atlas.backends.cuda.check import Args, activation_type, match, row_suffix
from atlas.backends.cuda.launch import Queue
from atlas.errors import ShapeError
from atlas.ops.check import match_dims

WIDTH, _HEAD_WIDTH = 8, 2
"""Elements of a row, and of a head, that a thread takes at once."""
_HEADS_PER_BLOCK = 4
_WARPS = NORM_THREADS // 32


def gated_rmsnorm(
    queue: Queue,
    x: DeviceArray,
    gate: DeviceArray,
    weight: DeviceArray,
    eps: float,
    group_size: int,
    norm_first: bool,
    *,
    out: DeviceArray,
) -> None:
    if x.ndim != 2:
        raise ShapeError(f"x is {x}; allowed: groups that lie side by side in rows [T, D]")
    sizes = match_dims("T D", x, "T D", gate, "T D", out, "W", weight)
    match("float32", "T D", x, "W", weight)
    groups, rest = divmod(sizes["D"], group_size)
    if rest or sizes["W"] not in (group_size, sizes["D"]):
        raise ShapeError(
            f"groups of {group_size} in rows of {sizes['D']}, weight of {sizes['W']}; allowed: "
            f"a divisor, weight of group_size or of the row"
        )
    type = activation_type(gate, out)
    suffix = row_suffix(group_size, WIDTH, x, gate, out, weight)
    if group_size in NORM_HEADS and norm_first and sizes["W"] == group_size and not suffix:
        heads = sizes["T"] * groups
        grid = (-(-heads // (NORM_HEADS[group_size] * _WARPS)), 1)
        args: Args = (x, gate, weight, out, groups, heads)
        args += (x.strides[0], gate.strides[0], out.strides[0], eps)
        queue.launch(f"gated_rmsnorm_heads_{type}_d{group_size}", grid, args)
        return
    args = (x, gate, weight, out, groups, group_size, int(norm_first), x.strides[0])
    args += (gate.strides[0], 0 if sizes["W"] == group_size else 4 * group_size, out.strides[0])
    grid = (sizes["T"], -(-groups // _HEADS_PER_BLOCK))
    queue.launch(f"gated_rmsnorm_{type}{suffix}", grid, (*args, eps))


def layernorm(
    queue: Queue,
    x: DeviceArray,
    weight: DeviceArray,
    bias: DeviceArray,
    eps: float,
    *,
    out: DeviceArray,
) -> None:
    sizes = match_dims("T D", x, "D", weight, "D", bias, "T D", out)
    match("float32", "D", weight, "D", bias)
    dim = sizes["D"]
    variant = activation_type(x, out) + row_suffix(dim, WIDTH, x, out, weight, bias)
    args: Args = (x, weight, bias, out, dim, x.strides[0], out.strides[0], eps)
    queue.launch(f"layernorm_{variant}", (sizes["T"], 1), args)


def rmsnorm(
    queue: Queue, x: DeviceArray, weight: DeviceArray, eps: float, *, out: DeviceArray
) -> None:
    spec = "T D" if x.ndim == 2 else "T H D"
    sizes = match_dims(spec, x, "D", weight, spec, out)
    match("float32", "D", weight)
    type, dim = activation_type(x, out), sizes["D"]
    if x.ndim == 2:
        variant = type + row_suffix(dim, WIDTH, x, out, weight)
        args: Args = (x, weight, out, dim, x.strides[0], out.strides[0], eps)
        queue.launch(f"rmsnorm_{variant}", (sizes["T"], 1), args)
        return
    variant = type + row_suffix(dim, _HEAD_WIDTH, x, out, weight)
    args = (x, weight, out, sizes["H"], dim, *x.strides[:2], *out.strides[:2], eps)
    grid = (sizes["T"], -(-sizes["H"] // _HEADS_PER_BLOCK))
    queue.launch(f"rmsnorm_heads_{variant}", grid, args)
