"""Rows out of a packed matrix, and rows out of a float matrix."""

# mypy: ignore-errors
from __future__ import annotations

from atlas.backends.cpu.bodies import body
from atlas.backends.cpu.bodies.simd import (
    add,
    bits_f32,
    load_first,
    load_i32,
    store_f32,
    store_first,
)
from atlas.backends.cpu.bodies.vectors import device
from atlas.backends.cpu.bodies.weight_elements import ELEMENTS


def _embedding(element):
    @device
    def read(tile, k, lane, column):
        return element(tile, k, lane, column)

    def embedding(thread, num_threads, args):
        ids, num_rows, weight, tile_bytes, k = args[0], args[1], args[2], args[3], args[4]
        scale, out, out_stride = bits_f32(args[5]), args[6], args[7]
        for row in range(thread, num_rows, num_threads):
            token = load_i32(ids + row * 4)
            tile, lane = weight + (token // 16) * tile_bytes, token % 16
            for column in range(k):
                value = read(tile, k, lane, column) * scale
                store_f32(out + row * out_stride + column * 4, value)

    return embedding


for _name, _element in ELEMENTS.items():
    body(f"embedding.{_name}")(_embedding(_element))


@body("embedding.add_positions")
def add_positions(thread, num_threads, args):
    x, x_stride, ids, positions, num_rows, size = (
        args[0],
        args[1],
        args[2],
        args[3],
        args[4],
        args[5],
    )
    table, table_stride, padding_id, out, out_stride = args[6], args[7], args[8], args[9], args[10]
    for row in range(thread, num_rows, num_threads):
        is_padding = load_i32(ids + row * 4) == padding_id
        place = table + load_i32(positions + row * 4) * table_stride
        for start in range(0, size, 16):
            count = min(16, size - start)
            value = load_first(x + row * x_stride + start * 4, count)
            if not is_padding:
                value = add(value, load_first(place + start * 4, count))
            store_first(out + row * out_stride + start * 4, value, count)


@body("embedding.gather_rows")
def gather_rows(thread, num_threads, args):
    x, x_stride, rows, num_rows, size = args[0], args[1], args[2], args[3], args[4]
    out, out_stride = args[5], args[6]
    for i in range(thread, num_rows, num_threads):
        source = x + load_i32(rows + i * 4) * x_stride
        for start in range(0, size, 16):
            count = min(16, size - start)
            store_first(
                out + i * out_stride + start * 4, load_first(source + start * 4, count), count
            )


@body("embedding.scatter_rows")
def scatter_rows(thread, num_threads, args):
    x, x_stride, rows, num_rows, size = args[0], args[1], args[2], args[3], args[4]
    out, out_stride = args[5], args[6]
    for i in range(thread, num_rows, num_threads):
        row = load_i32(rows + i * 4)
        if row >= 0:
            for start in range(0, size, 16):
                count = min(16, size - start)
                part = load_first(x + i * x_stride + start * 4, count)
                store_first(out + row * out_stride + start * 4, part, count)
