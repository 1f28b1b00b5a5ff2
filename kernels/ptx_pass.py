"""Products of a pass from chunk to chunk: tuples that these intrinsics unroll.

A state [K, V] is kept transposed: its columns are the rows of ``mma.sync``'s A, 16 to a tile, so
that what one product leaves in its C fragments is the A of the next, lane for lane. Such *words*
lie in shared memory in the order of the lanes: 512 bytes for every 16 × 16, 16 bytes a lane. What
they are multiplied by lies in rows of bf16 (see ``ptx_tile``).

A warp's C fragments of 16 columns of the state and n of something else are, for every 8 of n:
(column g, 2 t), (g, 2 t + 1), (g + 8, 2 t), (g + 8, 2 t + 1), with g = lane / 4 and t = lane % 4.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from atlas_kernels._cuda import f32, i32, i64, types
from atlas_kernels.ptx import typed_intrinsic
from atlas_kernels.ptx_tile import ldmatrix, members, mma, pack
from atlas_kernels.recurrence_shapes import CHUNK
from llvmlite import ir

WORD_BYTES = 512
"""Of the words of 16 × 16."""

_FLOAT, _INT, _LONG = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_WORDS = ir.LiteralStructType([_INT] * 4)


def _floats(count: int) -> Any:
    return types.UniTuple(f32, count)


def _statement(builder: Any, out: Any, text: str, constraints: str, args: list[Any]) -> Any:
    kind = ir.FunctionType(out, [arg.type for arg in args])
    return builder.call(
        ir.InlineAsm(kind, text, f"{constraints},~{{memory}}", side_effect=True), args
    )


def _words(builder: Any, address: Any, number: int) -> list[Any]:
    text = f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4+{WORD_BYTES * number}];"
    return members(builder, _statement(builder, _WORDS, text, "=r,=r,=r,=r,r", [address]), 4)


@cache
def read_rows(steps: int, tiles: int) -> Any:
    """(sums, words, rows) → sums + A · Rᵀ for 16 rows of R; k16 steps ascending.

    A is [16 · ``tiles``, 16 · ``steps``]: ``words`` is the lane's address of its first, tiles one
    after another. ``rows`` is that of (row lane % 8 + 8 · (lane / 16), bytes 16 · (lane / 8 % 2)).
    """
    sums = _floats(8 * tiles)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        total = members(builder, args[0], 8 * tiles)
        for step in range(steps):
            r = ldmatrix(builder, args[2], 32 * step, "")
            for at in range(0, 8 * tiles, 8):
                a = _words(builder, args[1], at // 8 * steps + step)
                total[at : at + 4] = mma(builder, total[at : at + 4], a, r[:2])
                total[at + 4 : at + 8] = mma(builder, total[at + 4 : at + 8], a, r[2:])
        return context.make_tuple(builder, sums, total)

    return typed_intrinsic(sums(sums, i32, i32), codegen)


@cache
def add_rows(pairs: int, tiles: int, pitch: int) -> Any:
    """(state, words, k) → state + A · K for 16 · ``pairs`` keys; k16 steps ascending.

    A is [16 · ``tiles``, ``CHUNK``]. K has ``CHUNK`` rows: address of (row lane % 16, bytes
    16 · (lane / 16)) of the first key.
    """
    state, steps = _floats(8 * pairs * tiles), CHUNK // 16

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        total = members(builder, args[0], 8 * pairs * tiles)
        for step in range(steps):
            a = [_words(builder, args[1], tile * steps + step) for tile in range(tiles)]
            for pair in range(pairs):
                k = ldmatrix(builder, args[2], 16 * step * pitch + 32 * pair, ".trans")
                for tile in range(tiles):
                    at = 8 * (tile * pairs + pair)
                    total[at : at + 4] = mma(builder, total[at : at + 4], a[tile], k[:2])
                    total[at + 4 : at + 8] = mma(builder, total[at + 4 : at + 8], a[tile], k[2:])
        return context.make_tuple(builder, state, total)

    return typed_intrinsic(state(state, i32, i32), codegen)


@cache
def put_words(pairs: int, tiles: int, steps: int) -> Any:
    """(address, values): C fragments to words, rounded; ``steps`` words from a tile to the next."""
    vector = _floats(8 * pairs * tiles)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        flat = members(builder, args[1], 8 * pairs * tiles)
        for at in range(0, len(flat), 8):
            number = at // 8 // pairs * steps + at // 8 % pairs
            text = f"st.shared.v4.b32 [$0+{WORD_BYTES * number}], {{$1, $2, $3, $4}};"
            words = [pack(builder, flat[i], flat[i + 1]) for i in range(at, at + 8, 2)]
            _statement(builder, ir.VoidType(), text, "r,r,r,r,r", [args[0], *words])
        return context.get_dummy_value()

    return typed_intrinsic(types.void(i32, vector), codegen)


@cache
def get_rows(tiles: int, tile_bytes: int) -> Any:
    """(address) → C fragments of 16 rows of bf16, transposed.

    ``address`` as ``rows`` of ``read_rows``; tiles of 16 columns ``tile_bytes`` apart.
    """
    vector = _floats(8 * tiles)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values = []
        for tile in range(tiles):
            for word in ldmatrix(builder, args[0], tile * tile_bytes, ".trans"):
                low = builder.shl(word, ir.Constant(_INT, 16))
                high = builder.and_(word, ir.Constant(_INT, 0xFFFF0000))
                values += [builder.bitcast(half, _FLOAT) for half in (low, high)]
        return context.make_tuple(builder, vector, values)

    return typed_intrinsic(vector(i32), codegen)


@cache
def scale_rows(tiles: int) -> Any:
    """(values, f0, f1, f8, f9) → C fragments of 16 rows, each row times its factor.

    The lane's rows are 2 t, 2 t + 1, and those 8 on.
    """
    vector = _floats(8 * tiles)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values = [
            builder.fmul(value, args[1 + (i >> 2 & 1) * 2 + (i & 1)])
            for i, value in enumerate(members(builder, args[0], 8 * tiles))
        ]
        return context.make_tuple(builder, vector, values)

    return typed_intrinsic(vector(vector, f32, f32, f32, f32), codegen)


def _places(builder: Any, address: Any, key_bytes: Any, tiles: int, pairs: int) -> Any:
    """(base, column's number) of every element of C fragments, keys ``key_bytes`` apart."""
    for tile in range(tiles):
        for pair in range(pairs):
            for half in (0, 8):
                for i in range(4):
                    key = ir.Constant(_LONG, 16 * pair + half + (i & 1))
                    base = builder.add(address, builder.mul(key, key_bytes))
                    yield base, 16 * tile + 8 * (i >> 1)


@cache
def load_piece(pairs: int, tiles: int, column_bytes: int) -> Any:
    """(address, key_bytes) → C fragments from float32, columns ``column_bytes`` apart."""
    vector = _floats(8 * pairs * tiles)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values = []
        for base, column in _places(builder, *args, tiles, pairs):
            text = f"ld.global.f32 $0, [$1+{column * column_bytes}];"
            values.append(_statement(builder, _FLOAT, text, "=f,l", [base]))
        return context.make_tuple(builder, vector, values)

    return typed_intrinsic(vector(i64, i64), codegen)


@cache
def store_piece(pairs: int, tiles: int, column_bytes: int) -> Any:
    """(address, key_bytes, values): the same the other way."""
    vector = _floats(8 * pairs * tiles)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        flat = members(builder, args[2], 8 * pairs * tiles)
        places = _places(builder, args[0], args[1], tiles, pairs)
        for value, (base, column) in zip(flat, places, strict=True):
            text = f"st.global.f32 [$0+{column * column_bytes}], $1;"
            _statement(builder, ir.VoidType(), text, "l,f", [base, value])
        return context.get_dummy_value()

    return typed_intrinsic(types.void(i64, i64, vector), codegen)
