"""What takes a state from chunk to chunk of a prompt: the parts of ``gated_delta_prefill`` and
``mamba2_prefill``.

A thread block takes 16 or 32 columns of one head's state [K, V] through all chunks. The next state
waits for the last one, so little shall lie between: two barriers a chunk, and four warps, one on
each scheduler, that do nothing else. Each has K / 4 rows of the state, float32 in registers, and
16 rows of a chunk's V'; they exchange both as bf16. Four more warps have 16 rows of the output
each. What a chunk needs lies in memory as it shall lie in shared memory, so that on Hopper and
newer it comes by a few bulk copies that the last warp asks for, elsewhere by ``cp.async``, some
stages ahead of its use.
"""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import device, i32
from atlas_kernels.ptx_async import (
    barrier_arrive,
    barrier_arrive_cluster,
    barrier_expect,
    barrier_init,
    barrier_init_fence,
    barrier_wait,
    bulk_load,
    bulk_load_pair,
    cluster_rank,
    copy16_or_zero,
    copy_commit,
    copy_wait,
    map_rank,
    sync_cluster,
)
from atlas_kernels.ptx_pass import WORD_BYTES
from atlas_kernels.ptx_warp import sync_threads, thread_x
from atlas_kernels.recurrence_shapes import CHUNK, matrix_bytes

CARRY, READ, COPY = 0, 1, 2
"""What a warp does, by its number / 4: the state, the output, and copies."""
THREADS = 288
BULK_PASSES = {"c16": (16, 3), "c32": (32, 3)}
"""Columns of a thread block and stages, for the shared memory of Hopper: whichever fills the GPU.
"""
PAIR_PASSES = {f"{form}_x2": sizes for form, sizes in BULK_PASSES.items()}
"""The same by clusters of two thread blocks, which read what all columns need once."""
PASSES = {"c16_s2": (16, 2), "c16_s1": (16, 1)}
"""The same by ``cp.async``: two stages fit 160 KB, one 99 KB."""
STRIP = 16
"""Columns of U that lie together: [V / 16, CHUNK, 16]."""
STRIP_BYTES = CHUNK * STRIP * 2
LOG_BYTES = CHUNK * 4
_COPIER = THREADS - 32  # the thread that asks for bulk copies


