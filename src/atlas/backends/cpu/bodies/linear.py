"""Matrix products: activation quantisation, tiles of 16 outputs × 1 or 4 rows, and their loops.

A tile function returns the sums of 16 outputs for one row or four, or, for float weights, of 32
outputs for eight rows. Within a row the order is the same in all (blocks or k ascending, one
accumulator), so a row's bits do not depend on how many rows there are.
"""

# mypy: ignore-errors
from __future__ import annotations

import numpy as np

from atlas.backends.cpu.bodies import body
from atlas.backends.cpu.bodies.simd import (
    absolute,
    add,
    fma,
    load,
    load_bf16,
    load_f16,
    load_f32,
    load_first,
    max_lane,
    maximum,
    mul,
    prefetch,
    rint,
    splat,
    store_f32,
    store_first,
    store_i32,
    sub,
    sum_lanes,
    to_i32,
    zeros,
)
from atlas.backends.cpu.bodies.simd_integer import (
    broadcast_i32,
    dot4,
    splat_i32,
    store_i8_lanes,
    sum_i32,
)
from atlas.backends.cpu.bodies.vectors import device
from atlas.backends.cpu.bodies.weight_blocks import FORMATS
from atlas.backends.cpu.target import simd_level

_f = np.float32
ZERO, MAX_INT8 = _f(0.0), _f(127.0)
# Tiles follow one another, so that a thread's weights are one run of memory; the hardware loses it
# between the areas of a tile. 16 KiB ahead measured best (benchmarks/NOTES.md).
PREFETCH_BYTES = 16384


