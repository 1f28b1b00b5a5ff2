"""Which of cuBLASLt's algorithms serves a product of many rows, and what it is called with."""

from __future__ import annotations

import ctypes
import gc
import time
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from atlas_kernels.gemm_step_plan import CHAINS, chain_length

from atlas.backends.cuda import linear, products
from atlas.backends.cuda.array import DeviceArray
from atlas.backends.cuda.device import CudaDevice
from atlas.backends.cuda.launch import Queue, Recording
from atlas.backends.cuda.memory import Workspace
from atlas.backends.cuda.pack import DeviceMatrix, MatrixLayout
from atlas.backends.cuda.products import Kind, Launches, Plan, Products
from tests.backends.cuda.host_cublaslt import (
    ASCENDING,
    DESCENDING,
    ONWARD,
    HostCublasLt,
    HostQueue,
    chain,
)
from tests.backends.cuda.host_gpu import HostGpu, on_host
from tests.kernels.launches import decode, encode

SLOW, FAST = np.array([1]), np.array([2])
ALGORITHM = 12  # among the arguments of a call
N, K, ONE_CHAIN_K = 64, 2048, 1024
CHAIN = K // CHAINS
ROWS, STRIDE = 300, K + 64  # of x: more than two slabs, and what lies between its rows


class Library:
    """What stands for cuBLASLt: notes who is called, and ``SLOW`` takes its time."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        words = [ctypes.c_void_p] * 16

        def matmul(*args: int) -> int:
            self.calls.append(args[ALGORITHM])
            time.sleep(0.02 if args[ALGORITHM] == SLOW[0] else 0)
            return 0

        self._matmul = ctypes.CFUNCTYPE(ctypes.c_int, *words)(matmul)
        self.function = ctypes.cast(self._matmul, ctypes.c_void_p).value

    def arguments(
        self, product: Any, algorithm: Any, *addresses: int, adds: bool
    ) -> tuple[int, ...]:
        return tuple(int(algorithm[0]) if i == ALGORITHM else 1 for i in range(15))


def _queue(recording: Recording | None) -> Queue:
    driver, kernels = SimpleNamespace(launch_address=1), SimpleNamespace(load=lambda names: None)
    device: Any = SimpleNamespace(driver=driver, kernels=kernels, synchronize=lambda: None)
    device.num_sms, device.capability = 132, (9, 0)
    device.ran = []

    def run(launches: Any) -> None:
        device.ran.append(len(launches))
        launches.run(1)

    device.run = run
    workspace: Any = SimpleNamespace(address=lambda nbytes, **options: 4096)
    return Queue(device, workspace, recording)


def _put(queue: Queue, library: Library, kind: Kind, plan: Plan, rows: int) -> None:
    stand_in: Any = SimpleNamespace(library=library)
    values = DeviceArray(4096, (kind.rows, kind.cols), "bfloat16")
    weight: Any = SimpleNamespace(is_quantized=False, values=values)
    x = DeviceArray(4096, (rows, kind.cols), "bfloat16")
    out = DeviceArray(4096, (rows, kind.rows), "bfloat16")
    Launches(stand_in, queue, kind, plan).put(x, weight, None, out)


def test_the_fastest_of_equal_algorithms_serves() -> None:
    library, recording = Library(), Recording()
    plan = Plan(False, {192: (SLOW, FAST), 1024: (SLOW,)})
    queue = _queue(recording)

    def put(rows: int) -> int:
        _put(queue, library, Kind("bf16", 64, 128, "bfloat16", False), plan, rows)
        launch: Any = recording.launches[-1]
        return int(launch.args[ALGORITHM])

    assert put(200) == FAST[0]
    timed = len(library.calls)
    assert {SLOW[0], FAST[0]} == set(library.calls)
    lists: Any = queue.device
    assert set(lists.ran) == {2}, "calls follow each other without Python in between"
    assert put(1000) == FAST[0]
    assert len(library.calls) == timed, "algorithms for 192 to 1,023 rows are timed once"
    assert put(5000) == SLOW[0]
    assert put(100) == FAST[0], "fewer rows than all take the least"
    assert len(recording.launches) == 4, "what is timed is not recorded"


def test_the_chains_of_a_product_are_timed_together() -> None:
    library, recording = Library(), Recording()
    queue, kind = _queue(recording), Kind("bf16", N, K, "bfloat16", False)
    _put(queue, library, kind, Plan(True, {192: (SLOW, FAST)}), 200)
    lists: Any = queue.device
    assert set(lists.ran) == {2 * CHAINS}
    *calls, finish = recording.launches
    algorithms: Any = [call.args[ALGORITHM] for call in calls]  # type: ignore[union-attr]
    assert algorithms == [FAST[0]] * CHAINS
    assert finish.kernel == "gemm_finish"  # type: ignore[union-attr]


class Matrix:
    """A bf16 matrix [N, k] on a GPU that is the host, rows for it, and a cuBLASLt."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, device: CudaDevice, k: int) -> None:
        self.k, self.cublaslt = k, HostCublasLt()
        monkeypatch.setattr(products, "CublasLt", lambda: self.cublaslt.install(monkeypatch))
        monkeypatch.setattr(products, "Queue", HostQueue)
        monkeypatch.setattr(products, "WORKSPACE_BYTES", 4096)
        monkeypatch.setattr(products, "_SUMS_BYTES", 128 * N * 4)  # room for slabs of 128 rows
        self.products = Products(device)
        self.workspace = Workspace(device, 1 << 20, 256)
        self.queue = HostQueue(device, self.workspace)
        self._rng, self._held = np.random.default_rng(k), []
        self.x = self._random(ROWS, STRIDE)[:, :k]
        values = self._random(N, k)
        raw = DeviceArray(values.address, (N, 2 * k), "uint8")
        self.weight = DeviceMatrix(MatrixLayout("bf16", "bf16", N, k), raw)
        self.bias = self.array(self._rng.standard_normal(N).astype(np.float32), "float32")

    def array(self, values: Any, dtype: str) -> DeviceArray:
        """An array with these values at a multiple of 256 bytes."""
        kept = np.empty(values.nbytes + 256, np.uint8)
        self._held.append(kept)
        place = kept.ctypes.data + -kept.ctypes.data % 256
        made = DeviceArray(place, values.shape, dtype)
        on_host(made)[...] = values
        return made

    def _random(self, *shape: int) -> DeviceArray:
        values = self._rng.standard_normal(shape).astype(np.float32)
        return self.array(encode(values, "bf16"), "bfloat16")

    def outputs(self, dtype: str) -> tuple[DeviceArray, DeviceArray]:
        """Two that hold the same."""
        start = self._rng.standard_normal((ROWS, N)).astype(np.float32)
        held = encode(start, "bf16" if dtype == "bfloat16" else "f32")
        return self.array(held, dtype), self.array(held, dtype)

    def step(
        self, x: DeviceArray, out: DeviceArray, bias: DeviceArray | None, *, adds: bool = False
    ) -> None:
        """The order of ``gemm_step_plan``."""
        rows, w = (decode(on_host(array), "bf16") for array in (x, self.weight.values))
        length = chain_length(N, self.k)
        parts = [slice(first, first + length) for first in range(0, self.k, length)]
        total = chain(rows[:, parts[0]], w[:, parts[0]])
        for part in parts[1:]:
            total = total + chain(rows[:, part], w[:, part])
        if bias is not None:
            total = total + on_host(bias)
        if adds:
            total = decode(encode(total, "bf16"), "bf16") + decode(on_host(out), "bf16")
        on_host(out)[...] = encode(total, "bf16" if out.dtype == "bfloat16" else "f32")

    def run(self, out: DeviceArray, bias: DeviceArray | None = None, *, adds: bool = False) -> bool:
        """As ``linear`` does it."""

        def step(queue: Queue, x: DeviceArray, out: DeviceArray) -> None:
            assert len(x) <= 128
            self.step(x, out, bias)

        residual = out if adds else None
        return self.products.run(self.queue, self.x, self.weight, bias, residual, out, step=step)