class ChunkPass:
    """Layout of the shared memory, and the copies of what a chunk needs.

    Parameters
    ----------
    key_dim : int
        K of the state.
    columns : int
        Of a thread block.
    stages : int
        Chunks in shared memory: the present one and those on their way.
    wide : int
        Matrices of CHUNK rows of K that a stage holds: q and k, and W of the gated delta rule.
    bulk : bool
        Copies by TMA's engine, which sm_90 and newer have.
    paired : bool
        Each of two thread blocks copies half of what both need to both.
    """

    def __init__(
        self, key_dim: int, columns: int, stages: int, wide: int, bulk: bool, paired: bool = False
    ) -> None:
        self.key_dim, self.stages, self.bulk, self.paired = key_dim, stages, bulk, paired
        self.wide_bytes, self.p_bytes = matrix_bytes(key_dim), matrix_bytes(CHUNK)
        self.q, self.k, self.w = (i * self.wide_bytes for i in range(3))
        self.p = wide * self.wide_bytes
        self.u = self.p + self.p_bytes
        self.tiles = columns // STRIP
        self.u_bytes = self.tiles * STRIP_BYTES
        self.logs = self.u + self.u_bytes
        self.stage = self.logs + LOG_BYTES
        self.state = stages * self.stage
        self.new = self.state + self.tiles * (key_dim // 16) * WORD_BYTES
        self.last = self.new + self.tiles * (CHUNK // 16) * WORD_BYTES
        self.barriers = self.last + self.tiles * (CHUNK // 16) * WORD_BYTES
        self.released = self.barriers + 8 * stages
        self.shared_bytes = self.released + 8
        self.pairs = key_dim // 64  # of 16 keys of the state, for each warp

    def prepare(self) -> Any:
        """(base): barriers for the copies."""
        if not self.bulk:
            return device(lambda base: None)
        barriers, stages, released, paired = self.barriers, self.stages, self.released, self.paired

        @device
        def prepare(base):
            if thread_x() == _COPIER:
                for i in range(stages):
                    barrier_init(base + barriers + 8 * i, 1)
                barrier_init(base + released, 2)
                barrier_init_fence()
            if paired:
                sync_cluster()
            else:
                sync_threads()

        return prepare

    def release(self) -> Any:
        """(base): tell both thread blocks that this one reads a stage no more."""
        released = self.released

        @device
        def release(base):
            if thread_x() == _COPIER:
                barrier_arrive(base + released)
                barrier_arrive_cluster(map_rank(base + released, cluster_rank() ^ 1))

        return release

    def wait_release(self) -> Any:
        """(base, parity): wait until both have told so."""
        released = self.released

        @device
        def wait_release(base, parity):
            if thread_x() == _COPIER:
                barrier_wait(base + released, parity)

        return wait_release

    def fetch(self) -> Any:
        """(base, stage, present, sources, key_place, place, strip): ask for a chunk.

        If it is ``present``, that is. The sources are q, k, p, u, logs, and w where a stage holds
        it; ``key_place`` and ``place`` count matrices of a key head and of a head, ``strip`` strips
        of U. Each call is one group of ``cp.async``.
        """
        fetch_all, bulk, stage, barriers = self._fetch_all(), self.bulk, self.stage, self.barriers

        @device
        def fetch(base, number, present, sources, key_place, place, strip):
            at, barrier = base + number * stage, base + barriers + number * 8
            if bulk:
                if present and thread_x() == _COPIER:
                    barrier_expect(barrier, stage)
                    fetch_all(at, barrier, sources, key_place, place, strip)
            else:
                if present:
                    fetch_all(at, barrier, sources, key_place, place, strip)
                copy_commit()

        return fetch

    def _fetch_all(self) -> Any:
        copy, has_w = self._copy(), self.p == 3 * self.wide_bytes
        k_at, w_at, p_at, u_at, logs_at = self.k, self.w, self.p, self.u, self.logs
        wide, p_bytes, u_bytes = self.wide_bytes, self.p_bytes, self.u_bytes

        @device
        def rest(at, barrier, sources, key_place, place, strip):
            copy(at, sources[0] + key_place * wide, barrier, wide)
            copy(at + k_at, sources[1] + key_place * wide, barrier, wide)
            copy(at + p_at, sources[2] + place * p_bytes, barrier, p_bytes)
            copy(at + u_at, sources[3] + strip * STRIP_BYTES, barrier, u_bytes)
            copy(at + logs_at, sources[4] + place * LOG_BYTES, barrier, LOG_BYTES)

        @device
        def everything(at, barrier, sources, key_place, place, strip):
            copy(at + w_at, sources[5] + place * wide, barrier, wide)
            rest(at, barrier, sources, key_place, place, strip)

        @device
        def share(at, barrier, sources, key_place, place, strip):
            """Half of what both need, and what this one needs alone."""
            if cluster_rank() == 0:
                bulk_load_pair(at, sources[0] + key_place * wide, barrier, wide)
                bulk_load_pair(at + k_at, sources[1] + key_place * wide, barrier, wide)
            else:
                bulk_load_pair(at + w_at, sources[5] + place * wide, barrier, wide)
                bulk_load_pair(at + p_at, sources[2] + place * p_bytes, barrier, p_bytes)
            copy(at + u_at, sources[3] + strip * STRIP_BYTES, barrier, u_bytes)
            copy(at + logs_at, sources[4] + place * LOG_BYTES, barrier, LOG_BYTES)

        if self.paired:
            return share
        return everything if has_w else rest

    def _copy(self) -> Any:
        """(target, source, barrier, bytes)."""
        if self.bulk:
            return device(lambda at, source, barrier, size: bulk_load(at, source, barrier, size))

        @device
        def copy(target, source, barrier, num_bytes):
            i = i32(thread_x() * 16)
            while i < num_bytes:
                copy16_or_zero(target + i, source + i, 16)
                i = i32(i + THREADS * 16)

        return copy

    def arrived(self) -> Any:
        """(base, stage, parity): wait for a chunk; after ``cp.async`` a barrier must follow."""
        if self.bulk:
            barriers = self.barriers
            return device(
                lambda base, number, parity: barrier_wait(base + barriers + number * 8, parity)
            )
        wait = copy_wait(max(0, self.stages - 2))
        return device(lambda base, number, parity: wait())