@body("linear.quantize_rows")
def quantize_rows(thread, num_threads, args):
    """int8 rows: q [K], then per block scale f32 [K/32], scale · Σq f32 [K/32], Σq i32 [K/16].

    A block that holds NaN or infinity gets the scale NaN, so that it shows in the result.
    """
    x, x_stride, num_rows, k, out, out_stride = args[0], args[1], args[2], args[3], args[4], args[5]
    for row in range(thread, num_rows, num_threads):
        source, target = x + row * x_stride, out + row * out_stride
        scales, sums = target + k, target + k + (k // 16) * 4
        for b in range(k // 32):
            first, second = load(source + b * 128), load(source + b * 128 + 64)
            amax = max_lane(maximum(absolute(first), absolute(second)))
            inverse = splat(MAX_INT8 / amax if amax > ZERO else ZERO)
            low, high = to_i32(rint(mul(first, inverse))), to_i32(rint(mul(second, inverse)))
            store_i8_lanes(target + b * 32, low)
            store_i8_lanes(target + b * 32 + 16, high)
            not_finite = sum_lanes(add(sub(first, first), sub(second, second)))
            scale = amax / MAX_INT8 + not_finite
            low_sum, high_sum = sum_i32(low), sum_i32(high)
            store_f32(scales + b * 4, scale)
            store_f32(scales + (k // 32 + b) * 4, scale * _f(low_sum + high_sum))
            store_i32(sums + b * 8, low_sum)
            store_i32(sums + b * 8 + 4, high_sum)


@device
def half_dot(w0, w1, w2, w3, x):
    """Σ over 16 columns: four byte vectors against the 16 activations at ``x``."""
    total = dot4(splat_i32(0), w0, broadcast_i32(x))
    total = dot4(total, w1, broadcast_i32(x + 4))
    total = dot4(total, w2, broadcast_i32(x + 8))
    return dot4(total, w3, broadcast_i32(x + 12))


@device
def prefetch_lines(address, nbytes):
    for at in range(0, nbytes, 64):
        prefetch(address + at)


def _quantised_tiles(unpack, finish, block_bytes):
    @device
    def step(tile, nb, b, acc, w, x, k):
        low = half_dot(w[0], w[1], w[2], w[3], x + b * 32)
        high = half_dot(w[4], w[5], w[6], w[7], x + b * 32 + 16)
        return finish(tile, nb, b, acc, low, high, x, k)

    @device
    def tile_1(tile, k, x):
        nb = k // 32
        acc = zeros()
        for b in range(nb):
            prefetch_lines(tile + b * block_bytes + PREFETCH_BYTES, block_bytes)
            acc = step(tile, nb, b, acc, unpack(tile, nb, b), x, k)
        return acc

    @device
    def tile_4(tile, k, x, fetch):
        nb = k // 32
        x0, x1, x2, x3 = x
        a0, a1, a2, a3 = zeros(), zeros(), zeros(), zeros()
        for b in range(nb):
            if fetch:
                prefetch_lines(tile + b * block_bytes + PREFETCH_BYTES, block_bytes)
            w = unpack(tile, nb, b)
            a0 = step(tile, nb, b, a0, w, x0, k)
            a1 = step(tile, nb, b, a1, w, x1, k)
            a2 = step(tile, nb, b, a2, w, x2, k)
            a3 = step(tile, nb, b, a3, w, x3, k)
        return a0, a1, a2, a3

    return tile_1, tile_4


def _float_tiles(read, width):
    @device
    def tile_1(tile, k, x):
        acc = zeros()
        for i in range(k):
            prefetch(tile + i * width + PREFETCH_BYTES)
            acc = fma(read(tile + i * width), splat(load_f32(x + i * 4)), acc)
        return acc

    @device
    def tile_4(tile, k, x, fetch):
        x0, x1, x2, x3 = x
        a0, a1, a2, a3 = zeros(), zeros(), zeros(), zeros()
        for i in range(k):
            if fetch:
                prefetch(tile + i * width + PREFETCH_BYTES)
            w = read(tile + i * width)
            a0 = fma(w, splat(load_f32(x0 + i * 4)), a0)
            a1 = fma(w, splat(load_f32(x1 + i * 4)), a1)
            a2 = fma(w, splat(load_f32(x2 + i * 4)), a2)
            a3 = fma(w, splat(load_f32(x3 + i * 4)), a3)
        return a0, a1, a2, a3

    return tile_1, tile_4


def _wide_tile(read, width):
    @device
    def tile_8(tile, second, k, x, y, fetch):
        """Two tiles × eight rows: enough sums in flight to keep two multiply-add units busy."""
        x0, x1, x2, x3 = x
        x4, x5, x6, x7 = y
        a0, a1, a2, a3 = zeros(), zeros(), zeros(), zeros()
        a4, a5, a6, a7 = zeros(), zeros(), zeros(), zeros()
        b0, b1, b2, b3 = zeros(), zeros(), zeros(), zeros()
        b4, b5, b6, b7 = zeros(), zeros(), zeros(), zeros()
        for i in range(k):
            if fetch:
                prefetch(tile + i * width + PREFETCH_BYTES)
                prefetch(second + i * width + PREFETCH_BYTES)
            w, v = read(tile + i * width), read(second + i * width)
            s = splat(load_f32(x0 + i * 4))
            a0, b0 = fma(w, s, a0), fma(v, s, b0)
            s = splat(load_f32(x1 + i * 4))
            a1, b1 = fma(w, s, a1), fma(v, s, b1)
            s = splat(load_f32(x2 + i * 4))
            a2, b2 = fma(w, s, a2), fma(v, s, b2)
            s = splat(load_f32(x3 + i * 4))
            a3, b3 = fma(w, s, a3), fma(v, s, b3)
            s = splat(load_f32(x4 + i * 4))
            a4, b4 = fma(w, s, a4), fma(v, s, b4)
            s = splat(load_f32(x5 + i * 4))
            a5, b5 = fma(w, s, a5), fma(v, s, b5)
            s = splat(load_f32(x6 + i * 4))
            a6, b6 = fma(w, s, a6), fma(v, s, b6)
            s = splat(load_f32(x7 + i * 4))
            a7, b7 = fma(w, s, a7), fma(v, s, b7)
        return (a0, a1, a2, a3), (a4, a5, a6, a7), (b0, b1, b2, b3), (b4, b5, b6, b7)

    return tile_8


TILES = {name: _quantised_tiles(*functions) for name, functions in FORMATS.items()}
_FLOATS = {"f32": (load, 64), "f16": (load_f16, 32), "bf16": (load_bf16, 32)}
TILES |= {name: _float_tiles(*read) for name, read in _FLOATS.items()}
# Sixteen sums and two weights fill the 32 registers of AVX-512; where vectors are two or four
# registers, they would spill.
HAS_WIDE_TILES = simd_level() == "avx512"
WIDE_TILES = {name: _wide_tile(*read) for name, read in _FLOATS.items() if HAS_WIDE_TILES}


@device
def write(out, acc, count, bias, accumulate):
    """Epilogue of 16 outputs: bias, then the residual that ``out`` holds."""
    if bias != 0:
        acc = add(acc, load_first(bias, count))
    if accumulate != 0:
        acc = add(load_first(out, count), acc)
    store_first(out, acc, count)


@device
def rows_from(x, x_stride, row, last):
    """Addresses of four rows; past the last, that one."""
    return (
        x + min(row, last) * x_stride,
        x + min(row + 1, last) * x_stride,
        x + min(row + 2, last) * x_stride,
        x + min(row + 3, last) * x_stride,
    )


@device
def write_rows(target, stride, acc, rows, count, bias, accumulate):
    """Epilogue of up to four rows."""
    write(target, acc[0], count, bias, accumulate)
    if rows > 1:
        write(target + stride, acc[1], count, bias, accumulate)
    if rows > 2:
        write(target + 2 * stride, acc[2], count, bias, accumulate)
    if rows > 3:
        write(target + 3 * stride, acc[3], count, bias, accumulate)


def _linear(tile_1, tile_4):
    def linear(thread, num_threads, args):
        x, x_stride, num_rows, k = args[0], args[1], args[2], args[3]
        weight, tile_bytes, num_outputs = args[4], args[5], args[6]
        out, out_stride, bias, accumulate = args[7], args[8], args[9], args[10]
        rows_a_pass = args[11]
        num_tiles = (num_outputs + 15) // 16
        first_tile = num_tiles * thread // num_threads
        last_tile = num_tiles * (thread + 1) // num_threads
        for start in range(0, num_rows, rows_a_pass):
            stop = min(num_rows, start + rows_a_pass)
            for t in range(first_tile, last_tile):
                tile = weight + t * tile_bytes
                count = min(16, num_outputs - t * 16)
                tile_bias = bias + t * 64 if bias != 0 else 0
                if num_rows == 1:
                    write(out + t * 64, tile_1(tile, k, x), count, tile_bias, accumulate)
                    continue
                for row in range(start, stop, 4):
                    # The first rows bring the next tiles' weights; the others find these cached.
                    a = tile_4(tile, k, rows_from(x, x_stride, row, stop - 1), row == start)
                    target = out + row * out_stride + t * 64
                    write_rows(target, out_stride, a, stop - row, count, tile_bias, accumulate)

    return linear


def _linear_wide(tile_1, tile_4, tile_8):
    """As ``_linear``, with eight rows against two tiles where there are as many."""
    narrow = device(_linear(tile_1, tile_4))

    @device
    def rows_of_four(tile, k, x, x_stride, row, stop, out, out_stride, count, bias, accumulate):
        for first in range(row, stop, 4):
            a = tile_4(tile, k, rows_from(x, x_stride, first, stop - 1), False)
            target = out + first * out_stride
            write_rows(target, out_stride, a, stop - first, count, bias, accumulate)

    def linear(thread, num_threads, args):
        x, x_stride, num_rows, k = args[0], args[1], args[2], args[3]
        weight, tile_bytes, num_outputs = args[4], args[5], args[6]
        out, out_stride, bias, accumulate = args[7], args[8], args[9], args[10]
        rows_a_pass = args[11]
        if num_rows < 8:
            narrow(thread, num_threads, args)
            return
        num_tiles = (num_outputs + 15) // 16
        first_tile = num_tiles * thread // num_threads
        last_tile = num_tiles * (thread + 1) // num_threads
        for start in range(0, num_rows, rows_a_pass):
            stop = min(num_rows, start + rows_a_pass)
            for t in range(first_tile, last_tile, 2):
                # An odd last tile is its own neighbour.
                u = min(t + 1, last_tile - 1)
                tile, second = weight + t * tile_bytes, weight + u * tile_bytes
                count, second_count = min(16, num_outputs - t * 16), min(16, num_outputs - u * 16)
                tile_bias, second_bias = (bias + t * 64, bias + u * 64) if bias != 0 else (0, 0)
                row = start
                while row + 8 <= stop:
                    last = stop - 1
                    x_rows = rows_from(x, x_stride, row, last)
                    y_rows = rows_from(x, x_stride, row + 4, last)
                    a, b, c, d = tile_8(tile, second, k, x_rows, y_rows, row == start)
                    here, below = out + row * out_stride, out + (row + 4) * out_stride
                    write_rows(here + t * 64, out_stride, a, 4, count, tile_bias, accumulate)
                    write_rows(below + t * 64, out_stride, b, 4, count, tile_bias, accumulate)
                    if u > t:
                        write_rows(
                            here + u * 64, out_stride, c, 4, second_count, second_bias, accumulate
                        )
                        write_rows(
                            below + u * 64, out_stride, d, 4, second_count, second_bias, accumulate
                        )
                    row += 8
                rows_of_four(
                    tile, k, x, x_stride, row, stop, out + t * 64, out_stride, count,
                    tile_bias, accumulate,
                )  # fmt: skip
                if u > t:
                    rows_of_four(
                        second, k, x, x_stride, row, stop, out + u * 64, out_stride, second_count,
                        second_bias, accumulate,
                    )  # fmt: skip

    return linear


for _name, _tiles in TILES.items():
    _wide = WIDE_TILES.get(_name)
    body(f"linear.{_name}")(_linear(*_tiles) if _wide is None else _linear_wide(*_tiles, _wide))
