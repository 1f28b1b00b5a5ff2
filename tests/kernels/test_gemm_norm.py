"""The step GEMM that normalises its row: the bits of ``rmsnorm`` and ``gemm_step``, one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from atlas_kernels.gemm_norm_plan import (
    NORM_K,
    NORM_TILES,
    NORM_WARPS,
    ROLE_WARPS,
    ROW_BYTES,
    norm_variant,
    pace,
)
from atlas_kernels.gemm_step_plan import (
    BESIDE_ATTENTION,
    CHAINS,
    NUM_SMS,
    TILES,
    TensorView,
    variant,
)
from hypothesis import given
from hypothesis import strategies as st

from atlas.backends.cuda.linear import linear
from atlas.backends.cuda.norm import rmsnorm
from atlas.backends.cuda.norm_linear import rmsnorm_linear, rmsnorm_linear_gated
from atlas.errors import ShapeError
from tests.kernels.launches import Bench, Buffer, machine_bench, rounded
from tests.kernels.op_launches import BenchQueue, run_op
from tests.kernels.ptx_machine import Memory
from tests.ops.cases import Case, random_matrix

Array = np.ndarray[Any, Any]
EPS = np.float32(1e-6)
NAMES = ["x", "norm", "eps", "weight", "bias"]


def test_every_tile_fits_an_sm() -> None:
    assert ROLE_WARPS == 2 * NORM_WARPS, "a thread has two units"
    assert ROW_BYTES % 1024 == 0, "the swizzle's period"
    for name, tile in NORM_TILES.items():
        places = {"gated": 3, "pair": 2}.get(name, 1)
        assert places * (tile.shared_bytes + 1024) <= 228 * 1024
        assert places > 1 or tile.shared_bytes <= BESIDE_ATTENTION
        assert tile.stage_bytes % 1024 == 0, "the swizzle's period"
        assert tile.stages >= 5
        assert tile.stages % tile.chains == 0, "a place in the ring is always the same chain's"
        assert pace(tile, 1) <= tile.stages, "the ring knows no stage before its first"
        assert 2 * tile.stages <= tile.threads, "a thread makes one barrier"
        assert tile.asker >= 32 * NORM_WARPS


def test_short_products_pace_their_requests() -> None:
    for name, tile in NORM_TILES.items():
        stages = pace(tile, 20 << 20)
        assert 1 <= stages <= tile.stages, name
        assert stages == 1 or stages * tile.stage_bytes <= 48 << 10, name
        assert pace(tile, 50 << 20) == 0, name


@pytest.mark.parametrize("gated", [False, True])
@given(
    n=st.integers(8, 300_000),
    k=st.integers(1, 140).map(lambda blocks: 64 * blocks),
    rows=st.integers(1, 3),
)
def test_every_product_that_is_taken_has_room(n: int, k: int, rows: int, gated: bool) -> None:
    n -= n % 2
    name = norm_variant(n, k, rows, gated=gated)
    if name is None:
        assert rows > 1 or k > NORM_K or n > 128 * NUM_SMS
        return
    assert rows == 1
    tile = NORM_TILES[name]
    assert -(-k // tile.k_block) * tile.k_block <= NORM_K
    assert tile.grid(n) * tile.box_rows >= (n // 2 if gated else n)
    assert gated == tile.gated
    assert gated or tile.grid(n) <= NUM_SMS


def _normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


class Layer:
    """A norm and a matrix on a device: both ways to their product."""

    def __init__(self, bench: Bench, n: int, k: int, *, has_bias: bool = False) -> None:
        self.bench, self.n, self.k = bench, n, k
        self.weight = bench.put(rounded(_normal(n, k, seed=1), "bf16"), "bf16")
        self.norm = bench.put(_normal(1, k, seed=2) * 0.2 + 1, "f32")
        self.bias = bench.put(_normal(1, n, seed=3), "f32") if has_bias else None
        for buffer in (self.weight, self.norm):
            bench.early(buffer.address)

    def _map(self, buffer: Buffer, view: TensorView) -> int:
        encoded = self.bench.memory.tensor_map(buffer.address, view.shape, view.box, view.strides)
        address: int = self.bench.memory.put(np.frombuffer(encoded, np.uint8))
        return address

    def _out(self, type: str, *, gated: bool) -> Buffer:
        return self.bench.empty((2, self.n // 2 if gated else self.n), type)

    def _got(self, out: Buffer) -> Array:
        got = self.bench.get(out)
        assert np.isnan(got[1]).all(), "one row past the only one"
        return got[:1]

    def apart(
        self, x: Buffer, type: str, option: int, *, gated: bool, chained: bool = False
    ) -> Array:
        """``rmsnorm``, then ``gemm_step``."""
        name = variant(self.n, 1, gated=gated, chained=chained)
        chain = self.k // CHAINS if chained else self.k
        normed, out = self.bench.empty((1, self.k), "bf16"), self._out(type, gated=gated)
        args = [x.address, self.norm.address, normed.address, self.k, x.stride, normed.stride, EPS]
        self.bench.run("rmsnorm_bf16", (1, 1), args)
        tile, bias = TILES[name], self.bias.address if self.bias else 0
        weights = self._map(self.weight, tile.weight_view(self.n, self.k))
        maps = [weights, self._map(normed, tile.row_view(1, self.k, normed.stride))]
        args = [*maps, bias, 0, out.address, self.n, self.k, chain, 1, 0, out.stride, option]
        self.bench.run(f"gemm_step_bf16_{name}", (tile.grid(self.n), 1), args)
        return self._got(out)

    def fused(self, name: str, x: Buffer, type: str, option: int, stages: int = 0) -> Array:
        """``gemm_step_norm``."""
        tile = NORM_TILES[name]
        out, bias = self._out(type, gated=tile.gated), self.bias.address if self.bias else 0
        weights = self._map(self.weight, tile.weight_view(self.n, self.k))
        args = [weights, x.address, self.norm.address, bias]
        args += [out.address, self.n, self.k, option, stages, EPS]
        self.bench.run(f"gemm_step_norm_bf16_{name}", (tile.grid(self.n), 1), args)
        return self._got(out)


def _skip_without_hopper(bench: Bench) -> None:
    if not isinstance(bench.memory, Memory) and bench.memory.arch != "sm_90a":
        pytest.skip(f"gemm_step needs sm_90a, not {bench.memory.arch}")


# 4,096 elements fill rmsnorm's threads once, 4,160 begin a second time; 1,600 end within a stage.
@pytest.mark.parametrize(
    ("name", "k", "has_bias"),
    [
        ("c16", 1600, True),
        ("c48", 4096, True),
        ("c32", 4160, True),
        ("c96", 576, False),
        ("c128", 1536, True),
        ("gated", 2048, True),
        ("gated", 4160, False),
        ("pair", 2048, True),
        ("pair", 1600, False),
        ("split16", 2048, True),
        ("split24", 4096, False),
        ("split48", 1024, True),
    ],
)
def test_the_bits_of_both_kernels(bench: Bench, name: str, k: int, has_bias: bool) -> None:
    _skip_without_hopper(bench)
    tile = NORM_TILES[name]
    gated, columns = tile.gated, tile.columns
    layer = Layer(bench, columns + (8 if k < 4096 else 0), k, has_bias=has_bias)
    x = bench.put(rounded(_normal(1, k) * 3, "bf16"), "bf16")
    type, option = ("bf16", 1) if gated else ("f32", 1)
    want = layer.apart(x, type, option, gated=gated, chained=tile.chains > 1)
    assert np.isfinite(want).all()
    for stages in (0, 2):
        np.testing.assert_array_equal(layer.fused(name, x, type, option, stages), want)


@pytest.mark.parametrize("name", ["c32", "gated"])
def test_rows_without_a_finite_sum(bench: Bench, name: str) -> None:
    """Zeros, squares that overflow, a NaN: what ``rmsnorm`` makes of them."""
    _skip_without_hopper(bench)
    tile = NORM_TILES[name]
    layer = Layer(bench, 64, 512)
    rows = np.zeros((3, 512), np.float32)
    rows[1], rows[2] = rounded(_normal(512) * 1e20, "bf16"), 1
    rows[2, 7] = np.nan
    type, option = ("bf16", 0) if tile.gated else ("f32", 1)
    for row in rows:
        x = bench.put(row[None], "bf16")
        want = layer.apart(x, type, option, gated=tile.gated)
        np.testing.assert_array_equal(layer.fused(name, x, type, option), want)


# Units of 8: of lanes 1 and 17 of warp 0, of lane 0 of warps 1 and 9.
@pytest.mark.parametrize("units", [(1, 17), (32, 288)])
def test_the_order_of_the_sum(bench: Bench, units: tuple[int, int]) -> None:
    """Squares that overflow if those of two units meet before either meets the largest sum."""
    _skip_without_hopper(bench)
    row = np.zeros((1, 2560), np.float32)
    row[0, :6] = np.array([4080, 360, 34, 7, 3, 1]) * 2.0**52  # squares: the largest float32
    row[0, [8 * unit for unit in units]] = 2.0**51  # a quarter of its last bit
    layer, x = Layer(bench, 16, 2560), bench.put(row, "bf16")
    want = layer.apart(x, "f32", 1, gated=False)
    assert not want.any(), "no overflow: the row says nothing of the order"
    np.testing.assert_array_equal(layer.fused("c16", x, "f32", 1), want)


@pytest.mark.parametrize("order", [1, -1, 2])
@pytest.mark.parametrize(("name", "stages"), [("c96", 0), ("split48", 0), ("split48", 3)])
def test_no_warp_needs_to_be_first(
    ptx_of: Callable[[str], str], name: str, stages: int, order: int
) -> None:
    """Warps one after the other, from either end, or by chance: a missing barrier would show.

    Every warp has a part of the row, and the last ones multiply too; the ring goes round.
    """
    x = rounded(_normal(1, 2048), "bf16")
    results = []
    for how in (0, order):
        bench = machine_bench(ptx_of, how)
        layer = Layer(bench, NORM_TILES[name].columns, 2048)
        results.append(layer.fused(name, bench.put(x, "bf16"), "f32", 1, stages))
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize(
    ("format", "rows", "cols", "kernels"),
    [
        ("bf16", 1, 320, ["gemm_step_norm_bf16_c16"]),
        ("bf16", 2, 320, ["rmsnorm_bf16", "gemm_step_bf16_c16_8"]),
        ("q8_0", 1, 256, ["rmsnorm_bf16", "gemm_step_q8_0_narrow_8"]),
    ],
)
def test_which_kernels_the_op_launches(
    bench: Bench, format: str, rows: int, cols: int, kernels: list[str]
) -> None:
    """And that it gives the bits of the two ops; what it did not write stays as it is."""
    _skip_without_hopper(bench)
    rng, results, queue = np.random.default_rng(rows), [], BenchQueue(bench, "sm_90a")
    matrix = random_matrix(rng, format, 40, cols)
    x, norm, bias = _normal(rows, cols), _normal(cols), _normal(40)
    for op, call in (("rmsnorm_linear", rmsnorm_linear), ("apart", _apart)):
        normed, out = (np.full((rows, width), np.nan, np.float32) for width in (cols, 40))
        kwargs, written = {"normed": normed, "out": out}, {"normed": normed, "out": out}
        case = Case("", (x, norm, 1e-5, matrix, bias), kwargs, written)
        results.append(run_op(queue, "rmsnorm_linear", call, NAMES, case))
        if op == "rmsnorm_linear":
            assert queue.launched == kernels
    np.testing.assert_array_equal(results[0]["out"], results[1]["out"])
    assert np.isnan(results[0]["normed"]).all() == (len(kernels) == 1)


def _apart(
    queue: Any, x: Any, norm: Any, eps: float, weight: Any, bias: Any, *, normed: Any, out: Any
) -> None:
    rmsnorm(queue, x, norm, eps, out=normed)
    linear(queue, normed, weight, bias, out=out)


def test_an_unknown_activation_is_refused(bench: Bench) -> None:
    with pytest.raises(ShapeError, match="activation 'gelu'; allowed: silu, gelu_tanh"):
        rmsnorm_linear_gated(
            BenchQueue(bench, "sm_90a"), *[None] * 5, "gelu", normed=None, gate_up=None, out=None
        )  # type: ignore[arg-type]


@pytest.mark.gpu
class TestOnTheGpu:
    """Every tile, and widths as models have them."""

    @pytest.fixture
    def device(self, gpu: Any) -> Bench:
        from tests.kernels.launches import gpu_bench

        if gpu.arch != "sm_90a":
            pytest.skip(f"gemm_step needs sm_90a, not {gpu.arch}")
        return gpu_bench(gpu)

    @pytest.mark.parametrize("name", sorted(NORM_TILES))
    @pytest.mark.parametrize("k", [512, 1024, 1536, 2560, 4096, 5120])
    def test_the_bits_of_both_kernels(self, device: Bench, name: str, k: int) -> None:
        tile = NORM_TILES[name]
        if tile.chains > 1 and k % (CHAINS * tile.k_block):
            pytest.skip(f"chains of {k // CHAINS} elements are no stages of {tile.k_block}")
        layer = Layer(device, 1608, k, has_bias=True)
        type, option = ("bf16", 1) if tile.gated else ("f32", 1)
        for seed in range(4):
            for spread in (0, 12):
                powers = np.random.default_rng(seed).integers(-spread, spread + 1, (1, k))
                values = rounded(_normal(1, k, seed=seed) * 2.0**powers, "bf16")
                x = device.put(values, "bf16")
                want = layer.apart(x, type, option, gated=tile.gated, chained=tile.chains > 1)
                np.testing.assert_array_equal(layer.fused(name, x, type, option), want)
