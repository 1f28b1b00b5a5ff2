"""Ragged sequences over shuffled blocks, and both attention kernels run on them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from atlas.ops import OPS
from tests.kernels.launches import Bench, Buffer, rounded


@dataclass
class Sequences:
    """Ragged sequences over shuffled blocks: lengths, and the last rows of each as queries."""

    lengths: list[int]
    heads: int
    kv_heads: int
    dim: int
    window: int = 0
    softcap: float = 0.0
    k: np.ndarray = field(init=False)
    v: np.ndarray = field(init=False)
    q: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng([self.dim, *self.lengths])
        counts = [-(-length // 16) for length in self.lengths]
        self.tables = np.full((len(counts), max(counts)), 2**31 - 1, np.int32)
        order, used = rng.permutation(sum(counts)), 0
        for table, count in zip(self.tables, counts, strict=True):
            table[:count] = order[used : used + count]
            used += count
        shape = (used, self.kv_heads, 16, self.dim)
        self.k, self.v = (rounded(rng.standard_normal(shape), "bf16") for _ in range(2))
        self.every_q = [
            rounded(2 * rng.standard_normal((length, self.heads, self.dim)), "bf16")
            for length in self.lengths
        ]
        for table, length in zip(self.tables, self.lengths, strict=True):
            for pool in (self.k, self.v):  # what lies behind the last key must not matter
                pool[table[(length - 1) // 16], :, (length - 1) % 16 + 1 :] = np.nan

    def definition(self, positions: list[tuple[int, int]]) -> np.ndarray:
        """What the op says about the rows (sequence, position)."""
        out = np.empty((len(positions), self.heads, self.dim), np.float32)
        q = np.stack([self.every_q[n][at] for n, at in positions])
        OPS["attention_prefill"](
            q,
            self.k.transpose(0, 1, 3, 2),
            self.v,
            self.tables[[n for n, _ in positions]],
            np.arange(len(positions) + 1, dtype=np.int32),
            np.array([at for _, at in positions], np.int32),
            self.dim**-0.5,
            self.window or None,
            self.softcap or None,
            out=out,
        )
        return out


def put_pools(bench: Bench, given: Sequences) -> list[Buffer]:
    """K and V in device memory."""
    return [bench.put(given.k, "bf16"), bench.put(given.v, "bf16")]


def decode(
    bench: Bench, given: Sequences, pools: list[Buffer], rows: list[list[int]], tile: int = 16,
    workers: int = 2,
) -> np.ndarray:  # fmt: skip
    """Run the kernel for the positions ``rows[n]`` of each sequence; out, row after row."""
    from atlas_kernels.attention_plan import SPLIT

    chosen = [(n, at) for n, positions in enumerate(rows) for at in positions]
    q = bench.put(np.stack([given.every_q[n][at] for n, at in chosen]), "bf16", pad=8)
    out = bench.empty((len(chosen), given.heads, given.dim), "bf16", pad=24)
    group, most = given.heads // given.kv_heads, max(len(positions) for positions in rows)
    room = max(given.lengths) // SPLIT + 1 if workers > 1 else 2
    shape = (len(rows) * room, given.kv_heads * most * group, given.dim)
    partials, sums = bench.empty(shape, "f32"), bench.empty((*shape[:2], 2), "f32")
    columns = len(rows) * given.kv_heads * -(-most * group // tile)
    counters = bench.put_ints(np.zeros(columns))
    args = [q.address, pools[0].address, pools[1].address, out.address]
    args += [bench.put_early(given.tables), bench.put_early(np.cumsum([0, *map(len, rows)]))]
    args += [bench.put_early([at for _, at in chosen]), partials.address, sums.address, counters]
    args += [given.heads, given.kv_heads, most, room, given.window, given.tables.shape[1]]
    args += [q.stride, out.stride]
    args += [np.float32(given.dim**-0.5), np.float32(given.softcap)]
    bench.run(f"attention_decode_d{given.dim}_r{tile}", (columns, workers), args)
    left = bench.memory.get(counters, np.ones(columns, np.int32))
    np.testing.assert_array_equal(left, 0)
    return bench.get(out)


def prefill(
    bench: Bench, given: Sequences, pools: list[Buffer], chunks: list[tuple[int, int]], form: str,
    left_out: list[int] | None = None,
) -> np.ndarray:  # fmt: skip
    """Run the kernel ``form`` for the positions first … end − 1 of each sequence, but for the first
    ``left_out[n]`` of them."""
    from atlas_kernels.attention_plan import prefill_rows, wgmma_tiles

    chosen = [(n, at) for n, chunk in enumerate(chunks) for at in range(*chunk)]
    q = bench.put(np.stack([given.every_q[n][at] for n, at in chosen]), "bf16", pad=8)
    out = bench.empty((len(chosen), given.heads, given.dim), "bf16", pad=24)
    lengths = [end - first for first, end in chunks]
    cu_rows = np.cumsum([0, *lengths])
    last = [out.address, bench.put_ints(given.tables)]
    last += [bench.put_ints(cu_rows[:-1] + (0 if left_out is None else left_out))]
    last += [bench.put_ints(cu_rows)]
    last += [bench.put_ints([at for _, at in chosen]), given.heads, given.kv_heads]
    if form.startswith("wgmma"):
        sources = [_pool_map(bench, given, pool) for pool in pools]
        last += [len(chunks)]
        grid = (given.heads, wgmma_tiles(sum(lengths), len(chunks)))
    else:
        sources = [pool.address for pool in pools]
        grid = (len(chunks) * given.heads, -(-max(lengths) // prefill_rows(given.dim)))
    last += [given.window, given.tables.shape[1], q.stride, out.stride]
    last += [np.float32(given.dim**-0.5), np.float32(given.softcap)]
    bench.run(f"attention_prefill_{form}", grid, [q.address, *sources, *last])
    return bench.get(out)


def _pool_map(bench: Bench, given: Sequences, pool: Buffer) -> int:
    """Address of a pool's tensor map."""
    from atlas_kernels.attention_plan import pool_view

    box, strides = pool_view(given.dim)
    shape = (len(given.k) * given.kv_heads, *box[1:])
    raw = bench.memory.tensor_map(pool.address, shape, box, strides)
    return bench.memory.put(np.frombuffer(raw, np.uint8))
