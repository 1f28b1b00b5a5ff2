"""Step GEMM: tiles, the ``mma.sync`` kernel on the PTX machine, both kernels on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from atlas_kernels.gemm_step_plan import (
    CHAINS,
    FEW_COLUMNS,
    MMA_TILES,
    NUM_SMS,
    RUNGS,
    TILES,
    MmaTile,
    chain_length,
    mma_form,
    rung,
    variant,
)
from hypothesis import given
from hypothesis import strategies as st

from atlas.ops import OPS
from tests.kernels.conftest import NO_COMPILER
from tests.kernels.launches import Bench, Buffer, machine_bench, rounded
from tests.kernels.ptx_machine import Memory, launch

Array = np.ndarray[Any, Any]


def test_every_tile_fits_an_sm() -> None:
    for tile in TILES.values():
        assert tile.shared_bytes + 1024 <= 228 * 1024
        assert tile.shared_bytes <= 227 * 1024
        for view in (tile.weight_view(1024, 1024), tile.row_view(8, 1024, 2048)):
            assert max(view.box) <= 256, "a box of a tensor map"
            assert view.box[-2] * 128 % 1024 == 0, "the swizzle has a period of 1,024 bytes"
        assert tile.stages >= 3
        assert tile.stages % tile.chains == 0, "a place in the ring is always the same chain's"
        assert 2 * tile.stages <= tile.threads, "a thread makes one barrier"
    for mma_tile in MMA_TILES.values():
        assert mma_tile.shared_bytes <= 99 * 1024, "the least of all GPUs since sm_80"
        assert mma_tile.stages >= 2


def test_a_thread_block_of_attention_fits_beside_one_of_few_rows() -> None:
    """Otherwise some of the output product's begin when attention ends, with nothing loaded."""
    pytest.importorskip("numba_cuda", reason=NO_COMPILER)
    from atlas_kernels.attention_step import shared_bytes

    for name, tile in TILES.items():
        if name.startswith(("c", "split")) and not name.endswith("_128"):
            for tiles in (1, 2) if tile.columns >= 32 else (1,):
                both = tile.shared_bytes + shared_bytes(128, tiles) + 2 * 1024
                assert both <= 228 * 1024, name


@pytest.mark.parametrize("gated", [False, True])
@given(n=st.integers(8, 300_000), rows=st.integers(1, RUNGS[-1]))
def test_every_matrix_has_tiles_that_cover_it(n: int, rows: int, gated: bool) -> None:
    n -= n % 2
    tile = TILES[variant(n, rows, gated=gated)]
    assert tile.rows * tile.sharers >= rows
    assert tile.grid(n) // tile.sharers * tile.box_rows >= (n // 2 if gated else n)
    mma = MMA_TILES[f"{mma_form(n, gated=gated)}_{rung(rows)}"]
    assert mma.grid(n) * mma.columns >= n


def test_gated_tiles_for_few_columns() -> None:
    """Two thread blocks an SM where three find nothing to do, for few rows."""
    widest = 2 * NUM_SMS * 64
    assert variant(widest, 1, gated=True) == "pair_8"
    assert variant(1024, 32, gated=True) == "pair_32"
    assert variant(widest + 2, 1, gated=True) == "gated_8"
    assert variant(1024, 33, gated=True) == "gated_64"
    for rows in (8, 16, 32):
        assert 2 * (TILES[f"pair_{rows}"].shared_bytes + 1024) <= 228 * 1024


def test_rungs() -> None:
    assert [rung(m) for m in (1, 8, 9, 33, 65, 128)] == [8, 8, 16, 64, 128, 128]
    with pytest.raises(ValueError, match="129 rows; the step GEMM takes 1 to 128"):
        rung(129)


def _normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


