"""What takes a state from chunk to chunk of a prompt: the parts of ``gated_delta_prefill`` and
``mamba2_prefill``.

A thread block takes ``columns`` columns of one head's state [K, V]: four warps for every 16, each
with 16 rows of a chunk and K / 4 rows of the state. The state is float32 in registers, with a copy
in bf16 for the products; what a chunk needs comes by ``cp.async``, some stages ahead of its use.
"""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import device
from atlas_kernels.ptx_async import copy16_or_zero
from atlas_kernels.ptx_chunk import CHUNK
from atlas_kernels.ptx_math import pack_bf16, quotient, unpack_bf16
from atlas_kernels.ptx_memory import (
    load_f32,
    load_f32x2,
    load_shared_b32,
    store_f32,
    store_f32x2,
    store_shared_b32,
)
from atlas_kernels.ptx_mma import mma_scale_rows
from atlas_kernels.ptx_warp import thread_x

PASSES = {"c16": (16, 3), "c32": (32, 3), "c16_s2": (16, 2), "c16_s1": (16, 1)}
"""Columns of a thread block and stages: c16 and c32 for Hopper's shared memory, whichever fills the
GPU; two stages fit 160 KB, one 99 KB."""


def row_pitch(dim: int) -> int:
    """Bytes from a row of bf16 to the next, an odd multiple of 16."""
    return 2 * dim + 16


class ChunkPass:
    """Layout of the shared memory, and device functions on C fragments of 16 columns.

    Parameters
    ----------
    key_dim, value_dim : int
        K and V of the state.
    columns : int
        Of a thread block.
    stages : int
        Chunks in shared memory: the present one and those on their way.
    wide : int
        Matrices of CHUNK rows of K that a stage holds: q and k, and W of the gated delta rule.
    """

    def __init__(self, key_dim: int, value_dim: int, columns: int, stages: int, wide: int) -> None:
        self.key_dim, self.value_dim, self.columns = key_dim, value_dim, columns
        self.threads = 8 * columns
        self.pitch, self.p_pitch, self.narrow = map(row_pitch, (key_dim, CHUNK, columns))
        self.q, self.k, self.w = (i * CHUNK * self.pitch for i in range(3))
        self.p = wide * CHUNK * self.pitch
        self.u = self.p + CHUNK * self.p_pitch
        self.logs = self.u + CHUNK * self.narrow
        self.stage = self.logs + CHUNK * 4
        self.state = stages * self.stage
        self.rows = self.state + key_dim * self.narrow
        self.last = self.rows + CHUNK * self.narrow
        self.shared_bytes = self.last + CHUNK * self.narrow
        self.tiles = key_dim // 64  # of 16 rows of the state, for each warp

    def copy(self, row_bytes: int, target_pitch: int, source_pitch: int) -> Any:
        """(target, source): start the thread block's copy of CHUNK rows."""
        per_row, threads = row_bytes // 16, self.threads

        @device
        def rows(target, source):
            for i in range(thread_x(), CHUNK * per_row, threads):
                row = quotient(i, per_row)
                column = (i - row * per_row) * 16
                place = source + row * source_pitch + column
                copy16_or_zero(target + row * target_pitch + column, place, 16)

        return rows

    def copy_wide(self) -> Any:
        """The copy of rows of K."""
        return self.copy(2 * self.key_dim, self.pitch, 2 * self.key_dim)

    def copy_rest(self) -> Any:
        """(stage, p, u, logs, place): the copies of P, the columns of U, and G."""
        copy_p = self.copy(2 * CHUNK, self.p_pitch, 2 * CHUNK)
        copy_u = self.copy(2 * self.columns, self.narrow, 2 * self.value_dim)
        p_at, u_at, logs_at, u_bytes = self.p, self.u, self.logs, 2 * self.value_dim

        @device
        def rest(target, p, u, logs, place):
            copy_p(target + p_at, p + place * (2 * CHUNK))
            copy_u(target + u_at, u + place * u_bytes)
            if thread_x() < CHUNK // 4:
                at = thread_x() * 16
                copy16_or_zero(target + logs_at + at, logs + place * 4 + at, 16)

        return rest

    def get(self) -> Any:
        """(address) → a fragment from bf16 rows of ``columns`` in shared memory."""
        narrow = self.narrow

        @device
        def get(at):
            a, b = unpack_bf16(load_shared_b32(at))
            c, d = unpack_bf16(load_shared_b32(at + 8 * narrow))
            e, f = unpack_bf16(load_shared_b32(at + 16))
            g, h = unpack_bf16(load_shared_b32(at + 8 * narrow + 16))
            return a, b, c, d, e, f, g, h

        return get

    def put(self) -> Any:
        """(address, fragment, upper, lower): the reverse, its rows times their factors."""
        narrow = self.narrow

        @device
        def put(at, v, upper, lower):
            store_shared_b32(at, pack_bf16(v[0] * upper, v[1] * upper))
            store_shared_b32(at + 8 * narrow, pack_bf16(v[2] * lower, v[3] * lower))
            store_shared_b32(at + 16, pack_bf16(v[4] * upper, v[5] * upper))
            store_shared_b32(at + 8 * narrow + 16, pack_bf16(v[6] * lower, v[7] * lower))

        return put

    def tile(self, number: int) -> Any:
        """(state) → a fragment of the state; with one tile, that one."""
        if number == 0 or self.tiles == 1:
            return device(lambda v: (v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7]))
        return device(lambda v: (v[8], v[9], v[10], v[11], v[12], v[13], v[14], v[15]))

    def join(self) -> Any:
        """(first, last) → the state."""
        if self.tiles == 1:
            return device(lambda first, last: first)

        @device
        def both(a, b):
            return (
                a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7],
                b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7],
            )  # fmt: skip

        return both


