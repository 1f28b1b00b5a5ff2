"""Norm, router and choice in one kernel: the bits of the three kernels that it stands for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from atlas_kernels.gemm_step_plan import CHAINS, chain_length
from atlas_kernels.moe_plan import NOT_YET
from atlas_kernels.moe_router_plan import (
    ROUTER_COLUMNS,
    ROUTER_ROWS,
    ROUTER_TILES,
    router_variant,
)

from atlas.backends.cuda import linear, norm
from atlas.backends.cuda import moe as moe_ops
from atlas.backends.cuda.array import DeviceArray
from atlas.backends.cuda.pack import DeviceMatrix, MatrixLayout
from tests.kernels.launches import Bench, Buffer, decode, machine_bench
from tests.kernels.op_launches import BenchQueue

Array = np.ndarray[Any, Any]
LEAST = 99 * 1024


def test_variants() -> None:
    for tile in ROUTER_TILES.values():
        assert tile.shared_bytes <= 227 * 1024
        assert tile.rows_at % 1024 == 0, "the swizzle's pattern"
        assert tile.dim <= 4096, "a thread of rmsnorm has one vector of a row"
        assert tile.sums_at + CHAINS * 256 <= tile.shared_bytes

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
        self.matrix = self.stored(values)
        self.chain = chain_length(self.columns, dim)
        self.parts = [
            self.stored(values[:, first : first + self.chain])
            for first in range(0, dim, self.chain)
        ]
        self.norm = self.constant(1 + self.normal(dim) / 4)
        self.bias = self.constant(self.normal(experts) / 8) if sigmoid else None

    def normal(self, *shape: int) -> Array:
        return self.random.standard_normal(shape).astype(np.float32)

    def stored(self, values: Array) -> DeviceMatrix:
        rows, cols = values.shape
        address = self.bench.early(self.bench.put(values, "bf16").address)
        data = DeviceArray(address, (rows, 2 * cols), "uint8")
        return DeviceMatrix(MatrixLayout("bf16", "bf16", rows, cols), data)

    def constant(self, values: Array) -> DeviceArray:
        return DeviceArray(self.bench.early(self.bench.memory.put(values)), values.shape, "float32")

    def rows(self, count: int) -> Array:
        """Rows of a residual stream, of different lengths."""
        return self.normal(count, self.dim) * (1 + np.arange(count, dtype=np.float32)[:, None])

    def scores(self, queue: BenchQueue, normed: DeviceArray) -> Buffer:
        """Each chain by the step GEMM, of a matrix that has no other; their sums added here."""
        bench, shape, sums = self.bench, (normed.shape[0], self.columns), []
        for i, part in enumerate(self.parts):
            out = bench.empty(shape, "f32", pad=-self.columns % 4 + 4)
            rows = normed[:, i * self.chain : (i + 1) * self.chain]
            linear.linear(queue, rows, part, out=on(out))
            sums.append(out)
        if len(sums) == 1:
            return sums[0]
        first, second, third, fourth = (bench.get(part) for part in sums)
        return bench.put(((first + second) + third) + fourth, "f32", pad=4)

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
        x_on, normed_on = on(source), on(normed)
        chosen = {
            "ids": DeviceArray(ids_at, ids.shape, "int32"),
            "weights": DeviceArray(weights_at, ids.shape, "float32"),
        }
        for _ in range(times):
            if at_once:
                moe_ops.moe_router(
                    queue, x_on, self.norm, 1e-6, self.matrix, self.experts, self.normalize,
                    self.scoring, self.bias, self.scale, 1, 1, given, normed=normed_on,
                    scores=on(scores), **chosen,
                )  # fmt: skip
                assert bench.memory.get(counter, np.zeros(1, np.int32)) == 0
                continue
            norm.rmsnorm(queue, x_on, self.norm, 1e-6, out=normed_on)
            scores = self.scores(queue, normed_on)
            scores_on = on(scores)
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
        assert launched[0].startswith("moe_router_d")
        want, apart = self.run(x, slots, at_once=False)
        products = ["gemm"] * len(self.parts)
        assert [name.split("_")[0] for name in apart] == ["rmsnorm", *products, "moe"]
        for one, other in zip(got, want, strict=True):
            np.testing.assert_array_equal(one.view(np.int32), other.view(np.int32))
        return got


def on(buffer: Buffer) -> DeviceArray:
    type, item = {"bf16": ("bfloat16", 2), "f32": ("float32", 4)}[buffer.type]
    return DeviceArray(buffer.address, buffer.shape, type, (buffer.stride, item))


@pytest.fixture(autouse=True)
def always_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that the kernels can do, whether it is fastest or not."""
    monkeypatch.setattr(moe_ops, "_AT_ONCE_ROWS", ROUTER_ROWS)


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8])
def test_softmax_of_an_odd_number_of_experts(bench: Bench, rows: int) -> None:
    arch = "sm_80" if rows == 3 else "sm_90a"
    router = Router(bench, 384, 67, normalize=rows > 2, seed=rows, arch=arch)
    _, scores, ids, weights = router.compare(router.rows(rows))
    best = np.argsort(-scores, axis=1, kind="stable")[:, :8]
    np.testing.assert_array_equal(ids, best)
    if rows > 2:
        np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-6)