@pytest.fixture
def device(gpu: HostGpu) -> Iterator[CudaDevice]:
    made = CudaDevice()
    yield made
    made.close()


@pytest.fixture
def matrix(
    request: pytest.FixtureRequest, device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Matrix]:
    """Of four chains, or as many columns as the parameter says."""
    made = Matrix(monkeypatch, device, getattr(request, "param", K))
    yield made
    made.workspace.close()


one_chain = pytest.mark.parametrize("matrix", [ONE_CHAIN_K], indirect=True)


def test_which_kinds_have_chains() -> None:
    assert Kind("bf16", N, K, "bfloat16", False).num_chains == CHAINS
    assert Kind("bf16", N, ONE_CHAIN_K, "bfloat16", False).num_chains == 1
    assert Kind("q8_0", N, K, "bfloat16", False).num_chains == 1
    assert Kind("bf16", N, K, "bfloat16", False, is_whole=True).num_chains == 1


@pytest.mark.parametrize(
    ("dtype", "has_bias", "adds"),
    [
        ("bfloat16", False, False),
        ("bfloat16", True, False),
        ("bfloat16", False, True),
        ("bfloat16", True, True),
        ("float32", False, False),
        ("float32", True, False),
    ],
)
def test_each_chain_is_a_call_that_adds(
    matrix: Matrix, dtype: str, has_bias: bool, adds: bool
) -> None:
    matrix.cublaslt.offered = [ASCENDING]
    out, want = matrix.outputs(dtype)
    bias = matrix.bias if has_bias else None
    assert matrix.run(out, bias, adds=adds)
    matrix.step(matrix.x, want, bias, adds=adds)
    np.testing.assert_array_equal(on_host(out), on_host(want))

    assert matrix.cublaslt.asked == {(N, CHAIN, K)}
    slabs = (0, 128, 256)
    expected = [
        (
            matrix.weight.data.address + i * 2 * CHAIN,
            matrix.x.address + first * 2 * STRIDE + i * 2 * CHAIN,
            CHAIN,
            float(i > 0),
        )
        for first in slabs
        for i in range(CHAINS)
    ]
    calls = matrix.cublaslt.calls[-len(expected) :]
    assert [(call["w"], call["x"], call["k"], call["beta"]) for call in calls] == expected
    sums = matrix.queue.scratch(1) + products.WORKSPACE_BYTES
    assert {call["out"] for call in calls} == {sums}, "of every slab, so that they stay in L2"
    assert matrix.queue.launched == ["gemm_finish"] * len(slabs)
    (plan,) = matrix.products.plans.values()
    assert plan is not None
    assert plan.is_finished


