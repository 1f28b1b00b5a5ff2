"""Causal depthwise convolution over the rows of a sequence, with its last inputs carried along.

A thread takes a vector of neighbouring channels through ``TILE`` rows of a sequence, its taps in
registers, four rows asked for while the four before them are used. The tile that begins a
sequence's rows reads the tail, and writes it anew when it is done: no other tile needs it.
Order of an output: bias, then taps ascending by fused multiply-add, then silu. Inputs are kept as
they came; sums and outputs are float32.

Source: Gu and Dao, "Mamba" (2023), arXiv 2312.00752, section 3.4.
"""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import device, i32, i64
from atlas_kernels.gates import silu
from atlas_kernels.ptx_async import launch_dependents, wait_prerequisites
from atlas_kernels.ptx_math import quotient, vector_fma
from atlas_kernels.ptx_memory import load_b32
from atlas_kernels.ptx_warp import block_x, block_y, thread_x
from atlas_kernels.recurrence_shapes import CONV_THREADS as THREADS
from atlas_kernels.recurrence_shapes import CONV_TILE as TILE
from atlas_kernels.recurrence_shapes import CONV_WIDTH as WIDTH
from atlas_kernels.registry import kernel
from atlas_kernels.vector import Access, access


def silu_of(width: int) -> Any:
    """(x) → silu(x), elementwise on tuples of 1, 2 or 4 numbers."""
    if width == 1:
        return device(lambda x: (silu(x[0]),))
    if width == 2:
        return device(lambda x: (silu(x[0]), silu(x[1])))
    return device(lambda x: (silu(x[0]), silu(x[1]), silu(x[2]), silu(x[3])))


def convolve(width: int) -> Any:
    """(a, b, c, x, taps, bias) → silu of four inputs' weighted sum, the oldest first."""
    multiply, activate = vector_fma(width), silu_of(width)

    @device
    def apply(a, b, c, x, w, total):
        total = multiply(a, w[0], total)
        total = multiply(b, w[1], total)
        total = multiply(c, w[2], total)
        return activate(multiply(x, w[3], total))

    return apply


@kernel(
    "causal_conv",
    args="ptr ptr ptr ptr ptr ptr ptr ptr i32 i64 i64",
    threads=THREADS,
    min_blocks=5,
    variants={
        f"{type}{suffix}": (access(type, width),)
        for type in ("bf16", "f32")
        for suffix, width in (("", WIDTH), ("_scalar", 1))
    },
)
def make_causal_conv(rows: Access) -> Any:
    """out [T, C] float32 = silu(conv(x [T, C])) for 4 taps.

    Grid (N · ⌈C / (threads · width)⌉, ⌈most rows / TILE⌉); ``weight`` float32 [4, C], ``bias``
    float32 [C] or 0; sequence n has the rows ``begins[n]`` … ``ends[n]`` − 1, and its tail at
    ``tails`` float32 [S, 3, C], ``slots[n]`` (−1: padding). Strides in bytes.
    """
    load, item, width, zero = rows.load, rows.item_bytes, rows.width, rows.zero
    floats = access("f32", width)
    constant, load_tail, put = floats.load_constant, floats.load, floats.store
    convolution = convolve(width)

    @device
    def four_rows(source, row, last, stride):
        """Rows from ``row`` on; after the last, that again."""
        a, b = load(source + min(row, last) * stride), load(source + min(row + 1, last) * stride)
        c = load(source + min(row + 2, last) * stride)
        return a, b, c, load(source + min(row + 3, last) * stride)

    def causal_conv(
        x, weight, bias, slots, begins, ends, tails, out, channels, x_stride, out_stride
    ):
        launch_dependents()
        sequence_blocks = quotient(channels + (THREADS * width - 1), i32(THREADS * width))
        sequence = quotient(block_x(), sequence_blocks)
        channel = (block_x() - sequence * sequence_blocks) * THREADS + thread_x()
        channel = i32(channel * width)
        if channel >= channels:
            return
        line = i64(channels) * 4
        at = weight + i64(channel) * 4
        w = (constant(at), constant(at + line), constant(at + 2 * line), constant(at + 3 * line))
        start = zero()
        if bias != 0:
            start = constant(bias + i64(channel) * 4)
        wait_prerequisites()
        begin, end = load_b32(begins + sequence * 4), load_b32(ends + sequence * 4)
        first, slot = i32(begin + block_y() * TILE), load_b32(slots + sequence * 4)
        if slot < 0 or first >= end:
            return
        source = x + i64(channel) * item
        tail = tails + (i64(slot) * (3 * channels) + channel) * 4
        if first == begin:
            a, b, c = load_tail(tail), load_tail(tail + line), load_tail(tail + 2 * line)
        else:
            a, b = load(source + (first - 3) * x_stride), load(source + (first - 2) * x_stride)
            c = load(source + (first - 1) * x_stride)
        last = i32(min(first + TILE, end) - 1)
        target = out + i64(channel) * 4
        row = i32(first)
        x0, x1, x2, x3 = four_rows(source, row, last, x_stride)
        while row <= last:
            y0, y1, y2, y3 = four_rows(source, row + 4, last, x_stride)
            put(target + row * out_stride, convolution(a, b, c, x0, w, start))
            if row + 1 <= last:
                put(target + (row + 1) * out_stride, convolution(b, c, x0, x1, w, start))
            if row + 2 <= last:
                put(target + (row + 2) * out_stride, convolution(c, x0, x1, x2, w, start))
            if row + 3 <= last:
                put(target + (row + 3) * out_stride, convolution(x0, x1, x2, x3, w, start))
            a, b, c = x1, x2, x3
            x0, x1, x2, x3 = y0, y1, y2, y3
            row = i32(row + 4)
        if first == begin:
            t0, t1, t2 = load_tail(tail), load_tail(tail + line), load_tail(tail + 2 * line)
            if end - begin >= 3:
                t0, t1 = load(source + (end - 3) * x_stride), load(source + (end - 2) * x_stride)
            elif end - begin == 2:
                t0, t1 = t2, load(source + (end - 2) * x_stride)
            else:
                t0, t1 = t1, t2
            put(tail, t0)
            put(tail + line, t1)
            put(tail + 2 * line, load(source + (end - 1) * x_stride))

    return causal_conv


