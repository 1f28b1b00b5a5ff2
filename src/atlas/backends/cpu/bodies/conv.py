"""Causal depthwise convolution: a thread takes a range of channels through all rows."""

# mypy: ignore-errors
from __future__ import annotations

from atlas.backends.cpu.bodies import body
from atlas.backends.cpu.bodies.activation import silu
from atlas.backends.cpu.bodies.simd import fma, load_first, load_i32, store_first, zeros
from atlas.backends.cpu.bodies.vectors import device


@device
def input_of(x, x_stride, tail, tail_stride, before, row):
    """Address of a sequence's input ``row`` of this call; those before the first are its tail."""
    return x + row * x_stride if row >= 0 else tail + (row + before) * tail_stride


@body("conv.causal")
def causal(thread, num_threads, args):
    x, x_stride, channels, weight, width = args[0], args[1], args[2], args[3], args[4]
    bias, slots, cu_rows, num_seqs = args[5], args[6], args[7], args[8]
    tails, out, out_stride = args[9], args[10], args[11]
    pieces = (channels + 15) // 16
    first, last = pieces * thread // num_threads, pieces * (thread + 1) // num_threads
    before, line = width - 1, channels * 4
    for n in range(num_seqs):
        start, stop = load_i32(cu_rows + n * 4), load_i32(cu_rows + (n + 1) * 4)
        rows, source = stop - start, x + start * x_stride
        tail = tails + load_i32(slots + n * 4) * before * line
        for row in range(rows):
            for piece in range(first, last):
                at, count = piece * 64, min(16, channels - piece * 16)
                total = load_first(bias + at, count) if bias != 0 else zeros()
                for j in range(width):
                    value = input_of(source, x_stride, tail, line, before, row + j - before)
                    tap = load_first(weight + j * line + at, count)
                    total = fma(load_first(value + at, count), tap, total)
                store_first(out + (start + row) * out_stride + at, silu(total), count)
        for j in range(before):  # ascending: what moves within the tail moves towards its start
            value = input_of(source, x_stride, tail, line, before, rows + j - before)
            for piece in range(first, last):
                at, count = piece * 64, min(16, channels - piece * 16)
                store_first(tail + j * line + at, load_first(value + at, count), count)
