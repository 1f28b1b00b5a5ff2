"""Norm, router and choice in one kernel: the bits of the three kernels that it stands for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from atlas_kernels.moe_router_plan import ROUTER_ROWS, ROUTER_TILES, router_variant

from atlas.backends.cuda import linear, norm
from atlas.backends.cuda import moe as moe_ops
from atlas.backends.cuda.array import DeviceArray
from atlas.backends.cuda.pack import DeviceMatrix, MatrixLayout
from tests.kernels.launches import Bench, machine_bench
from tests.kernels.op_launches import BenchQueue

Array = np.ndarray[Any, Any]
LEAST = 99 * 1024


def test_variants() -> None:
    for tile in ROUTER_TILES.values():
        assert tile.shared_bytes <= 227 * 1024
        assert tile.rows_at % 1024 == 0, "the swizzle's pattern"
        assert tile.dim <= 4096, "a thread of rmsnorm has one vector of a row"

    def chosen(rows: int, dim: int, experts: int, room: int = 227 * 1024) -> str | None:
        return router_variant(rows, dim=dim, experts=experts, shared_bytes=room)

    assert chosen(1, 2048, 128) == chosen(8, 2048, 100) == "d2048_e128"
    assert chosen(8, 2048, 256) == "d2048_e256"
    assert chosen(1, 2048, 512) == "d2048_e512"
    assert chosen(1, 2688, 128) == "d4096_e128"
    assert chosen(1, 2048, 256, LEAST) == "d2048_e256"
    assert chosen(1, 4096, 256, LEAST) is None
    assert chosen(ROUTER_ROWS + 1, 2048, 128) is None
    assert chosen(1, 2112, 128) is chosen(1, 4224, 128) is chosen(1, 2048, 513) is None


class Router:
    """A router's arrays in memory, and both forms of running it."""

    def __init__(
        self, bench: Bench, dim: int, experts: int, *, top_k: int = 8, shared: bool = False,
        sigmoid: bool = False, normalize: bool = True, scale: float = 1.0, seed: int = 0,
        arch: str = "sm_90a",
    ) -> None:  # fmt: skip
        self.bench, self.dim, self.experts, self.arch = bench, dim, experts, arch
        self.choices, self.normalize, self.scale = top_k + shared, normalize, scale
        self.scoring = "sigmoid" if sigmoid else "softmax"
        self.random = np.random.default_rng(seed)
        self.columns = experts + 8 * shared
        values = self.normal(self.columns, dim) * dim**-0.5
        values[experts + 1 :] = 0
        values[experts // 2] = values[0]  # equal scores: the lower id
        address = bench.early(bench.put(values, "bf16").address)
        data = DeviceArray(address, (self.columns, 2 * dim), "uint8")
        self.matrix = DeviceMatrix(MatrixLayout("bf16", "bf16", self.columns, dim), data)
        self.norm = self.constant(1 + self.normal(dim) / 4)
        self.bias = self.constant(self.normal(experts) / 8) if sigmoid else None

    def normal(self, *shape: int) -> Array:
        return self.random.standard_normal(shape).astype(np.float32)

    def constant(self, values: Array) -> DeviceArray:
        return DeviceArray(self.bench.early(self.bench.memory.put(values)), values.shape, "float32")

    def rows(self, count: int) -> Array:
        """Rows of a residual stream, of different lengths."""
        return self.normal(count, self.dim) * (1 + np.arange(count, dtype=np.float32)[:, None])

    def run(
        self, x: Array, slots: Array | None, *, at_once: bool, times: int = 1
    ) -> tuple[list[Array], list[str]]:
        """normed, scores, ids and weights, and the kernels that ran."""
        bench, rows = self.bench, len(x)
        queue = BenchQueue(bench, self.arch)
        counter = bench.memory.put(np.zeros(1, np.int32))
        queue.scratch = lambda nbytes, zeroed: counter  # type: ignore[method-assign]
        source = bench.put(x, "bf16", pad=8)
        normed = bench.empty((rows, self.dim), "bf16", pad=16)
        scores = bench.empty((rows, self.columns), "f32", pad=-self.columns % 4 + 4)
        ids = np.full((rows, self.choices), -7, np.int32)
        weights = np.full(ids.shape, np.nan, np.float32)
        ids_at, weights_at = bench.memory.put(ids), bench.memory.put(weights)
        given = None
        if slots is not None:
            given = DeviceArray(bench.put_early(slots), (rows,), "int32")

        def array(buffer: Any, type: str) -> DeviceArray:
            item = 2 if type == "bfloat16" else 4
            return DeviceArray(buffer.address, buffer.shape, type, (buffer.stride, item))

        x_on, normed_on = array(source, "bfloat16"), array(normed, "bfloat16")
        scores_on = array(scores, "float32")
        chosen = {
            "ids": DeviceArray(ids_at, ids.shape, "int32"),
            "weights": DeviceArray(weights_at, ids.shape, "float32"),
        }
        for _ in range(times):
            if at_once:
                moe_ops.moe_router(
                    queue, x_on, self.norm, 1e-6, self.matrix, self.experts, self.normalize,
                    self.scoring, self.bias, self.scale, 1, 1, given, normed=normed_on,
                    scores=scores_on, **chosen,
                )  # fmt: skip
                assert bench.memory.get(counter, np.zeros(1, np.int32)) == 0
                continue
            norm.rmsnorm(queue, x_on, self.norm, 1e-6, out=normed_on)
            linear.linear(queue, normed_on, self.matrix, out=scores_on)
            joins = self.columns > self.experts
            moe_ops.moe_route(
                queue, scores_on[:, : self.experts], self.normalize, self.scoring, self.bias,
                self.scale, 1, 1, scores_on[:, self.experts : self.experts + 1] if joins else None,
                given, **chosen,
            )  # fmt: skip
        results = [bench.get(normed), bench.get(scores)]
        results += [bench.memory.get(ids_at, ids), bench.memory.get(weights_at, weights)]
        return results, queue.launched

    def compare(self, x: Array, slots: Array | None = None, times: int = 1) -> list[Array]:
        """The results, which both forms must have to the bit."""
        got, launched = self.run(x, slots, at_once=True, times=times)
        assert len(launched) == times
        form = "moe_router_wgmma_d" if self.arch == "sm_90a" else "moe_router_d"
        assert launched[0].startswith(form)
        want, apart = self.run(x, slots, at_once=False)
        assert [name.split("_")[0] for name in apart] == ["rmsnorm", "gemm", "moe"]
        for one, other in zip(got, want, strict=True):
            np.testing.assert_array_equal(one.view(np.int32), other.view(np.int32))
        return got


@pytest.fixture(autouse=True)
def always_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that the kernels can do, whether it is fastest or not."""
    monkeypatch.setattr(moe_ops, "_AT_ONCE_ROWS", ROUTER_ROWS)
    monkeypatch.setattr(moe_ops, "_WGMMA_EXPERTS", 512)


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8])
def test_softmax_of_an_odd_number_of_experts(bench: Bench, rows: int) -> None:
    arch = "sm_80" if rows == 3 else "sm_90a"
    router = Router(bench, 384, 67, normalize=rows > 2, seed=rows, arch=arch)
    _, scores, ids, weights = router.compare(router.rows(rows))
    best = np.argsort(-scores, axis=1, kind="stable")[:, :8]
    np.testing.assert_array_equal(ids, best)
    if rows > 2:
        np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-6)


@pytest.mark.parametrize("rows", [1, 8])
def test_rows_as_long_as_a_model_has_them(bench: Bench, rows: int) -> None:
    arch = "sm_90a" if rows == 1 else "sm_80"
    router = Router(bench, 2048, 128 if rows == 1 else 20, seed=rows, arch=arch)
    router.compare(router.rows(rows))


def test_longer_rows(bench: Bench) -> None:
    """With half a step of the loop at the end."""
    router = Router(bench, 2688, 12, top_k=3, shared=True)
    tile = ROUTER_TILES["d4096_e256"]
    assert tile.shared_bytes > LEAST
    router.compare(router.rows(2))


@pytest.mark.parametrize(
    ("sigmoid", "arch"), [(False, "sm_90a"), (True, "sm_90a"), (True, "sm_80")]
)
def test_padding_and_a_shared_expert(bench: Bench, sigmoid: bool, arch: str) -> None:
    router = Router(bench, 256, 24, top_k=4, shared=True, sigmoid=sigmoid, scale=2.5, arch=arch)
    x, slots = router.rows(6), np.array([3, -1, 0, 90, -1, 4], np.int32)
    x[1] = np.nan
    *_, ids, weights = router.compare(x, slots)
    assert (ids[slots < 0] == -1).all()
    assert (weights[slots < 0] == 0).all()
    assert (ids[slots >= 0, -1] == 24).all()
    assert (weights[slots >= 0] > 0).all()


def test_it_may_run_again(bench: Bench) -> None:
    """As a graph that is replayed: the counter is zero again."""
    for arch in ("sm_80", "sm_90a"):
        router = Router(bench, 128, 40, sigmoid=True, arch=arch)
        router.compare(router.rows(2), times=3)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("order", [1, -1])
def test_no_barrier_is_missing(ptx_of: Callable[[str], str], order: int, arch: str) -> None:
    bench = machine_bench(ptx_of, order)
    router = Router(bench, 256, 17, top_k=2, arch=arch)
    router.compare(router.rows(4))


def test_a_row_has_its_bits_alone(bench: Bench) -> None:
    router = Router(bench, 512, 30)
    x = router.rows(7)
    together = router.compare(x)
    for row in (0, 4, 6):
        alone = router.compare(x[row : row + 1])
        for one, all_of_them in zip(alone, together, strict=True):
            np.testing.assert_array_equal(one[0], all_of_them[row])


def test_more_rows_go_through_three_kernels(ptx_of: Callable[[str], str]) -> None:
    router = Router(machine_bench(ptx_of), 128, 9, top_k=2)
    x = router.rows(9)
    got, launched = router.run(x, None, at_once=True)
    assert launched == ["rmsnorm_bf16", "gemm_step_bf16_c16_16", "moe_route_e128"]
    first, _ = router.run(x[:8], None, at_once=True)
    for one, other in zip(first, got, strict=True):
        np.testing.assert_array_equal(one, other[:8])