@device
def scale_rows(v, upper, lower):
    """A fragment, its rows times their factors."""
    low = mma_scale_rows((v[0], v[1], v[2], v[3]), upper, lower)
    high = mma_scale_rows((v[4], v[5], v[6], v[7]), upper, lower)
    return low[0], low[1], low[2], low[3], high[0], high[1], high[2], high[3]


@device
def store_rows(at, stride, v):
    """A fragment to float32 rows ``stride`` bytes apart."""
    store_f32x2(at, (v[0], v[1]))
    store_f32x2(at + 8 * stride, (v[2], v[3]))
    store_f32x2(at + 32, (v[4], v[5]))
    store_f32x2(at + 8 * stride + 32, (v[6], v[7]))


@device
def load_rows(at, stride):
    """The same the other way."""
    a, b = load_f32x2(at)
    c, d = load_f32x2(at + 8 * stride)
    e, f = load_f32x2(at + 32)
    g, h = load_f32x2(at + 8 * stride + 32)
    return a, b, c, d, e, f, g, h


@device
def store_columns(at, stride, v):
    """A fragment to float32 columns ``stride`` bytes apart: the transpose."""
    store_f32(at, v[0])
    store_f32(at + stride, v[1])
    store_f32(at + 32, v[2])
    store_f32(at + stride + 32, v[3])
    store_f32(at + 8 * stride, v[4])
    store_f32(at + 9 * stride, v[5])
    store_f32(at + 8 * stride + 32, v[6])
    store_f32(at + 9 * stride + 32, v[7])


@device
def load_columns(at, stride):
    """The same the other way."""
    a, b = load_f32(at), load_f32(at + stride)
    c, d = load_f32(at + 32), load_f32(at + stride + 32)
    e, f = load_f32(at + 8 * stride), load_f32(at + 9 * stride)
    g, h = load_f32(at + 8 * stride + 32), load_f32(at + 9 * stride + 32)
    return a, b, c, d, e, f, g, h
