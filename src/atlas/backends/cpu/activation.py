"""Elementwise ops: launches."""

from __future__ import annotations

from atlas.backends.cpu.device import Args, Array, Queue, address, float_bits
from atlas.errors import ShapeError
from atlas.ops.check import match_dims


def _gated(queue: Queue, name: str, gate_up: Array, out: Array) -> None:
    sizes = match_dims("T F2", gate_up, "T F", out, dtype="float32")
    if sizes["F2"] != 2 * sizes["F"]:
        raise ShapeError(f"gate_up has {sizes['F2']} columns, out has {sizes['F']}; allowed: twice")
    args = (address(gate_up), gate_up.strides[0], sizes["T"], sizes["F"])
    queue.launch(name, (*args, address(out), out.strides[0]), (gate_up, out))


def silu_and_mul(queue: Queue, gate_up: Array, *, out: Array) -> None:
    _gated(queue, "activation.silu_and_mul", gate_up, out)


def gelu_tanh_and_mul(queue: Queue, gate_up: Array, *, out: Array) -> None:
    _gated(queue, "activation.gelu_tanh_and_mul", gate_up, out)


def relu_squared(queue: Queue, x: Array, *, out: Array) -> None:
    sizes = match_dims("T F", x, "T F", out, dtype="float32")
    args = (address(x), x.strides[0], sizes["T"], sizes["F"], address(out), out.strides[0])
    queue.launch("activation.relu_squared", args, (x, out))


def sigmoid_gate(queue: Queue, x: Array, gate: Array, *, out: Array) -> None:
    sizes = match_dims("T D", x, "T G", gate, "T D", out, dtype="float32")
    if sizes["G"] not in (1, sizes["D"]):
        raise ShapeError(f"gate has {sizes['G']} columns; allowed: 1 or {sizes['D']}")
    one_a_row = int(sizes["G"] == 1)
    args: Args = (address(x), x.strides[0], sizes["T"], sizes["D"], address(gate), gate.strides[0])
    args += (one_a_row, address(out), out.strides[0])
    queue.launch("activation.sigmoid_gate", args, (x, gate, out))


def zero(queue: Queue, *, out: Array) -> None:
    sizes = match_dims("T D", out, dtype="float32")
    args = (address(out), out.strides[0], sizes["T"], sizes["D"])
    queue.launch("activation.zero", args, out)


def relu(queue: Queue, x: Array, *, out: Array) -> None:
    sizes = match_dims("T F", x, "T F", out, dtype="float32")
    args = (address(x), x.strides[0], sizes["T"], sizes["F"], address(out), out.strides[0])
    queue.launch("activation.relu", args, (x, out))


def add(queue: Queue, x: Array, y: Array, *, out: Array) -> None:
    sizes = match_dims("T D", x, "T D", y, "T D", out, dtype="float32")
    args = (address(x), x.strides[0], address(y), y.strides[0], sizes["T"], sizes["D"])
    queue.launch("activation.add", (*args, address(out), out.strides[0]), (x, y, out))


def softcap(queue: Queue, x: Array, cap: float, *, out: Array) -> None:
    sizes = match_dims("T C", x, "T C", out, dtype="float32")
    args = (address(x), x.strides[0], sizes["T"], sizes["C"], float_bits(cap))
    queue.launch("activation.softcap", (*args, address(out), out.strides[0]), (x, out))
