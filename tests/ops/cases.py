"""Parity cases of every op: arguments, and which of them the op writes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from atlas.layers.rope import no_rotation
from atlas.ops.blocks import FORMATS, HostMatrix, dequantize, quantize


@dataclass
class Case:
    """One call; ``written``: the arrays to compare; ``tolerance``: relative to their greatest."""

    id: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    written: dict[str, np.ndarray]
    tolerance: float = 2e-6
    groups: int = 1  # experts in a matrix argument
    extra: dict[str, Any] = field(default_factory=dict)

    def groups_of(self, matrix: HostMatrix) -> int:
        """Experts in a matrix; one that has a row for each is the router."""
        return 1 if matrix.rows == self.groups else self.groups


def _rng(*seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def _nan(*shape: int) -> np.ndarray:
    return np.full(shape, np.nan, np.float32)


def _strided(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Rows inside a wider buffer, as the fused q/k/v projection leaves them."""
    wide = _normal(rng, shape[0], int(np.prod(shape[1:])) + 48)
    return wide[:, 16 : 16 + int(np.prod(shape[1:]))].reshape(shape, copy=False)


def random_matrix(rng: np.random.Generator, format: str, rows: int, cols: int) -> HostMatrix:
    """Random weights; for a quantised format random blocks with small finite scales."""
    weights = _normal(rng, rows, cols)
    if format == "f32":
        return HostMatrix(format, rows, cols, weights)
    if format == "f16":
        return HostMatrix(format, rows, cols, weights.astype(np.float16))
    if format == "bf16":
        return HostMatrix(format, rows, cols, (weights.view(np.uint32) >> 16).astype(np.uint16))
    if format in ("q8_0", "q4_0"):
        return quantize(weights, format)
    layout = FORMATS[format]
    data = rng.integers(0, 256, (rows * (cols // layout.block_len), layout.block_bytes), np.uint8)
    halves = {
        "q4_1": (0, 2),
        "q5_0": (0,),
        "q5_1": (0, 2),
        "q2_k": (80, 82),
        "q3_k": (108,),
        "q4_k": (0, 2),
        "q5_k": (0, 2),
        "q6_k": (208,),
        "iq4_nl": (0,),
        "iq4_xs": (0,),
    }
    for at in halves[format]:
        scale = rng.uniform(0.001, 0.02, len(data)).astype(np.float16)
        data[:, at : at + 2] = scale.view(np.uint8).reshape(-1, 2)
    return HostMatrix(format, rows, cols, data.reshape(rows, -1))


def rmsnorm() -> Iterator[Case]:
    for n, shape in enumerate([(1, 64), (3, 576), (5, 100), (2, 3, 80), (4, 1, 7), (2, 2, 256)]):
        rng = _rng(1, n)
        out = _nan(*shape)
        yield Case(
            "x".join(map(str, shape)),
            (_strided(rng, *shape), _normal(rng, shape[-1]), 1e-5),
            {"out": out},
            {"out": out},
        )


def gated_rmsnorm() -> Iterator[Case]:
    shapes = [(1, 64, 64, True), (3, 96, 24, True), (2, 160, 80, False), (5, 21, 7, False)]
    for n, (rows, size, group, norm_first) in enumerate(shapes):
        for shared in (True, False):
            rng, out = _rng(17, n, shared), _nan(rows, size)
            weight = _normal(rng, group if shared else size)
            yield Case(
                f"T{rows}-D{size}-G{group}-{'norm' if norm_first else 'gate'}-W{len(weight)}",
                (
                    _strided(rng, rows, size),
                    _strided(rng, rows, size) * 4,
                    weight,
                    1e-5,
                    group,
                    norm_first,
                ),
                {"out": out},
                {"out": out},
                4e-6,
            )
    heads = _normal(_rng(17, 9), 3, 6, 20), _normal(_rng(17, 10), 3, 6, 20)
    weight, every_second = _normal(_rng(17, 11), 20), tuple(array[:, 1::2] for array in heads)
    out = {"out": _nan(3, 9, 20)[:, 3:6]}
    yield Case("T3-H3-strided", (*every_second, weight, 1e-5, 20, True), out, dict(out), 4e-6)


def layernorm() -> Iterator[Case]:
    for n, (rows, size) in enumerate([(1, 64), (3, 1024), (5, 100), (2, 7)]):
        rng, out = _rng(17, n), _nan(rows, size)
        x = _strided(rng, rows, size) * np.float32(3) + np.float32(2)
        yield Case(
            f"T{rows}-D{size}",
            (x, _normal(rng, size), _normal(rng, size), 1e-5),
            {"out": out},
            {"out": out},
            4e-6,
        )


def _gated(seed: int) -> Iterator[Case]:
    for n, (rows, size) in enumerate([(1, 16), (3, 1536), (2, 37), (5, 1)]):
        rng, out = _rng(seed, n), _nan(rows, size)
        yield Case(
            f"T{rows}-F{size}",
            (_normal(rng, rows, 2 * size) * 8,),
            {"out": out},
            {"out": out},
            4e-6,
        )


def silu_and_mul() -> Iterator[Case]:
    yield from _gated(2)


def gelu_tanh_and_mul() -> Iterator[Case]:
    yield from _gated(3)


def relu_squared() -> Iterator[Case]:
    for n, (rows, size) in enumerate([(1, 16), (3, 77)]):
        rng, out = _rng(18, n), _nan(rows, size)
        yield Case(
            f"T{rows}-F{size}", (_strided(rng, rows, size),), {"out": out}, {"out": out}, 0.0
        )


def sigmoid_gate() -> Iterator[Case]:
    for n, (rows, size, gates) in enumerate([(1, 16, 16), (3, 77, 77), (2, 50, 1), (4, 1, 1)]):
        rng, out = _rng(19, n), _nan(rows, size)
        yield Case(
            f"T{rows}-D{size}-G{gates}",
            (_strided(rng, rows, size), _strided(rng, rows, gates) * 8),
            {"out": out},
            {"out": out},
            4e-6,
        )


def relu() -> Iterator[Case]:
    for n, (rows, size) in enumerate([(1, 16), (3, 77), (9, 1040)]):
        rng, out = _rng(18, n), _nan(rows, size)
        x = _strided(rng, rows, size)
        x[0, 3], x[-1, -1] = np.nan, -np.inf
        yield Case(f"T{rows}-F{size}", (x,), {"out": out}, {"out": out}, 0.0)


def add() -> Iterator[Case]:
    for n, (rows, size) in enumerate([(1, 16), (3, 77)]):
        rng, out = _rng(4, n), _nan(rows, size)
        yield Case(
            f"T{rows}-D{size}",
            (_strided(rng, rows, size), _normal(rng, rows, size)),
            {"out": out},
            {"out": out},
            0.0,
        )


def zero() -> Iterator[Case]:
    wide = _nan(3, 90)
    out = wide[:, 5:40]
    yield Case("strided", (), {"out": out}, {"out": out}, 0.0)


def softcap() -> Iterator[Case]:
    for n, cap in enumerate([30.0, 0.5]):
        rng, out = _rng(5, n), _nan(3, 333)
        yield Case(f"cap{cap}", (_normal(rng, 3, 333) * cap, cap), {"out": out}, {"out": out})


def embedding() -> Iterator[Case]:
    for n, format in enumerate(FORMATS):
        rng = _rng(6, n)
        table = random_matrix(rng, format, 83, 512)
        out = _nan(5, 512)
        ids = np.array([0, 82, 15, 16, 47], np.int32)
        yield Case(format, (ids, table, 1.5), {"out": out}, {"out": out})


def add_positions() -> Iterator[Case]:
    for n, (padding_id, size) in enumerate([(1, 64), (-1, 50)]):
        rng, out = _rng(19, n), _nan(4, size)
        ids, places = np.array([7, 1, 0, 1], np.int32), np.array([0, 30, 5, 2], np.int32)
        yield Case(
            f"pad{padding_id}-D{size}",
            (_strided(rng, 4, size), ids, places, _normal(rng, 31, size), padding_id),
            {"out": out},
            {"out": out},
            0.0,
        )


def gather_rows() -> Iterator[Case]:
    rng, out = _rng(7), _nan(3, 50)
    yield Case(
        "L3", (_normal(rng, 6, 50), np.array([5, 0, 2], np.int32)), {"out": out}, {"out": out}, 0.0
    )


def scatter_rows() -> Iterator[Case]:
    rng, out, wide = _rng(8), _nan(6, 50), _normal(_rng(8), 4, 90)
    rows = np.array([5, -1, 0, 2], np.int32)
    yield Case("L4", (_normal(rng, 4, 50), rows), {"out": out}, {"out": out}, 0.0)
    yield Case("L4-strided", (wide[:, 7:57], rows), {"out": out}, {"out": out}, 0.0)


def linear() -> Iterator[Case]:
    for n, format in enumerate(FORMATS):
        for rows in (1, 2, 3, 4, 5, 9, 28):
            rng = _rng(8, n, rows)
            outputs, cols = (40, 512) if FORMATS[format].is_quantized else (37, 83)
            out = _nan(rows, outputs)
            bias = _normal(rng, outputs) if rows % 2 else None
            yield Case(
                f"{format}-T{rows}",
                (_strided(rng, rows, cols), random_matrix(rng, format, outputs, cols), bias),
                {"out": out},
                {"out": out},
                1e-5,
            )
    for n, format in enumerate(["f32", "f16", "bf16", "q8_0"]):
        for rows in (1, 6):  # seven tiles: several side by side, and what is left
            rng, out = _rng(8, 98, n, rows), _nan(rows, 107)
            yield Case(
                f"{format}-T{rows}-N107",
                (_normal(rng, rows, 64), random_matrix(rng, format, 107, 64)),
                {"out": out},
                {"out": out},
                1e-5,
            )
    for rows in (130, 400):
        rng, out = _rng(8, 99, rows), _nan(rows, 48)
        yield Case(
            f"q4_0-T{rows}",
            (_normal(rng, rows, 4096), random_matrix(rng, "q4_0", 48, 4096)),
            {"out": out},
            {"out": out},
            1e-5,
        )


def linear_add() -> Iterator[Case]:
    for n, format in enumerate(["f32", "q4_1", "q8_0"]):
        rng = _rng(9, n)
        out = _normal(rng, 3, 40)
        yield Case(
            format,
            (_normal(rng, 3, 64), random_matrix(rng, format, 40, 64)),
            {"out": out},
            {"out": out},
            1e-5,
        )


def linear_relu() -> Iterator[Case]:
    for n, (format, rows) in enumerate([("f32", 3), ("q4_1", 1), ("bf16", 9), ("q8_0", 130)]):
        rng, out = _rng(43, n), _nan(rows, 40)
        bias = None if n == 1 else _normal(rng, 40)
        yield Case(
            f"{format}-T{rows}",
            (_normal(rng, rows, 64), random_matrix(rng, format, 40, 64), bias),
            {"out": out},
            {"out": out},
            1e-5,
        )


def linear_gated() -> Iterator[Case]:
    for n, (format, activation) in enumerate(
        [("f32", "silu"), ("q4_1", "gelu_tanh"), ("q8_0", "silu")]
    ):
        rng, out = _rng(42, n), _nan(5, 20)
        bias = None if n == 1 else _normal(rng, 40)
        yield Case(
            f"{format}-{activation}",
            (_normal(rng, 5, 64), random_matrix(rng, format, 40, 64), bias, activation),
            {"gate_up": _nan(5, 40), "out": out},
            {"out": out},
            1e-5,
        )


def rmsnorm_linear() -> Iterator[Case]:
    for n, (format, rows) in enumerate([("f32", 3), ("q4_1", 1), ("bf16", 1), ("bf16", 5)]):
        rng, out = _rng(44, n), _nan(rows, 40)
        bias = None if n == 1 else _normal(rng, 40)
        norm = (_strided(rng, rows, 64), _normal(rng, 64), 1e-5)
        yield Case(
            f"{format}-T{rows}",
            (*norm, random_matrix(rng, format, 40, 64), bias),
            {"normed": _nan(rows, 64), "out": out},
            {"out": out},
            1e-5,
        )


def rmsnorm_linear_gated() -> Iterator[Case]:
    for n, (format, rows, activation) in enumerate(
        [("f32", 4, "silu"), ("q8_0", 2, "gelu_tanh"), ("bf16", 1, "silu")]
    ):
        rng, out = _rng(45, n), _nan(rows, 20)
        bias = None if n == 1 else _normal(rng, 40)
        norm = (_strided(rng, rows, 64), _normal(rng, 64), 1e-5)
        yield Case(
            f"{format}-{activation}-T{rows}",
            (*norm, random_matrix(rng, format, 40, 64), bias, activation),
            {"normed": _nan(rows, 64), "gate_up": _nan(rows, 40), "out": out},
            {"out": out},
            1e-5,
        )


def rope() -> Iterator[Case]:
    for n, (heads, dim, half) in enumerate([(1, 64, 32), (3, 80, 40), (2, 96, 24), (4, 6, 3)]):
        rng = _rng(10, n)
        x = _strided(rng, 4, heads, dim)
        yield Case(
            f"H{heads}-K{dim}-R{2 * half}",
            (x, np.array([0, 7, 1, 30], np.int32), _normal(rng, 31, 2, half)),
            {},
            {"x": x},
        )

    for n, (dim, half, sections) in enumerate([(64, 32, (11, 11, 10)), (20, 9, (5, 2, 2))]):
        rng = _rng(10, 9, n)
        x = _strided(rng, 4, 3, dim)
        positions = rng.integers(0, 31, (3, 4)).astype(np.int32)
        positions[:, 1] = 7  # text: three times the same
        yield Case(
            f"K{dim}-sections{sections}",
            (x, positions, _normal(rng, 31, 2, half), sections),
            {},
            {"x": x},
        )


def kv_store() -> Iterator[Case]:
    for n, (dtype, dim) in enumerate([("float32", 64), ("float16", 80), ("float32", 7)]):
        rng = _rng(11, n)
        k_pool = _normal(rng, 5, 2, dim, 16).astype(dtype)
        v_pool = _normal(rng, 5, 2, 16, dim).astype(dtype)
        yield Case(
            f"{dtype}-K{dim}",
            (_strided(rng, 3, 2, dim), _strided(rng, 3, 2, dim), np.array([79, 0, 33], np.int32)),
            {"k_pool": k_pool, "v_pool": v_pool},
            {"k_pool": k_pool, "v_pool": v_pool},
            0.0,
        )


def attention_prefill() -> Iterator[Case]:
    shapes = [(64, 1, 1), (80, 2, 1), (96, 4, 2), (128, 16, 1), (256, 3, 3), (20, 6, 2)]
    for n, (dim, heads, kv_heads) in enumerate(shapes):
        for window, cap, dtype in (
            (None, None, "float32"),
            (5, None, "float16"),
            (300, 2.0, "float32"),
        ):
            yield _attention_case(
                _rng(12, n, window or 0), dim, heads, kv_heads, window, cap, dtype
            )


_ENDS = ((1, 1), (15, 15), (16, 1), (17, 17), (255, 2), (256, 1), (257, 18), (530, 3))
"""Last position and rows of sequences that end just before, at and after block, segment and tile
edges."""


def _attention_case(
    rng: np.random.Generator,
    dim: int,
    heads: int,
    kv_heads: int,
    window: int | None,
    cap: float | None,
    dtype: str,
    lengths: tuple[tuple[int, int], ...] = _ENDS,
) -> Case:
    most = 34
    blocks = sum(-(-end // 16) for end, _ in lengths)
    tables = np.full((len(lengths), most), 2**31 - 1, np.int32)
    order, at = rng.permutation(blocks), 0
    for row, (end, _) in enumerate(lengths):
        count = -(-end // 16)
        tables[row, :count] = order[at : at + count]
        at += count
    positions = np.concatenate([np.arange(end - rows, end) for end, rows in lengths])
    cu_rows = np.cumsum([0, *(rows for _, rows in lengths)])
    k_pool = _normal(rng, blocks, kv_heads, dim, 16).astype(dtype)
    v_pool = _normal(rng, blocks, kv_heads, 16, dim).astype(dtype)
    q, out = _strided(rng, len(positions), heads, dim), _nan(len(positions), heads, dim)
    args = (
        q,
        k_pool,
        v_pool,
        tables,
        cu_rows.astype(np.int32),
        positions.astype(np.int32),
        dim**-0.5,
        window,
        cap,
    )
    return Case(
        f"K{dim}-H{heads}-HK{kv_heads}-w{window}-{dtype}", args, {"out": out}, {"out": out}, 1e-5
    )


def encoder_attention() -> Iterator[Case]:
    lengths = [1, 15, 16, 17, 33, 257]
    cu_rows = np.cumsum([0, *lengths]).astype(np.int32)
    for n, (dim, heads) in enumerate([(64, 1), (80, 2), (20, 3), (128, 4)]):
        rng, rows = _rng(20, n), sum(lengths)
        q, k, v = (_strided(rng, rows, heads, dim) for _ in range(3))
        out = _nan(rows, heads, dim)
        args = (q, k, v, cu_rows, dim**-0.5)
        yield Case(f"K{dim}-H{heads}", args, {"out": out}, {"out": out}, 1e-5)


def cross_attention() -> Iterator[Case]:
    shapes = [(64, 4, 4, "float32"), (80, 2, 1, "float16"), (20, 6, 2, "float32")]
    for n, (dim, heads, kv_heads, dtype) in enumerate(shapes):
        rng = _rng(21, n)
        sources = [(1, 1), (15, 4), (16, 16), (17, 2), (257, 5), (530, 1)]  # keys, rows
        lens = np.array([length for length, _ in sources], np.int32)
        cu_rows = np.cumsum([0, *(rows for _, rows in sources)]).astype(np.int32)
        blocks = int((-(-lens // 16)).sum())
        tables = np.full((len(sources), 34), 2**31 - 1, np.int32)
        order, at = rng.permutation(blocks), 0
        for row, length in enumerate(lens):
            count = -(-length // 16)
            tables[row, :count] = order[at : at + count]
            at += count
        k_pool = _normal(rng, blocks, kv_heads, dim, 16).astype(dtype)
        v_pool = _normal(rng, blocks, kv_heads, 16, dim).astype(dtype)
        rows = int(cu_rows[-1])
        q, out = _strided(rng, rows, heads, dim), _nan(rows, heads, dim)
        yield Case(
            f"K{dim}-H{heads}-HK{kv_heads}-{dtype}",
            (q, k_pool, v_pool, tables, cu_rows, 16, lens, dim**-0.5),
            {"out": out},
            {"out": out},
            1e-5,
        )


def _candidates(case: str, logits: np.ndarray, k: int, bans: list[list[int]]) -> Case:
    written = {
        "ids": np.full((len(logits), k), 99, np.int32),
        "values": _nan(len(logits), k),
        "totals": _nan(len(logits)),
    }
    banned = np.array([token for row in bans for token in row], np.int32)
    cu_banned = np.cumsum([0, *(len(row) for row in bans)]).astype(np.int32)
    return Case(case, (logits, banned, cu_banned), written, written, 0.0)


def top_candidates() -> Iterator[Case]:
    rng = _rng(22)
    yield _candidates("k1", _normal(rng, 3, 100), 1, [[]] * 3)
    yield _candidates("k32", _normal(rng, 5, 5003) * 3, 32, [[], [7, 0, 7], [], [5002], []])
    tied = np.round(_normal(rng, 4, 1000) * 2)
    greatest = [int(i) for i in np.argsort(-tied[1], kind="stable")[:20]]
    yield _candidates("ties", tied, 8, [[], greatest, [], [1, 2, 3]])
    yield _candidates("C1", _normal(rng, 2, 1), 3, [[], [0]])
    # Differences that are equal although the logits are not; parts of 4,096 and what they prune.
    near = _normal(rng, 2, 9000) * np.float32(1e-7)
    near[:, 4500] = 16
    yield _candidates("rounded-C9000", near, 12, [[], [4500, 0, 1]])
    # Differences beyond float32, which are −∞ and candidates all the same, behind every other.
    far = np.full((2, 40), -3e38, np.float32)
    far[:, 5], far[:, 30] = 3e38, 1
    yield _candidates("far", far, 8, [[], [0, 5]])
    broken = _normal(rng, 3, 50)
    broken[0, 5], broken[1, 49], broken[2, 0] = np.nan, np.inf, -np.inf
    yield _candidates("non-finite", broken, 4, [[]] * 3)


def prepare_heads() -> Iterator[Case]:
    for n, (heads, kv_heads, dim, half, norm, dtype) in enumerate(
        [
            (4, 2, 64, 32, False, "float32"),
            (3, 3, 80, 20, True, "float16"),
            (8, 1, 128, 64, True, "float32"),
        ]
    ):
        yield _heads_case(_rng(40, n), heads, kv_heads, dim, half, norm, dtype)


def _heads_case(
    rng: np.random.Generator, heads: int, kv_heads: int, dim: int, half: int, norm: bool, dtype: str
) -> Case:
    q = _strided(rng, 3, heads, dim)
    k, v = _strided(rng, 3, kv_heads, dim), _strided(rng, 3, kv_heads, dim)
    norms = (1 + _normal(rng, dim) / 4, 1 + _normal(rng, dim) / 4) if norm else (None, None)
    k_pool = _normal(rng, 5, kv_heads, dim, 16).astype(dtype)
    v_pool = _normal(rng, 5, kv_heads, 16, dim).astype(dtype)
    positions, slots = np.array([7, 0, 30], np.int32), np.array([79, 0, 33], np.int32)
    pools = {"k_pool": k_pool, "v_pool": v_pool}
    args = (q, k, v, *norms, 1e-5, positions, _normal(rng, 31, 2, half), slots)
    tolerance = 2e-6 if dtype == "float32" else 1e-3
    return Case(f"H{heads}-HK{kv_heads}-K{dim}-{dtype}", args, pools, {"q": q, **pools}, tolerance)


def attention_step() -> Iterator[Case]:
    for n, (dim, heads, kv_heads, norm) in enumerate(
        [(64, 2, 1, False), (80, 3, 3, True), (128, 16, 2, True), (256, 4, 1, False)]
    ):
        for window, cap, dtype in ((None, None, "float32"), (300, 2.0, "float16")):
            rng = _rng(41, n, window or 0)
            yield _step_case(rng, dim, heads, kv_heads, norm, window, cap, dtype)
    still = _step_case(_rng(41, 9), 64, 2, 2, False, None, None, "float32")
    table = no_rotation(still.args[6].shape[0])
    args = (*still.args[:6], table, *still.args[7:])
    yield replace(still, id=f"{still.id}-unrotated", args=args)


def attention_step_gated() -> Iterator[Case]:
    few = ((17, 2), (0, 0), (256, 1), (530, 3))
    for n, (dim, heads, kv_heads, norm, window, lengths) in enumerate(
        [
            (64, 4, 2, True, None, few),
            (64, 3, 3, False, 40, _ENDS),
            (128, 4, 1, False, None, few),
            (256, 8, 1, True, None, few),
        ]
    ):
        rng = _rng(42, n)
        case = _step_case(rng, dim, heads, kv_heads, norm, window, None, "float32", lengths)
        gate = _strided(rng, len(case.args[0]), heads * dim) * 4
        yield replace(case, args=(*case.args[:3], gate, *case.args[3:]))


def _step_case(
    rng: np.random.Generator,
    dim: int,
    heads: int,
    kv_heads: int,
    norm: bool,
    window: int | None,
    cap: float | None,
    dtype: str,
    lengths: tuple[tuple[int, int], ...] = _ENDS,
) -> Case:
    """An attention case whose own keys and values are still to be stored."""
    given = _attention_case(rng, dim, heads, kv_heads, window, cap, dtype, lengths)
    q, k_pool, v_pool, tables, cu_rows, positions, scale, _, _ = given.args
    k, v = (_strided(rng, len(q), kv_heads, dim) for _ in range(2))
    seqs = np.repeat(np.arange(len(cu_rows) - 1), np.diff(cu_rows))
    slots = (tables[seqs, positions // 16] * 16 + positions % 16).astype(np.int32)
    most = int(np.diff(cu_rows).max())
    norms = (1 + _normal(rng, dim) / 4, 1 + _normal(rng, dim) / 4) if norm else (None, None)
    angles = rng.uniform(0, 6, (int(positions.max()) + 1, dim // 2)).astype(np.float32)
    table = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    args = (
        q, k, v, *norms, 1e-5, table, slots, tables, cu_rows, most, positions, scale, window, cap,
    )  # fmt: skip
    written = {"k_pool": k_pool, "v_pool": v_pool, "out": given.kwargs["out"]}
    return Case(given.id, args, dict(written), written, 1e-5 if dtype == "float32" else 1e-3)


def argmax() -> Iterator[Case]:
    rng = _rng(13)
    logits = np.round(_normal(rng, 6, 1003) * 2)  # many ties
    logits[1, 5], logits[2, 1002], logits[3, 0] = np.nan, np.inf, -np.inf
    out = np.full(6, 99, np.int32)
    yield Case("ties-and-non-finite", (logits,), {"out": out}, {"out": out}, 0.0)
    single = np.full(1, 99, np.int32)
    yield Case("C1", (_normal(rng, 1, 1),), {"out": single}, {"out": single}, 0.0)


def moe_route() -> Iterator[Case]:
    for n, (experts, top_k, normalize) in enumerate([(8, 2, True), (5, 5, False), (128, 8, True)]):
        rng = _rng(14, n)
        ids, weights = np.full((7, top_k), -1, np.int32), _nan(7, top_k)
        scores = np.round(_normal(rng, 7, experts) * 4) / 2  # ties
        yield Case(
            f"E{experts}-X{top_k}",
            (scores, normalize),
            {"ids": ids, "weights": weights},
            {"ids": ids, "weights": weights},
        )
    yield from _routed(True)
    yield from _routed(False)
    yield from _routed_padding()


@dataclass(frozen=True)
class _Routing:
    experts: int
    top_k: int
    scoring: str
    biased: bool
    num_groups: int = 1
    top_groups: int = 1


def _routed(normalize: bool) -> Iterator[Case]:
    for n, kind in enumerate(
        [
            _Routing(16, 4, "softmax", True),
            _Routing(20, 3, "sigmoid", False),
            _Routing(48, 6, "sigmoid", True, 8, 3),
            _Routing(12, 2, "softmax", False, 3, 1),
        ]
    ):
        rng = _rng(20, n, normalize)
        ids, weights = np.full((7, kind.top_k), -1, np.int32), _nan(7, kind.top_k)
        scores = np.round(_normal(rng, 7, kind.experts) * 4) / 2  # ties
        bias = np.round(_normal(rng, kind.experts)) if kind.biased else None
        args = (scores, normalize, kind.scoring, bias, 2.5, kind.num_groups, kind.top_groups)
        written = {"ids": ids, "weights": weights}
        name = f"{kind.scoring}-E{kind.experts}-X{kind.top_k}-G{kind.top_groups}of{kind.num_groups}"
        yield Case(f"{name}-{'sum' if normalize else 'plain'}", args, dict(written), written)


def _routed_padding() -> Iterator[Case]:
    """Rows of padding, one of them all NaN, get no experts."""
    for scoring in ("softmax", "sigmoid"):
        rng = _rng(22)
        ids, weights, scores = np.full((5, 3), 9, np.int32), _nan(5, 3), _normal(rng, 5, 9)
        scores[1] = np.nan
        slots = np.array([0, -1, 700, -1, 3], np.int32)
        written = {"ids": ids, "weights": weights}
        args = (scores, True, scoring, None, 1.5, 1, 1, None, slots)
        yield Case(f"{scoring}-padding", args, dict(written), written)


def moe_router() -> Iterator[Case]:
    for n, (format, dim, experts, rows, scoring) in enumerate(
        [
            ("bf16", 128, 9, 1, "softmax"),
            ("f32", 384, 12, 3, "sigmoid"),
            ("bf16", 256, 16, 8, "softmax"),
            ("q8_0", 256, 16, 5, "softmax"),
            ("bf16", 256, 10, 9, "sigmoid"),
        ]
    ):
        yield _router_case(_rng(25, n), format, dim, experts, rows, scoring)


def _router_case(
    rng: np.random.Generator, format: str, dim: int, experts: int, rows: int, scoring: str,
    top_k: int = 3,
) -> Case:  # fmt: skip
    """Choices so far apart that rounding changes none; a row of padding where there are three."""
    router = random_matrix(rng, format, experts, dim)
    bias = _normal(rng, experts) / 4 if scoring == "sigmoid" else None
    x, norm = _normal(rng, rows, dim), (1 + _normal(rng, dim) / 4) * 2 / np.float32(dim**0.5)
    slots = np.arange(rows, dtype=np.int32)
    slots[2:3] = -1
    for row in range(rows):
        while True:
            weights = dequantize(router)
            scores = weights @ (x[row] / np.sqrt(np.square(x[row]).mean()) * norm)
            choice = scores if bias is None else 1 / (1 + np.exp(-scores)) + bias
            if np.diff(np.sort(choice)[-top_k - 1 :]).min() > (0.02 if bias is not None else 0.06):
                break
            x[row] = _normal(rng, dim)
    written = {"normed": _nan(rows, dim), "scores": _nan(rows, experts)}
    written |= {"ids": np.full((rows, top_k), 9, np.int32), "weights": _nan(rows, top_k)}
    args = (x, norm, 1e-6, router, experts, True, scoring, bias, 1.5, 1, 1, slots)
    return Case(f"{format}-D{dim}-E{experts}-T{rows}-{scoring}", args, dict(written), written, 2e-5)


def moe_block() -> Iterator[Case]:
    inner, top_k = 64, 2
    for n, (format, experts, rows, scoring, activation) in enumerate(
        [
            ("bf16", 3, 1, "softmax", "silu"),
            ("bf16", 3, 3, "sigmoid", "silu"),
            ("bf16", 6, 8, "softmax", "silu"),
            ("f32", 5, 4, "sigmoid", "gelu_tanh"),
            ("bf16", 3, 9, "softmax", "silu"),
        ]
    ):
        rng, dim = _rng(26, n), 128
        case = _router_case(rng, format, dim, experts, rows, scoring, top_k)
        gate_up = random_matrix(rng, format, experts * 2 * inner, dim)
        down, out = random_matrix(rng, format, experts * dim, inner), _normal(rng, rows, dim)
        scratch = {
            "expert_gate_up": _nan(rows, top_k, 2 * inner),
            "expert_activated": _nan(rows, top_k, inner),
            "expert_out": _nan(rows, top_k, dim),
        }
        written = case.written | {"out": out}
        args = (*case.args, gate_up, down, activation)
        name = f"{case.id}-{activation}"
        yield Case(name, args, scratch | written, written, 2e-5, groups=experts)


def moe_experts() -> Iterator[Case]:
    formats = ["f32", "bf16", "q4_0", "q8_0", "q4_k", "q5_1"]
    for n, format in enumerate(formats):
        for activation, rows in (("silu", 11), ("gelu_tanh", 2), ("relu_squared", 3)):
            rng = _rng(15, n, rows)
            halves = 1 if activation == "relu_squared" else 2
            dim, inner = (256, 256) if FORMATS[format].is_quantized else (128, 64)
            ids = np.stack([rng.permutation(6)[:3] for _ in range(rows)]).astype(np.int32)
            gate_up = random_matrix(rng, format, 6 * halves * inner, dim)
            down = random_matrix(rng, format, 6 * dim, inner)
            x, out = _normal(rng, rows, dim) / 16, _normal(rng, rows, dim)
            weights = np.abs(_normal(rng, rows, 3))
            scratch = {
                "expert_gate_up": _nan(rows, 3, 2 * inner),
                "expert_activated": _nan(rows, 3, inner),
                "expert_out": _nan(rows, 3, dim),
            }
            yield Case(
                f"{format}-{activation}",
                (x, gate_up, down, ids, weights, activation),
                scratch | {"out": out},
                {"out": out},
                2e-5,
                groups=6,
            )

    # Rows of padding among others, whose scratch stays NaN.
    for n, (format, rows) in enumerate([("bf16", 3), ("q8_0", 5), ("bf16", 11)]):
        rng, dim, inner = _rng(15, 98, n), 128, 64
        ids = np.stack([rng.permutation(3)[:2] for _ in range(rows)]).astype(np.int32)
        ids[[0, rows - 1]] = -1
        weights, out = np.abs(_normal(rng, rows, 2)), _normal(rng, rows, dim)
        weights[ids < 0] = 0
        gate_up = random_matrix(rng, format, 3 * 2 * inner, dim)
        down = random_matrix(rng, format, 3 * dim, inner)
        scratch = {
            "expert_gate_up": _nan(rows, 2, 2 * inner),
            "expert_activated": _nan(rows, 2, inner),
            "expert_out": _nan(rows, 2, dim),
        }
        yield Case(
            f"{format}-padding-T{rows}",
            (_normal(rng, rows, dim) / 16, gate_up, down, ids, weights, "silu"),
            scratch | {"out": out},
            {"out": out},
            2e-5,
            groups=3,
        )

    # More than 16 rows for an expert on average; expert 5 has none.
    rng = _rng(15, 98)
    ids = np.stack([rng.permutation(5)[:3] for _ in range(40)]).astype(np.int32)
    out = _normal(rng, 40, 128)
    yield Case(
        "bf16-T40",
        (
            _normal(rng, 40, 128) / 16,
            random_matrix(rng, "bf16", 6 * 128, 128),
            random_matrix(rng, "bf16", 6 * 128, 64),
            ids,
            np.abs(_normal(rng, 40, 3)),
            "silu",
        ),
        {
            "expert_gate_up": _nan(40, 3, 128),
            "expert_activated": _nan(40, 3, 64),
            "expert_out": _nan(40, 3, 128),
            "out": out,
        },
        {"out": out},
        2e-5,
        groups=6,
    )

    # Experts of more than six tiles, with a row, two or none.
    for n, (format, dim) in enumerate([("f32", 107), ("q8_0", 224)]):
        rng = _rng(15, 99, n)
        out = _normal(rng, 2, dim)
        scratch = {
            "expert_gate_up": _nan(2, 3, 128),
            "expert_activated": _nan(2, 3, 64),
            "expert_out": _nan(2, 3, dim),
        }
        gate_up = random_matrix(rng, format, 6 * 128, dim)
        down = random_matrix(rng, format, 6 * dim, 64)
        ids = np.array([[4, 0, 5], [0, 2, 3]], np.int32)
        yield Case(
            f"{format}-D{dim}",
            (_normal(rng, 2, dim) / 16, gate_up, down, ids, np.abs(_normal(rng, 2, 3)), "silu"),
            scratch | {"out": out},
            {"out": out},
            2e-5,
            groups=6,
        )


def _sequences(
    rng: np.random.Generator, *, is_long: bool = False
) -> tuple[int, int, np.ndarray, np.ndarray, np.ndarray]:
    """(rows, slots in the pool, slots, cu_rows, positions) of a ragged batch.

    Rows before the first sequence are another call's; one sequence has none. ``is_long``: two of
    them have rows for chunks of 64 positions, and rows before and behind those.
    """
    lengths = [1, 200, 0, 150, 9] if is_long else [1, 5, 0, 2, 9]
    cu_rows = (2 + np.cumsum([0, *lengths])).astype(np.int32)
    positions = np.zeros(cu_rows[-1], np.int32)
    for n, length in enumerate(lengths):
        positions[cu_rows[n] : cu_rows[n + 1]] = 60 + 3 * n + np.arange(length)
    slots = rng.permutation(7)[: len(lengths)].astype(np.int32)
    return int(cu_rows[-1]), 7, slots, cu_rows, positions


def _convolution(seed: int) -> Iterator[Case]:
    for n, (channels, width, biased) in enumerate([(64, 4, False), (37, 2, True), (100, 5, True)]):
        rng = _rng(21, seed, n)
        rows, num_slots, slots, cu_rows, positions = _sequences(rng)
        tails, out = _normal(rng, num_slots, width - 1, channels), _normal(rng, rows, channels)
        bias = _normal(rng, channels) if biased else None
        args = (_strided(rng, rows, channels), _normal(rng, width, channels), bias)
        written = {"tails": tails, "out": out}
        yield Case(
            f"C{channels}-W{width}",
            (*args, slots, cu_rows, positions),
            dict(written),
            written,
            4e-6,
        )


def causal_conv_step() -> Iterator[Case]:
    yield from _convolution(0)


def causal_conv_prefill() -> Iterator[Case]:
    yield from _convolution(1)


def _delta(seed: int) -> Iterator[Case]:
    shapes = [(2, 4, 64, 128), (1, 3, 128, 64), (3, 3, 20, 37), (2, 6, 16, 80), (1, 2, 64, 64)]
    shapes += [(2, 4, 128, 128)] * seed
    for n, (key_heads, value_heads, key_dim, value_dim) in enumerate(shapes):
        rng, is_long = _rng(22, seed, n), n == 5
        rows, num_slots, slots, cu_rows, positions = _sequences(rng, is_long=is_long)
        qkv = _strided(rng, rows, 2 * key_heads * key_dim + value_heads * value_dim)
        ab = _normal(rng, rows, 2 * value_heads) * 2  # views of one fused projection
        states = _normal(rng, num_slots, value_heads, key_dim, value_dim)
        out = _normal(rng, rows, value_heads, value_dim)
        args = (qkv, ab[:, :value_heads], ab[:, value_heads:])
        args += (_normal(rng, value_heads), _normal(rng, value_heads))
        written = {"states": states, "out": out}
        yield Case(
            f"HK{key_heads}-HV{value_heads}-K{key_dim}-V{value_dim}{'-long' * is_long}",
            (*args, slots, cu_rows, positions),
            dict(written),
            written,
            2e-5 if is_long else 4e-6,
        )


def gated_delta_mixer_step() -> Iterator[Case]:
    for n, (keys, values, dim, taps) in enumerate([(1, 2, 64, 4), (2, 2, 128, 4), (1, 2, 64, 3)]):
        rng = _rng(24, n)
        rows, num_slots, slots, cu_rows, positions = _sequences(rng)
        first = cu_rows[0]  # the norm takes every row: all of them are this call's
        rows, cu_rows, positions = rows - int(first), cu_rows - first, positions[first:].copy()
        channels = (2 * keys + values) * dim
        qkv, gate = _strided(rng, rows, channels), _strided(rng, rows, values * dim)
        ab = _normal(rng, rows, 2 * values) * 2
        states = _normal(rng, num_slots, values, dim, dim)
        tails = _normal(rng, num_slots, taps - 1, channels)
        recurred, out = _nan(rows, values * dim), _nan(rows, values * dim)
        vectors = (_normal(rng, dim), 1e-6, _normal(rng, values), _normal(rng, values))
        args = (qkv, gate, ab[:, :values], ab[:, values:], _normal(rng, taps, channels), *vectors)
        scratch = {"convolved": _nan(rows, channels), "recurred": recurred}
        written = {"states": states, "tails": tails, "out": out}
        yield Case(
            f"HK{keys}-HV{values}-D{dim}-W{taps}",
            (*args, slots, cu_rows, positions),
            scratch | written,
            written,
            1e-5,
        )


def gated_delta_step() -> Iterator[Case]:
    yield from _delta(0)


def gated_delta_prefill() -> Iterator[Case]:
    yield from _delta(1)


def _mamba2(seed: int) -> Iterator[Case]:
    shapes = [(4, 2, 64, 128), (3, 1, 20, 16), (6, 6, 8, 37), (2, 1, 64, 128)]
    shapes += [(8, 4, 64, 128)] * seed
    for n, (heads, groups, dim, size) in enumerate(shapes):
        rng, is_long = _rng(23, seed, n), n == 4
        rows, num_slots, slots, cu_rows, positions = _sequences(rng, is_long=is_long)
        x, b = _strided(rng, rows, heads, dim), _strided(rng, rows, groups, size)
        c, dt = _strided(rng, rows, groups, size), _strided(rng, rows, heads)
        vectors = tuple(_normal(rng, heads) for _ in range(3))
        bounds = (0.0, float("inf")) if n else (0.3, 1.5)
        states, out = _normal(rng, num_slots, heads, dim, size), _normal(rng, rows, heads, dim)
        written = {"states": states, "out": out}
        yield Case(
            f"H{heads}-G{groups}-P{dim}-N{size}{'-long' * is_long}",
            (x, b, c, dt, *vectors, *bounds, slots, cu_rows, positions),
            dict(written),
            written,
            2e-5 if is_long else 4e-6,
        )


def mamba2_step() -> Iterator[Case]:
    yield from _mamba2(0)


def mamba2_prefill() -> Iterator[Case]:
    yield from _mamba2(1)
