"""A block whose first kernel of experts makes the choice: the bits of what is given it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from atlas_kernels.moe_plan import (
    DOWN_TILES,
    GATE_UP_TILES,
    NOT_YET,
    UNIT,
    decode_kernels,
    down_view,
    fits,
    gate_up_view,
    route_variant,
    routed_kernel,
)

from atlas.backends.cuda import moe as moe_ops
from atlas.backends.cuda.array import DeviceArray
from atlas.backends.cuda.moe import moe_block
from atlas.backends.cuda.pack import DeviceMatrix, MatrixLayout
from atlas.ops.moe import block_in_parts
from tests.kernels.launches import Bench, Buffer, machine_bench, rounded
from tests.kernels.op_launches import BenchQueue

Array = np.ndarray[Any, Any]
DIM, INNER = 128, 64
EPSILON = 1e-20


class Block:
    """A block's weights, and both ways of running it."""

    def __init__(
        self, bench: Bench, experts: int, *, top_k: int = 4, shared: bool = False,
        sigmoid: bool = False, normalize: bool = True, scale: float = 1.0, seed: int = 0,
    ) -> None:  # fmt: skip
        self.bench, self.experts, self.top_k, self.shared = bench, experts, top_k, shared
        self.sigmoid, self.normalize, self.scale = sigmoid, normalize, scale
        self.slots, self.columns = top_k + shared, experts + 8 * shared
        self.random = np.random.default_rng(seed)
        self.gate_up = self.matrix(experts * 2 * INNER, DIM, experts)
        self.down = self.matrix(experts * DIM, INNER, experts)
        self.last = [self.matrix(2 * INNER, DIM), self.matrix(DIM, INNER)] if shared else []
        self.router = self.matrix(self.columns, DIM)
        self.norm = self.constant(1 + self.normal(DIM) / 4)
        self.bias = self.constant(self.normal(experts) / 8) if sigmoid else None

    def normal(self, *shape: int) -> Array:
        return self.random.standard_normal(shape, np.float32)

    def constant(self, values: Array) -> DeviceArray:
        return DeviceArray(self.bench.early(self.bench.memory.put(values)), values.shape, "float32")

    def matrix(self, rows: int, cols: int, groups: int = 1) -> DeviceMatrix:
        values = self.normal(rows, cols) * np.float32(cols**-0.5)
        data = DeviceArray(
            self.bench.early(self.bench.put(values, "bf16").address), (rows, 2 * cols), "uint8"
        )
        return DeviceMatrix(MatrixLayout("bf16", "bf16", rows, cols, groups), data)

    def maps(
        self, variant: str, experts: int, gate_up: DeviceMatrix, down: DeviceMatrix
    ) -> list[int]:
        """Tensor maps of some experts."""
        memory, found = self.bench.memory, []
        views = (
            (gate_up, gate_up_view(experts, DIM, INNER), GATE_UP_TILES[variant].gate_up_box),
            (down, down_view(down.rows, INNER), DOWN_TILES[variant].down_box),
        )
        for matrix, (shape, strides), box in views:
            raw = memory.tensor_map(matrix.data.address, shape, box, strides)
            found.append(memory.put(np.frombuffer(raw, np.uint8)))
        return found

    def kernels(
        self, scores: Array, active: Array | None, *, variant: str, routed: bool
    ) -> list[Array]:
        """ids, weights, activations and outputs by the decode kernels, of given scores."""
        bench, rows, pairs = self.bench, len(scores), len(scores) * self.slots
        random = np.random.default_rng(9)
        x = bench.put(random.standard_normal((rows, DIM)).astype(np.float32), "bf16", pad=8)
        residual = random.standard_normal((rows, DIM)).astype(np.float32)
        out, act = bench.put(residual, "bf16", pad=8), bench.empty((pairs, INNER), "bf16")
        ids = np.full((rows, self.slots), NOT_YET if routed else -7, np.int32)
        weights = np.full(ids.shape, np.nan, np.float32)
        ids_at, weights_at = bench.memory.put(ids), bench.memory.put(weights)
        source = bench.put(scores, "f32", pad=3)
        early = 0 if active is None else bench.put_early(active)
        bias = 0 if self.bias is None else self.bias.address
        last = source.address + 4 * self.experts if self.shared else 0
        raw = self.gate_up.data.address
        w, v = self.maps(variant, self.experts, self.gate_up, self.down)
        w_shared, v_shared = self.maps(variant, 1, *self.last) if self.last else (0, 0)
        sizes = [rows, self.slots, self.experts, DIM, INNER]
        scale = np.float32(self.scale)
        how = [int(self.sigmoid), int(self.normalize), np.float32(EPSILON), scale]
        kernel = decode_kernels(variant)[0]
        if routed:
            kernel = routed_kernel(variant, self.experts) or ""
            args = [w, w_shared, raw, x.address, source.address, bias, early, ids_at]
            args += [weights_at]
            args += [act.address, *sizes, self.columns, self.top_k, *how, x.stride, source.stride]
        else:
            args = [source.address, bias, last, early, ids_at, weights_at, self.experts]
            args += [self.top_k, self.slots, *how, source.stride, source.stride]
            bench.run(f"moe_route_{route_variant(self.experts)}", (rows, 1), args)
            args = [w, w_shared, x.address, ids_at, act.address, *sizes, x.stride]
        bench.run(kernel, (3, 1), args)
        bench.early(ids_at)  # gate_up waited for whoever wrote them, or did so itself
        args = [v, v_shared, ids_at, weights_at, act.address, out.address, out.address, *sizes]
        args += [int(routed), out.stride, out.stride]
        bench.run(decode_kernels(variant)[1], (DIM // UNIT - 3, 1), args)  # some take two groups
        results = [bench.memory.get(ids_at, ids), bench.memory.get(weights_at, weights)]
        return [*results, bench.get(act), bench.get(out)]

    def compare(
        self, scores: Array, active: Array | None = None, *, variant: str = ""
    ) -> list[Array]:
        """What the kernels leave, by either way, which must be the same to the bit."""
        names = [variant] if variant else self.variants(len(scores))
        for name in names:
            want = self.kernels(scores, active, variant=name, routed=False)
            got = self.kernels(scores, active, variant=name, routed=True)
            same_bits(got, want)
        return got

    def variants(self, rows: int) -> list[str]:
        """The first that takes a number of rows, and the last, which does as well."""
        names = [
            name for name in GATE_UP_TILES
            if fits(name, rows, dim=DIM, inner=INNER, slots=self.slots)
        ]  # fmt: skip
        return sorted({names[0], names[-1]})

    def op(
        self, call: Callable[..., None], x: Array, slots: Array | None, arch: str = "sm_90a"
    ) -> tuple[list[Array], list[str]]:
        """normed, scores, ids, weights, activations and the residual stream; kernels that ran."""
        bench, rows = self.bench, len(x)
        queue, on = BenchQueue(bench, arch), self.on
        stream, normed = bench.put(x, "bf16", pad=8), bench.empty((rows, DIM), "bf16", pad=16)
        scores = bench.empty((rows, self.columns), "f32", pad=-self.columns % 4 + 4)
        act = bench.empty((rows, self.slots, INNER), "bf16")
        ids = np.full((rows, self.slots), -7, np.int32)
        weights = np.full(ids.shape, np.nan, np.float32)
        ids_at, weights_at = bench.memory.put(ids), bench.memory.put(weights)
        given = None
        if slots is not None:
            given = DeviceArray(bench.put_early(slots), (rows,), "int32")
        call(
            queue, on(stream), self.norm, 1e-6, self.router, self.experts, self.normalize,
            "sigmoid" if self.sigmoid else "softmax", self.bias, self.scale, 1, 1, given,
            self.gate_up, self.down, "silu", *self.last, normed=on(normed), scores=on(scores),
            ids=DeviceArray(ids_at, ids.shape, "int32"),
            weights=DeviceArray(weights_at, ids.shape, "float32"),
            expert_gate_up=on(bench.empty((rows, self.slots, 2 * INNER), "bf16")),
            expert_activated=on(act), out=on(stream),
            expert_out=on(bench.empty((rows, self.slots, DIM), "bf16")),
        )  # fmt: skip
        results = [bench.get(normed), bench.get(scores), bench.memory.get(ids_at, ids)]
        results += [bench.memory.get(weights_at, weights), bench.get(act), bench.get(stream)]
        return results, queue.launched

    @staticmethod
    def on(buffer: Buffer) -> DeviceArray:
        type, item = {"bf16": ("bfloat16", 2), "f32": ("float32", 4)}[buffer.type]
        strides = (buffer.stride, item)
        if len(buffer.shape) == 3:
            strides = (buffer.stride, buffer.shape[2] * item, item)
        return DeviceArray(buffer.address, buffer.shape, type, strides)


def in_parts(*args: Any, **kwargs: Any) -> None:
    parts = {"moe_router": moe_ops.moe_router, "moe_experts": moe_ops.moe_experts}
    block_in_parts(parts, *args, **kwargs)


def same_bits(got: list[Array], want: list[Array]) -> None:
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one.view(np.int32), other.view(np.int32))


@pytest.mark.parametrize(
    ("rows", "experts", "kind"),
    [
        (1, 128, {"top_k": 8}),
        (1, 256, {"top_k": 8, "shared": True}),
        (1, 512, {"top_k": 10, "shared": True, "normalize": False}),
        (1, 60, {"sigmoid": True, "scale": 2.5}),
        (2, 128, {"sigmoid": True, "shared": True}),
        (2, 200, {"normalize": False}),
        (5, 256, {"top_k": 3, "shared": True, "sigmoid": True, "scale": 0.5}),
        (8, 100, {"top_k": 3}),
    ],
)
def test_kernels_that_choose(bench: Bench, rows: int, experts: int, kind: dict[str, Any]) -> None:
    block = Block(bench, experts, **kind, seed=rows)
    scores = block.normal(rows, block.columns) * 3
    active = None
    if rows > 2:
        active = np.arange(rows, dtype=np.int32)
        active[[1, rows - 1]] = -1
        scores[1] = np.nan
    ids, weights, *_ = block.compare(scores, active)
    real = np.ones(rows, bool) if active is None else active >= 0
    assert (np.sort(ids[real, : block.top_k], axis=1)[:, 1:] > 0).all()
    assert (ids[~real] == -1).all()
    assert (weights[~real] == 0).all()


NAN, INF = np.float32(np.nan), np.float32(np.inf)
ODD_SCORES: dict[str, Callable[[Array], Array]] = {
    "all equal": np.zeros_like,
    "none of either sign": lambda scores: np.where(scores > 0, np.float32(0), np.float32(-0.0)),
    "few values": np.round,
    "equal in a lane": lambda scores: np.resize(scores[:, :32], scores.shape),
    "chances of 0": lambda scores: scores * 200,
    "one of NaN": lambda scores: np.where(np.arange(scores.shape[1]) == 37, NAN, scores),
    "many of NaN": lambda scores: np.where(scores > 0, NAN, scores),
    "infinite": lambda scores: np.where(np.arange(scores.shape[1]) % 50 == 7, INF, scores),
    "minus infinite": lambda scores: np.where(np.arange(scores.shape[1]) != 9, -INF, scores),
    "nothing but minus infinite": lambda scores: np.full_like(scores, -INF),
}


@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize("name", ODD_SCORES)
def test_choices_of_odd_scores(bench: Bench, name: str, sigmoid: bool) -> None:
    experts = 256 if name == "equal in a lane" else 70
    block = Block(bench, experts, top_k=9, sigmoid=sigmoid)
    scores = ODD_SCORES[name](block.normal(1, experts)).astype(np.float32)
    ids, *_ = block.compare(scores, variant="r1")
    assert len(set(ids[0].tolist())) == 9
    assert ((ids >= 0) & (ids < experts)).all()
    if np.isfinite(scores).all() and not sigmoid:  # that both forms choose rightly, ties as well
        chances = np.exp(scores - scores.max())
        chances[scores - scores.max() < -87.33] = 0
        np.testing.assert_array_equal(ids, np.argsort(-chances, axis=1, kind="stable")[:, :9])


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("rows", [1, 5])
def test_no_barrier_is_missing(ptx_of: Callable[[str], str], rows: int, order: int) -> None:
    block = Block(machine_bench(ptx_of, order), 40, shared=True)
    block.compare(block.normal(rows, block.columns))


@pytest.mark.parametrize(
    ("rows", "experts", "kind"),
    [
        (1, 128, {"top_k": 8}),
        (1, 300, {"top_k": 5, "shared": True}),
        (2, 60, {"sigmoid": True, "scale": 2.5}),
        (4, 256, {"shared": True, "sigmoid": True}),
        (5, 60, {"normalize": False}),
        (8, 128, {"top_k": 2, "shared": True}),
    ],
)
def test_a_block_and_its_parts(bench: Bench, rows: int, experts: int, kind: dict[str, Any]) -> None:
    block = Block(bench, experts, **kind, seed=rows)
    x = rounded(block.normal(rows, DIM), "bf16")
    slots = np.arange(rows, dtype=np.int32)
    slots[1:2] = -1
    want, apart = block.op(in_parts, x, slots)
    got, launched = block.op(moe_block, x, slots)
    same_bits(got, want)
    variant = block.variants(rows)[0]
    kernels = (routed_kernel(variant, experts), decode_kernels(variant)[1])
    assert launched == ["moe_scores_d2048", *kernels]
    assert not set(apart) & set(launched[:2])


def test_ids_are_awaited(ptx_of: Callable[[str], str]) -> None:
    """What ``moe_down`` finds before they are written is no id, whatever was there."""
    block = Block(machine_bench(ptx_of), 40)
    memory, seen = block.bench.memory, []
    run = block.bench.run

    def watched(name: str, grid: tuple[int, int], args: list[Any]) -> None:
        run(name, grid, args)
        if name.startswith("moe_scores"):
            seen.append(memory.get(args[5], np.zeros((2, 4), np.int32)))

    block.bench.run = watched
    block.op(moe_block, rounded(block.normal(2, DIM), "bf16"), None)
    assert len(seen) == 1
    assert (seen[0] == NOT_YET).all()


def test_moe_down_waits_for_ids(ptx_of: Callable[[str], str]) -> None:
    """It finds none, reads again, and has those that are there by then."""
    block = Block(machine_bench(ptx_of), 40)
    x, memory, run = rounded(block.normal(2, DIM), "bf16"), block.bench.memory, block.bench.run
    want, _ = block.op(in_parts, x, None)
    reads = []

    def late(name: str, grid: tuple[int, int], args: list[Any]) -> None:
        if not name.startswith("moe_down"):
            run(name, grid, args)
            return
        at, indices = args[2], memory.indices
        first = indices(np.array([at], np.uint64), 4)[0, 0]
        place = memory.data[first : first + 2 * block.slots * 4].view(np.int32)
        chosen = place.copy()
        place[:] = NOT_YET

        def watched(addresses: Array, size: int) -> Array:
            if (addresses == at).any():
                reads.append(size)
                if len(reads) == 3:
                    place[:] = chosen
            return indices(addresses, size)

        memory.indices = watched
        run(name, grid, args)
        memory.indices = indices

    block.bench.run = late
    got, _ = block.op(moe_block, x, None)
    same_bits(got, want)
    assert len(reads) > 3


def test_what_no_kernel_chooses_for(ptx_of: Callable[[str], str]) -> None:
    """More rows or experts, and other GPUs: by the two ops that it stands for."""
    for rows, experts, arch in ((9, 20, "sm_90a"), (1, 513, "sm_90a"), (1, 20, "sm_80")):
        block = Block(machine_bench(ptx_of), experts, top_k=2)
        x = rounded(block.normal(rows, DIM), "bf16")
        got, launched = block.op(moe_block, x, None, arch)
        want, apart = block.op(in_parts, x, None, arch)
        same_bits(got, want)
        assert launched == apart
