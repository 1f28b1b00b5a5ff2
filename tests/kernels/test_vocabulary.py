"""The intrinsics that no kernel uses yet assemble, without spills and without warnings.

Tensor-core fragments, TMA and barriers cannot be run here: the device tests do that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.kernels.conftest import HAS_COMPILER, NO_COMPILER

if not HAS_COMPILER:
    pytest.skip(NO_COMPILER, allow_module_level=True)

from atlas_kernels import build, ptx_async, ptx_math, ptx_memory, ptx_mma, ptx_warp, ptx_wgmma
from atlas_kernels._cuda import i32, i64
from atlas_kernels.manifest import CompiledKernel
from atlas_kernels.registry import KERNELS, register

Compile = Callable[..., CompiledKernel]


@pytest.fixture
def compiled() -> Iterator[Compile]:
    """Compile a function as a kernel whose declaration is removed afterwards."""

    def compile(function: Any, args: str, arch: str, **options: Any) -> CompiledKernel:
        options.setdefault("threads", 128)
        declared = register(function, "probe", args=args, **options)
        return build.compile_kernel(declared, arch)

    yield compile
    KERNELS.pop("probe", None)


def _clean(kernel: CompiledKernel) -> None:
    assert kernel.info.spill_bytes == 0
    assert kernel.info.stack_bytes == 0
    assert kernel.info.warnings == ()


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
@pytest.mark.parametrize("mma", [ptx_mma.mma_bf16, ptx_mma.mma_f16], ids=["bf16", "f16"])
def test_mma_fed_by_asynchronous_copies(compiled: Compile, mma: Any, arch: str) -> None:
    zero, scale_rows, pack = ptx_mma.mma_zero, ptx_mma.mma_scale_rows, ptx_mma.mma_pack_bf16
    load_a, load_b = ptx_mma.ldmatrix_x4, ptx_mma.ldmatrix_x2_transposed
    copy, copy_or_zero, commit = ptx_async.copy16, ptx_async.copy16_or_zero, ptx_async.copy_commit
    wait = ptx_async.copy_wait(1)
    tile = ptx_memory.shared_buffer("tile", 4096)
    lane, sync, store = ptx_warp.lane_id, ptx_warp.sync_threads, ptx_memory.store_b32x2

    def probe(x, out, steps):
        at = tile() + lane() * 16
        copy(at, x + lane() * 16)
        copy_or_zero(at + 512, x + lane() * 16, 16 if steps > lane() else 0)
        commit()
        wait()
        sync()
        total = zero()
        for _ in range(steps):
            total = mma(total, load_a(at), load_b(at + 512))
        store(out + lane() * 8, pack(scale_rows(total, 0.5, 2.0)))

    _clean(compiled(probe, "ptr ptr i32", arch))


@pytest.mark.parametrize("n", [8, 64, 128, 256])
@pytest.mark.parametrize("lto", [False, True])
def test_wgmma_from_tiles(compiled: Compile, n: int, lto: bool) -> None:
    zero, settle = ptx_wgmma.wgmma_zero(n), ptx_wgmma.settle(n)
    steps = (0, 32, 64, 96)
    stage = ptx_wgmma.wgmma_stage(n, steps, steps)
    wait, store = ptx_wgmma.wgmma_wait0, ptx_wgmma.store_accumulators(n, 272)
    scale = ptx_wgmma.scale_accumulator_rows(n)
    load = ptx_async.tile_load(2, ptx_async.EVICT_FIRST)
    init, fence = ptx_async.barrier_init, ptx_async.barrier_init_fence
    expect, arrive = ptx_async.barrier_expect, ptx_async.barrier_arrive
    wait_barrier, acquire = ptx_async.barrier_wait, ptx_async.map_acquire
    shared, thread, sync = ptx_memory.dynamic_shared, ptx_warp.thread_x, ptx_warp.sync_threads
    load_shared, store_global = ptx_memory.load_shared_b32x4, ptx_memory.store_b32x4
    constant = ptx_wgmma.descriptor(1024)

    def probe(map_a, map_b, out, steps):
        base = shared()
        ready, empty = base + 65536, base + 65544
        if thread() == 0:
            init(ready, 1)
            init(empty, 4)
            fence()
            acquire(map_a)
        sync()
        total = zero()
        for step in range(steps):
            if thread() == 0:
                expect(ready, 16384)
                load(base, map_a, ready, step * 64, 0)
                load(base + 8192, map_b, ready, step * 64, 0)
            wait_barrier(ready, step & 1)
            a = i64(constant) | i64((base & 0x3FFFF) >> 4)
            total = stage(total, a, a + 512)
            wait()
            total = settle(total)
            if thread() & 31 == 0:
                arrive(empty)
        sync()
        store(scale(total, 0.5, 2.0), i32(base + thread() * 4))
        sync()
        store_global(out + thread() * 16, load_shared(base + thread() * 16))

    _clean(compiled(probe, "ptr ptr ptr i32", "sm_90a", shared=131072, lto=lto))


def test_wgmma_chain_with_exchanged_registers(compiled: Compile) -> None:
    """P · V after Q · Kᵀ, as prefill attention has it, with registers moved between warp groups."""
    steps, v_steps = (0, 32, 64, 96), (0, 2048, 4096, 6144, 8192, 10240, 12288, 14336)
    scores = ptx_wgmma.wgmma_stage(128, steps, steps, accumulate=False)
    values = ptx_wgmma.wgmma_stage_registers(128, v_steps, b_transposed=True)
    pack, settle = ptx_wgmma.pack_accumulators(128), ptx_wgmma.settle(128)
    more = ptx_wgmma.set_max_registers(232, more=True)
    fewer = ptx_wgmma.set_max_registers(40, more=False)
    zero, wait, store = (
        ptx_wgmma.wgmma_zero(128),
        ptx_wgmma.wgmma_wait0,
        ptx_wgmma.store_accumulators(128, 272),
    )
    shared, thread = ptx_memory.dynamic_shared, ptx_warp.thread_x
    load, bar, expect = ptx_async.tile_load(5), ptx_async.barrier_wait, ptx_async.barrier_expect
    copy_out, commit_out = ptx_async.tile_store(4), ptx_async.tile_store_commit
    wait_out, async_fence = ptx_async.tile_store_wait, ptx_async.async_fence

    def probe(map_k, map_out, a, b, count):
        base = shared()
        if thread() >= 128:
            fewer()
            if thread() == 128:
                for i in range(count):
                    expect(base + 65536, 4096)
                    load(base, map_k, base + 65536, 0, 0, 0, 0, i)
        else:
            more()
            total = zero()
            for i in range(count):
                bar(base + 65536, i & 1)
                s = scores(a, b)
                wait()
                total = values(total, pack(settle(s)), b)
                wait()
                total = settle(total)
            store(total, base + thread() * 4)
            async_fence()
            if thread() == 0:
                copy_out(base, map_out, 0, 0, 0, 0)
                commit_out()
                wait_out()

    args, sizes = "ptr ptr i64 i64 i32", {"threads": 256, "shared": 65552}
    _clean(compiled(probe, args, "sm_90a", lto=True, **sizes))
    # From PTX the assembler ignores setmaxnreg, and a manifest says so.
    (warning,) = compiled(probe, args, "sm_90a", **sizes).info.warnings
    assert "C7504" in warning


def test_clusters(compiled: Compile) -> None:
    sync, rank, map_rank = ptx_async.sync_cluster, ptx_async.cluster_rank, ptx_async.map_rank
    load, arrive = ptx_async.load_cluster_f32x4, ptx_async.barrier_arrive_cluster
    shared, thread, store = ptx_memory.dynamic_shared, ptx_warp.thread_x, ptx_memory.store_f32x4
    bulk, prefetch, stmatrix = ptx_async.bulk_load, ptx_async.map_prefetch, ptx_mma.stmatrix_x4

    def probe(out, map):
        base = shared()
        prefetch(map)
        bulk(base, out, base + 1024, 512)
        stmatrix(base, (1, 2, 3, 4))
        sync()
        other = map_rank(base + thread() * 16, rank() ^ 1)
        store(out + thread() * 16, load(other))
        arrive(map_rank(base + 1024, 0))
        sync()

    _clean(compiled(probe, "ptr ptr", "sm_90a", shared=4096, cluster=2))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_scalar_instructions(compiled: Compile, arch: str) -> None:
    m, w, g = ptx_math, ptx_warp, ptx_memory
    floats = (m.fast_exp2, m.fast_log2, m.fast_rsqrt, m.fast_reciprocal, m.fast_tanh)
    exp2, log2, rsqrt, reciprocal, tanh = floats
    fma, add, mul, greater, lesser = m.fma, m.add, m.mul, m.maximum, m.minimum
    popcount, first_bit, dot, permute, shift = (
        m.popcount, m.first_bit, m.dot_i8, m.permute_bytes, m.shift_right,
    )  # fmt: skip
    quotient, remainder, bits_float = m.quotient, m.remainder, m.bits_float
    shuffle, shuffle_bits, down, ballot = w.shuffle_f32, w.shuffle_b32, w.shuffle_down_f32, w.ballot
    warp_max, sync_named, arrive_named, sync_warp = (
        w.warp_max,
        w.sync_named,
        w.arrive_named,
        w.sync_warp,
    )
    stream, load, store, lane = g.load_stream_b32x4, g.load_f32, g.store_f32, w.lane_id

    def probe(x, out, n):
        a, b, c, d = stream(x + lane() * 16)
        v = load(x + lane() * 4)
        v = tanh(reciprocal(rsqrt(log2(exp2(v)))))
        v = lesser(greater(fma(v, v, v), mul(v, v)), add(v, v))
        word = dot(permute(a, b, 0x5410), shift(c, 3), d) + popcount(a) + first_bit(b)
        word = quotient(word, n) ^ remainder(word, n) ^ ballot(a & 1) ^ shuffle_bits(b, 3)
        v = warp_max(down(shuffle(v, 1), 2)) + bits_float(word)
        sync_warp()
        if lane() < 16:
            arrive_named(1, 128)
        else:
            sync_named(1, 128)
        store(out + lane() * 4, v)

    _clean(compiled(probe, "ptr ptr i32", arch))


def test_contraction_is_explicit(compiled: Compile) -> None:
    """A product and a sum stay two operations, through NVVM and the assembler."""
    load, store, fma = ptx_memory.load_f32, ptx_memory.store_f32, ptx_math.fma

    def probe(x, out):
        a, b, c = load(x), load(x + 4), load(x + 8)
        store(out, a * b + c)
        store(out + 4, fma(a, b, c))

    declared = register(probe, "probe", args="ptr ptr", threads=32)
    from atlas_kernels.registry import Architecture

    ptx = build.compile_body(probe, declared, Architecture.parse("sm_90a")).decode()
    assert ptx.count("fma.rn.f32") == 1
    assert ptx.count("mul.rn.f32") == 1  # the assembler fuses only what carries no rounding
    assert ptx.count("add.rn.f32") == 1
    KERNELS.pop("probe")
