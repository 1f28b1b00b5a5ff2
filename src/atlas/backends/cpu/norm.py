"""RMS and layer normalisation: launches."""

from __future__ import annotations

from atlas.backends.cpu.device import Args, Array, Queue, address, float_bits
from atlas.ops.check import match_dims


def rmsnorm(queue: Queue, x: Array, weight: Array, eps: float, *, out: Array) -> None:
    spec = "T D" if x.ndim == 2 else "T H D"
    match_dims(spec, x, "D", weight, spec, out, dtype="float32")
    heads = x.shape[1] if x.ndim == 3 else 1
    inner_in, inner_out = (x.strides[1], out.strides[1]) if x.ndim == 3 else (0, 0)
    args: Args = (address(x), x.strides[0], inner_in, x.shape[0], heads, x.shape[-1])
    args += (address(weight), float_bits(eps), address(out), out.strides[0], inner_out)
    queue.launch("norm.rmsnorm", args, (x, weight, out))


def layernorm(
    queue: Queue, x: Array, weight: Array, bias: Array, eps: float, *, out: Array
) -> None:
    sizes = match_dims("T D", x, "D", weight, "D", bias, "T D", out, dtype="float32")
    args: Args = (address(x), x.strides[0], sizes["T"], sizes["D"], address(weight), address(bias))
    args += (float_bits(eps), address(out), out.strides[0])
    queue.launch("norm.layernorm", args, (x, weight, bias, out))
