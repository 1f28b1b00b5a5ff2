"""A chain of products: the bits of its kernels one after the other, and its plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from atlas_kernels.chain_plan import (
    CHAIN_TILES,
    GATED,
    MAX_STEPS,
    NORM,
    OWN_NORM,
    WIDTH,
    ChainStep,
    ChainTile,
    chain_rung,
    row_view,
    unit_columns,
    weight_view,
)
from atlas_kernels.gemm_step_plan import BESIDE_ATTENTION, TILES, TensorView, variant
from atlas_kernels.grid_barrier import COUNTER_BYTES
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.launches import Bench, Buffer, gpu_bench, machine_bench, rounded

Array = np.ndarray[Any, Any]
EPS = np.float32(1e-6)


def test_every_tile_fits_beside_attention() -> None:
    for rows, tile in CHAIN_TILES.items():
        assert tile.shared_bytes <= BESIDE_ATTENTION
        assert tile.ring_bytes % 1024 == 0, "the swizzle's period"
        assert tile.rows == rows
        for columns in range(8, WIDTH + 1, 8):
            size = tile.blocks(columns) * tile.block_bytes(columns)
            assert size % 1024 == 0
            assert 5 * size <= tile.ring_bytes


@given(columns=st.integers(8, 300_000), num_blocks=st.integers(1, 200), gated=st.booleans())
def test_units_share_the_columns_out(columns: int, num_blocks: int, gated: bool) -> None:
    box = unit_columns(columns, num_blocks, gated=gated)
    assert box % 8 == 0
    assert 8 <= box <= (WIDTH // 2 if gated else WIDTH)

    def slowest(box: int) -> int:
        units = -(-columns // box)
        return -(-units // num_blocks) * box

    assert all(slowest(box) <= slowest(other) for other in range(8, (64 if gated else 128) + 1, 8))


def test_rungs() -> None:
    assert [chain_rung(rows) for rows in (1, 8, 9, 16, 17, 32, 33)] == [8, 8, 16, 16, 32, 32, None]


def _normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


class Layer:
    """Output product, gated product, down product and the next layer's, on a device."""

    def __init__(self, bench: Bench, hidden: int, inner: int, heads: int, last: int) -> None:
        self.bench, self.hidden, self.inner = bench, hidden, inner
        self.weights = {
            "out": self._matrix(hidden, heads, 1),
            "gated": self._matrix(2 * inner, hidden, 2),
            "down": self._matrix(hidden, inner, 3),
            "last": self._matrix(last, hidden, 4),
        }
        self.norms = [bench.put(_normal(1, hidden, seed=5 + i) * 0.2 + 1, "f32") for i in range(2)]
        self.bias = bench.put(_normal(1, last, seed=9), "f32")
        for buffer in (*self.weights.values(), *self.norms, self.bias):
            bench.early(buffer.address)

    def _matrix(self, rows: int, cols: int, seed: int) -> Buffer:
        return self.bench.put(rounded(_normal(rows, cols, seed=seed), "bf16"), "bf16")

    def start(self, m: int) -> tuple[Buffer, Buffer]:
        """The residual stream, and what attention leaves."""
        heads = self.weights["out"].shape[1]
        stream = self.bench.put(rounded(_normal(m, self.hidden, seed=10), "bf16"), "bf16")
        return stream, self.bench.put(rounded(_normal(m, heads, seed=11), "bf16"), "bf16")

    def map(self, buffer: Buffer, view: TensorView) -> int:
        encoded = self.bench.memory.tensor_map(buffer.address, view.shape, view.box, view.strides)
        address: int = self.bench.memory.put(np.frombuffer(encoded, np.uint8))
        return self.bench.early(address)

    def apart(self, m: int) -> list[Array]:
        """Kernel after kernel."""
        stream, attended = self.start(m)
        empty = self.bench.empty
        normed, gated = empty((m, self.hidden), "bf16"), empty((m, self.inner), "bf16")
        last = empty((m, self.weights["last"].shape[0]), "bf16")
        self._product("out", attended, stream, residual=stream)
        self._norm(0, stream, normed)
        self._product("gated", normed, gated)
        self._product("down", gated, stream, residual=stream)
        self._norm(1, stream, normed)
        self._product("last", normed, last, bias=self.bias.address)
        return [self.bench.get(buffer) for buffer in (stream, gated, last)]

    def _norm(self, number: int, x: Buffer, out: Buffer) -> None:
        args = [x.address, self.norms[number].address, out.address, self.hidden]
        self.bench.run("rmsnorm_bf16", (x.shape[0], 1), [*args, x.stride, out.stride, EPS])

    def _product(
        self, name: str, x: Buffer, out: Buffer, residual: Buffer | None = None, bias: int = 0
    ) -> None:
        weight, (m, k), gated = self.weights[name], x.shape, name == "gated"
        n = weight.shape[0]
        tile = TILES[kernel := variant(n, m, gated=gated)]
        maps = [self.map(weight, tile.weight_view(n, k))]
        maps.append(self.map(x, tile.row_view(m, k, x.stride)))
        added = (residual.address, residual.stride) if residual else (0, 0)
        args = [*maps, bias, added[0], out.address, n, k, m, added[1], out.stride, 0]
        self.bench.run(f"gemm_step_bf16_{kernel}", (tile.grid(n), 1), args)

    def chained(self, m: int, num_blocks: int, *, own_norm: bool, rounds: int = 1) -> list[Array]:
        """In one kernel, ``rounds`` times from the same start; what came last."""
        tile = CHAIN_TILES[chain_rung(m) or 0]
        empty = self.bench.empty
        normed, gated = empty((m, self.hidden), "bf16"), empty((m, self.inner), "bf16")
        own = empty((num_blocks, self.hidden), "bf16")
        last = empty((m, self.weights["last"].shape[0]), "bf16")
        counters = self.bench.early(
            self.bench.memory.put(np.zeros(MAX_STEPS * COUNTER_BYTES, np.uint8))
        )
        for _ in range(rounds):
            stream, attended = self.start(m)
            steps = [self._step(tile, num_blocks, "out", attended, stream, residual=stream)]
            for number, name, out in ((0, "gated", gated), (1, "last", last)):
                norm = ChainStep(
                    source=stream.address, source_stride=stream.stride, k=self.hidden,
                    norm=self.norms[number].address, eps=float(EPS),
                )  # fmt: skip
                if own_norm:
                    product = self._step(tile, num_blocks, name, own, out, own=True)
                    norm = replace(norm, kind=product.kind | OWN_NORM, target=own.address)
                    norm = replace(norm, target_stride=own.stride)
                    fields = ("map_w", "map_x", "bias", "out", "out_stride", "columns", "box")
                    fields += ("units", "blocks")
                    steps.append(replace(norm, **{name: getattr(product, name) for name in fields}))
                else:
                    steps.append(
                        replace(norm, kind=NORM, target=normed.address, target_stride=normed.stride)
                    )
                    steps.append(self._step(tile, num_blocks, name, normed, out))
                if name == "gated":
                    down = self._step(tile, num_blocks, "down", gated, stream, residual=stream)
                    steps.append(down)
            words = np.array([word for step in steps for word in step.words()], np.int64)
            program = self.bench.early(self.bench.memory.put(words))
            name = f"gemm_chain_bf16_{tile.rows}"
            self.bench.run(name, (num_blocks, 1), [program, counters, len(steps), m])
        return [self.bench.get(buffer) for buffer in (stream, gated, last)]

    def _step(
        self,
        tile: ChainTile,
        num_blocks: int,
        name: str,
        x: Buffer,
        out: Buffer,
        residual: Buffer | None = None,
        *,
        own: bool = False,
    ) -> ChainStep:
        weight, (m, k), gated = self.weights[name], x.shape, name == "gated"
        n = weight.shape[0]
        columns = n // 2 if gated else n
        box = unit_columns(columns, num_blocks, gated=gated)
        blocks, copies = tile.blocks(2 * box if gated else box), m if own else 1
        return ChainStep(
            kind=GATED if gated else 0,
            map_w=self.map(weight, weight_view(n, k, box, blocks, gated=gated)),
            map_x=self.map(x, row_view(m // copies, k, x.stride, tile, blocks, copies)),
            bias=self.bias.address if name == "last" else 0,
            residual=residual.address if residual else 0,
            residual_stride=residual.stride if residual else 0,
            out=out.address,
            out_stride=out.stride,
            columns=columns,
            k=k,
            box=box,
            units=-(-columns // box),
            blocks=blocks,
        )


def _check(bench: Bench, m: int, sizes: tuple[int, ...], num_blocks: int, own_norm: bool) -> None:
    layer = Layer(bench, *sizes)
    want = layer.apart(m)
    got = layer.chained(m, num_blocks, own_norm=own_norm, rounds=2)
    for one, other in zip(want, got, strict=True):
        assert not np.isnan(one).any()
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("m", "sizes", "num_blocks", "own_norm"),
    [
        (1, (128, 192, 64, 48), 3, True),
        (3, (128, 192, 64, 48), 3, False),
        (8, (64, 64, 192, 200), 2, False),
        (11, (64, 128, 64, 16), 2, False),
        (1, (192, 64, 128, 264), 1, True),
    ],
)
def test_chain_has_the_bits_of_its_kernels(
    ptx_of: Callable[[str], str], m: int, sizes: tuple[int, ...], num_blocks: int, own_norm: bool
) -> None:
    _check(machine_bench(ptx_of), m, sizes, num_blocks, own_norm)


@pytest.mark.parametrize("order", [1, -1])
def test_chain_survives_warps_in_any_order(ptx_of: Callable[[str], str], order: int) -> None:
    _check(machine_bench(ptx_of, order), 1, (64, 64, 64, 16), 2, own_norm=True)
    _check(machine_bench(ptx_of, order), 2, (64, 64, 64, 16), 2, own_norm=False)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 2, 8, 13, 32])
@pytest.mark.parametrize(
    "sizes", [(2048, 8192, 2048, 3072), (4096, 12288, 4096, 6144), (1024, 2944, 576, 70000)]
)
def test_chain_on_a_gpu(gpu: Any, m: int, sizes: tuple[int, ...]) -> None:
    if gpu.arch != "sm_90a":
        pytest.skip("gemm_chain needs sm_90a")
    num_blocks = gpu.device.properties.multiprocessor_count
    _check(gpu_bench(gpu), m, sizes, num_blocks, own_norm=m == 1)
    gpu.free()
