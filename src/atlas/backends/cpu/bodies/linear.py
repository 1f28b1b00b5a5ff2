"""Matrix products: activation quantisation, tiles of 16 outputs × 1 or 4 rows, and their loops.

A tile function returns the sums of 16 outputs for one row or four. As a sum waits for its last
addition, several tiles go side by side: four of one row, two of four rows and, for float weights
where registers hold them, two of eight. Within a row the order is the same in all (blocks or k
ascending, one accumulator), so a row's bits do not depend on how many rows there are.
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
    add_i32,
    broadcast_i32,
    dot4,
    dot4_offset,
    dot4_small,
    splat_i32,
    store_i8_lanes,
    sum_i32,
)
from atlas.backends.cpu.bodies.vectors import device
from atlas.backends.cpu.bodies.weight_blocks import FORMATS, finish_q8_0_less_128, x_sum
from atlas.backends.cpu.target import simd_level

_f = np.float32
ZERO, MAX_INT8 = _f(0.0), _f(127.0)
# Tiles follow one another, so that a thread's weights are one run of memory; the hardware loses it
# between the areas of a tile. 16 KiB ahead measured best (benchmarks/NOTES.md).
PREFETCH_BYTES = 16384
AHEAD = 4096  # for each of four tiles side by side


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


def _half_dot(dot):
    @device
    def half_dot(w0, w1, w2, w3, x):
        """Σ over 16 columns: four byte vectors against the 16 activations at ``x``."""
        total = dot(splat_i32(0), w0, broadcast_i32(x))
        total = dot(total, w1, broadcast_i32(x + 4))
        total = dot(total, w2, broadcast_i32(x + 8))
        return dot(total, w3, broadcast_i32(x + 12))

    return half_dot


@device
def halves(w, x, k, b):
    """Dot products of the halves of block b: integers, the same whatever computes them."""
    return _any_dot(w[0], w[1], w[2], w[3], x + b * 32), _any_dot(
        w[4], w[5], w[6], w[7], x + b * 32 + 16
    )


@device
def halves_of_small(w, x, k, b):
    """The same of weights up to 127, on AVX2."""
    return _small_dot(w[0], w[1], w[2], w[3], x + b * 32), _small_dot(
        w[4], w[5], w[6], w[7], x + b * 32 + 16
    )


@device
def halves_less_128(w, x, k, b):
    """The same of any bytes after 128 is taken off each, on AVX2."""
    low = _offset_dot(w[0], w[1], w[2], w[3], x + b * 32)
    return low, _offset_dot(w[4], w[5], w[6], w[7], x + b * 32 + 16)


@device
def halves_of_bytes(w, x, k, b):
    """The same of any bytes, on AVX2."""
    low, high = halves_less_128(w, x, k, b)
    low = add_i32(low, splat_i32(128 * x_sum(x, k, 2 * b)))
    return low, add_i32(high, splat_i32(128 * x_sum(x, k, 2 * b + 1)))


_any_dot, _small_dot, _offset_dot = (_half_dot(dot) for dot in (dot4, dot4_small, dot4_offset))


def _parts_of(format):
    """How a format's blocks are multiplied, unpacked and added, and their bytes."""
    unpack, finish, block_bytes = FORMATS[format]
    dots = halves
    if simd_level() == "avx2":
        dots = halves_of_bytes if format in ("b8_32", "b8_16") else halves_of_small
        if format == "q8_0":
            dots, finish = halves_less_128, finish_q8_0_less_128
    return dots, unpack, finish, block_bytes


@device
def prefetch_lines(address, nbytes):
    for at in range(0, nbytes, 64):
        prefetch(address + at)


def _quantised_tiles(dots, unpack, finish, block_bytes):
    @device
    def step(tile, nb, b, acc, w, x, k):
        low, high = dots(w, x, k, b)
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

    @device
    def tiles_1(tile, tile_bytes, k, x):
        a0, a1 = tile_1(tile, k, x), tile_1(tile + tile_bytes, k, x)
        return a0, a1, tile_1(tile + 2 * tile_bytes, k, x), tile_1(tile + 3 * tile_bytes, k, x)

    @device
    def tiles_4(tile, tile_bytes, k, x, fetch):
        return tile_4(tile, k, x, fetch), tile_4(tile + tile_bytes, k, x, fetch)

    return tile_1, tile_4, tiles_1, tiles_4


