"""Kernels over heads and KV pools against the ops' definitions, on the PTX machine and on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from atlas.ops import OPS
from tests.kernels.launches import TYPES, Bench, Buffer, close, rounded

EPS = np.float32(1e-6)
ROWS = 3
POSITIONS, SLOTS = [0, 30, 7], [79, -1, 33]  # the row in the middle is padding


@dataclass(frozen=True)
class Heads:
    """Numbers of query and KV heads, head dimension, half the rotated dimensions, kernel form."""

    queries: int
    kv: int
    dim: int
    half: int
    suffix: str = ""

    @property
    def grid(self) -> tuple[int, int]:
        """A warp takes four heads of q, k or v, a thread block has four warps."""
        return ROWS, -(-(-(-self.queries // 4) + 2 * -(-self.kv // 4)) // 4)


SHAPES = [
    Heads(4, 1, 64, 32),
    Heads(3, 3, 80, 40),
    Heads(2, 1, 96, 24),
    Heads(9, 3, 128, 64),
    Heads(14, 2, 128, 64),
    Heads(5, 5, 128, 32),
    Heads(1, 1, 256, 128),
    Heads(4, 2, 7, 3, "_scalar"),
    Heads(5, 1, 64, 32, "_scalar"),
]
CASES = [(shape, type) for shape in SHAPES for type in TYPES]


def _normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


class _Layer:
    """The arrays of one layer: q, k and v as columns of one array, pools, table, weights."""

    def __init__(self, bench: Bench, heads: Heads, type: str) -> None:
        self.bench, self.heads, self.type = bench, heads, type
        total = heads.queries + 2 * heads.kv
        self.qkv = rounded(_normal(ROWS, total, heads.dim), type)
        self.buffer = bench.put(self.qkv, type, pad=8)
        pool = _normal(5, heads.kv, 16, heads.dim, seed=1)
        self.k_pool, self.v_pool = bench.put(pool, type), bench.put(-pool, type)
        self.table = _normal(31, 2, heads.half, seed=2)
        self.angles = bench.put(self.table, "f32")
        self.weights = [_normal(heads.dim, seed=3), _normal(heads.dim, seed=4)]
        self.positions, self.slots = bench.put_ints(POSITIONS), bench.put_ints(SLOTS)

    def columns(self) -> list[int]:
        """Addresses of q, k and v."""
        head_bytes = self.heads.dim * self.buffer.stored.itemsize
        first = self.buffer.address
        after_q = first + self.heads.queries * head_bytes
        return [first, after_q, after_q + self.heads.kv * head_bytes]

    def split(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        queries, kv = self.heads.queries, self.heads.kv
        q, k, v = np.split(values, [queries, queries + kv], axis=1)
        return q.copy(), k.copy(), v.copy()

    def stored(self, pool: Buffer, values: np.ndarray, before: np.ndarray) -> np.ndarray:
        """What a pool should hold once the rows' heads are in it."""
        after = before.copy()
        for row, slot in enumerate(SLOTS):
            if slot >= 0:
                after[slot // 16, :, slot % 16] = values[row]
        return after

    def run(self, name: str, normed: bool = False) -> None:
        h, stride = self.heads, self.buffer.stride
        weights = [self.bench.put(w[None], "f32").address for w in self.weights] if normed else []
        args = [*self.columns(), *weights, self.positions, self.slots, self.angles.address]
        args += [self.k_pool.address, self.v_pool.address, h.queries, h.kv, h.dim, h.half]
        args += [stride, stride, stride, *([EPS] if normed else [])]
        self.bench.run(f"{name}_{self.type}{h.suffix}", h.grid, args)

    def check(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, tolerance: float) -> None:
        """Compare with rotated q and k, and untouched padding."""
        got_q, got_k, got_v = self.split(self.bench.get(self.buffer))
        old_q, old_k, old_v = self.split(self.qkv)
        q[1] = old_q[1]
        np.testing.assert_array_equal(got_k, old_k)
        np.testing.assert_array_equal(got_v, old_v)
        pool = rounded(_normal(5, self.heads.kv, 16, self.heads.dim, seed=1), self.type)
        want_k, got_pool = self.stored(self.k_pool, k, pool), self.bench.get(self.k_pool)
        if tolerance == 0.0:
            np.testing.assert_array_equal(got_q, rounded(q, self.type))
            np.testing.assert_array_equal(got_pool, rounded(want_k, self.type))
        else:
            close(got_q, q, self.type, tolerance)
            close(got_pool, want_k, self.type, tolerance)
        want_v = self.stored(self.v_pool, v, -pool)
        np.testing.assert_array_equal(self.bench.get(self.v_pool), want_v)


@pytest.mark.parametrize(("heads", "type"), CASES)
def test_rope_is_bitwise(bench: Bench, heads: Heads, type: str) -> None:
    x = rounded(_normal(ROWS, heads.queries, heads.dim), type)
    buffer = bench.put(x, type, pad=8)
    table = _normal(31, 2, heads.half, seed=2)
    angles = bench.put(table, "f32")
    args = [buffer.address, bench.put_ints(POSITIONS), angles.address]
    args += [heads.queries, heads.dim, heads.half, buffer.stride]
    bench.run(f"rope_{type}{heads.suffix}", (ROWS, -(-heads.queries // 4)), args)
    OPS["rope"](x, np.array(POSITIONS, np.int32), table)
    np.testing.assert_array_equal(bench.get(buffer), rounded(x, type))


@pytest.mark.parametrize(("heads", "type"), CASES)
def test_rope_kv_store_is_bitwise(bench: Bench, heads: Heads, type: str) -> None:
    layer = _Layer(bench, heads, type)
    layer.run("rope_kv_store")
    q, k, v = layer.split(layer.qkv)
    for x in (q, k):
        OPS["rope"](x, np.array(POSITIONS, np.int32), layer.table)
    layer.check(q, k, v, 0.0)


@pytest.mark.parametrize(("heads", "type"), CASES)
def test_norm_rope_kv_store(bench: Bench, heads: Heads, type: str) -> None:
    layer = _Layer(bench, heads, type)
    layer.run("norm_rope_kv_store", normed=True)
    q, k, v = layer.split(layer.qkv)
    for x, weight in zip((q, k), layer.weights, strict=True):
        OPS["rmsnorm"](x, weight, EPS, out=x)
        OPS["rope"](x, np.array(POSITIONS, np.int32), layer.table)
    layer.check(q, k, v, 1e-6)


@pytest.mark.parametrize("heads", SHAPES)
def test_norm_rope_kv_store_has_the_bits_of_its_parts(bench: Bench, heads: Heads) -> None:
    whole, parts = _Layer(bench, heads, "f32"), _Layer(bench, heads, "f32")
    whole.run("norm_rope_kv_store", normed=True)
    buffer, head_bytes = parts.buffer, 4 * heads.dim
    for at, count, weight in zip(
        parts.columns(), (heads.queries, heads.kv), parts.weights, strict=False
    ):
        args = [at, bench.put(weight[None], "f32").address, at, count, heads.dim]
        args += [buffer.stride, head_bytes, buffer.stride, head_bytes, EPS]
        bench.run(f"rmsnorm_heads_f32{heads.suffix}", (ROWS, -(-count // 4)), args)
    parts.run("rope_kv_store")
    real = [row for row, slot in enumerate(SLOTS) if slot >= 0]
    got_q, want_q = (layer.split(bench.get(layer.buffer))[0][real] for layer in (whole, parts))
    np.testing.assert_array_equal(got_q, want_q)
    np.testing.assert_array_equal(bench.get(whole.k_pool), bench.get(parts.k_pool))
    np.testing.assert_array_equal(bench.get(whole.v_pool), bench.get(parts.v_pool))


@pytest.mark.parametrize(("heads", "type"), CASES)
def test_kv_store(bench: Bench, heads: Heads, type: str) -> None:
    layer = _Layer(bench, heads, type)
    _, k_address, v_address = layer.columns()
    args = [k_address, v_address, layer.slots, layer.k_pool.address, layer.v_pool.address]
    args += [heads.kv, heads.dim, layer.buffer.stride, layer.buffer.stride]
    bench.run(f"kv_store_{type}{heads.suffix}", (ROWS, -(-heads.kv // 4)), args)
    layer.check(*layer.split(layer.qkv), 0.0)


@pytest.mark.parametrize(("heads", "type"), CASES)
def test_rmsnorm_heads(bench: Bench, heads: Heads, type: str) -> None:
    x = rounded(_normal(ROWS, heads.queries, heads.dim), type)
    weight = _normal(heads.dim, seed=3)
    buffer, out = bench.put(x, type, pad=8), bench.empty(x.shape, type)
    head_bytes = heads.dim * buffer.stored.itemsize
    args = [buffer.address, bench.put(weight[None], "f32").address, out.address]
    args += [heads.queries, heads.dim, buffer.stride, head_bytes, out.stride, head_bytes, EPS]
    bench.run(f"rmsnorm_heads_{type}{heads.suffix}", (ROWS, -(-heads.queries // 4)), args)
    want = np.empty_like(x)
    OPS["rmsnorm"](x, weight, EPS, out=want)
    close(bench.get(out), want, type, 1e-6)
