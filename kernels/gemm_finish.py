"""What follows a product whose sums lie in memory, and a comparison of results, bit by bit."""

from __future__ import annotations

from atlas_kernels._cuda import i32, i64
from atlas_kernels.gemm_step_epilogue import finish
from atlas_kernels.ptx_async import launch_dependents, wait_prerequisites
from atlas_kernels.ptx_memory import atomic_add_b32, load_b32x4, load_f32x4
from atlas_kernels.ptx_warp import block_x, block_y, thread_x
from atlas_kernels.registry import kernel

THREADS = 256
QUADS = 4 * THREADS
"""Columns, or words, of a thread block."""


@kernel("gemm_finish", args="ptr ptr ptr ptr i32 i64 i64 i64 i32", threads=THREADS)
def gemm_finish(sums, bias, residual, out, n, sums_stride, residual_stride, out_stride, out_is_f32):
    """out [m, n] from float32 sums, with the bits of the step GEMM; grid (m, ⌈n / 1024⌉).

    ``sums`` float32; bias (float32) and residual (bf16) or 0; out, bf16 or float32. Rows hold a
    multiple of four columns; strides in bytes.
    """
    launch_dependents()
    wait_prerequisites()
    column = i32((block_y() * THREADS + thread_x()) * 4)
    if column < n:
        total = load_f32x4(sums + i64(block_x()) * sums_stride + i64(column) * 4)
        finish(
            total, block_x(), column, bias, residual, out, residual_stride, out_stride, out_is_f32
        )


@kernel("count_differences", args="ptr ptr ptr i64", threads=THREADS)
def count_differences(a, b, count, words):
    """count += how many of a's and b's 32-bit words differ; grid (⌈words / 1024⌉).

    ``words`` is a multiple of four, and both addresses are of 16.
    """
    launch_dependents()
    wait_prerequisites()
    at = (i64(block_x()) * THREADS + thread_x()) * 4
    if at < words:
        left, right = load_b32x4(a + at * 4), load_b32x4(b + at * 4)
        found = i32(0)
        for i in range(4):
            found += i32(1) if left[i] != right[i] else i32(0)
        if found > 0:
            atomic_add_b32(count, found)