# Sixteen sums and two weights fill the 32 registers of AVX-512; where vectors are two or four
# registers, they would spill.
HAS_WIDE_TILES = simd_level() == "avx512"


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

    @device
    def tiles_1(tile, tile_bytes, k, x):
        a0, a1, a2, a3 = zeros(), zeros(), zeros(), zeros()
        for i in range(k):
            at, value = tile + i * width, splat(load_f32(x + i * 4))
            ahead = at + AHEAD
            prefetch(ahead)
            prefetch(ahead + tile_bytes)
            prefetch(ahead + 2 * tile_bytes)
            prefetch(ahead + 3 * tile_bytes)
            a0 = fma(read(at), value, a0)
            a1 = fma(read(at + tile_bytes), value, a1)
            a2 = fma(read(at + 2 * tile_bytes), value, a2)
            a3 = fma(read(at + 3 * tile_bytes), value, a3)
        return a0, a1, a2, a3

    @device
    def tiles_4(tile, tile_bytes, k, x, fetch):
        x0, x1, x2, x3 = x
        a0, a1, a2, a3 = zeros(), zeros(), zeros(), zeros()
        b0, b1, b2, b3 = zeros(), zeros(), zeros(), zeros()
        for i in range(k):
            at = tile + i * width
            if fetch:
                prefetch(at + AHEAD)
                prefetch(at + tile_bytes + AHEAD)
            v, w = read(at), read(at + tile_bytes)
            value = splat(load_f32(x0 + i * 4))
            a0, b0 = fma(v, value, a0), fma(w, value, b0)
            value = splat(load_f32(x1 + i * 4))
            a1, b1 = fma(v, value, a1), fma(w, value, b1)
            value = splat(load_f32(x2 + i * 4))
            a2, b2 = fma(v, value, a2), fma(w, value, b2)
            value = splat(load_f32(x3 + i * 4))
            a3, b3 = fma(v, value, a3), fma(w, value, b3)
        return (a0, a1, a2, a3), (b0, b1, b2, b3)

    @device
    def tiles_4_apart(tile, tile_bytes, k, x, fetch):
        """Eight sums of two registers: with those of both tiles AVX2's sixteen would spill."""
        return tile_4(tile, k, x, fetch), tile_4(tile + tile_bytes, k, x, fetch)

    return tile_1, tile_4, tiles_1, tiles_4 if HAS_WIDE_TILES else tiles_4_apart


def _wide_tiles(read, width):
    @device
    def tiles_8(tile, tile_bytes, k, x, y, fetch):
        """Two tiles × eight rows: enough sums in flight to keep two multiply-add units busy."""
        x0, x1, x2, x3 = x
        x4, x5, x6, x7 = y
        a0, a1, a2, a3 = zeros(), zeros(), zeros(), zeros()
        a4, a5, a6, a7 = zeros(), zeros(), zeros(), zeros()
        b0, b1, b2, b3 = zeros(), zeros(), zeros(), zeros()
        b4, b5, b6, b7 = zeros(), zeros(), zeros(), zeros()
        for i in range(k):
            at = tile + i * width
            if fetch:
                prefetch(at + AHEAD)
                prefetch(at + tile_bytes + AHEAD)
            v, w = read(at), read(at + tile_bytes)
            value = splat(load_f32(x0 + i * 4))
            a0, b0 = fma(v, value, a0), fma(w, value, b0)
            value = splat(load_f32(x1 + i * 4))
            a1, b1 = fma(v, value, a1), fma(w, value, b1)
            value = splat(load_f32(x2 + i * 4))
            a2, b2 = fma(v, value, a2), fma(w, value, b2)
            value = splat(load_f32(x3 + i * 4))
            a3, b3 = fma(v, value, a3), fma(w, value, b3)
            value = splat(load_f32(x4 + i * 4))
            a4, b4 = fma(v, value, a4), fma(w, value, b4)
            value = splat(load_f32(x5 + i * 4))
            a5, b5 = fma(v, value, a5), fma(w, value, b5)
            value = splat(load_f32(x6 + i * 4))
            a6, b6 = fma(v, value, a6), fma(w, value, b6)
            value = splat(load_f32(x7 + i * 4))
            a7, b7 = fma(v, value, a7), fma(w, value, b7)
        return (a0, a1, a2, a3), (a4, a5, a6, a7), (b0, b1, b2, b3), (b4, b5, b6, b7)

    return tiles_8


TILES = {name: _quantised_tiles(*_parts_of(name)) for name in FORMATS}
_FLOATS = {"f32": (load, 64), "f16": (load_f16, 32), "bf16": (load_bf16, 32)}
TILES |= {name: _float_tiles(*read) for name, read in _FLOATS.items()}
WIDE_TILES = {name: _wide_tiles(*read) for name, read in _FLOATS.items() if HAS_WIDE_TILES}


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


