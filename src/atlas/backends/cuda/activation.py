"""Elementwise ops: launches."""

from __future__ import annotations

from atlas.backends.cuda.array import DeviceArray
from atlas.backends.cuda.check import activation_type, match, row_suffix
from atlas.backends.cuda.launch import Queue
from atlas.errors import ShapeError
from atlas.ops.check import match_dims

_THREADS, _WIDTH = 256, 8


def _grid(rows: int, columns: int, suffix: str) -> tuple[int, int]:
    return rows, -(-columns // (_THREADS * (1 if suffix else _WIDTH)))


def _gated(queue: Queue, name: str, gate_up: DeviceArray, out: DeviceArray) -> None:
    sizes = match_dims("T F2", gate_up, "T F", out)
    columns = sizes["F"]
    if sizes["F2"] != 2 * columns:
        raise ShapeError(f"gate_up has {sizes['F2']} columns, out has {columns}; allowed: twice")
    type, suffix = activation_type(gate_up, out), row_suffix(columns, _WIDTH, gate_up, out)
    args = (gate_up, out, columns, gate_up.strides[0], out.strides[0])
    queue.launch(f"{name}_{type}{suffix}", _grid(sizes["T"], columns, suffix), args)


def silu_and_mul(queue: Queue, gate_up: DeviceArray, *, out: DeviceArray) -> None:
    _gated(queue, "silu_and_mul", gate_up, out)


def gelu_tanh_and_mul(queue: Queue, gate_up: DeviceArray, *, out: DeviceArray) -> None:
    _gated(queue, "gelu_tanh_and_mul", gate_up, out)


def _alone(queue: Queue, name: str, x: DeviceArray, out: DeviceArray) -> None:
    sizes = match_dims("T F", x, "T F", out)
    type, suffix = activation_type(x, out), row_suffix(sizes["F"], _WIDTH, x, out)
    args = (x, out, sizes["F"], x.strides[0], out.strides[0])
    queue.launch(f"{name}_{type}{suffix}", _grid(sizes["T"], sizes["F"], suffix), args)


def relu_squared(queue: Queue, x: DeviceArray, *, out: DeviceArray) -> None:
    _alone(queue, "relu_squared", x, out)


def relu(queue: Queue, x: DeviceArray, *, out: DeviceArray) -> None:
    _alone(queue, "relu", x, out)


def sigmoid_gate(queue: Queue, x: DeviceArray, gate: DeviceArray, *, out: DeviceArray) -> None:
    sizes = match_dims("T D", x, "T G", gate, "T D", out)
    dim = sizes["D"]
    if sizes["G"] not in (1, dim):
        raise ShapeError(f"gate has {sizes['G']} columns; allowed: 1 or {dim}")
    name, vectors = "row_gate", [x, out]
    if sizes["G"] == dim > 1:
        name, vectors = "sigmoid_gate", [x, gate, out]
    type, suffix = activation_type(x, gate, out), row_suffix(dim, _WIDTH, *vectors)
    args = (x, gate, out, dim, x.strides[0], gate.strides[0], out.strides[0])
    queue.launch(f"{name}_{type}{suffix}", _grid(sizes["T"], dim, suffix), args)


def zero(queue: Queue, *, out: DeviceArray) -> None:
    rows, dim = match_dims("T D", out).values()
    suffix = row_suffix(dim, _WIDTH, out)
    name = f"zero_{activation_type(out)}{suffix}"
    queue.launch(name, _grid(rows, dim, suffix), (out, dim, out.strides[0]))


def add(queue: Queue, x: DeviceArray, y: DeviceArray, *, out: DeviceArray) -> None:
    sizes = match_dims("T D", x, "T D", y, "T D", out)
    type, suffix = activation_type(x, y, out), row_suffix(sizes["D"], _WIDTH, x, y, out)
    args = (x, y, out, sizes["D"], x.strides[0], y.strides[0], out.strides[0])
    queue.launch(f"add_{type}{suffix}", _grid(sizes["T"], sizes["D"], suffix), args)


def softcap(queue: Queue, x: DeviceArray, cap: float, *, out: DeviceArray) -> None:
    sizes = match("float32", "T C", x, "T C", out)
    args = (x, out, sizes["C"], x.strides[0], out.strides[0], cap)
    queue.launch("softcap_f32", _grid(sizes["T"], sizes["C"], "_scalar"), args)
