"""Mixture of experts: launches."""

from __future__ import annotations

from atlas.backends.cpu.activation import gelu_tanh_and_mul, silu_and_mul
from atlas.backends.cpu.device import Args, Array, Queue, address
from atlas.backends.cpu.linear import activation_stride, activations
from atlas.backends.cpu.pack import PackedMatrix
from atlas.errors import ShapeError
from atlas.ops.check import match_dims


def moe_route(queue: Queue, scores: Array, normalize: bool, *, ids: Array, weights: Array) -> None:
    sizes = match_dims("T E", scores, "T X", weights, dtype="float32")
    match_dims(f"{sizes['T']} {sizes['X']}", ids, dtype="int32")
    _require_contiguous(scores=scores, ids=ids, weights=weights)
    scratch = queue.device.scratch(scores.nbytes)
    args: Args = (address(scores), sizes["T"], sizes["E"], sizes["X"], int(normalize), address(ids))
    args += (address(weights), address(scratch))
    queue.launch("moe.route", args, (scores, ids, weights, scratch))


def moe_experts(
    queue: Queue,
    x: Array,
    gate_up: PackedMatrix,
    down: PackedMatrix,
    ids: Array,
    weights: Array,
    activation: str,
    *,
    expert_gate_up: Array,
    expert_activated: Array,
    expert_out: Array,
    out: Array,
) -> None:
    gates = {"silu": silu_and_mul, "gelu_tanh": gelu_tanh_and_mul}
    rows, top_k, inner = expert_activated.shape
    moe_linear(queue, x[:, None, :], gate_up, ids, out=expert_gate_up)
    both = expert_gate_up.reshape(rows * top_k, 2 * inner)
    gates[activation](queue, both, out=expert_activated.reshape(rows * top_k, inner))
    moe_linear(queue, expert_activated, down, ids, out=expert_out)
    moe_combine(queue, expert_out, weights, out=out)


def moe_linear(queue: Queue, x: Array, weight: PackedMatrix, ids: Array, *, out: Array) -> None:
    sizes = match_dims("T I K", x, "T X N", out, dtype="float32")
    match_dims(f"{sizes['T']} {sizes['X']}", ids, dtype="int32")
    match_dims(f"T I {weight.cols}", x)
    _require_contiguous(x=x, ids=ids, out=out)
    if sizes["I"] not in (1, sizes["X"]):
        raise ShapeError(f"x has {sizes['I']} inputs a row; allowed: 1 or {sizes['X']}")
    if weight.rows != weight.groups * sizes["N"]:
        raise ShapeError(
            f"{weight.groups} experts with {weight.rows} rows in all; out has {sizes['N']} columns"
        )
    inputs, experts, pairs = x.reshape(-1, sizes["K"]), weight.groups, ids.size
    # The grouping lies behind the quantised rows, so the scratch is sized for both at once.
    quantised = len(inputs) * activation_stride(weight.cols) if weight.is_quantized else 0
    scratch = queue.device.scratch(quantised + (experts + 1 + pairs) * 4)
    source, stride, keep = activations(queue, inputs, weight)
    starts = address(scratch) + quantised
    order = starts + (experts + 1) * 4
    queue.launch("moe.group", (address(ids), pairs, experts, starts, order), (ids, scratch))
    args: Args = (source, stride, sizes["K"], sizes["X"], sizes["I"], address(weight.data))
    args += (weight.tile_bytes, sizes["N"], experts, starts, order, address(out))
    queue.launch(f"moe.linear_{weight.format}", args, (x, weight, ids, out, keep, scratch))


def moe_combine(queue: Queue, y: Array, weights: Array, *, out: Array) -> None:
    sizes = match_dims("T X D", y, "T X", weights, "T D", out, dtype="float32")
    _require_contiguous(y=y, weights=weights)
    args: Args = (address(y), address(weights), sizes["T"], sizes["X"], sizes["D"], address(out))
    queue.launch("moe.combine", (*args, out.strides[0]), (y, weights, out))


def _require_contiguous(**arrays: Array) -> None:
    for name, array in arrays.items():
        if not array.flags.c_contiguous:
            raise ShapeError(f"{name} must be contiguous")
