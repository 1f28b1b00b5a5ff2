"""Matrix products: activation quantisation and the product, launched one after the other."""

from __future__ import annotations

from atlas.backends.cpu.activation import gelu_tanh_and_mul, relu, silu_and_mul
from atlas.backends.cpu.device import Args, Array, Queue, address
from atlas.backends.cpu.pack import PackedMatrix
from atlas.ops.check import match_dims

_PASS_BYTES = 384 << 10  # of activation rows, so that they stay in the second-level cache


def linear(
    queue: Queue, x: Array, weight: PackedMatrix, bias: Array | None = None, *, out: Array
) -> None:
    _product(queue, x, weight, bias, out, accumulate=0)


def linear_add(
    queue: Queue, x: Array, weight: PackedMatrix, bias: Array | None = None, *, out: Array
) -> None:
    _product(queue, x, weight, bias, out, accumulate=1)


def linear_relu(
    queue: Queue, x: Array, weight: PackedMatrix, bias: Array | None = None, *, out: Array
) -> None:
    linear(queue, x, weight, bias, out=out)
    relu(queue, out, out=out)


def linear_gated(
    queue: Queue,
    x: Array,
    weight: PackedMatrix,
    bias: Array | None,
    activation: str,
    *,
    gate_up: Array,
    out: Array,
) -> None:
    gates = {"silu": silu_and_mul, "gelu_tanh": gelu_tanh_and_mul}
    linear(queue, x, weight, bias, out=gate_up)
    gates[activation](queue, gate_up, out=out)


def _product(
    queue: Queue, x: Array, weight: PackedMatrix, bias: Array | None, out: Array, accumulate: int
) -> None:
    rows = match_dims(f"T {weight.cols}", x, f"T {weight.rows}", out, dtype="float32")["T"]
    if bias is not None:
        match_dims(f"{weight.rows}", bias, dtype="float32")
    source, stride, keep = activations(queue, x, weight)
    args: Args = (source, stride, rows, weight.cols, address(weight.data), weight.tile_bytes)
    args += (weight.rows, address(out), out.strides[0], 0 if bias is None else address(bias))
    args += (accumulate, max(4, _PASS_BYTES // stride // 4 * 4) if stride else rows)
    queue.launch(f"linear.{weight.format}", args, (x, weight, bias, out, keep))


def activations(queue: Queue, x: Array, weight: PackedMatrix) -> tuple[int, int, object]:
    """(address, row stride, owner) of the rows that ``weight`` multiplies.

    Float weights read ``x`` itself; quantised ones read int8 rows, made here in the scratch.
    """
    if not weight.is_quantized:
        return address(x), x.strides[0], x
    cols = weight.cols
    stride = activation_stride(cols)
    scratch = queue.device.scratch(len(x) * stride)
    args: Args = (address(x), x.strides[0], len(x), cols, address(scratch), stride)
    queue.launch("linear.quantize_rows", args, (x, scratch))
    return address(scratch), stride, scratch


def activation_stride(cols: int) -> int:
    """Bytes of one quantised row: int8 values, two float32 and two int32 a block, aligned."""
    return -(-(cols + cols // 32 * 16) // 64) * 64
