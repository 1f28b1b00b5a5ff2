"""Quantised weights: their cells, the step GEMMs over them, dequantised rows.

The kernels run on the PTX machine, whose ``wgmma`` and ``mma`` sum alike, and with ``-m gpu`` on a
GPU, where ``gemm_step`` on the weights rounded to bf16 says what is right, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from atlas_kernels.gemm_step_plan import BOX_K, MMA_TILES, TILES, TensorView, rung
from atlas_kernels.quant_plan import (
    CELL_K,
    CELLS,
    QUANT_MMA_TILES,
    QUANT_RUNGS,
    QUANT_TILES,
    WIDENED,
    QuantTile,
    quant_form,
    quant_rung,
)

from atlas.backends.cuda.pack import host_units, layout
from atlas.backends.cuda.pack_cells import pack_units
from atlas.errors import ShapeError
from atlas.ops.blocks import FORMATS, HostMatrix, dequantize
from tests.kernels.cells import unit_weights
from tests.kernels.launches import Bench, Buffer, gpu_bench, rounded
from tests.kernels.ptx_machine import Memory
from tests.ops.cases import random_matrix

Array = np.ndarray[Any, Any]
SOURCES = [name for name, found in FORMATS.items() if found.is_quantized]
ONE_EACH = [*(name for name in CELLS if not name.startswith("b8")), "q5_1", "q3_k"]
"""A file format for each kind of cell."""


def _matrix(source: str, rows: int, cols: int) -> HostMatrix:
    """Random weights; blocks of 256 want columns to match."""
    cols += -cols % FORMATS[source].block_len
    return random_matrix(np.random.default_rng([rows, cols]), source, rows, cols)


def _normal(*shape: int) -> Array:
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


def test_every_tile_fits_an_sm() -> None:
    for tile in QUANT_TILES.values():
        assert tile.shared_bytes <= 227 * 1024
        assert tile.min_blocks * (tile.shared_bytes + 1024) <= 228 * 1024
        assert tile.cell_bytes % 16 == 0, "what a bulk copy takes"
        assert tile.row_bytes % 2048 == 0, "two boxes that begin at multiples of 1,024"
        assert tile.weights_offset % 16 == 0
        assert tile.stages >= 3
    for mma_tile in QUANT_MMA_TILES.values():
        assert mma_tile.shared_bytes <= 99 * 1024, "the least of all GPUs since sm_80"
        assert mma_tile.stages >= 2
        assert not mma_tile.gated or mma_tile.columns % 64 == 0, "a half is made of units"


def test_rungs_and_forms() -> None:
    assert [quant_rung(m) for m in (1, 8, 9, 33, 128)] == [8, 8, 32, 128, 128]
    with pytest.raises(ValueError, match="129 rows; the step GEMM takes 1 to 128"):
        quant_rung(129)
    assert [quant_form(n) for n in (32, 8192, 8193)] == ["narrow", "narrow", "wide"]
    assert quant_form(64, gated=True) == "gated"


@pytest.mark.parametrize("source", SOURCES)
def test_units_hold_the_matrix(source: str) -> None:
    format = WIDENED.get(source, source)
    for rows, cols in ((1, 32), (70, 416)):  # last units and cells that are not full
        matrix = _matrix(source, rows, cols)
        units = pack_units(matrix, format)
        want = dequantize(matrix)
        np.testing.assert_array_equal(unit_weights(units, format, rows, matrix.cols), want)
        full = unit_weights(units, format, 32 * len(units), -(-matrix.cols // CELL_K) * CELL_K)
        assert (full[rows:] == 0).all()
        assert (full[:, matrix.cols :] == 0).all()


@pytest.mark.parametrize("source", ["q4_0", "q5_k"])
def test_units_of_stacked_matrices(source: str) -> None:
    parts = [_matrix(source, rows, 256) for rows in (40, 5, 51)]
    found = layout(parts)
    units = np.concatenate([host_units(parts, i, i + 1, found) for i in range(3)])
    assert units.shape == found.shape
    assert units.nbytes == found.nbytes
    assert not found.is_converted
    want = np.concatenate([dequantize(part) for part in parts])
    np.testing.assert_array_equal(unit_weights(units, found.format, 96, 256), want)


def test_what_cannot_be_packed() -> None:
    with pytest.raises(ShapeError, match="q4_1 rows as q4_0; allowed: q4_1"):
        pack_units(_matrix("q4_1", 4, 32), "q4_0")
    with pytest.raises(ShapeError, match="q2_k in blocks of 16 as b8_32"):
        pack_units(_matrix("q2_k", 4, 256), "b8_32")


class Weights:
    """A quantised matrix on a device, and the step GEMMs over it."""

    def __init__(
        self, bench: Bench, source: str, n: int, k: int, host: HostMatrix | None = None
    ) -> None:
        self.bench, self.n, self.host = bench, n, host or _matrix(source, n, k)
        self.k, self.format = self.host.cols, WIDENED.get(source, source)
        self.units = bench.early(bench.memory.put(pack_units(self.host, self.format)))
        self.values = rounded(dequantize(self.host), "bf16")
        self.is_machine = isinstance(bench.memory, Memory)

    def rows(self, m: int) -> Buffer:
        return self.bench.put(_normal(m, self.k) / 8, "bf16")

    def plain(self, x: Buffer) -> Array:
        """By the step GEMM for bf16 with one range of K, in float32."""
        weight = self.bench.put(self.values, "bf16")
        self.bench.early(weight.address)
        name = f"wide_{rung(x.shape[0])}"
        if self.is_machine or self.bench.memory.arch != "sm_90a" or self.k % BOX_K:
            last = [weight.stride, x.stride]
            args = [weight.address, x.address]
            kernel, grid = f"gemm_step_mma_bf16_{name}", MMA_TILES[name].grid(self.n)
        else:
            last, tile = [], TILES[name]
            views = tile.weight_view(self.n, self.k), tile.row_view(x.shape[0], self.k, x.stride)
            args = [self._view(*pair) for pair in zip((weight, x), views, strict=True)]
            kernel, grid = f"gemm_step_bf16_{name}", tile.grid(self.n)
        whole = [self.k]  # a chain
        return self._run(kernel, grid, args, last, x.shape[0], self.n, "f32", {}, whole)

    def wgmma(self, form: str, x: Buffer, type: str = "f32", **options: Buffer) -> Array:
        """By ``gemm_step_tiles``."""
        name = f"{self.format}_{form}_{quant_rung(x.shape[0])}"
        tile = QUANT_TILES[name]
        return self.tile(name, tile, x, type, **options)

    def tile(self, name: str, tile: QuantTile, x: Buffer, type: str, **options: Buffer) -> Array:
        args = [self.units, self._map(x, tile.rows)]
        width = self.n // 2 if tile.gated else self.n
        grid = tile.grid(self.n)
        return self._run(f"gemm_step_{name}", grid, args, [], x.shape[0], width, type, options)

    def mma(self, form: str, x: Buffer, type: str = "f32", **options: Buffer) -> Array:
        """By ``gemm_step_quant``."""
        name = f"{self.format}_{form}_{quant_rung(x.shape[0])}"
        tile, args = QUANT_MMA_TILES[name], [self.units, x.address]
        width = self.n // 2 if tile.gated else self.n
        kernel, grid = f"gemm_step_mma_{name}", tile.grid(self.n)
        return self._run(kernel, grid, args, [x.stride], x.shape[0], width, type, options)

    def _view(self, matrix: Buffer, view: TensorView) -> int:
        encoded = self.bench.memory.tensor_map(matrix.address, view.shape, view.box, view.strides)
        return self.bench.memory.put(np.frombuffer(encoded, np.uint8))

    def _map(self, matrix: Buffer, box_rows: int) -> int:
        encoded = self.bench.memory.tensor_map(matrix.address, matrix.shape, (box_rows, 64))
        return self.bench.memory.put(np.frombuffer(encoded, np.uint8))

    def _run(
        self, kernel: str, grid: int, args: list[Any], strides: list[int], m: int, width: int,
        type: str, options: dict[str, Buffer], chain: Sequence[int] = (),
    ) -> Array:  # fmt: skip
        """One more row of NaN must stay as it is, and so must the columns past the last."""
        residual, bias = options.get("residual"), options.get("bias")
        out = residual or self.bench.empty((m + 1, -(-width // 4) * 4), type, pad=4)
        args += [bias.address if bias else 0, residual.address if residual else 0, out.address]
        args += [self.n, self.k, *chain, m, *strides, out.stride, out.stride]
        args += [int(out.type == "f32")]
        self.bench.run(kernel, (grid, 1), args)
        got = self.bench.get(out)
        assert residual is not None or np.isnan(got[m:]).all()
        return got[:m, :width]


@pytest.fixture
def hopper(bench: Bench) -> Bench:
    """A bench that has ``wgmma``."""
    if not isinstance(bench.memory, Memory) and bench.memory.arch != "sm_90a":
        pytest.skip(f"gemm_step_tiles needs sm_90a, not {bench.memory.arch}")
    return bench


# 100 columns, and 416 of k: ragged last units and cells.
@pytest.mark.parametrize("source", ONE_EACH)
@pytest.mark.parametrize("form", ["narrow", "wide"])
def test_products_have_the_bits_of_bf16_ones(hopper: Bench, source: str, form: str) -> None:
    weights = Weights(hopper, source, 100, 416)
    x = weights.rows(5)
    want = weights.plain(x)
    assert np.abs(want).max() > 0
    np.testing.assert_array_equal(weights.wgmma(form, x), want)


@pytest.mark.parametrize("source", ONE_EACH)
def test_mma_products_have_the_bits_of_bf16_ones(bench: Bench, source: str) -> None:
    weights = Weights(bench, source, 100, 416)
    x = weights.rows(5)
    np.testing.assert_array_equal(weights.mma("plain", x), weights.plain(x))


_FLOAT16 = {"q8_0": [0], "q4_0": [0], "q4_1": [0, 2], "q4_k": [0, 2], "q6_k": [208]}
"""Where a block has float16 numbers."""


def _any_bits(source: str, rows: int, cols: int) -> HostMatrix:
    """Blocks of random bits, scales of any size but finite."""
    layout, rng = FORMATS[source], np.random.default_rng(cols)
    data = rng.integers(0, 256, (rows, cols // layout.block_len, layout.block_bytes), np.uint8)
    for at in _FLOAT16[source]:
        data[..., at + 1] &= 0xBF  # below 2: so that no float32 product is infinite
        small = rng.random(data.shape[:2]) < 0.2
        data[..., at + 1][small] &= 0x83  # subnormal
    return HostMatrix(source, rows, cols, data.reshape(rows, -1))


@pytest.mark.parametrize("source", list(_FLOAT16))
def test_every_weight_is_the_definition_s(hopper: Bench, source: str) -> None:
    """A row of x that is 1 in one place gives the weights there, rounded once."""
    host = _any_bits(source, 64, 256)
    for first in range(0, 256, 32):
        x = np.zeros((32, 256), np.float32)
        x[np.arange(32), first + np.arange(32)] = 1
        weights = Weights(hopper, source, 64, 256, host)
        want = weights.values[:, first : first + 32].T
        rows = hopper.put(x, "bf16")
        np.testing.assert_array_equal(weights.wgmma("narrow", rows), want)
        if first == 96:
            np.testing.assert_array_equal(weights.mma("plain", rows), want)


@pytest.mark.parametrize(("form", "m"), [("narrow", 20), ("wide", 20), ("narrow", 100)])
def test_rows_are_independent(hopper: Bench, form: str, m: int) -> None:
    weights = Weights(hopper, "q4_0", 40, 96)
    x = weights.rows(m)
    full, values = weights.wgmma(form, x), hopper.get(x)
    np.testing.assert_array_equal(full, weights.plain(x))
    for part in (slice(3, 4), slice(m - 9, m)):
        got = weights.wgmma(form, hopper.put(values[part], "bf16"))
        np.testing.assert_array_equal(got, full[part])


@pytest.mark.parametrize("name", ["q4_0_wide_128", "q8_0_gated_128", "q6_k_narrow_8"])
def test_the_ring_goes_round(hopper: Bench, name: str) -> None:
    tile = QUANT_TILES[name]
    cells = tile.stages + 2
    weights = Weights(hopper, tile.type, 64, CELL_K * cells - CELL_K // 4)
    x = weights.rows(3)
    want = weights.plain(x)
    if tile.gated:
        got = weights.tile(name, tile, x, "bf16")
        np.testing.assert_array_equal(got, _gated(hopper, want))
    else:
        np.testing.assert_array_equal(weights.tile(name, tile, x, "f32"), want)


def _gated(bench: Bench, product: Array) -> Array:
    """silu · mul of a product stored in bf16."""
    stored, width = bench.put(product, "bf16"), product.shape[1] // 2
    out = bench.empty((len(product), width), "bf16")
    args = [stored.address, out.address, width, stored.stride, out.stride]
    bench.run("silu_and_mul_bf16", (len(product), 1), args)
    return bench.get(out)


@pytest.mark.parametrize("source", ["q8_0", "q4_k"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_gates(hopper: Bench, source: str, has_bias: bool) -> None:
    weights = Weights(hopper, source, 2 * 96, 128)
    x, bias = weights.rows(6), _normal(1, 2 * 96)
    options = {"bias": hopper.put(bias, "f32")} if has_bias else {}
    want = _gated(hopper, weights.plain(x) + (bias if has_bias else 0))
    assert np.abs(want).max() > 0
    np.testing.assert_array_equal(weights.wgmma("gated", x, "bf16", **options), want)
    np.testing.assert_array_equal(weights.mma("gated", x, "bf16", **options), want)


def test_bias_and_residual(hopper: Bench) -> None:
    weights = Weights(hopper, "q4_1", 72, 160)
    x, bias, residual = weights.rows(6), _normal(1, 72), rounded(_normal(6, 72), "bf16")
    want = rounded(rounded(weights.plain(x) + bias, "bf16") + residual, "bf16")
    for run in (
        lambda **o: weights.wgmma("narrow", x, **o),
        lambda **o: weights.mma("plain", x, **o),
    ):
        options = {"bias": hopper.put(bias, "f32"), "residual": hopper.put(residual, "bf16")}
        np.testing.assert_array_equal(run(**options), want)


@pytest.mark.parametrize("source", ONE_EACH)
@pytest.mark.parametrize("out_type", ["bf16", "f32"])
def test_dequantised_rows(bench: Bench, source: str, out_type: str) -> None:
    weights = Weights(bench, source, 40, 416)
    out = bench.empty((41, weights.k), out_type)
    stride = pack_units(weights.host, weights.format).shape[1]
    args = [0, weights.units, out.address, weights.k, stride, out.stride, np.float32(1)]
    bench.run(f"embedding_{weights.format}_{out_type}", (40, -(-weights.k // 2048)), args)
    got = bench.get(out)
    assert np.isnan(got[40]).all()
    np.testing.assert_array_equal(got[:40], rounded(dequantize(weights.host), out_type))


@pytest.mark.gpu
class TestOnTheGpu:
    """Sizes and rows that the machine is too slow for."""

    @pytest.fixture
    def device(self, gpu: Any) -> Bench:
        if gpu.arch != "sm_90a":
            pytest.skip(f"gemm_step_tiles needs sm_90a, not {gpu.arch}")
        return gpu_bench(gpu)

    @pytest.mark.parametrize("source", ONE_EACH)
    def test_every_form_and_row(self, device: Bench, source: str) -> None:
        weights = Weights(device, source, 2 * 544, 4096)
        x = weights.rows(128)
        values, full = device.get(x), weights.plain(x)
        gated = _gated(device, full)
        for m in (1, 2, 7, 8, 9, 31, 32, 33, 64, 127, 128):
            for start in {0, 128 - m}:
                part = slice(start, start + m)
                some = device.put(values[part], "bf16")
                for form in ("narrow", "wide"):
                    np.testing.assert_array_equal(weights.wgmma(form, some), full[part])
                np.testing.assert_array_equal(weights.mma("plain", some), full[part])
                np.testing.assert_array_equal(weights.wgmma("gated", some, "bf16"), gated[part])
                np.testing.assert_array_equal(weights.mma("gated", some, "bf16"), gated[part])

    @pytest.mark.parametrize("source", ONE_EACH)
    def test_a_long_k(self, device: Bench, source: str) -> None:
        weights = Weights(device, source, 256, 12288)
        x = weights.rows(len(QUANT_RUNGS))
        want = weights.plain(x)
        for form in ("narrow", "wide"):
            np.testing.assert_array_equal(weights.wgmma(form, x), want)