@pytest.mark.parametrize(("rows", "experts", "dim"), [(1, 128, 2048), (8, 20, 2048), (5, 9, 4096)])
def test_four_chains(bench: Bench, rows: int, experts: int, dim: int) -> None:
    """Of rows as long as a model has them."""
    router = Router(bench, dim, experts, seed=rows, arch="sm_80" if rows == 8 else "sm_90a")
    assert len(router.parts) == CHAINS
    normed, scores, *_ = router.compare(router.rows(rows))
    whole = bench.empty((rows, router.columns), "f32", pad=-router.columns % 4 + 4)
    normed_on = on(bench.put(normed, "bf16", pad=16))
    linear.linear(BenchQueue(bench, router.arch), normed_on, router.matrix, out=on(whole))
    np.testing.assert_array_equal(bench.get(whole), scores)


@pytest.mark.parametrize(("rows", "dim"), [(1, 2048), (8, 2048), (3, 1920), (2, 2304)])
def test_the_order_of_a_score(ptx_of: Callable[[str], str], rows: int, dim: int) -> None:
    """16 products at a time in a float32 sum, as the machine adds them; then the chains' sums."""
    router = Router(machine_bench(ptx_of), dim, 12, top_k=2, seed=rows)
    (normed, scores, *_), _ = router.run(router.rows(rows), None, at_once=True)
    weights = router.bench.memory.get(
        router.matrix.data.address, np.empty((router.columns, dim), np.uint16)
    )
    steps = (rows, 1, dim // 16, 16)
    products = normed.reshape(steps).astype(np.float64) * decode(weights, "bf16").reshape(
        1, router.columns, dim // 16, 16
    )
    sums = []
    for chain in np.split(products, 4 if dim == 2048 else 1, axis=2):
        total = np.zeros((rows, router.columns), np.float32)
        for step in range(chain.shape[2]):
            exact = total.astype(np.float64)
            for k in range(16):
                exact += chain[:, :, step, k]
            total = exact.astype(np.float32)
        sums.append(total)
    want = sums[0]
    for total in sums[1:]:
        want = want + total
    np.testing.assert_array_equal(scores.view(np.int32), want.view(np.int32))


@pytest.mark.parametrize(("rows", "dim"), [(1, 2048), (8, 2048), (3, 640)])
def test_scores_without_the_choice(bench: Bench, rows: int, dim: int) -> None:
    router = Router(bench, dim, 19, shared=True, seed=rows)
    (want_normed, want, *_), _ = router.run(x := router.rows(rows), None, at_once=True)
    source, normed = bench.put(x, "bf16", pad=8), bench.empty((rows, dim), "bf16", pad=16)
    scores, ids = bench.empty((rows, router.columns), "f32", pad=5), np.zeros(9 * rows, np.int32)
    ids_at = bench.memory.put(ids)
    args = [source.address, router.norm.address, router.matrix.data.address, normed.address]
    args += [scores.address, ids_at, rows, ids.size, dim, router.chain, router.columns]
    args += [np.float32(1e-6), source.stride, normed.stride, scores.stride]
    bench.run("moe_scores_d2048", (-(-router.columns // ROUTER_COLUMNS), 1), args)
    for got, other in ((bench.get(normed), want_normed), (bench.get(scores), want)):
        np.testing.assert_array_equal(got.view(np.int32), other.view(np.int32))
    assert (bench.memory.get(ids_at, ids) == NOT_YET).all()


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
    for dim in (256, 2048):
        router = Router(bench, dim, 17, top_k=2, arch=arch)
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
