"""RMS normalisation: launch."""

from __future__ import annotations

from atlas.backends.cuda.array import DeviceArray
from atlas.backends.cuda.check import Args, activation_type, match, row_suffix
from atlas.backends.cuda.launch import Queue
from atlas.ops.check import match_dims

_WIDTH, _HEAD_WIDTH = 8, 2
_HEADS_PER_BLOCK = 4


def rmsnorm(
    queue: Queue, x: DeviceArray, weight: DeviceArray, eps: float, *, out: DeviceArray
) -> None:
    spec = "T D" if x.ndim == 2 else "T H D"
    sizes = match_dims(spec, x, "D", weight, spec, out)
    match("float32", "D", weight)
    type, dim = activation_type(x, out), sizes["D"]
    if x.ndim == 2:
        variant = type + row_suffix(dim, _WIDTH, x, out, weight)
        args: Args = (x, weight, out, dim, x.strides[0], out.strides[0], eps)
        queue.launch(f"rmsnorm_{variant}", (sizes["T"], 1), args)
        return
    variant = type + row_suffix(dim, _HEAD_WIDTH, x, out, weight)
    args = (x, weight, out, sizes["H"], dim, *x.strides[:2], *out.strides[:2], eps)
    grid = (sizes["T"], -(-sizes["H"] // _HEADS_PER_BLOCK))
    queue.launch(f"rmsnorm_heads_{variant}", grid, args)
