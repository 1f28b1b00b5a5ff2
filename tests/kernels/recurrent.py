"""Recurrent layers' inputs and states on a bench, and the kernels run on them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from atlas_kernels.recurrence_shapes import matrix_bytes

from atlas.ops import OPS
from tests.kernels.launches import Bench, Buffer, rounded

SLOTS = 4


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    """Normal numbers that depend on shape and seed alone."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


@dataclass
class Rows:
    """Sequences with the rows ``lengths``, the last of them in the pool's first slots."""

    bench: Bench
    lengths: list[int]

    @cached_property
    def cu_rows(self) -> np.ndarray:
        return np.cumsum([0, *self.lengths]).astype(np.int32)

    @cached_property
    def slots(self) -> np.ndarray:
        return np.arange(len(self.lengths), dtype=np.int32)[::-1].copy()

    @property
    def total(self) -> int:
        return int(self.cu_rows[-1])

    def ranges(self, first: int = 0, count: int | None = None) -> list[int]:
        """Addresses of ``begins`` and ``ends``: some rows of each sequence, or all."""
        begins = self.cu_rows[:-1] + first
        ends = self.cu_rows[1:] if count is None else np.minimum(begins + count, self.cu_rows[1:])
        return [self.bench.put_ints(np.minimum(begins, ends)), self.bench.put_ints(ends)]

    def definition(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Slots, row ranges and positions for the ops."""
        return self.slots, self.cu_rows, np.arange(self.total, dtype=np.int32)


class DeltaLayer:
    """A gated-delta layer of K = V = ``dim``: projection, weights, state and tail."""

    def __init__(
        self, bench: Bench, rows: Rows, key_heads: int, value_heads: int, dim: int, type: str
    ) -> None:
        self.bench, self.rows, self.type = bench, rows, type
        self.key_heads, self.value_heads, self.dim = key_heads, value_heads, dim
        self.channels = (2 * key_heads + value_heads) * dim
        values = value_heads * dim
        self.projected = rounded(normal(rows.total, self.channels + values), type)
        self.ab = rounded(2 * normal(rows.total, 2 * value_heads), type)
        self.decay_log, self.dt_bias = normal(value_heads), normal(value_heads, seed=1)
        self.conv_weight, self.norm_weight = normal(4, self.channels), normal(dim, seed=2)
        self.state = normal(SLOTS, value_heads, dim, dim)
        self.tail = rounded(normal(SLOTS, 3, self.channels), type)
        self.projection = bench.put(self.projected, type, pad=8)
        self.gates = bench.put(self.ab, type)
        self.constants = [
            bench.put(array.reshape(1, -1), "f32").address
            for array in (self.conv_weight, self.norm_weight, self.decay_log, self.dt_bias)
        ]
        self.restart()

    def restart(self) -> None:
        """Put fresh copies of state and tail."""
        self.states, self.tails = (
            self.bench.put(array, "f32") for array in (self.state, self.tail)
        )

    def gate_addresses(self) -> list[int]:
        size = self.gates.stored.itemsize
        return [self.gates.address, self.gates.address + self.value_heads * size]

    def mix(
        self, first: int = 0, count: int | None = None, out: Buffer | None = None,
        write: bool = True,
    ) -> Buffer:  # fmt: skip
        """Run the fused kernel over some rows of each sequence."""
        rows, num_seqs = self.rows, len(self.rows.lengths)
        if out is None:
            out = self.bench.empty((rows.total, self.value_heads, self.dim), self.type)
        size = self.projection.stored.itemsize
        counters = self.bench.put_ints(np.zeros(num_seqs * self.key_heads))
        slots = rows.slots if write else np.full(num_seqs, -1)
        args = [self.projection.address, self.projection.address + self.channels * size]
        args += [*self.gate_addresses(), *self.constants, self.bench.put_ints(rows.slots)]
        args += [self.bench.put_ints(slots), *rows.ranges(first, count), self.states.address]
        args += [self.tails.address, counters, out.address, self.key_heads, self.value_heads]
        args += [self.projection.stride, self.projection.stride, self.gates.stride, out.stride]
        name = f"gated_delta_mixer_step_d{self.dim}_{self.type}"
        # What earlier steps left, and constants.
        for address in (self.tails.address, self.states.address, *self.constants):
            self.bench.early(address)
        self.bench.run(name, (num_seqs * self.value_heads, 1), [*args, np.float32(1e-6)])
        left = self.bench.memory.get(counters, np.ones(num_seqs * self.key_heads, np.int32))
        np.testing.assert_array_equal(left, 0)
        return out

    def convolve(self) -> Buffer:
        """The convolution alone, float32."""
        out = self.bench.empty((self.rows.total, self.channels), "f32", pad=4)
        num_seqs, most = len(self.rows.lengths), max(self.rows.lengths)
        args = [self.projection.address, self.constants[0], 0, self.bench.put_ints(self.rows.slots)]
        args += [*self.rows.ranges(), self.tails.address, out.address, self.channels]
        args += [self.projection.stride, out.stride]
        grid = (num_seqs * -(-self.channels // 512), -(-most // 32))
        self.bench.run(f"causal_conv_{self.type}", grid, args)
        return out

    def step(self, qkv: Buffer) -> Buffer:
        """The recurrence alone."""
        out = self.bench.empty((self.rows.total, self.value_heads, self.dim), "f32")
        slots = self.bench.put_ints(self.rows.slots)
        args = [qkv.address, *self.gate_addresses(), *self.constants[2:], slots, slots]
        args += [*self.rows.ranges(), self.states.address, out.address, self.key_heads]
        args += [self.value_heads, qkv.stride, self.gates.stride, out.stride]
        name = f"gated_delta_step_d{self.dim}_{self.type}"
        self.bench.run(name, (len(self.rows.lengths) * self.value_heads, 1), args)
        return out

    def defined(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The ops one after the other: convolved, out, gated and normed, state, tail."""
        rows, values = self.rows, self.value_heads * self.dim
        state, tail = self.state.copy(), self.tail.copy()
        x, gate = np.split(self.projected, [self.channels], axis=1)
        qkv = np.empty_like(x)
        OPS["causal_conv_step"](x, self.conv_weight, None, *rows.definition(), tails=tail, out=qkv)
        out = np.empty((rows.total, self.value_heads, self.dim), np.float32)
        a, b = np.split(self.ab, 2, axis=1)
        args = (qkv, a, b, self.decay_log, self.dt_bias, *rows.definition())
        OPS["gated_delta_step"](*args, states=state, out=out)
        normed = np.empty((rows.total, values), np.float32)
        flat = out.reshape(rows.total, values)
        OPS["gated_rmsnorm"](flat, gate, self.norm_weight, 1e-6, self.dim, True, out=normed)
        return qkv, out, normed.reshape(out.shape), state, tail


class MambaLayer:
    """A Mamba-2 layer of heads of 64: what its convolution left, weights, state."""

    BOUNDS = (np.float32(0.01), np.float32(2.5))

    def __init__(self, bench: Bench, rows: Rows, heads: int, groups: int, size: int) -> None:
        self.bench, self.rows, self.heads, self.groups, self.size = bench, rows, heads, groups, size
        self.convolved = normal(rows.total, 64 * heads + 2 * groups * size)
        self.time = rounded(normal(rows.total, heads), "bf16")
        self.vectors = [normal(heads, seed=seed) for seed in (1, 2, 3)]  # decay, skip, bias
        self.state = normal(SLOTS, heads, 64, size)
        self.input = bench.put(self.convolved, "f32", pad=4)
        self.times = bench.put(self.time, "bf16", pad=2)
        self.constants = [bench.put(vector[None], "f32").address for vector in self.vectors]
        self.restart()

    def restart(self) -> None:
        """Put a fresh copy of the state."""
        self.states = self.bench.put(self.state, "f32")

    def columns(self) -> list[int]:
        """Addresses of x, b and c."""
        b = self.input.address + 64 * self.heads * 4
        return [self.input.address, b, b + self.groups * self.size * 4]

    def empty(self) -> Buffer:
        return self.bench.empty((self.rows.total, self.heads, 64), "f32", pad=4)

    def step(
        self, first: int = 0, count: int | None = None, out: Buffer | None = None,
        write: bool = True,
    ) -> Buffer:  # fmt: skip
        """Run the step kernel over some rows of each sequence."""
        out = self.empty() if out is None else out
        num_seqs = len(self.rows.lengths)
        targets = self.rows.slots if write else np.full(num_seqs, -1)
        args = [*self.columns(), self.times.address, *self.constants]
        args += [self.bench.put_ints(self.rows.slots), self.bench.put_ints(targets)]
        args += [*self.rows.ranges(first, count), self.states.address, out.address]
        args += [self.heads, self.groups, 64, self.input.stride, self.times.stride, out.stride]
        channels = 8 if self.size == 256 else 16
        grid = (num_seqs * self.heads, 64 // (4 * channels))
        self.bench.run(f"mamba2_step_n{self.size}_bf16", grid, [*args, *self.BOUNDS])
        return out

    def prefill(self, chunks: list[list[int]], out: Buffer, form: str = "c16") -> None:
        """Prefill some chunks of each sequence: ``chunks[n]`` are numbers of chunks of its rows."""
        bench, rows, heads, groups, size = (
            self.bench, self.rows, self.heads, self.groups, self.size,
        )  # fmt: skip
        firsts = [rows.cu_rows[n] + 64 * c for n, numbers in enumerate(chunks) for c in numbers]
        count, chunk_rows = len(firsts), bench.put_ints(firsts)
        q, k = (bench.empty((count, groups, matrix_bytes(size) // 2), "bf16") for _ in "qk")
        u = bench.empty((count, heads, 64, 64), "bf16")
        p = bench.empty((count, heads, matrix_bytes(64) // 2), "bf16")
        work = [q, k, u, p, bench.empty((count, heads, 64), "f32")]
        addresses = [buffer.address for buffer in work]
        decay, skip, bias = self.constants
        args = [
            *self.columns(),
            self.times.address,
            decay,
            bias,
            chunk_rows,
            bench.put_ints([count]),
            *addresses,
        ]
        args += [heads, groups, 64, self.input.stride, self.times.stride]
        bench.run(f"mamba2_chunk_n{size}_bf16", (count, heads), [*args, *self.BOUNDS])
        cu_chunks = bench.put_ints(np.cumsum([0, *map(len, chunks)]))
        args = [*addresses, self.input.address, skip, chunk_rows, cu_chunks]
        args += [bench.put_ints(rows.slots), self.states.address, out.address, heads, groups]
        grid = (len(chunks) * heads * (64 // int(form[1:3])), 1)
        args += [self.input.stride, out.stride]
        bench.run(f"mamba2_prefill_n{size}_{form}", grid, args)

    def defined(self) -> tuple[np.ndarray, np.ndarray]:
        """The op: out and state."""
        rows, split = self.rows, [64 * self.heads, 64 * self.heads + self.groups * self.size]
        x, b, c = np.split(self.convolved, split, axis=1)
        x = x.reshape(rows.total, self.heads, 64)
        b, c = (part.reshape(rows.total, self.groups, self.size) for part in (b, c))
        state, out = self.state.copy(), np.empty((rows.total, self.heads, 64), np.float32)
        args = (x, b, c, self.time, *self.vectors, *self.BOUNDS, *rows.definition())
        OPS["mamba2_step"](*args, states=state, out=out)
        return out, state


def delta_chunks(
    layer: DeltaLayer, qkv: Buffer, chunks: list[list[int]], out: Buffer, form: str = "c16"
) -> None:
    """Prefill some chunks of each sequence: ``chunks[n]`` are numbers of chunks of its rows."""
    bench, rows, dim = layer.bench, layer.rows, layer.dim
    firsts = [rows.cu_rows[n] + 64 * c for n, numbers in enumerate(chunks) for c in numbers]
    count, keys, values = len(firsts), layer.key_heads, layer.value_heads
    q, k = (bench.empty((count, keys, matrix_bytes(dim) // 2), "bf16") for _ in "qk")
    w = bench.empty((count, values, matrix_bytes(dim) // 2), "bf16")
    u = bench.empty((count, values, 64, dim), "bf16")
    p = bench.empty((count, values, matrix_bytes(64) // 2), "bf16")
    logs = bench.empty((count, values, 64), "f32")
    work = [buffer.address for buffer in (q, k, w, u, p, logs)]
    chunk_rows = bench.put_ints(firsts)
    args = [
        qkv.address,
        *layer.gate_addresses(),
        *layer.constants[2:],
        chunk_rows,
        bench.put_ints([count]),
        *work,
    ]
    args += [keys, values, qkv.stride, layer.gates.stride]
    bench.run(f"gated_delta_chunk_d{dim}_{layer.type}", (count, values), args)
    cu_chunks = bench.put_ints(np.cumsum([0, *map(len, chunks)]))
    args = [*work, chunk_rows, cu_chunks, bench.put_ints(rows.slots), layer.states.address]
    args += [out.address, keys, values, out.stride]
    grid = (len(chunks) * values * (dim // int(form[1:3])), 1)
    bench.run(f"gated_delta_prefill_d{dim}_{form}", grid, args)