@kernel(
    "causal_conv_any",
    args="ptr ptr ptr ptr ptr ptr ptr ptr i32 i32 i64 i64",
    threads=THREADS,
    variants={type: (access(type, 1),) for type in ("bf16", "f32")},
)
def make_causal_conv_any(rows: Access) -> Any:
    """The same for any number of taps, a channel a thread; ``taps`` follows ``channels``."""
    load, item, zero = rows.load, rows.item_bytes, rows.zero
    floats = access("f32", 1)
    constant, load_tail, put = floats.load_constant, floats.load, floats.store
    multiply, activate = vector_fma(1), silu_of(1)

    def causal_conv_any(
        x, weight, bias, slots, begins, ends, tails, out, channels, taps, x_stride, out_stride
    ):
        launch_dependents()
        wait_prerequisites()
        sequence_blocks = quotient(channels + (THREADS - 1), i32(THREADS))
        sequence = quotient(block_x(), sequence_blocks)
        channel = i32((block_x() - sequence * sequence_blocks) * THREADS + thread_x())
        begin, end = load_b32(begins + sequence * 4), load_b32(ends + sequence * 4)
        first, before = i32(begin + block_y() * TILE), i32(taps - 1)
        slot = load_b32(slots + sequence * 4)
        if channel >= channels or slot < 0 or first >= end:
            return
        line = i64(channels) * 4
        source = x + i64(channel) * item
        tail = tails + (i64(slot) * before * channels + channel) * 4
        for row in range(first, min(first + TILE, end)):
            total = constant(bias + i64(channel) * 4) if bias != 0 else zero()
            for j in range(taps):
                at = row + j - before
                if at >= begin:
                    value = load(source + at * x_stride)
                else:
                    value = load_tail(tail + (at - begin + before) * line)
                total = multiply(value, constant(weight + j * line + i64(channel) * 4), total)
            put(out + row * out_stride + i64(channel) * 4, activate(total))
        if first == begin:
            for j in range(before):  # ascending: what moves within the tail moves to its start
                at = end + j - before
                if at >= begin:
                    put(tail + j * line, load(source + at * x_stride))
                else:
                    put(tail + j * line, load_tail(tail + (at - begin + before) * line))

    return causal_conv_any
