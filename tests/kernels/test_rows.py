"""Kernels over rows against their ops' NumPy definitions, on the PTX machine and on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from atlas_kernels.recurrence_shapes import NORM_HEADS

from atlas.ops import OPS
from tests.kernels.launches import TYPES, Bench, close, encode, machine_bench, rounded
from tests.kernels.ptx_machine import launch

FORMS = [(type, suffix) for type in TYPES for suffix in ("", "_scalar")]
EPS = np.float32(1e-5)


def _normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


# 4,096 elements fill the threads of a row once, 4,104 and 9,000 begin a second and a third time.
@pytest.mark.parametrize(("type", "suffix"), FORMS)
@pytest.mark.parametrize("dim", [8, 576, 4096, 4104, 9000])
def test_rmsnorm(bench: Bench, type: str, suffix: str, dim: int) -> None:
    dim += 3 if suffix else 0
    x, weight = rounded(_normal(2, dim), type), _normal(dim, seed=1)
    source, out = bench.put(x, type, pad=8), bench.empty((2, dim), type)
    scale = bench.put(weight[None], "f32")
    bench.early(scale.address)
    args = [source.address, scale.address, out.address, dim, source.stride, out.stride, EPS]
    bench.run(f"rmsnorm_{type}{suffix}", (2, 1), args)
    want = np.empty_like(x)
    OPS["rmsnorm"](x, weight, EPS, out=want)
    close(bench.get(out), want, type, 1e-6)


@pytest.mark.parametrize("order", [1, -1])
def test_a_block_sum_does_not_depend_on_who_comes_first(
    ptx_of: Callable[[str], str], order: int
) -> None:
    """Warps one after the other, from either end: a missing barrier would show."""
    together = machine_bench(ptx_of)
    x, weight = together.put(_normal(1, 4096), "f32"), together.put(_normal(1, 4096), "f32")
    together.early(weight.address)
    out = [together.empty((1, 4096), "f32") for _ in range(2)]
    for buffer, how in zip(out, (0, order), strict=True):
        args = [x.address, weight.address, buffer.address, 4096, 0, 0, EPS]
        launch(ptx_of("rmsnorm_f32"), (1, 1), 512, args, together.memory, how)
    np.testing.assert_array_equal(together.get(out[0]), together.get(out[1]))
    keys = [together.memory.put(np.zeros(1, np.int64)) for _ in range(2)]
    for key, how in zip(keys, (0, order), strict=True):
        args = [x.address, key, 4096, 4096, 0]
        launch(ptx_of("argmax_partial"), (1, 1), 256, args, together.memory, how)
    first, second = (together.memory.get(key, np.zeros(1, np.int64))[0] for key in keys)
    assert 0xFFFFFFFF - (first & 0xFFFFFFFF) == np.argmax(together.get(x))
    assert first == second


@pytest.mark.parametrize(("type", "suffix"), FORMS)
@pytest.mark.parametrize("dim", [576, 9000])
def test_add_rmsnorm_is_add_then_rmsnorm(bench: Bench, type: str, suffix: str, dim: int) -> None:
    x, old = bench.put(_normal(2, dim), type), _normal(2, dim, seed=1)
    weight = bench.put(_normal(1, dim, seed=2), "f32")
    bench.early(weight.address)
    kept, again = bench.put(old, type, pad=8), bench.put(old, type, pad=8)
    out, want = bench.empty((2, dim), type), bench.empty((2, dim), type)
    args = [x.address, kept.address, weight.address, out.address, dim]
    args += [x.stride, kept.stride, out.stride, EPS]
    bench.run(f"add_rmsnorm_{type}{suffix}", (2, 1), args)

    columns = -(-dim // (256 * (1 if suffix else 8)))
    args = [x.address, again.address, again.address, dim, x.stride, again.stride, again.stride]
    bench.run(f"add_{type}{suffix}", (2, columns), args)
    args = [again.address, weight.address, want.address, dim, again.stride, want.stride, EPS]
    bench.run(f"rmsnorm_{type}{suffix}", (2, 1), args)
    np.testing.assert_array_equal(bench.get(kept), bench.get(again))
    np.testing.assert_array_equal(bench.get(out), bench.get(want))


@pytest.mark.parametrize(("type", "suffix"), FORMS)
@pytest.mark.parametrize("op", ["silu_and_mul", "gelu_tanh_and_mul"])
def test_gated(bench: Bench, type: str, suffix: str, op: str) -> None:
    size = 301 if suffix else 2056
    gate_up = rounded(_normal(2, 2 * size) * 8, type)
    gate_up[0, :2] = rounded(np.array([-100.0, 90.0], np.float32), type)
    source, out = bench.put(gate_up, type, pad=8), bench.empty((2, size), type)
    args = [source.address, out.address, size, source.stride, out.stride]
    bench.run(f"{op}_{type}{suffix}", (2, 2), args)
    want = np.empty((2, size), np.float32)
    OPS[op](gate_up, out=want)
    close(bench.get(out), want, type, 2e-6)


@pytest.mark.parametrize(("type", "suffix"), FORMS)
def test_add(bench: Bench, type: str, suffix: str) -> None:
    dim = 77 if suffix else 80
    x, y = bench.put(_normal(3, dim), type, pad=8), bench.put(_normal(3, dim, seed=1), type)
    out = bench.empty((3, dim), type)
    args = [x.address, y.address, out.address, dim, x.stride, y.stride, out.stride]
    bench.run(f"add_{type}{suffix}", (3, 1), args)
    want = rounded(bench.get(x) + bench.get(y), type)
    np.testing.assert_array_equal(bench.get(out), want)


@pytest.mark.parametrize("cap", [30.0, 0.5])
def test_softcap(bench: Bench, cap: float) -> None:
    x = bench.put(_normal(2, 333) * cap, "f32")
    args = [x.address, x.address, 333, x.stride, x.stride, np.float32(cap)]
    want = np.empty((2, 333), np.float32)
    OPS["softcap"](bench.get(x), cap, out=want)
    bench.run("softcap_f32", (2, 2), args)
    close(bench.get(x), want, "f32", 4e-7)


@pytest.mark.parametrize("table_type", ["bf16", "f16", "f32"])
@pytest.mark.parametrize(("type", "suffix"), FORMS)
def test_embedding(bench: Bench, table_type: str, type: str, suffix: str) -> None:
    dim = 70 if suffix else 72
    table, out = bench.put(_normal(11, dim), table_type), bench.empty((4, dim), type, pad=8)
    ids = bench.put_ints([10, 0, -1, 7])
    args = [ids, table.address, out.address, dim, table.stride, out.stride, np.float32(1.5)]
    bench.run(f"embedding_{table_type}_{type}{suffix}", (4, 1), args)
    want = bench.get(table)[[10, 0, 0, 7]] * np.float32(1.5)
    want[2] = 0
    np.testing.assert_array_equal(bench.get(out), rounded(want, type))


@pytest.mark.parametrize(
    ("variant", "type", "dim"), [("b128", "f32", 52), ("b32", "f32", 51), ("b16", "bf16", 51)]
)
def test_gather_rows(bench: Bench, variant: str, type: str, dim: int) -> None:
    x, out = bench.put(_normal(6, dim), type), bench.put(_normal(3, dim, seed=1), type)
    before = bench.get(out)
    rows = bench.put_ints([5, -1, 2])
    row_bytes = dim * x.stored.itemsize
    args = [x.address, rows, out.address, row_bytes, x.stride, out.stride]
    bench.run(f"gather_rows_{variant}", (3, 1), args)
    want = np.stack([bench.get(x)[5], before[1], bench.get(x)[2]])
    np.testing.assert_array_equal(bench.get(out), want)


@pytest.mark.parametrize("count", [1, 8, 2049, 4096])
@pytest.mark.parametrize(
    "name", ["f32_bf16", "f32_f16", "bf16_f32", "f16_f32", "bf16_f16", "f16_bf16"]
)
def test_cast(bench: Bench, name: str, count: int) -> None:
    source_type, target_type = name.split("_")
    x, out = bench.put(_normal(1, count), source_type), bench.empty((1, count), target_type)
    bench.run(f"cast_{name}", (-(-count // 2048), 1), [x.address, out.address, count])
    np.testing.assert_array_equal(bench.get(out), rounded(bench.get(x), target_type))


def test_cast_rounds_to_nearest_even(bench: Bench) -> None:
    ties = np.array(
        [1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 3e38, np.inf, -0.0, 1e-40, 0.1], np.float32
    )
    x, out = bench.put(ties[None], "f32"), bench.empty((1, 8), "bf16")
    bench.run("cast_f32_bf16", (1, 1), [x.address, out.address, 8])
    got = bench.get(out)[0]
    assert got[:3].tolist() == [1.0, 1 + 2**-6, -1.0]
    np.testing.assert_array_equal(encode(got, "bf16"), encode(ties, "bf16"))


@pytest.mark.parametrize("parts", [1, 3, 40])
def test_argmax(bench: Bench, parts: int) -> None:
    size = 5003
    logits = _normal(7, size)
    logits[0, [17, 4900]] = 9.0  # a tie across parts: the lower id
    logits[1] = -5.0
    logits[2, 5002], logits[3, 44], logits[4, 3] = np.inf, np.nan, -np.inf
    logits[5] = np.float32(-1)
    logits[5, [1000, 2000]] = [0.0, -0.0]  # equal, whichever sign comes first
    logits[6] = np.float32(-1)
    logits[6, [1000, 2000]] = [-0.0, 0.0]
    source, out = bench.put(logits, "f32", pad=1), bench.put_ints(np.full(7, -7))
    keys = bench.memory.put(np.zeros((7, parts), np.int64))
    args = [source.address, keys, size, -(-size // parts), source.stride]
    bench.run("argmax_partial", (parts, 7), args)
    bench.run("argmax_final", (7, 1), [keys, out, parts])
    want = np.empty(7, np.int32)
    OPS["argmax"](logits, out=want)
    assert want.tolist()[:7] == [17, 0, -1, -1, -1, 1000, 1000]
    np.testing.assert_array_equal(bench.memory.get(out, want), want)


@pytest.mark.parametrize(("type", "suffix"), FORMS)
@pytest.mark.parametrize("op", ["sigmoid_gate", "row_gate", "relu_squared"])
def test_gates(bench: Bench, type: str, suffix: str, op: str) -> None:
    dim = 301 if suffix else 2056
    x, gate = rounded(_normal(2, dim) * 4, type), rounded(_normal(2, dim, seed=1) * 8, type)
    gate = gate[:, :1] if op == "row_gate" else gate
    source, gates = bench.put(x, type, pad=8), bench.put(gate, type, pad=8)
    out, want = bench.empty((2, dim), type), np.empty((2, dim), np.float32)
    if op == "relu_squared":
        OPS[op](x, out=want)
        args = [source.address, out.address, dim, source.stride, out.stride]
    else:
        OPS["sigmoid_gate"](x, gate, out=want)
        args = [source.address, gates.address, out.address, dim]
        args += [source.stride, gates.stride, out.stride]
    columns = -(-dim // (256 * (1 if suffix else 8)))
    bench.run(f"{op}_{type}{suffix}", (2, columns), args)
    close(bench.get(out), want, type, 2e-6)


@pytest.mark.parametrize(("type", "suffix"), FORMS)
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_gated_rmsnorm(
    bench: Bench, type: str, suffix: str, norm_first: bool, shared: bool
) -> None:
    groups, size = 5, 77 if suffix else 320
    dim = groups * size
    x, gate = _normal(2, dim), rounded(_normal(2, dim, seed=1) * 4, type)
    weight = _normal(size if shared else dim, seed=2)
    source, gates = bench.put(x, "f32", pad=8), bench.put(gate, type, pad=8)
    out, scale = bench.empty((2, dim), type), bench.put(weight[None], "f32")
    args = [source.address, gates.address, scale.address, out.address, groups, size]
    args += [int(norm_first), source.stride, gates.stride, 0 if shared else size * 4, out.stride]
    bench.run(f"gated_rmsnorm_{type}{suffix}", (2, 2), [*args, EPS])
    want = np.empty((2, dim), np.float32)
    OPS["gated_rmsnorm"](x, gate, weight, EPS, size, norm_first, out=want)
    close(bench.get(out), want, type, 4e-6)


@pytest.mark.parametrize(("type", "size"), [("bf16", 128), ("bf16", 256), ("f32", 64)])
def test_gated_rmsnorm_of_heads(bench: Bench, type: str, size: int) -> None:
    """Several heads to a warp, the last warp's partly missing: the bits of one head to a warp."""
    rows, heads = 3, 5
    dim = heads * size
    x, gate = _normal(rows, dim), rounded(_normal(rows, dim, seed=1) * 4, type)
    source, gates = bench.put(x, "f32", pad=8), bench.put(gate, type, pad=8)
    scale = bench.put(_normal(1, size, seed=2), "f32")
    out, alone = (bench.empty((rows, dim), type, pad=8) for _ in range(2))
    inputs = [source.address, gates.address, scale.address]
    args = [*inputs, out.address, heads, rows * heads, source.stride, gates.stride, out.stride]
    grid = (-(-rows * heads // (4 * NORM_HEADS[size])), 1)
    bench.run(f"gated_rmsnorm_heads_{type}_d{size}", grid, [*args, EPS])
    args = [*inputs, alone.address, heads, size, 1]
    args += [source.stride, gates.stride, 0, alone.stride, EPS]
    bench.run(f"gated_rmsnorm_{type}", (rows, 2), args)
    np.testing.assert_array_equal(bench.get(out), bench.get(alone))
    assert np.isfinite(bench.get(out)).all()