@one_chain
@pytest.mark.parametrize(("adds", "then"), [(False, []), (True, ["add_bf16"] * 2)])
def test_one_chain_is_one_call(matrix: Matrix, adds: bool, then: list[str]) -> None:
    matrix.cublaslt.offered = [ASCENDING]
    out, want = matrix.outputs("bfloat16")
    assert matrix.run(out, adds=adds)
    matrix.step(matrix.x, want, None, adds=adds)
    np.testing.assert_array_equal(on_host(out), on_host(want))
    assert matrix.cublaslt.asked == {(N, ONE_CHAIN_K, ONE_CHAIN_K)}
    last = matrix.cublaslt.calls[-1]
    assert (last["w"], last["k"], last["beta"]) == (matrix.weight.data.address, ONE_CHAIN_K, 0)
    assert {call["beta"] for call in matrix.cublaslt.calls} == {0}
    assert (last["out"] == out.address) is not adds
    assert matrix.queue.launched == then


def test_a_gated_matrix_is_one_chain_here_too(
    matrix: Matrix, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is in the kernels that gate: of a shape that has several chains otherwise."""
    matrix.cublaslt.offered = [ASCENDING]
    weights = decode(on_host(matrix.weight.values), "bf16")

    def step(_: Queue, x: DeviceArray, weight: DeviceMatrix, epilogue: Any, out: Any) -> None:
        assert epilogue.chain(weight.rows, weight.cols) == K
        on_host(out)[...] = encode(chain(decode(on_host(x), "bf16"), weights), "bf16")

    monkeypatch.setattr(linear, "step_product", step)
    monkeypatch.setattr(linear.gates, "silu_and_mul", lambda queue, gate_up, out: None)
    (gate_up, want), (out, _) = matrix.outputs("bfloat16"), matrix.outputs("bfloat16")
    places = {"gate_up": gate_up, "out": out[:, : N // 2]}
    with monkeypatch.context() as patched:
        patched.setattr(matrix.queue.device, "products", matrix.products)
        linear.linear_gated(matrix.queue, matrix.x, matrix.weight, None, "silu", **places)
    step(matrix.queue, matrix.x, matrix.weight, linear.Epilogue(is_whole=True), want)
    np.testing.assert_array_equal(on_host(gate_up), on_host(want))
    assert matrix.cublaslt.asked == {(N, K, K)}
    assert [kind.is_whole for kind in matrix.products.plans] == [True]


def test_what_sums_otherwise_is_refused(matrix: Matrix) -> None:
    """A kernel that starts with what C holds, too: its chain goes on where ours ends."""
    matrix.cublaslt.offered = [DESCENDING, ONWARD]
    out, kept = matrix.outputs("bfloat16")
    assert not matrix.run(out)
    np.testing.assert_array_equal(on_host(out), on_host(kept))
    assert matrix.products.disclosed() == [
        f"prompts, bf16 [{N}, {K}]: step GEMM, 128 rows at a time"
    ]


def test_only_equal_algorithms_are_timed(matrix: Matrix) -> None:
    matrix.cublaslt.offered = [DESCENDING, ONWARD, ASCENDING]
    out, _ = matrix.outputs("bfloat16")
    assert matrix.run(out)
    (plan,) = matrix.products.plans.values()
    assert plan is not None
    assert {int(one[0]) for own in plan.algorithms.values() for one in own} == {ASCENDING}


@one_chain
def test_one_chain_may_start_with_what_is_there(matrix: Matrix) -> None:
    matrix.cublaslt.offered = [ONWARD]
    assert matrix.run(matrix.outputs("bfloat16")[0])


def test_recorded_calls_keep_what_they_point_to(matrix: Matrix, device: CudaDevice) -> None:
    recording, kind = Recording(), Kind("bf16", N, K, "bfloat16", False)
    plan = Plan(True, {0: (np.array([ASCENDING]),)})
    plan.fastest[0] = plan.algorithms[0][0]
    queue, library = (
        Queue(device, matrix.workspace, recording),
        weakref.ref(matrix.products.library),
    )
    x, out = matrix.x[:100], matrix.outputs("bfloat16")[0][:100]
    Launches(matrix.products, queue, kind, plan).put(x, matrix.weight, None, out)
    del matrix.products, plan, queue
    gc.collect()
    assert library() is not None
    recording.launches.pop()  # gemm_finish
    device.run(recording.compile(device))
    assert [call["beta"] for call in matrix.cublaslt.calls] == [0, 1, 1, 1]
