"""Mixture of experts: launches."""

from __future__ import annotations

from functools import partial

from atlas.backends.cpu.activation import gelu_tanh_and_mul, relu_squared, silu_and_mul
from atlas.backends.cpu.device import Args, Array, Queue, address, float_bits
from atlas.backends.cpu.linear import activation_stride, activations, linear
from atlas.backends.cpu.norm import rmsnorm
from atlas.backends.cpu.pack import PackedMatrix
from atlas.errors import CapabilityError, ShapeError
from atlas.ops.check import match_dims, require_contiguous
from atlas.ops.moe import SCORINGS, Scoring, block_in_parts, router_in_parts


def moe_route(
    queue: Queue,
    scores: Array,
    normalize: bool,
    scoring: Scoring = "softmax",
    bias: Array | None = None,
    scale: float = 1.0,
    num_groups: int = 1,
    top_groups: int = 1,
    shared: Array | None = None,
    slots: Array | None = None,
    *,
    ids: Array,
    weights: Array,
) -> None:
    _require_apart(shared)
    sizes = match_dims("T E", scores, "T X", weights, dtype="float32")
    match_dims(f"{sizes['T']} {sizes['X']}", ids, dtype="int32")
    experts = sizes["E"]
    if bias is not None:
        match_dims(f"{experts}", bias, dtype="float32")
    if slots is not None:
        match_dims(f"{sizes['T']}", slots, dtype="int32")
    require_contiguous(scores=scores, bias=bias, slots=slots, ids=ids, weights=weights)
    if scoring not in SCORINGS:
        raise ShapeError(f"scoring is {scoring!r}; allowed: {', '.join(SCORINGS)}")
    if experts % num_groups or not 1 <= top_groups <= num_groups:
        raise ShapeError(
            f"{top_groups} of {num_groups} groups of {experts} experts; allowed: a divisor of the "
            f"experts, and from 1 to that many"
        )
    if sizes["X"] > top_groups * (experts // num_groups):
        raise ShapeError(
            f"{sizes['X']} experts a row; allowed: up to {top_groups * (experts // num_groups)}"
        )
    scratch = queue.device.scratch(sizes["T"] * (2 * experts + num_groups) * 4)
    args: Args = (address(scores), sizes["T"], experts, sizes["X"], int(normalize), address(ids))
    args += (address(weights), address(scratch), int(scoring == "sigmoid"))
    args += (0 if bias is None else address(bias), float_bits(scale), num_groups, top_groups)
    args += (0 if slots is None else address(slots),)
    queue.launch("moe.route", args, (scores, bias, slots, ids, weights, scratch))


moe_router = partial(
    router_in_parts, {"rmsnorm": rmsnorm, "linear": linear, "moe_route": moe_route}
)


def moe_experts(
    queue: Queue,
    x: Array,
    gate_up: PackedMatrix,
    down: PackedMatrix,
    ids: Array,
    weights: Array,
    activation: str,
    shared_gate_up: PackedMatrix | None = None,
    shared_down: PackedMatrix | None = None,
    *,
    expert_gate_up: Array,
    expert_activated: Array,
    expert_out: Array,
    out: Array,
) -> None:
    _require_apart(shared_gate_up)
    gates = {"silu": silu_and_mul, "gelu_tanh": gelu_tanh_and_mul}
    rows, top_k, inner = expert_activated.shape
    activated = expert_activated.reshape(rows * top_k, inner)
    if activation == "relu_squared":
        moe_linear(queue, x[:, None, :], gate_up, ids, out=expert_activated)
        relu_squared(queue, activated, out=activated)
    else:
        moe_linear(queue, x[:, None, :], gate_up, ids, out=expert_gate_up)
        both = expert_gate_up.reshape(rows * top_k, 2 * inner)
        gates[activation](queue, both, out=activated)
    moe_linear(queue, expert_activated, down, ids, out=expert_out)
    moe_combine(queue, expert_out, ids, weights, out=out)


moe_block = partial(block_in_parts, {"moe_router": moe_router, "moe_experts": moe_experts})


def _require_apart(shared: object) -> None:
    if shared is not None:
        raise CapabilityError("a shared expert among the others; allowed on the CPU: apart")


def moe_linear(queue: Queue, x: Array, weight: PackedMatrix, ids: Array, *, out: Array) -> None:
    sizes = match_dims("T I K", x, "T X N", out, dtype="float32")
    match_dims(f"{sizes['T']} {sizes['X']}", ids, dtype="int32")
    match_dims(f"T I {weight.cols}", x)
    require_contiguous(x=x, ids=ids, out=out)
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


def moe_combine(queue: Queue, y: Array, ids: Array, weights: Array, *, out: Array) -> None:
    sizes = match_dims("T X D", y, "T X", weights, "T D", out, dtype="float32")
    match_dims(f"{sizes['T']} {sizes['X']}", ids, dtype="int32")
    require_contiguous(y=y, ids=ids, weights=weights)
    args: Args = (address(y), address(weights), sizes["T"], sizes["X"], sizes["D"], address(out))
    args += (out.strides[0], address(ids))
    queue.launch("moe.combine", args, (y, ids, weights, out))