@device
def write_tile_rows(out, stride, t, acc, rows, num_outputs, bias, accumulate):
    """Epilogue of tile ``t``, up to four rows."""
    count, tile_bias = min(16, num_outputs - t * 16), bias + t * 64 if bias != 0 else 0
    write_rows(out + t * 64, stride, acc, rows, count, tile_bias, accumulate)


def _eights(tiles_8):
    """A pair of tiles against eight rows at a time; answers with the first row that is left."""

    @device
    def eights(
        t, start, stop, x, x_stride, k, weight, tile_bytes, num_outputs, out, out_stride, bias,
        accumulate,
    ):  # fmt: skip
        tile, row = weight + t * tile_bytes, start
        while row + 8 <= stop:
            upper = rows_from(x, x_stride, row, stop - 1)
            lower = rows_from(x, x_stride, row + 4, stop - 1)
            a, c, b, d = tiles_8(tile, tile_bytes, k, upper, lower, row == start)
            target, below = out + row * out_stride, out + (row + 4) * out_stride
            write_tile_rows(target, out_stride, t, a, 4, num_outputs, bias, accumulate)
            write_tile_rows(below, out_stride, t, c, 4, num_outputs, bias, accumulate)
            write_tile_rows(target, out_stride, t + 1, b, 4, num_outputs, bias, accumulate)
            write_tile_rows(below, out_stride, t + 1, d, 4, num_outputs, bias, accumulate)
            row += 8
        return row

    return eights


@device
def no_eights(
    t, start, stop, x, x_stride, k, weight, tile_bytes, num_outputs, out, out_stride, bias,
    accumulate,
):  # fmt: skip
    """Where there are no such tiles, every row is left."""
    return start


def _linear(tile_1, tile_4, tiles_1, tiles_4, eights):
    @device
    def write_tile(out, t, acc, num_outputs, bias, accumulate):
        count, tile_bias = min(16, num_outputs - t * 16), bias + t * 64 if bias != 0 else 0
        write(out + t * 64, acc, count, tile_bias, accumulate)

    @device
    def one_row(x, k, weight, tile_bytes, first, last, num_outputs, out, bias, accumulate):
        whole = first + (last - first) // 4 * 4
        for t in range(first, whole, 4):
            a = tiles_1(weight + t * tile_bytes, tile_bytes, k, x)
            write_tile(out, t, a[0], num_outputs, bias, accumulate)
            write_tile(out, t + 1, a[1], num_outputs, bias, accumulate)
            write_tile(out, t + 2, a[2], num_outputs, bias, accumulate)
            write_tile(out, t + 3, a[3], num_outputs, bias, accumulate)
        for t in range(whole, last):
            acc = tile_1(weight + t * tile_bytes, k, x)
            write_tile(out, t, acc, num_outputs, bias, accumulate)

    def linear(thread, num_threads, args):
        x, x_stride, num_rows, k = args[0], args[1], args[2], args[3]
        weight, tile_bytes, num_outputs = args[4], args[5], args[6]
        out, out_stride, bias, accumulate = args[7], args[8], args[9], args[10]
        rows_a_pass = args[11]
        num_tiles = (num_outputs + 15) // 16
        first, last = num_tiles * thread // num_threads, num_tiles * (thread + 1) // num_threads
        if num_rows == 1:
            one_row(x, k, weight, tile_bytes, first, last, num_outputs, out, bias, accumulate)
            return
        for start in range(0, num_rows, rows_a_pass):
            stop = min(num_rows, start + rows_a_pass)
            for t in range(first, last, 2):
                tile, begin = weight + t * tile_bytes, start
                if t + 1 < last:
                    begin = eights(
                        t, start, stop, x, x_stride, k, weight, tile_bytes, num_outputs, out,
                        out_stride, bias, accumulate,
                    )  # fmt: skip
                for row in range(begin, stop, 4):
                    # The first rows bring the next tiles' weights; the others find these cached.
                    fetch, target = row == start, out + row * out_stride
                    rows, left = rows_from(x, x_stride, row, stop - 1), stop - row
                    if t + 1 < last:
                        a, b = tiles_4(tile, tile_bytes, k, rows, fetch)
                        u = t + 1
                        write_tile_rows(
                            target, out_stride, u, b, left, num_outputs, bias, accumulate
                        )
                    else:
                        a = tile_4(tile, k, rows, fetch)
                    write_tile_rows(target, out_stride, t, a, left, num_outputs, bias, accumulate)

    return linear


for _name, _tiles in TILES.items():
    _rows_of_eight = _eights(WIDE_TILES[_name]) if _name in WIDE_TILES else no_eights
    body(f"linear.{_name}")(_linear(*_tiles, _rows_of_eight))
