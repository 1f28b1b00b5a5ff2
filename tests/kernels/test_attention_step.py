"""The fused kernel of the step against the kernels that it stands for, bit by bit.

Without an output gate and with one, which ``sigmoid_gate`` applies where it is a kernel of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from atlas_kernels.attention_plan import DOWN_TO_OUTPUT, HELD_DIMS, LOOP, rehearsal, step_variant
from atlas_kernels.gemm_step_plan import BESIDE_ATTENTION
from atlas_kernels.registry import load_table

from atlas.backends.cuda.activation import sigmoid_gate
from atlas.backends.cuda.attention import attention_step, attention_step_gated
from atlas.ops import OPS
from atlas.ops.attention import step_then_gate
from tests.kernels.conftest import NO_COMPILER
from tests.kernels.launches import Bench, Buffer, machine_bench, rounded
from tests.kernels.op_launches import BenchQueue, run_op
from tests.ops import cases

EPS = np.float32(1e-6)
APART = {"attention_step": attention_step, "sigmoid_gate": sigmoid_gate}


@dataclass(frozen=True)
class Layer:
    """Rows (first position, count) of each sequence, heads, and what is done to them."""

    rows: tuple[tuple[int, int], ...]
    heads: int
    kv_heads: int
    dim: int
    half: int
    is_normed: bool = True
    window: int = 0
    softcap: float = 0.0

    @property
    def most(self) -> int:
        return max(count for _, count in self.rows)


LAYERS = [
    Layer(((39, 1), (300, 1)), 4, 1, 64, 32),
    Layer(((510, 4), (0, 2), (15, 2)), 8, 2, 128, 64),
    Layer(((510, 3), (17, 1)), 2, 2, 80, 40, is_normed=False, window=100),
    Layer(((33, 1),), 3, 1, 96, 24, softcap=20.0),
    Layer(((506, 8), (7, 0)), 8, 2, 128, 64, is_normed=False),
    Layer(((511, 2),), 2, 1, 256, 128),
    Layer(((13, 4),), 2, 2, 128, 24),
    Layer(((29, 6),), 1, 1, 128, 48, is_normed=False),
    Layer(((600, 1), (30, 2)), 16, 2, 256, 32),
    Layer(((29, 3),), 2, 1, 256, 96),
    Layer(((13, 2),), 2, 2, 256, 72, is_normed=False),
]


def _normal(*shape: int, seed: int = 0) -> np.ndarray:
    return rounded(np.random.default_rng([seed, *shape]).standard_normal(shape), "bf16")


class Given:
    """The layer's arrays on a device; ``pools`` are fresh copies for each form."""

    def __init__(self, bench: Bench, layer: Layer) -> None:
        self.bench, self.layer = bench, layer
        ends = [first + count for first, count in layer.rows]
        blocks = [-(-max(end, 1) // 16) for end in ends]
        order, used = np.random.default_rng(1).permutation(sum(blocks)), 0
        self.tables = np.full((len(ends), max(blocks)), 2**31 - 1, np.int32)
        slots, positions = [], []
        for table, count, (first, num) in zip(self.tables, blocks, layer.rows, strict=True):
            table[:count] = order[used : used + count]
            used += count
            for at in range(first, first + num):
                positions.append(at)
                slots.append(int(table[at // 16]) * 16 + at % 16)
        self.values = _normal(used, layer.kv_heads, 16, layer.dim)
        for table, (first, _) in zip(self.tables, layer.rows, strict=True):
            for block in range(first // 16, len(table)):
                if table[block] < used:  # what lies behind the last known key must not matter
                    self.values[table[block], :, max(0, first - block * 16) :] = np.nan
        total = (layer.heads + 2 * layer.kv_heads) * layer.dim
        self.qkv = _normal(len(positions), total, seed=1)
        self.gate_values = 3 * _normal(len(positions), layer.heads * layer.dim, seed=5)
        self.gate_values[0, :4] = -np.inf, np.inf, -120.0, 0.0
        self.positions, self.slots = bench.put_early(positions), bench.put_early(slots)
        self.cu_rows = bench.put_early(np.cumsum([0, *(count for _, count in layer.rows)]))
        self.block_tables = bench.put_early(self.tables)
        self.angles = bench.put(_normal(max(ends), 2, layer.half, seed=2), "f32")
        bench.early(self.angles.address)
        self.norms = [
            bench.early(bench.put(_normal(1, layer.dim, seed=seed), "f32").address)
            if layer.is_normed
            else 0
            for seed in (3, 4)
        ]
        self.room = max(ends) // 512 + 2

    def pools(self) -> list[Buffer]:
        return [self.bench.put(sign * self.values, "bf16") for sign in (1, -1)]

    def columns(self, buffer: Buffer) -> list[int]:
        """Addresses of q, k and v."""
        after_q = buffer.address + 2 * self.layer.heads * self.layer.dim
        return [buffer.address, after_q, after_q + 2 * self.layer.kv_heads * self.layer.dim]

    def scratch(self, groups: int) -> list[int]:
        """Partial results, their sums, and counters."""
        layer = self.layer
        rows = len(layer.rows) * self.room * layer.most * layer.heads
        shapes = [(rows, layer.dim), (rows, 2)]
        places = [self.bench.empty(shape, "f32").address for shape in shapes]
        return [*places, self.bench.put_ints(np.zeros(groups))]

    def gated(self, attended: Buffer) -> np.ndarray:
        """What ``sigmoid_gate`` makes of it."""
        gate, out = self.gates(), self.bench.empty(self.gate_values.shape, "bf16", pad=24)
        dim = self.gate_values.shape[1]
        args = [attended.address, gate.address, out.address, dim]
        args += [attended.stride, gate.stride, out.stride]
        self.bench.run("sigmoid_gate_bf16", (len(self.qkv), -(-dim // (256 * 8))), args)
        return self.bench.get(out)

    def gates(self) -> Buffer:
        return self.bench.put(self.gate_values, "bf16", pad=8)

    def apart(self, tile: int, workers: int) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        """The kernels one after the other: out, the same gated, pools."""
        layer, bench, pools = self.layer, self.bench, self.pools()
        qkv = bench.put(self.qkv, "bf16", pad=8)
        q, k, v = self.columns(qkv)
        heads, prefix = [layer.heads, layer.kv_heads, layer.dim, layer.half], ""
        addresses = [self.positions, self.slots, self.angles.address]
        addresses += [pool.address for pool in pools]
        strides, norms, last = [qkv.stride] * 3, [], []
        if layer.is_normed:
            prefix, norms, last = "norm_", self.norms, [EPS]
        groups = -(-layer.heads // 4) + 2 * -(-layer.kv_heads // 4)  # of a warp each
        grid = (len(self.qkv), -(-groups // 4))
        args = [q, k, v, *norms, *addresses, *heads, *strides, *last]
        bench.run(f"{prefix}rope_kv_store_bf16", grid, args)
        out = bench.empty((len(self.qkv), layer.heads * layer.dim), "bf16", pad=24)
        groups = self.groups(tile)
        args = [q, *(pool.address for pool in pools), out.address, self.block_tables, self.cu_rows]
        args += [self.positions, *self.scratch(groups), layer.heads, layer.kv_heads, layer.most]
        args += [self.room, layer.window, self.tables.shape[1], qkv.stride, out.stride]
        args += [np.float32(layer.dim**-0.5), np.float32(layer.softcap)]
        bench.run(f"attention_decode_d{layer.dim}_r{tile}", (groups, workers), args)
        return bench.get(out), self.gated(out), [bench.get(pool) for pool in pools]

    def fused(
        self, tile: int, workers: int, form: str, *, is_gated: bool, far: int = DOWN_TO_OUTPUT
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """One kernel: out, pools; q, k and v must stay as they are."""
        layer, bench, pools = self.layer, self.bench, self.pools()
        for pool in pools:
            bench.early(pool.address)
        qkv = bench.put(self.qkv, "bf16", pad=8)
        out = bench.empty((len(self.qkv), layer.heads * layer.dim), "bf16", pad=24)
        groups, gate, gate_stride = self.groups(tile), 0, 0
        if is_gated:
            buffer = self.gates()
            gate, gate_stride = buffer.address, buffer.stride
        args = [*self.columns(qkv), gate, *self.norms, self.angles.address, self.slots]
        args += [*(pool.address for pool in pools), out.address, self.block_tables, self.cu_rows]
        args += [self.positions, *self.scratch(groups), layer.heads, layer.kv_heads, layer.half]
        args += [layer.most, self.room, layer.window, self.tables.shape[1], far]
        args += [qkv.stride] * 3 + [gate_stride, out.stride]
        args += [np.float32(layer.dim**-0.5), np.float32(layer.softcap), EPS]
        bench.run(f"attention_step_d{layer.dim}_r{tile}{form}", (groups, workers), args)
        np.testing.assert_array_equal(bench.get(qkv), self.qkv)
        return bench.get(out), [bench.get(pool) for pool in pools]

    def groups(self, tile: int) -> int:
        layer = self.layer
        per_head = layer.most * layer.heads // layer.kv_heads
        return len(layer.rows) * layer.kv_heads * -(-per_head // tile)


@pytest.mark.parametrize("layer", LAYERS, ids=range(len(LAYERS)))
@pytest.mark.parametrize("workers", [1, 2])
def test_one_kernel_has_the_bits_of_two(bench: Bench, layer: Layer, workers: int) -> None:
    given = Given(bench, layer)
    tile = 32 if layer.most > 4 else 16
    out, gated, pools = given.apart(16, workers)
    assert not np.array_equal(gated, out)
    forms = ["", "_held"] if tile == 16 and layer.dim in HELD_DIMS else [""]
    for form in forms:
        for is_gated in (False, True):
            far = DOWN_TO_OUTPUT if is_gated == (form == "") else LOOP
            got, got_pools = given.fused(tile, workers, form, is_gated=is_gated, far=far)
            assert np.isfinite(got).all()
            np.testing.assert_array_equal(got, gated if is_gated else out)
            for pool, want in zip(got_pools, pools, strict=True):
                np.testing.assert_array_equal(pool, want)


@pytest.mark.parametrize("workers", [1, 2])
def test_no_warp_needs_to_be_first(ptx_of: Callable[[str], str], workers: int) -> None:
    """Warps one after the other, from either end: gates over queries that are needed would show,
    and what a rehearsal leaves where they lie."""
    results = []
    for far in (DOWN_TO_OUTPUT, LOOP, 0):
        for order in (0, 1, -1):
            given = Given(machine_bench(ptx_of, order), Layer(((511, 2),), 2, 1, 64, 32))
            results.append(given.fused(16, workers, "", is_gated=True, far=far)[0])
    for result in results:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize(
    ("which", "shift", "kernels"),
    [
        (0, 0, ["attention_step_d64_r16"]),
        (0, 4, ["attention_step_d64_r16", "sigmoid_gate_bf16_scalar"]),
        (1, 0, ["rope_kv_store_bf16", "attention_decode_d64_r32", "sigmoid_gate_bf16"]),
    ],
    ids=["few rows", "gates not aligned", "many rows"],
)
def test_which_kernels_the_op_launches(
    bench: Bench, which: int, shift: int, kernels: list[str]
) -> None:
    """And that it gives the bits of the two ops."""
    case = list(cases.attention_step_gated())[which]
    gate = np.pad(case.args[3], ((0, 0), (shift, 0)))
    case = replace(case, args=(*case.args[:3], gate, *case.args[4:]))
    names, results = list(inspect.signature(OPS["attention_step_gated"]).parameters), []
    for op in (attention_step_gated, partial(step_then_gate, APART)):
        queue = BenchQueue(bench, "sm_80")
        call = partial(_with_shifted_gates, op, shift)
        results.append((run_op(queue, "attention_step_gated", call, names, case), queue.launched))
    assert results[0][1] == kernels
    for key, want in results[1][0].items():
        np.testing.assert_array_equal(results[0][0][key], want)


def _with_shifted_gates(
    op: Callable[..., None], shift: int, queue: Any, q: Any, k: Any, v: Any, gate: Any, *args: Any,
    **outs: Any,
) -> None:  # fmt: skip
    op(queue, q, k, v, gate[:, shift:], *args, **outs)


def test_a_products_thread_block_has_room_beside_it() -> None:
    pytest.importorskip("numba_cuda", reason=NO_COMPILER)
    of_sm, for_system = 228 << 10, 1 << 10
    steps = [info for name, info in load_table().items() if name.startswith("attention_step_")]
    assert len(steps) > 8
    for info in steps:
        assert info.shared_bytes + BESIDE_ATTENTION + 2 * for_system <= of_sm, info.name


def test_how_far_a_thread_block_rehearses() -> None:
    def far(megabytes: int, *, few: bool = True, is_early: bool = True) -> int:
        return rehearsal(megabytes << 20, few=few, is_early=is_early)

    assert far(12) == LOOP, "it would be late"
    assert far(50) == DOWN_TO_OUTPUT
    assert far(0) == DOWN_TO_OUTPUT, "behind another kernel"
    assert far(50, few=False) == LOOP, "several on an SM"
    assert far(50, is_early=False) == far(12, few=False, is_early=False) == 0, "nothing to wait for"


def test_few_thread_blocks_hold_keys_in_registers() -> None:
    def chosen(dim: int, tile: int, columns: int, arch: str = "sm_90a") -> str:
        return step_variant(dim, tile, columns, arch=arch, num_sms=132)

    assert chosen(128, 16, 8) == chosen(128, 16, 64) == "d128_r16_held"
    assert chosen(128, 16, 128) == chosen(128, 16, 8, "sm_80") == "d128_r16"
    assert chosen(128, 32, 8) == "d128_r32"
    assert chosen(256, 16, 2) == "d256_r16"
