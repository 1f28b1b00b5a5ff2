"""Mixture of experts: routing, the decode kernels and the grouped ones, and that they agree."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from atlas_kernels.moe_plan import (
    DOWN_TILES,
    GATE_UP_TILES,
    GROUPED_TILES,
    MAX_SLOTS,
    ROW_BOX,
    UNIT,
    WGMMA_TILES,
    decode_kernels,
    decode_variant,
    down_view,
    gate_up_view,
    grouped_variant,
    route_variant,
    wgmma_variant,
)
from hypothesis import given
from hypothesis import strategies as st

from atlas.backends.cuda import moe as moe_ops
from atlas.backends.cuda.array import DeviceArray
from atlas.backends.cuda.moe import moe_experts
from atlas.backends.cuda.pack import DeviceMatrix, MatrixLayout
from atlas.errors import ShapeError
from atlas.ops import OPS
from tests.kernels.launches import Bench, Buffer, close, machine_bench, rounded
from tests.kernels.op_launches import BenchQueue, run_op
from tests.kernels.ptx_machine import Memory
from tests.ops import cases

Array = np.ndarray[Any, Any]
EXPERTS, DIM, INNER = 6, 384, 64


def test_tiles_fit_an_sm() -> None:
    for tile in (*GATE_UP_TILES.values(), *DOWN_TILES.values()):
        assert (tile.shared_bytes + 1024) * tile.places <= 228 * 1024
        assert tile.blocks_per_sm <= tile.places
        assert tile.threads * tile.blocks_per_sm <= 1024, "64 registers a thread at least"
        assert tile.stage_bytes % 1024 == 0, "the swizzle's period"
        assert max(*tile.gate_up_box, *tile.down_box) <= 256, "a box of a tensor map"
        assert tile.stages <= 32, "a lane makes one barrier"
        assert tile.max_pairs <= min(tile.threads, 256), "a thread lists a pair"
    assert all(tile.threads == 32 * tile.warps for tile in DOWN_TILES.values()), "all have a ring"
    for grouped in GROUPED_TILES.values():
        assert grouped.shared_bytes <= 99 * 1024, "the least of all GPUs since sm_80"
        assert grouped.rows * (grouped.columns + 4) * 4 <= grouped.shared_bytes
        assert grouped.threads % 256 == 0
        assert grouped.threads // 8 % 16 == 0, "gate and up lines of a thread"
    for wide in WGMMA_TILES.values():
        assert wide.shared_bytes <= 227 * 1024
        assert wide.stage_bytes % 1024 == 0, "the swizzle's pattern"
        assert wide.rows % ROW_BOX == 0, "whole boxes of activations"
        assert wide.sizes[-1] == wide.rows
        assert 2 <= wide.lag <= wide.stages - 2


@given(
    rows=st.integers(1, 200),
    dim=st.integers(1, 128).map(lambda n: 64 * n),
    inner=st.integers(1, 64).map(lambda n: 64 * n),
    slots=st.integers(1, MAX_SLOTS),
)
def test_a_decode_variant_has_room(rows: int, dim: int, inner: int, slots: int) -> None:
    name = decode_variant(rows, dim=dim, inner=inner, slots=slots)
    if name is not None:
        gate_up, down = GATE_UP_TILES[name], DOWN_TILES[name]
        assert rows <= min(gate_up.rows, down.rows)
        x_bytes, act_bytes = rows * (2 * dim + 16), rows * slots * (2 * inner + 16 + 2 * UNIT)
        for tile, area in ((gate_up, x_bytes), (down, act_bytes)):
            rings = (tile.list_bytes + area + 1023) & -1024  # as the kernels have it
            assert rings + tile.ring_bytes <= tile.shared_bytes


@pytest.mark.parametrize(
    ("experts", "dim", "inner"), [(512, 8192, 2048), (8, 6144, 16384), (1, 64, 64), (3, 192, 704)]
)
def test_maps_of_experts_are_what_the_driver_takes(experts: int, dim: int, inner: int) -> None:
    """Of great models and of those that are smaller than a box; a copy is a stage."""
    for tile, (shape, strides), box in [
        *((t, gate_up_view(experts, dim, inner), t.gate_up_box) for t in GATE_UP_TILES.values()),
        *((t, down_view(experts * dim, inner), t.down_box) for t in DOWN_TILES.values()),
    ]:
        assert len(Memory().tensor_map(1 << 20, shape, box, strides)) == 128
        assert 2 * math.prod(box) == tile.stage_bytes
        last = sum((n - 1) * step for n, step in zip(shape, (*strides, 2), strict=True))
        assert math.prod(shape) * 2 == last + 2, "each element once"
        assert max(shape) < 1 << 31, "coordinates are int32"


def test_variants_of_known_shapes() -> None:
    for slots, inner in ((9, 512), (8, 768)):
        chosen = [decode_variant(m, dim=2048, inner=inner, slots=slots) for m in (1, 2, 3, 4, 8, 9)]
        assert chosen == ["r1", "r2", "r8", "r8", "r8", None]
    assert decode_variant(1, dim=2050, inner=512, slots=9) is None
    assert grouped_variant(128, experts=257, slots=9) == "r16"
    assert grouped_variant(8192, experts=257, slots=9) == "r128"
    assert wgmma_variant(128, experts=257, slots=9) is None
    assert wgmma_variant(2048, experts=257, slots=9) == "w160"
    assert [route_variant(n) for n in (128, 129, 1024, 1025)] == ["e128", "e256", "e1024", None]


def _route(
    bench: Bench, scores: Array, top_k: int, *, normalize: bool = True, bias: Array | None = None,
    sigmoid: bool = False, shared: Array | None = None, slots: int = 0, scaling: float = 1.0,
    active: Array | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    rows, slots = len(scores), slots or top_k
    source = bench.put(scores, "f32", pad=3)
    ids, weights = np.full((rows, slots), -7, np.int32), np.full((rows, slots), np.nan, np.float32)
    ids_at, weights_at = bench.memory.put(ids), bench.memory.put(weights)
    bias_at = 0 if bias is None else bench.memory.put(bias)
    shared_at = 0 if shared is None else bench.memory.put(shared)
    active_at = 0 if active is None else bench.memory.put(active)
    args = [source.address, bias_at, shared_at, active_at, ids_at, weights_at, scores.shape[1]]
    args += [top_k, slots, int(sigmoid), int(normalize), np.float32(0), np.float32(scaling)]
    name = f"moe_route_{route_variant(scores.shape[1])}"
    bench.run(name, (rows, 1), [*args, source.stride, 4])
    return bench.memory.get(ids_at, ids), bench.memory.get(weights_at, weights)


@pytest.mark.parametrize("normalize", [False, True])
def test_route_by_softmax(bench: Bench, normalize: bool) -> None:
    scores = np.random.default_rng(1).standard_normal((5, 70)).astype(np.float32) * 3
    scores[1] = 0.5  # all equal: the lowest ids
    scores[2, [60, 3, 35]] = 9.0
    scores[3] = -3e38
    scores[3, 69] = 3e38
    ids, weights = _route(bench, scores, 8, normalize=normalize)
    want_ids, want = np.empty((5, 8), np.int32), np.empty((5, 8), np.float32)
    OPS["moe_route"](scores, normalize, ids=want_ids, weights=want)
    np.testing.assert_array_equal(ids, want_ids)
    np.testing.assert_allclose(weights, want, rtol=3e-6, atol=1e-30)


def test_sigmoids_of_great_scores(bench: Bench) -> None:
    scores = np.array([[-200, -88, -87, 0, 10, 200]], np.float32)
    ids, weights = _route(bench, scores, 6, normalize=False, sigmoid=True)
    np.testing.assert_array_equal(ids[0, :4], [5, 4, 3, 2])
    want = 1 / (1 + np.exp(-scores[0, ids[0]].astype(np.float64)))
    np.testing.assert_allclose(weights[0], want, rtol=1e-6, atol=2.0**-126)


def test_route_by_sigmoid_with_bias_and_a_shared_expert(bench: Bench) -> None:
    random = np.random.default_rng(2)
    scores = random.standard_normal((4, 40)).astype(np.float32) * 2
    bias = random.standard_normal(40).astype(np.float32)
    shared = random.standard_normal(4).astype(np.float32)
    active = np.array([0, 5, -1, 2], np.int32)
    ids, weights = _route(
        bench,
        scores,
        6,
        bias=bias,
        sigmoid=True,
        shared=shared,
        slots=7,
        scaling=2.5,
        active=active,
    )
    probabilities = 1 / (1 + np.exp(-scores.astype(np.float64)))
    order = np.argsort(-(probabilities + bias), axis=1, kind="stable")[:, :6]
    chosen = np.take_along_axis(probabilities, order, axis=1)
    want = 2.5 * chosen / chosen.sum(axis=1, keepdims=True)
    kept = [0, 1, 3]
    np.testing.assert_array_equal(ids[kept, :6], order[kept])
    np.testing.assert_allclose(weights[kept, :6], want[kept], rtol=3e-6)
    assert (ids[kept, 6] == 40).all()
    np.testing.assert_allclose(weights[kept, 6], 1 / (1 + np.exp(-shared[kept])), rtol=3e-6)
    assert (ids[2] == -1).all()
    assert (weights[2] == 0).all()


def test_a_row_of_nan_shows(bench: Bench) -> None:
    ids, weights = _route(bench, np.full((1, 9), np.nan, np.float32), 3)
    assert len(set(ids[0].tolist())) == 3
    assert ((ids >= 0) & (ids < 9)).all()
    assert np.isnan(weights).all()


def _sorted(bench: Bench, ids: Array, experts: int, tile_rows: int) -> tuple[int, int, int]:
    num_tiles = ids.size // tile_rows + experts
    order = bench.memory.put(np.full(ids.size, -9, np.int32))
    tiles = bench.memory.put(np.full((num_tiles, 4), -9, np.int32))
    ids_at = bench.memory.put(ids.astype(np.int32))
    args = [ids_at, order, tiles, ids.size, experts, tile_rows, num_tiles]
    bench.run("moe_sort", (experts, 1), args)
    return order, tiles, num_tiles


@pytest.mark.parametrize(("pairs", "tile_rows"), [(5, 16), (203, 16), (4500, 64)])
def test_sort(bench: Bench, pairs: int, tile_rows: int) -> None:
    experts = 5
    ids = np.random.default_rng(pairs).integers(-1, experts, pairs).astype(np.int32)
    ids[ids == 3] = 1  # nobody chooses 3
    order_at, tiles_at, num_tiles = _sorted(bench, ids, experts, tile_rows)
    order = bench.memory.get(order_at, ids)
    tiles = bench.memory.get(tiles_at, np.empty((num_tiles, 4), np.int32))
    want = np.argsort(ids, kind="stable")[(ids < 0).sum() :]
    np.testing.assert_array_equal(order[: want.size], want)
    covered = []
    for expert, first, rows, _ in tiles[tiles[:, 2] > 0]:
        assert rows <= tile_rows
        assert (ids[order[first : first + rows]] == expert).all()
        covered += range(first, first + rows)
    assert covered == list(range(want.size)), "in order, each pair once"
    assert (tiles[:, 2] >= 0).all()


def view_map(bench: Bench, address: int, view: tuple[Any, Any], box: tuple[int, ...]) -> int:
    """Address of the tensor map of a view (shape, strides)."""
    raw = bench.memory.tensor_map(address, view[0], box, view[1])
    return int(bench.memory.put(np.frombuffer(raw, np.uint8)))


class Experts:
    """Weights of a few experts and a shared one, and both forms of running them."""

    def __init__(self, bench: Bench, *, shared: bool, seed: int = 0) -> None:
        self.bench, self.random = bench, np.random.default_rng(seed)
        self.slots = 3 if shared else 2
        self.gate_up = self._matrix(EXPERTS, 2 * INNER, DIM)
        self.down = self._matrix(EXPERTS, DIM, INNER)
        self.shared = [self._matrix(1, 2 * INNER, DIM), self._matrix(1, DIM, INNER)]
        self.addresses = [self._put(matrix) for matrix in (self.gate_up, self.down, *self.shared)]
        if not shared:
            self.addresses[2:] = 0, 0

    def _matrix(self, *shape: int) -> Array:
        values = self.random.standard_normal(shape).astype(np.float32) * shape[-1] ** -0.5
        return rounded(values, "bf16")

    def _map(self, address: int, rows: int, columns: int, box_rows: int = 128) -> int:
        """The tensor map of a matrix, or 0 of none."""
        if not address:
            return 0
        box, strides = (box_rows, 64), (2 * columns,)
        raw = self.bench.memory.tensor_map(address, (rows, columns), box, strides)
        return int(self.bench.memory.put(np.frombuffer(raw, np.uint8)))

    def _view(self, address: int, view: tuple[Any, Any], box: tuple[int, ...]) -> int:
        """The tensor map of a view, or 0 of none."""
        return view_map(self.bench, address, view, box) if address else 0

    def _put(self, matrix: Array) -> int:
        address = self.bench.put(matrix.reshape(len(matrix), -1), "bf16").address
        constants = getattr(self.bench.memory, "constants", set())
        constants.add(address)
        return address

    def choose(self, rows: int) -> tuple[Array, Array]:
        ids = np.stack([self.random.permutation(EXPERTS)[:2] for _ in range(rows)])
        if self.slots == 3:
            ids = np.concatenate([ids, np.full((rows, 1), EXPERTS)], axis=1)
        weights = self.random.random((rows, self.slots)).astype(np.float32)
        return ids.astype(np.int32), weights

    def want(self, x: Array, ids: Array, weights: Array, residual: Array) -> Array:
        out = residual.astype(np.float64)
        for row, slot in np.argwhere(ids >= 0):
            e = ids[row, slot]
            gate_up = self.gate_up[e] if e < EXPERTS else self.shared[0][0]
            down = self.down[e] if e < EXPERTS else self.shared[1][0]
            h = rounded((gate_up.astype(np.float64) @ x[row]).astype(np.float32), "bf16")
            gate, up = h[:INNER].astype(np.float64), h[INNER:]
            act = rounded((gate / (1 + np.exp(-gate)) * up).astype(np.float32), "bf16")
            y = rounded((down.astype(np.float64) @ act).astype(np.float32), "bf16")
            out[row] += weights[row, slot].astype(np.float64) * y
        return out.astype(np.float32)

    def decode(self, x: Array, ids: Array, weights: Array, out: Buffer, *, variant: str) -> Array:
        """The decode kernels, in place on ``out``, the residual."""
        bench, rows, slots = self.bench, len(x), self.slots
        gate_up, down, shared_gate_up, shared_down = self.addresses
        source, ids_at = bench.put(x, "bf16", pad=8), bench.put_ints(ids)
        bench.early(ids_at)  # gate_up waited for whoever wrote them
        weights_at = bench.memory.put(weights)
        act = bench.empty((rows * slots, INNER), "bf16").address
        first, box = gate_up_view(EXPERTS, DIM, INNER), GATE_UP_TILES[variant].gate_up_box
        args = [self._view(gate_up, first, box)]
        args += [self._view(shared_gate_up, gate_up_view(1, DIM, INNER), box)]
        args += [source.address, ids_at, act, rows, slots, EXPERTS, DIM]
        bench.run(decode_kernels(variant)[0], (3, 1), [*args, INNER, source.stride])
        box = DOWN_TILES[variant].down_box
        args = [self._view(down, down_view(EXPERTS * DIM, INNER), box)]
        args += [self._view(shared_down, down_view(DIM, INNER), box), ids_at, weights_at, act]
        args += [out.address, out.address, rows, slots, EXPERTS, DIM, INNER]
        args += [0, out.stride, out.stride]
        blocks = DIM // UNIT - 3  # some take two groups of columns
        bench.run(decode_kernels(variant)[1], (blocks, 1), args)
        return bench.get(out)

    def grouped(self, x: Array, ids: Array, weights: Array, out: Buffer, *, variant: str) -> Array:
        """The grouped kernels, in place on ``out``."""
        bench, rows, slots = self.bench, len(x), self.slots
        tile, (gate_up, down, shared_gate_up, shared_down) = GROUPED_TILES[variant], self.addresses
        source, weights_at = bench.put(x, "bf16", pad=8), bench.memory.put(weights)
        order, tiles, num_tiles = _sorted(bench, ids, EXPERTS + 1, tile.rows)
        assert num_tiles == tile.tiles(ids.size, EXPERTS + 1)
        act = bench.empty((rows * slots, INNER), "bf16").address
        y = bench.empty((rows * slots, DIM), "bf16").address
        args = [gate_up, shared_gate_up, source.address, order, tiles, act, EXPERTS, slots, DIM]
        args += [INNER, source.stride]
        bench.run(f"moe_grouped_gate_up_bf16_{variant}", (INNER // 64, num_tiles), args)
        args = [down, shared_down, act, order, tiles, y, EXPERTS, DIM, INNER]
        bench.run(f"moe_grouped_down_bf16_{variant}", (-(-DIM // 128), num_tiles), args)
        return self._combine(y, ids, weights_at, out)

    def wgmma(
        self, x: Array, ids: Array, weights: Array, out: Buffer, *, variant: str, blocks: int = 4
    ) -> Array:
        """The grouped kernels of Hopper, in place on ``out``."""
        bench, rows, slots = self.bench, len(x), self.slots
        tile, (gate_up, down, shared_gate_up, shared_down) = WGMMA_TILES[variant], self.addresses
        source, weights_at = bench.put(x, "bf16", pad=8), bench.memory.put(weights)
        order, tiles, num_tiles = _sorted(bench, ids, EXPERTS + 1, tile.rows)
        assert num_tiles == tile.tiles(ids.size, EXPERTS + 1)
        act = bench.empty((rows * slots, INNER), "bf16").address
        y = bench.empty((rows * slots, DIM), "bf16").address
        args = [self._map(gate_up, EXPERTS * 2 * INNER, DIM)]
        args += [self._map(shared_gate_up, 2 * INNER, DIM), source.address, order, tiles, act]
        args += [num_tiles, EXPERTS, slots, DIM, INNER, source.stride]
        grid = (blocks, 1)
        bench.run(f"moe_grouped_wgmma_gate_up_bf16_{variant}", grid, args)
        args = [self._map(down, EXPERTS * DIM, INNER), self._map(shared_down, DIM, INNER)]
        args += [self._map(act, rows * slots, INNER, 32), order, tiles, y, num_tiles]
        bench.run(f"moe_grouped_wgmma_down_bf16_{variant}", grid, [*args, EXPERTS, DIM, INNER])
        return self._combine(y, ids, weights_at, out)

    def _combine(self, y: int, ids: Array, weights_at: int, out: Buffer) -> Array:
        bench, stride = self.bench, out.stride
        args = [y, bench.put_ints(ids), weights_at, out.address, out.address, self.slots, DIM]
        bench.run("moe_combine", (len(ids), -(-DIM // 1024)), [*args, stride, stride])
        return bench.get(out)


def _rows_of(experts: Experts, counts: list[int]) -> tuple[Array, Array, Array, Array]:
    """x, ids, weights, residual of rows of which ``counts[e]`` chose expert e, in mixed order."""
    chosen = np.repeat(np.arange(len(counts)), counts)
    rows = -(-chosen.size // 2) + 1  # a choice or two are left over: none
    ids = np.full((rows, experts.slots), -1, np.int32)
    ids[:, :2].flat[experts.random.permutation(2 * rows)[: chosen.size]] = chosen
    if experts.slots == 3:
        ids[: rows - 2, 2] = EXPERTS
    x, residual = (experts.random.standard_normal((rows, DIM)).astype(np.float32) for _ in "ab")
    weights = experts.random.random((rows, experts.slots)).astype(np.float32)
    return rounded(x, "bf16"), ids, weights, rounded(residual, "bf16")


@pytest.mark.parametrize(
    ("counts", "shared", "blocks"),
    [
        ([0, 1, 63, 0, 129, 0], False, 3),
        ([33, 0, 2, 0, 0, 97], True, 4),
        ([0, 161, 0, 0, 0, 1], False, 7),
        ([1] * 6, True, 5),
        ([0] * 6, False, 2),
    ],
)
def test_wgmma_and_mma(bench: Bench, counts: list[int], shared: bool, blocks: int) -> None:
    """The same bits from both grouped forms, for any rows of an expert."""
    experts = Experts(bench, shared=shared, seed=sum(counts))
    x, ids, weights, residual = _rows_of(experts, counts)
    run = experts.wgmma(
        x, ids, weights, bench.put(residual, "bf16", pad=8), variant="w160", blocks=blocks
    )
    close(run, experts.want(x, ids, weights, residual), "bf16", 1e-2)
    again = experts.grouped(x, ids, weights, bench.put(residual, "bf16", pad=8), variant="r64")
    np.testing.assert_array_equal(run, again)


@pytest.mark.gpu
@pytest.mark.parametrize("bench", ["gpu"], indirect=True)
@pytest.mark.parametrize("variant", WGMMA_TILES)
@pytest.mark.parametrize(
    ("counts", "blocks"),
    [([0, 1, 700, 321, 40, 161], 132), ([2, 0, 0, 319, 320, 17], 10), ([0, 0, 5, 0, 0, 0], 2)],
)
def test_wgmma_at_length(bench: Bench, variant: str, counts: list[int], blocks: int) -> None:
    """On Hopper: tables of several turns of every thread block."""
    experts = Experts(bench, shared=True, seed=sum(counts))
    x, ids, weights, residual = _rows_of(experts, counts)
    want = experts.grouped(x, ids, weights, bench.put(residual, "bf16"), variant="r64")
    for _ in range(3):
        out = bench.put(residual, "bf16")
        run = experts.wgmma(x, ids, weights, out, variant=variant, blocks=blocks)
        np.testing.assert_array_equal(run, want)


def test_the_op_takes_wgmma_on_hopper(ptx_of: Callable[[str], str]) -> None:
    case = next(case for case in cases.moe_experts() if case.id == "bf16-T40")
    names, results = list(inspect.signature(OPS["moe_experts"]).parameters), []
    for arch, part in (
        ("sm_90a", "grouped_wgmma_gate_up_bf16_w160"),
        ("sm_80", "gate_up_bf16_r64"),
    ):
        queue = BenchQueue(machine_bench(ptx_of), arch)
        results.append(run_op(queue, "moe_experts", moe_experts, names, case)["out"])
        assert part in queue.launched[1]
    np.testing.assert_array_equal(*results)


_WAIT = "wgmma.wait_group.sync.aligned"
FAULTS = {
    "sums read before they are there": (f"{_WAIT} 0;", ""),
    "a stage not given back": ("@p mbarrier.arrive.shared::cta.b64 _, ", "@p prefetch.global.L2 "),
    "rows announced before they are there": ("cp.async.wait_group 2;", ""),
    "a buffer written too early": ("bar.sync ", "prefetch.global.L2 "),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_machine_sees_what_a_grouped_kernel_gets_wrong(
    ptx_of: Callable[[str], str], fault: str
) -> None:
    """Otherwise the test above would prove little."""
    right, wrong = FAULTS[fault]
    part = "gate_up"
    assert right in ptx_of(f"moe_grouped_wgmma_{part}_bf16_w160")

    def broken(name: str) -> str:
        return ptx_of(name).replace(right, wrong) if f"wgmma_{part}" in name else ptx_of(name)

    with pytest.raises(AssertionError):
        _run_in_order(broken, 1)


@pytest.mark.parametrize("order", [1, -1])
def test_warps_may_run_in_any_order(ptx_of: Callable[[str], str], order: int) -> None:
    _run_in_order(ptx_of, order)


def _run_in_order(ptx_of: Callable[[str], str], order: int) -> None:
    bench = machine_bench(ptx_of, order)
    experts = Experts(bench, shared=False)
    x, ids, weights, residual = _rows_of(experts, [20, 0, 40, 0, 0, 3])
    run = experts.wgmma(x, ids, weights, bench.put(residual, "bf16"), variant="w160", blocks=1)
    close(run, experts.want(x, ids, weights, residual), "bf16", 1e-2)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("rows", "variant"),
    [(1, "r1"), (2, "r2"), (3, "r8"), (5, "r8"), (7, "r8")],
)
def test_decode_and_grouped(bench: Bench, rows: int, variant: str, shared: bool) -> None:
    experts = Experts(bench, shared=shared, seed=rows)
    x = rounded(experts.random.standard_normal((rows, DIM)).astype(np.float32), "bf16")
    residual = rounded(experts.random.standard_normal((rows, DIM)).astype(np.float32), "bf16")
    ids, weights = experts.choose(rows)
    if rows > 2:
        ids[1] = ids[0]  # two rows that share all their experts
        ids[2] = -1  # a padding row
    want = experts.want(x, ids, weights, residual)
    run = experts.decode(x, ids, weights, bench.put(residual, "bf16", pad=8), variant=variant)
    close(run, want, "bf16", 1e-2)
    again = experts.grouped(x, ids, weights, bench.put(residual, "bf16", pad=8), variant="r16")
    np.testing.assert_array_equal(run, again)


@pytest.mark.parametrize(
    ("rows", "variant", "dim", "inner"),
    [(1, "r1", 640, 64), (1, "r1", 128, 448), (2, "r2", 384, 64), (5, "r8", 128, 192)],
)
def test_decode_in_an_order_by_chance(
    ptx_of: Callable[[str], str], monkeypatch: pytest.MonkeyPatch,
    rows: int, variant: str, dim: int, inner: int,
) -> None:  # fmt: skip
    """Copies overtake one another, where a unit ends within a stage and units within the ring."""
    monkeypatch.setattr(sys.modules[__name__], "DIM", dim)
    monkeypatch.setattr(sys.modules[__name__], "INNER", inner)
    bench = machine_bench(ptx_of, 40 + rows)
    experts = Experts(bench, shared=True, seed=rows)
    x, residual = (
        rounded(experts.random.standard_normal((rows, dim)).astype(np.float32), "bf16")
        for _ in "ab"
    )
    ids, weights = experts.choose(rows)
    out = bench.put(residual, "bf16", pad=8)
    run = experts.decode(x, ids, weights, out, variant=variant)
    close(run, experts.want(x, ids, weights, residual), "bf16", 1e-2)


@pytest.mark.parametrize(
    "ids", [[2, -1], [-1, 0], [-1, -1], [-1, 3, EXPERTS], [-1, -1, -1]], ids=str
)
def test_a_row_without_some_choices(bench: Bench, ids: list[int]) -> None:
    """A tile of one row makes no list of the others', as the greater ones do."""
    results = []
    for variant in ("r1", "r8"):
        experts = Experts(bench, shared=len(ids) == 3, seed=3)
        normal = experts.random.standard_normal((2, 1, DIM)).astype(np.float32)
        x, out = rounded(normal[0], "bf16"), bench.put(normal[1], "bf16", pad=8)
        weights = experts.random.random((1, len(ids))).astype(np.float32)
        chosen = np.array([ids], np.int32)
        want = experts.want(x, chosen, weights, rounded(normal[1], "bf16"))
        results.append(experts.decode(x, chosen, weights, out, variant=variant))
        close(results[-1], want, "bf16", 1e-2)
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("variant", list(DOWN_TILES))
def test_order_of_a_product(bench: Bench, variant: str) -> None:
    """Steps of 16, ascending, in one float32 accumulator."""
    random, inner = np.random.default_rng(7), 704  # no multiple of any ring
    w = rounded(random.standard_normal((DIM, inner)).astype(np.float32), "bf16")
    act = rounded(random.standard_normal((1, inner)).astype(np.float32), "bf16")
    want = np.zeros(DIM, np.float32)
    for first in range(0, inner, 16):
        step = slice(first, first + 16)
        products = w[:, step].astype(np.float64) * act[0, step]
        want = (want + products.sum(axis=1)).astype(np.float32)
    matrix, ids = bench.early(bench.put(w, "bf16").address), np.zeros((1, 1), np.int32)
    ids_at, weights = bench.memory.put(ids), bench.memory.put(np.ones((1, 1), np.float32))
    bench.early(ids_at)
    out = bench.empty((1, DIM), "bf16")
    matrix = view_map(bench, matrix, down_view(DIM, inner), DOWN_TILES[variant].down_box)
    args = [matrix, 0, ids_at, weights, bench.put(act, "bf16").address, 0, out.address, 1, 1, 1]
    grid = (DIM // UNIT, 1)
    bench.run(decode_kernels(variant)[1], grid, [*args, DIM, inner, 0, 0, out.stride])
    close(bench.get(out)[0], want, "bf16", 1e-2)
    if hasattr(bench.memory, "constants"):  # a GPU sums the 16 products in a way of its own
        np.testing.assert_array_equal(bench.get(out)[0], rounded(want, "bf16"))


class Block:
    """A block's ops as the backend launches them; of six experts three are in memory.

    On the PTX machine a read of the others fails.
    """

    def __init__(self, bench: Bench, capability: tuple[int, int]) -> None:
        self.bench, self.queue = bench, BenchQueue(bench, "sm_90a")
        self.queue.device.capability = capability
        self.random = np.random.default_rng(4)
        self.matrices = [self._matrix(2 * INNER, DIM), self._matrix(DIM, INNER)]

    def _matrix(self, rows: int, cols: int) -> DeviceMatrix:
        values = self.random.standard_normal((3 * rows, cols)).astype(np.float32) * cols**-0.5
        address = self.bench.early(self.bench.put(values, "bf16").address)
        data = DeviceArray(address, (6 * rows, 2 * cols), "uint8")
        return DeviceMatrix(MatrixLayout("bf16", "bf16", 6 * rows, cols, 6), data)

    def buffer(self, *shape: int) -> DeviceArray:
        return DeviceArray(self.bench.empty(shape, "bf16").address, shape, "bfloat16")

    def run(self, scores: Array, slots: Array, x: Array, residual: Array) -> Array:
        """The residual stream after the block."""
        bench, rows, ids = self.bench, len(x), np.zeros((len(x), 2), np.int32)
        scores_at, slots_at, ids_at = map(bench.memory.put, (scores, slots, ids))
        weights_at = bench.memory.put(ids.astype(np.float32))
        routed = (
            DeviceArray(ids_at, (rows, 2), "int32"),
            DeviceArray(weights_at, (rows, 2), "float32"),
        )
        moe_ops.moe_route(
            self.queue, DeviceArray(scores_at, scores.shape, "float32"), True,
            slots=DeviceArray(slots_at, (rows,), "int32"), ids=routed[0], weights=routed[1],
        )  # fmt: skip
        bench.early(ids_at)  # gate_up waited for whoever wrote them
        source, out = bench.put(x, "bf16"), bench.put(residual, "bf16")
        moe_ops.moe_experts(
            self.queue, DeviceArray(source.address, x.shape, "bfloat16"), *self.matrices, *routed,
            "silu", expert_gate_up=self.buffer(rows, 2, 2 * INNER),
            expert_activated=self.buffer(rows, 2, INNER), expert_out=self.buffer(rows, 2, DIM),
            out=DeviceArray(out.address, x.shape, "bfloat16"),
        )  # fmt: skip
        return bench.get(out)


def test_padding_reads_no_experts(bench: Bench) -> None:
    """Rows of negative slots change no bit of the others, and read no weights."""
    random, real = np.random.default_rng(5), np.array([0, 2, 5])
    scores, x, residual = (random.standard_normal((6, n)).astype(np.float32) for n in (6, DIM, DIM))
    scores[:, 3:] += 30
    scores[real, 3:] -= 60  # only padding would choose experts 3 to 5
    slots, residual = np.full(6, -1, np.int32), rounded(residual, "bf16")
    slots[real] = 0, 17, 4
    for capability in ((9, 0), (8, 0)):  # the decode kernels, the grouped ones
        block = Block(bench, capability)
        padded = block.run(scores, slots, x, residual)
        alone = block.run(scores[real], slots[real], x[real], residual[real])
        np.testing.assert_array_equal(padded[real], alone)
        np.testing.assert_array_equal(padded[slots < 0], residual[slots < 0])
        assert (alone != residual[real]).any(axis=1).all()


def test_ids_between_multiples_of_16_bytes_are_refused(ptx_of: Callable[[str], str]) -> None:
    """Such as those from some row on: ``moe_sort`` loads four at once."""
    bench = machine_bench(ptx_of)
    block = Block(bench, (8, 0))
    x, out = (block.buffer(1, DIM) for _ in range(2))
    address = bench.memory.put(np.zeros((2, 2), np.int32))
    weights = DeviceArray(bench.memory.put(np.zeros((1, 2), np.float32)), (1, 2), "float32")
    with pytest.raises(ShapeError, match=r"ids .* must lie at multiples of 16 bytes"):
        moe_experts(
            block.queue, x, *block.matrices, DeviceArray(address + 8, (1, 2), "int32"), weights,
            "silu", expert_gate_up=block.buffer(1, 2, 2 * INNER),
            expert_activated=block.buffer(1, 2, INNER), expert_out=block.buffer(1, 2, DIM), out=out,
        )  # fmt: skip
    assert block.queue.launched == []


@pytest.mark.gpu
@pytest.mark.parametrize("bench", ["gpu"], indirect=True)
def test_bits_of_a_row_depend_on_the_row_alone(bench: Bench, gpu: Any) -> None:
    experts = Experts(bench, shared=True)
    rows = 300
    x = rounded(experts.random.standard_normal((rows, DIM)).astype(np.float32), "bf16")
    residual = rounded(experts.random.standard_normal((rows, DIM)).astype(np.float32), "bf16")
    ids, weights = experts.choose(rows)
    runs = []
    for variant in GROUPED_TILES:
        out = bench.put(residual, "bf16")
        runs.append(experts.grouped(x, ids, weights, out, variant=variant))
    hopper = gpu.arch == "sm_90a"
    for variant in WGMMA_TILES if hopper else ():
        for blocks in (2, 132):
            out = bench.put(residual, "bf16")
            runs.append(experts.wgmma(x, ids, weights, out, variant=variant, blocks=blocks))
    for run in runs[1:]:
        np.testing.assert_array_equal(runs[0], run)
    runs_alone = [(0, 1, "r1"), (0, 1, "r8"), (7, 2, "r2"), (40, 4, "r8")]
    runs_alone += [(11, 8, "r8")]
    for first, count, variant in runs_alone:
        part = slice(first, first + count)
        out = bench.put(residual[part], "bf16")
        alone = experts.decode(x[part], ids[part], weights[part], out, variant=variant)
        np.testing.assert_array_equal(alone, runs[0][part])