class Product:
    """A matrix on a device, and the kernels' products with it."""

    def __init__(
        self, bench: Bench, n: int, k: int, pad: int = 8, values: Array | None = None
    ) -> None:
        self.bench, self.n, self.k = bench, n, k
        values = rounded(_normal(n, k, seed=1), "bf16") if values is None else values
        self.weight = bench.put(values, "bf16", pad=pad)
        if isinstance(bench.memory, Memory):
            bench.memory.constants.add(self.weight.address)

    def mma(
        self, name: str, x: Buffer, type: str = "f32", *, bias: Buffer | None = None,
        residual: Buffer | None = None, chain: int = 0,
    ) -> Array:  # fmt: skip
        """By ``gemm_step_mma``; one more row of NaN must stay as it is."""
        tile, chain = MMA_TILES[name], chain or self.k
        return self._run(f"gemm_step_mma_bf16_{name}", tile, x, type, bias, residual, chain)

    def wgmma(self, name: str, x: Array, chain: int = 0) -> Array:
        """By ``gemm_step``; one more row of NaN must stay as it is."""
        bench, tile, (m, k) = self.bench, TILES[name], x.shape
        bf16 = bench.put(x, "bf16")
        encode = bench.memory.tensor_map
        views = (
            (self.weight.address, tile.weight_view(self.n, k)),
            (bf16.address, tile.row_view(m, k, 2 * k)),
        )
        maps = [encode(address, view.shape, view.box, view.strides) for address, view in views]
        places = [bench.memory.put(np.frombuffer(encoded, np.uint8)) for encoded in maps]
        width, type = (self.n // 2, "bf16") if tile.gated else (self.n, "f32")
        out = bench.empty((m + 1, width), type)
        args = [*places, 0, 0, out.address, self.n, k, chain or k, m]
        args += [0, out.stride, int(not tile.gated)]
        bench.run(f"gemm_step_bf16_{name}", (tile.grid(self.n), 1), args)
        got = bench.get(out)
        assert np.isnan(got[m]).all()
        return got[:m]

    def _run(
        self, kernel: str, tile: MmaTile, x: Buffer, type: str, bias: Buffer | None,
        residual: Buffer | None, chain: int,
    ) -> Array:  # fmt: skip
        m, width = x.shape[0], self.n // 2 if tile.gated else self.n
        out = residual or self.bench.empty((m + 1, -(-width // 4) * 4), type, pad=4)
        args: list[Any] = [self.weight.address, x.address, bias.address if bias else 0]
        args += [residual.address if residual else 0, out.address, self.n, self.k, chain, m]
        args += [self.weight.stride, x.stride, out.stride, out.stride, int(out.type == "f32")]
        self.bench.run(kernel, (tile.grid(self.n), 1), args)
        got = self.bench.get(out)
        assert residual is not None or np.isnan(got[m]).all()
        return got[:m, :width]


def _reference(product: Product, x: Array) -> Array:
    return x.astype(np.float64) @ product.bench.get(product.weight).astype(np.float64).T


# 100 columns and 328 of k: ragged last tiles, part of a stage.
@pytest.mark.parametrize(
    ("name", "rows"), [("narrow_8", 5), ("wide_8", 8), ("narrow_16", 9), ("wide_128", 101)]
)
def test_mma_products(bench: Bench, name: str, rows: int) -> None:
    product = Product(bench, 100, 328)
    x = rounded(_normal(rows, 328), "bf16")
    got = product.mma(name, bench.put(x, "bf16", pad=16))
    want = _reference(product, x)
    assert np.abs(got - want).max() <= 2e-6 * np.abs(want).max()


# A ring that goes round, stages of 64 and of 128 elements, 16 to 96 rows of W in a tile.
@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("c16_8", 5), ("c24_8", 1), ("c48_16", 9), ("c72_16", 12), ("wide_8", 8), ("c64_64", 33),
        ("c24_32", 30), ("c32_32", 17), ("c72_32", 32), ("c96_64", 40),
    ],
)  # fmt: skip
def test_wgmma_gives_the_bits_of_mma(bench: Bench, name: str, rows: int) -> None:
    if not isinstance(bench.memory, Memory) and bench.memory.arch != "sm_90a":
        pytest.skip(f"gemm_step needs sm_90a, not {bench.memory.arch}")
    product = Product(bench, 100, 1344, pad=0)
    x = rounded(_normal(rows, 1344), "bf16")
    want = product.mma(f"wide_{rung(rows)}", bench.put(x, "bf16"))
    np.testing.assert_array_equal(product.wgmma(name, x), want)


def _in_chains(product: Product, x: Array, chain: int) -> Array:
    """The sums of a product whose matrix is cut along K, added in ascending order."""
    bench, weight = product.bench, product.bench.get(product.weight)
    total: Array | None = None
    for begin in range(0, product.k, chain):
        part = Product(bench, product.n, chain, values=weight[:, begin : begin + chain])
        own = bench.put(np.ascontiguousarray(x[:, begin : begin + chain]), "bf16")
        sums = part.mma(f"wide_{rung(len(x))}", own)
        total = sums if total is None else total + sums
    assert total is not None
    return total


# Tiles that take a matrix' chains side by side and those that take them in turn; stages of 256 and
# of 128 elements; a ring that goes round; columns that fill no 16, and a tile in part.
@pytest.mark.parametrize(
    ("name", "rows", "k"),
    [
        ("split16_8", 1, 4096),
        ("split24_8", 8, 1024),
        ("split40_8", 3, 2048),
        ("c16_16", 9, 1024),
        ("c48_32", 20, 1024),
        ("c16_64", 33, 1024),
    ],
)
def test_chains(bench: Bench, name: str, rows: int, k: int) -> None:
    if not isinstance(bench.memory, Memory) and bench.memory.arch != "sm_90a":
        pytest.skip(f"gemm_step needs sm_90a, not {bench.memory.arch}")
    product = Product(bench, 60, k, pad=0)
    x = rounded(_normal(rows, k), "bf16")
    want = _in_chains(product, x, k // CHAINS)
    np.testing.assert_array_equal(product.wgmma(name, x, k // CHAINS), want)
    got = product.mma(f"narrow_{rung(rows)}", bench.put(x, "bf16"), chain=k // CHAINS)
    np.testing.assert_array_equal(got, want)


# Rings that go round, and one that does not fill.
@pytest.mark.parametrize("order", [1, -1, 2, 3])
@pytest.mark.parametrize(
    ("name", "rows", "k"),
    [("split48_8", 3, 4096), ("split24_8", 8, 1536), ("c48_32", 20, 2048), ("c24_16", 9, 4096)],
)
def test_warps_and_copies_may_come_in_any_order(
    ptx_of: Callable[[str], str], name: str, rows: int, k: int, order: int
) -> None:
    """Of tiles with chains: warps run far apart, and copies overtake one another."""
    results = []
    for how in (0, order):
        product = Product(machine_bench(ptx_of, how), TILES[name].columns + 4, k, pad=0)
        x = rounded(_normal(rows, k), "bf16")
        results.append(product.wgmma(name, x, k // CHAINS))
    np.testing.assert_array_equal(*results)


def test_the_machine_sees_a_ring_whose_places_change_chains() -> None:
    """Otherwise the test above would prove little: parities say nothing there."""
    pytest.importorskip("numba_cuda", reason=NO_COMPILER)
    from atlas_kernels import build
    from atlas_kernels.gemm_step import make_gemm_step
    from atlas_kernels.registry import Architecture

    tile = replace(TILES["split48_8"], stages=TILES["split48_8"].stages + 2)
    declared, target = build.find("gemm_step_bf16_split48_8"), Architecture.parse("sm_90a")
    ptx = build.compile_body(make_gemm_step(tile), replace(declared, lto=False), target).decode()
    memory = Memory()

    def run(_: str, grid: tuple[int, int], args: list[Any]) -> None:
        launch(ptx, grid, tile.threads, args, memory, 2, tile.shared_bytes)

    product = Product(Bench(memory, run), tile.columns, 4096, pad=0)
    with pytest.raises(AssertionError):
        product.wgmma("split48_8", rounded(_normal(3, 4096), "bf16"), 4096 // CHAINS)


def test_which_matrices_have_chains() -> None:
    # Output products of 30B-A3B and 35B-A3B, all but the gated one of Llama-1B, a router.
    for n, k in ((2048, 4096), (3072, 2048), (2048, 2048), (2048, 8192), (128, 2048), (5120, 2048)):
        assert chain_length(n, k) == k // CHAINS
        assert variant(n, 8, chained=True).startswith("split")
        assert variant(n, 9, chained=True).startswith("c")
    # Those of an 8B model; short rows; what does not divide.
    for n, k in ((4096, 4096), (6144, 4096), (4096, 12288), (1024, 1024), (1024, 2560)):
        assert chain_length(n, k) == k


@given(n=st.integers(8, 300_000), k=st.integers(1, 200), rows=st.integers(1, RUNGS[-1]))
def test_tiles_of_matrices_with_chains(n: int, k: int, rows: int) -> None:
    chain = chain_length(n, 64 * k)
    if chain == 64 * k:
        return
    tile = TILES[variant(n, rows, chained=True)]
    assert chain % tile.k_block == 0
    assert (tile.chains, tile.adds) == ((CHAINS, False) if rows <= 8 else (1, True))
    assert tile.stages >= tile.chains


def test_mma_rows_are_independent(bench: Bench) -> None:
    product = Product(bench, 40, 392)
    x = rounded(_normal(20, 392), "bf16")
    full = product.mma("narrow_32", bench.put(x, "bf16"))
    for name, part in (("narrow_8", slice(3, 4)), ("narrow_16", slice(8, 20))):
        got = product.mma(name, bench.put(x[part], "bf16"))
        np.testing.assert_array_equal(got, full[part])


@pytest.mark.parametrize("name", ["narrow_8", "wide_16"])
def test_mma_bias_and_residual(bench: Bench, name: str) -> None:
    product = Product(bench, 72, 136)
    x, residual = bench.put(rounded(_normal(6, 136), "bf16"), "bf16"), _normal(6, 72, seed=2)
    plain, bias = product.mma(name, x), _normal(1, 72)
    kept = bench.put(residual, "bf16")
    got = product.mma(name, x, bias=bench.put(bias, "f32"), residual=kept)
    want = rounded(rounded(plain + bias, "bf16") + rounded(residual, "bf16"), "bf16")
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("has_bias", [False, True])
def test_mma_gate_is_a_product_stored_and_gated(bench: Bench, has_bias: bool) -> None:
    product, bias = Product(bench, 2 * 72, 136), _normal(1, 2 * 72)
    x = bench.put(rounded(_normal(6, 136), "bf16"), "bf16")
    options = {"bias": bench.put(bias, "f32")} if has_bias else {}
    stored = bench.put(product.mma("wide_8", x, "bf16", **options), "bf16")
    separate = bench.empty((6, 72), "bf16")
    args = [stored.address, separate.address, 72, stored.stride, separate.stride]
    bench.run("silu_and_mul_bf16", (6, 1), args)
    got = product.mma("gated_8", x, "bf16", **options)
    np.testing.assert_array_equal(got, bench.get(separate))
    want = np.empty((6, 72), np.float32)
    OPS["silu_and_mul"](bench.get(stored), out=want)
    assert np.abs(got - want).max() <= 2.0**-8 * np.abs(want).max()


@pytest.mark.gpu
class TestOnTheGpu:
    """``gemm_step``, which has no machine but a Hopper GPU to run on."""

    @pytest.fixture
    def device(self, gpu: Any) -> Bench:
        from tests.kernels.launches import gpu_bench

        if gpu.arch != "sm_90a":
            pytest.skip(f"gemm_step needs sm_90a, not {gpu.arch}")
        return gpu_bench(gpu)

    @pytest.mark.parametrize("family", ["c16", "c32", "c48", "c64", "c96", "c128", "wide"])
    def test_rows_are_independent(self, device: Bench, family: str) -> None:
        product = Product(device, 1000, 1216, pad=0)
        x = rounded(_normal(128, 1216), "bf16")
        full, want = product.wgmma(f"{family}_128", x), _reference(product, x)
        assert np.abs(full - want).max() <= 1e-5 * np.abs(want).max()
        for m in (1, 2, 7, 8, 9, 31, 33, 64, 65, 127):
            for start in (0, 128 - m):
                name = f"{family}_{rung(m)}"
                got = product.wgmma(name, x[start : start + m])
                np.testing.assert_array_equal(got, full[start : start + m])

    @pytest.mark.parametrize("columns", FEW_COLUMNS)
    def test_widths_for_few_rows_have_the_same_bits(self, device: Bench, columns: int) -> None:
        product = Product(device, 1000, 1216, pad=0)
        for m in (1, 8, 13, 32):
            x = rounded(_normal(m, 1216), "bf16")
            got = product.wgmma(f"c{columns}_{rung(m)}", x)
            np.testing.assert_array_equal(got, product.wgmma(f"wide_{rung(m)}", x))

    def test_gated_tiles_have_the_same_bits(self, device: Bench) -> None:
        product = Product(device, 1024, 1216, pad=0)
        for m in (1, 8, 13, 32):
            x = rounded(_normal(m, 1216), "bf16")
            got = product.wgmma(f"pair_{rung(m)}", x)
            np.testing.assert_array_equal(got, product.wgmma(f"gated_{rung(m)}", x))

    @pytest.mark.parametrize("family", ["c16", "wide"])
    @pytest.mark.parametrize("spread", [0, 15])
    def test_both_kernels_give_the_same_bits(self, device: Bench, family: str, spread: int) -> None:
        product = Product(device, 512, 4096)
        x, w = (_normal(m, 4096, seed=spread) for m in (128, 512))
        powers = np.random.default_rng(0).integers(-spread, spread + 1, (640, 4096))
        x, w = rounded(x * 2.0 ** powers[:128], "bf16"), rounded(w * 2.0 ** powers[128:], "bf16")
        product.weight = device.put(w, "bf16")
        for m in (3, 16, 30, 64, 128):
            got = product.mma(f"narrow_{rung(m)}", device.put(x[:m], "bf16"))
            want = product.wgmma(f"{family}_{rung(m)}", x[:m])
            np.testing.assert_array_equal(got, want)
