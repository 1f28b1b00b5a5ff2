"""RMS and layer normalisation: launches."""

from __future__ import annotations

from atlas.backends.cpu.device import Args, Array, Queue, address, float_bits
from atlas.errors import ShapeError
from atlas.ops.check import match_dims


def rmsnorm(queue: Queue, x: Array, weight: Array, eps: float, *, out: Array) -> None:
    spec = "T D" if x.ndim == 2 else "T H D"
    match_dims(spec, x, "D", weight, spec, out, dtype="float32")
    heads = x.shape[1] if x.ndim == 3 else 1
    inner_in, inner_out = (x.strides[1], out.strides[1]) if x.ndim == 3 else (0, 0)
    args: Args = (address(x), x.strides[0], inner_in, x.shape[0], heads, x.shape[-1])
    args += (address(weight), float_bits(eps), address(out), out.strides[0], inner_out)
    queue.launch("norm.rmsnorm", args, (x, weight, out))


def gated_rmsnorm(
    queue: Queue,
    x: Array,
    gate: Array,
    weight: Array,
    eps: float,
    group_size: int,
    norm_first: bool,
    *,
    out: Array,
) -> None:
    spec = "T D" if x.ndim == 2 else "T H G"
    sizes = match_dims(spec, x, spec, gate, spec, out, "W", weight, dtype="float32")
    width = sizes["D"] if x.ndim == 2 else sizes["H"] * sizes["G"]
    groups, rest = divmod(width, group_size)
    if rest or sizes["W"] not in (group_size, width) or sizes.get("G", group_size) != group_size:
        raise ShapeError(
            f"groups of {group_size} in rows of {width}, weight of {sizes['W']}; allowed: "
            f"a divisor, weight of group_size or of the row"
        )
    steps = [array.strides[1] if x.ndim == 3 else group_size * 4 for array in (x, gate, out)]
    weight_stride = 0 if sizes["W"] == group_size else group_size * 4
    args: Args = (address(x), x.strides[0], steps[0], address(gate), gate.strides[0], steps[1])
    args += (sizes["T"], groups, group_size, address(weight), weight_stride, float_bits(eps))
    args += (int(norm_first), address(out), out.strides[0], steps[2])
    queue.launch("norm.gated_rmsnorm", args, (x, gate, weight, out))


def layernorm(
    queue: Queue, x: Array, weight: Array, bias: Array, eps: float, *, out: Array
) -> None:
    sizes = match_dims("T D", x, "D", weight, "D", bias, "T D", out, dtype="float32")
    args: Args = (address(x), x.strides[0], sizes["T"], sizes["D"], address(weight), address(bias))
    args += (float_bits(eps), address(out), out.strides[0])
    queue.launch("norm.layernorm", args, (x, weight, bias, out))
