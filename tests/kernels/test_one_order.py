"""A matrix has one order of summation: a row's bits are the same alone, in company, in every op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from atlas_kernels.gemm_step_plan import CHAINS, chain_length

from atlas.backends.cuda import activation, linear, norm_linear
from atlas.backends.cuda.array import DeviceArray
from atlas.backends.cuda.norm import rmsnorm
from atlas.backends.cuda.pack import DeviceMatrix, MatrixLayout
from tests.kernels.launches import Bench, Buffer, machine_bench, rounded
from tests.kernels.op_launches import BenchQueue

Array = np.ndarray[Any, Any]
K, ROWS = 2048, 10


class Matrix:
    """A matrix of a width that has several chains, on a device; rows of x, a norm and a bias."""

    def __init__(self, ptx_of: Callable[[str], str], n: int, arch: str) -> None:
        self.bench: Bench = machine_bench(ptx_of)
        self.n, self.queue, random = n, BenchQueue(self.bench, arch), np.random.default_rng(n)
        weights, self.x, norm, bias = (
            random.standard_normal(shape).astype(np.float32)
            for shape in ((n, K), (ROWS, K), (K,), (-(-n // 4) * 4,))
        )
        self.weights, self.x = rounded(weights, "bf16"), rounded(self.x, "bf16")
        address = self.bench.early(self.bench.put(weights, "bf16").address)
        data = DeviceArray(address, (n, 2 * K), "uint8")
        self.matrix = DeviceMatrix(MatrixLayout("bf16", "bf16", n, K), data)
        self.norm, self.bias = self.constant(norm), self.constant(bias)[:n]

    def constant(self, values: Array) -> DeviceArray:
        return DeviceArray(self.bench.early(self.bench.memory.put(values)), values.shape, "float32")

    def buffer(self, rows: int, columns: int, type: str) -> tuple[Buffer, DeviceArray]:
        """Rows with room for whole quads."""
        wide = self.bench.put(np.zeros((rows, -(-columns // 8) * 8), np.float32), type)
        name, item = {"bf16": ("bfloat16", 2), "f32": ("float32", 4)}[type]
        return wide, DeviceArray(wide.address, (rows, columns), name, (wide.stride, item))

    def run(self, op: str, rows: slice, type: str = "bf16") -> Array:
        """What an op makes of these rows of x."""
        source = self.bench.put(self.x[rows], "bf16")
        x = DeviceArray(source.address, source.shape, "bfloat16")
        count, args = len(self.x[rows]), (self.matrix, self.bias)
        gate_up = self.buffer(count, self.n, "bf16")[1]
        wide, out = self.buffer(count, self.n // 2 if "gated" in op else self.n, type)
        normed = self.buffer(count, K, "bf16")[1]
        options = {"gate_up": gate_up, "out": out}
        if op == "linear_gated":
            linear.linear_gated(self.queue, x, *args, "silu", **options)
        elif op == "rmsnorm_linear_gated":
            norm_linear.rmsnorm_linear_gated(
                self.queue, x, self.norm, 1e-5, *args, "silu", normed=normed, **options
            )
        elif op == "rmsnorm_linear":
            of_norm = (x, self.norm, 1e-5)
            norm_linear.rmsnorm_linear(self.queue, *of_norm, *args, normed=normed, out=out)
        else:
            getattr(linear, op)(self.queue, x, *args, out=out)
        return self.bench.get(wide)[:, : out.shape[1]]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize(
    ("op", "n"),
    [
        ("linear", 1),
        ("linear", 23),
        ("linear_add", 12),
        ("linear_relu", 12),
        ("rmsnorm_linear", 17),
        ("linear_gated", 16),
        ("linear_gated", 12),  # gates that are no quads: a product, then the gate
        ("rmsnorm_linear_gated", 16),
        ("rmsnorm_linear_gated", 24),
        ("rmsnorm_linear_gated", 12),
    ],
)
def test_a_row_alone_and_in_company(
    ptx_of: Callable[[str], str], op: str, n: int, arch: str
) -> None:
    assert chain_length(n, K) == K // CHAINS
    matrix = Matrix(ptx_of, n, arch)
    for type in ("bf16", "f32") if op in ("linear", "rmsnorm_linear") else ("bf16",):
        full = matrix.run(op, slice(None), type)
        assert np.any(full, axis=0).all()
        for rows in (slice(3, 4), slice(2, 10)):
            np.testing.assert_array_equal(matrix.run(op, rows, type), full[rows])


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("n", [12, 16])
def test_every_form_of_a_gated_matrix_is_one_chain(
    ptx_of: Callable[[str], str], n: int, arch: str
) -> None:
    """By the definition: steps of 16, ascending, in one float32 sum, as the machine adds them."""
    matrix = Matrix(ptx_of, n, arch)
    sums = np.zeros((ROWS, n), np.float32)
    for first in range(0, K, 16):
        exact = sums.astype(np.float64)
        for k in range(first, first + 16):
            exact += matrix.x[:, k, None].astype(np.float64) * matrix.weights[:, k]
        sums = exact.astype(np.float32)
    bias = matrix.bench.memory.get(matrix.bias.address, np.empty(n, np.float32))
    stored = matrix.bench.put(sums + bias, "bf16", pad=-n % 8)
    gate_up = DeviceArray(stored.address, (ROWS, n), "bfloat16", (stored.stride, 2))
    wide, out = matrix.buffer(ROWS, n // 2, "bf16")
    activation.silu_and_mul(matrix.queue, gate_up, out=out)
    want = matrix.bench.get(wide)[:, : n // 2]
    for rows in (slice(None), slice(1, 2)):
        np.testing.assert_array_equal(matrix.run("linear_gated", rows), want[rows])


def test_a_normed_row_is_one_of_the_two_ops(ptx_of: Callable[[str], str]) -> None:
    matrix = Matrix(ptx_of, 20, "sm_90a")
    got = matrix.run("rmsnorm_linear", slice(4, 5), "f32")
    x = DeviceArray(matrix.bench.put(matrix.x[4:5], "bf16").address, (1, K), "bfloat16")
    kept, normed = matrix.buffer(1, K, "bf16")
    rmsnorm(matrix.queue, x, matrix.norm, 1e-5, out=normed)
    matrix.x = matrix.bench.get(kept)
    np.testing.assert_array_equal(got, matrix.run("linear", slice(None), "f32"))
