"""Matrix products: the step GEMM up to 128 rows, above it cuBLASLt where that gives the same bits.

A matrix has one order of summation, one chain or several (``atlas_kernels.gemm_step_plan``), so a
row's result does not depend on the rows beside it. cuBLASLt serves a matrix only with an algorithm
that was seen to give these bits, chain by chain (``products``); otherwise rows go through the step
GEMM 128 at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from atlas_kernels.gemm_step_plan import (
    BOX_K,
    MMA_TILES,
    RUNGS,
    TILES,
    chain_length,
    mma_form,
    rung,
    variant,
)
from atlas_kernels.quant_plan import (
    CELL_ROWS,
    QUANT_MMA_TILES,
    QUANT_TILES,
    quant_form,
    quant_rung,
)

from atlas.backends.cuda import activation as gates
from atlas.backends.cuda.array import DeviceArray
from atlas.backends.cuda.check import Args, is_aligned, match, require
from atlas.backends.cuda.launch import Queue
from atlas.backends.cuda.pack import DeviceMatrix
from atlas.errors import ShapeError
from atlas.ops.check import match_dims

STEP_ROWS = RUNGS[-1]
"""Rows that the step GEMM takes at once."""
_QUAD = 4  # columns that the step GEMM writes at once
_GATES = {"silu": 0, "gelu_tanh": 1}


@dataclass(frozen=True, slots=True, eq=False)
class Epilogue:
    """What follows the sums: bias, then residual, ReLU or gate; then one rounding.

    ``gate`` is a key of ``_GATES``: the matrix holds [gate; up], ``out`` has half its columns.
    ``is_whole``: the matrix is one chain, whatever its shape (``atlas_kernels.gemm_step_plan``).
    """

    bias: DeviceArray | None = None
    residual: DeviceArray | None = None
    gate: str | None = None
    relu: bool = False
    is_whole: bool = False

    def __post_init__(self) -> None:
        if self.gate is not None and self.gate not in _GATES:
            raise ShapeError(f"activation {self.gate!r}; allowed: {', '.join(_GATES)}")

    def chain(self, n: int, k: int) -> int:
        """Elements of K in a chain of the bf16 matrix [n, k] that this follows."""
        if self.is_whole or self.gate is not None:
            return k
        length: int = chain_length(n, k)
        return length


def linear(
    queue: Queue,
    x: DeviceArray,
    weight: DeviceMatrix,
    bias: DeviceArray | None = None,
    *,
    out: DeviceArray,
) -> None:
    check_product(x, weight, bias, out, weight.rows)
    _product(queue, x, weight, Epilogue(bias), out)


def linear_add(
    queue: Queue,
    x: DeviceArray,
    weight: DeviceMatrix,
    bias: DeviceArray | None = None,
    *,
    out: DeviceArray,
) -> None:
    check_product(x, weight, bias, out, weight.rows)
    match("bfloat16", "T N", out)
    _product(queue, x, weight, Epilogue(bias, residual=out), out)


def linear_relu(
    queue: Queue,
    x: DeviceArray,
    weight: DeviceMatrix,
    bias: DeviceArray | None = None,
    *,
    out: DeviceArray,
) -> None:
    check_product(x, weight, bias, out, weight.rows)
    match("bfloat16", "T N", out)
    if len(out) <= STEP_ROWS:
        step_product(queue, x, weight, Epilogue(bias, relu=True), out)
        return
    _product(queue, x, weight, Epilogue(bias), out)
    gates.relu(queue, out, out=out)


def linear_gated(
    queue: Queue,
    x: DeviceArray,
    weight: DeviceMatrix,
    bias: DeviceArray | None,
    activation: str,
    *,
    gate_up: DeviceArray,
    out: DeviceArray,
) -> None:
    columns, gated = weight.rows // 2, Epilogue(bias, gate=activation)
    check_product(x, weight, bias, out, columns)
    match("bfloat16", "T F", out, "T F2", gate_up)
    fused = columns % (CELL_ROWS if weight.is_quantized else _QUAD) == 0
    if fused and out.shape[0] <= STEP_ROWS:
        step_product(queue, x, weight, gated, out)
        return
    _product(queue, x, weight, Epilogue(bias, is_whole=True), gate_up)
    gate = gates.silu_and_mul if activation == "silu" else gates.gelu_tanh_and_mul
    gate(queue, gate_up, out=out)


def check_product(
    x: DeviceArray, weight: DeviceMatrix, bias: DeviceArray | None, out: DeviceArray, columns: int
) -> None:
    """Raise ShapeError where arrays do not fit a product with ``columns`` columns."""
    match_dims(f"T {weight.cols}", x, f"T {columns}", out)
    match("bfloat16", "T K", x)
    if bias is not None:
        match("float32", f"{weight.rows}", bias)
        require(bias.address % 16 == 0, "a bias' address", bias.address, "multiples of 16")
    if out.dtype not in ("bfloat16", "float32"):
        raise ShapeError(f"out is {out.dtype}; allowed: bfloat16 or float32")
    if not is_aligned(16, x) or not is_aligned(8 if out.dtype == "bfloat16" else 16, out):
        raise ShapeError(f"rows of x {x} and out {out} must lie at multiples of 16 bytes")
    if columns % _QUAD and len(out) > 1 and out.strides[0] < _padded(columns) * out.itemsize:
        raise ShapeError(f"out {out} lacks room for rows of {_padded(columns)} columns")


def _padded(columns: int) -> int:
    return -(-columns // _QUAD) * _QUAD


def _product(
    queue: Queue,
    x: DeviceArray,
    weight: DeviceMatrix,
    epilogue: Epilogue,
    out: DeviceArray,
) -> None:
    """Any number of rows."""
    rows = len(x)
    if rows > STEP_ROWS:
        products = queue.device.products

        def step(queue: Queue, x: DeviceArray, out: DeviceArray) -> None:
            step_product(queue, x, weight, replace(epilogue, residual=None), out)

        if products is not None and products.run(
            queue, x, weight, epilogue.bias, epilogue.residual, out, step=step,
            is_whole=epilogue.is_whole,
        ):  # fmt: skip
            return
    for first in range(0, rows, STEP_ROWS):
        part = slice(first, first + STEP_ROWS)
        residual = None if epilogue.residual is None else epilogue.residual[part]
        own = replace(epilogue, residual=residual)
        step_product(queue, x[part], weight, own, out[part])


def store_option(epilogue: Epilogue, out: DeviceArray) -> int:
    """What the kernels call ``option``."""
    if epilogue.gate is not None:
        return _GATES[epilogue.gate]
    return 2 if epilogue.relu else int(out.dtype == "float32")


def step_product(
    queue: Queue, x: DeviceArray, weight: DeviceMatrix, epilogue: Epilogue, out: DeviceArray
) -> None:
    """Up to ``STEP_ROWS`` rows by the step GEMM."""
    _step_product(queue, x, weight, epilogue, out)
    queue.reading = weight.data.nbytes


def _step_product(
    queue: Queue, x: DeviceArray, weight: DeviceMatrix, epilogue: Epilogue, out: DeviceArray
) -> None:
    (m, k), n, gated = x.shape, weight.rows, epilogue.gate is not None
    residual = epilogue.residual
    shared: Args = (
        0 if epilogue.bias is None else epilogue.bias,
        0 if residual is None else residual,
        out, n, k,
    )  # fmt: skip
    strides = (0 if residual is None else residual.strides[0], out.strides[0])
    option = store_option(epilogue, out)
    if weight.is_quantized:
        _quantised_product(queue, x, weight, (*shared, m), (*strides, option), gated=gated)
        return
    chain = epilogue.chain(n, k)
    shared = (*shared, chain, m)
    if queue.device.arch == "sm_90a" and k % BOX_K == 0:
        name = variant(n, m, gated=gated, chained=chain < k)
        tile = TILES[name]
        maps = (
            queue.tensor_map(weight.values, *tile.weight_view(n, k)),
            queue.tensor_map(x, *tile.row_view(m, k, x.strides[0])),
        )
        args: Args = (*maps, *shared, *strides, option)
        queue.launch(f"gemm_step_bf16_{name}", (tile.grid(n), 1), args, (weight, x))
        return
    args = (weight.data, x, *shared, 2 * k, x.strides[0], *strides, option)
    name = f"{mma_form(n, gated=gated)}_{rung(m)}"
    queue.launch(f"gemm_step_mma_bf16_{name}", (MMA_TILES[name].grid(n), 1), args, weight)


def _quantised_product(
    queue: Queue, x: DeviceArray, weight: DeviceMatrix, shared: Args, last: Args, *, gated: bool
) -> None:
    """``step_product`` of quantised weights; every form sums alike."""
    n, size = weight.rows, quant_rung(len(x))
    if queue.device.arch == "sm_90a":
        name = f"{weight.format}_{quant_form(n, gated=gated)}_{size}"
        tile = QUANT_TILES[name]
        args: Args = (weight.data, queue.tensor_map(x, (tile.rows, 64)), *shared, *last)
        queue.launch(f"gemm_step_{name}", (tile.grid(n), 1), args, (weight, x))
        return
    name = f"{weight.format}_{'gated' if gated else 'plain'}_{size}"
    args = (weight.data, x, *shared, x.strides[0], *last)
    queue.launch(f"gemm_step_mma_{name}", (QUANT_MMA_TILES[name].grid(n), 1), args, weight)
