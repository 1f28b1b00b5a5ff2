"""A warp's piece of a recurrent state, in registers: tuples that these intrinsics unroll.

A lane holds ``rows`` rows of ``columns`` neighbouring columns, row after row. A sum over rows is
ascending, by fused multiply-add; what several lanes hold of one sum is added by ``sum_over_lanes``
and ``gather_sums``. Addresses are those of the lane's first element.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from atlas_kernels._cuda import f32, i32, i64, types
from atlas_kernels.ptx import typed_intrinsic
from llvmlite import ir

_FLOAT, _INT = ir.FloatType(), ir.IntType(32)
_LOAD = "ld.global.L1::no_allocate.L2::128B"
_STORE = "st.global.cs"  # evict first: a state is not read again within its step


def _floats(count: int) -> Any:
    return types.UniTuple(f32, count)


def _members(builder: Any, value: Any, count: int) -> list[Any]:
    return [builder.extract_value(value, i) for i in range(count)]


def _assembly(builder: Any, out: Any, text: str, constraints: str, args: list[Any]) -> Any:
    kind = ir.FunctionType(out, [arg.type for arg in args])
    return builder.call(ir.InlineAsm(kind, text, constraints, side_effect=True), args)


def _exchange(builder: Any, value: Any, mask: int) -> Any:
    text = f"shfl.sync.bfly.b32 $0, $1, {mask}, 31, 0xffffffff;"
    kind = ir.FunctionType(_FLOAT, [_FLOAT])
    assembly = ir.InlineAsm(kind, text, "=f,f,~{memory}", side_effect=True)
    return builder.call(assembly, [value], attrs=("convergent",))


def _load(space: str, address: Any, rows: int, columns: int, row_bytes: int) -> Any:
    """An intrinsic: (address) → tuple, from rows ``row_bytes`` apart."""
    result = _floats(rows * columns)
    width = min(columns, 4)
    outs = ir.LiteralStructType([_FLOAT] * width)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values: list[Any] = []
        registers = ", ".join(f"${i}" for i in range(width))
        for row in range(rows):
            for column in range(0, columns, width):
                offset = row * row_bytes + column * 4
                text = f"{space}.v{width}.f32 {{{registers}}}, [${width}+{offset}];"
                letter = "l" if address is i64 else "r"
                constraints = ",".join(["=f"] * width + [letter, "~{memory}"])
                loaded = _assembly(builder, outs, text, constraints, [args[0]])
                values += _members(builder, loaded, width)
        return context.make_tuple(builder, result, values)

    return typed_intrinsic(result(address), codegen)


@cache
def state_load(rows: int, columns: int, row_bytes: int) -> Any:
    """(address) → the lane's piece, past L1: nobody else reads it."""
    return _load(_LOAD, i64, rows, columns, row_bytes)


@cache
def shared_vector(count: int) -> Any:
    """(shared address, a multiple of 16) → ``count`` neighbouring float32."""
    return _load("ld.shared", i32, count // 4, 4, 16)


@cache
def global_vector(count: int) -> Any:
    """(address) → ``count`` neighbouring float32, the address a multiple of min(16, 4 · count)."""
    width = min(count, 4)
    return _load("ld.global", i64, count // width, width, 16)


@cache
def global_row(dim: int) -> Any:
    """(address) → a lane's share of a row of ``dim`` float32 that eight lanes read together.

    Four elements of every 32; the address is that of the lane's first.
    """
    return _load("ld.global", i64, dim // 32, 4, 128)


@cache
def state_store(rows: int, columns: int, row_bytes: int) -> Any:
    """(address, piece)."""
    piece, width = _floats(rows * columns), min(columns, 4)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values = _members(builder, args[1], rows * columns)
        registers = ", ".join(f"${i + 1}" for i in range(width))
        constraints = ",".join(["l"] + ["f"] * width + ["~{memory}"])
        for at in range(0, rows * columns, width):
            offset = at // columns * row_bytes + at % columns * 4
            text = f"{_STORE}.v{width}.f32 [$0+{offset}], {{{registers}}};"
            _assembly(
                builder, ir.VoidType(), text, constraints, [args[0], *values[at : at + width]]
            )
        return context.get_dummy_value()

    return typed_intrinsic(types.void(i64, piece), codegen)


@cache
def decay_and_read(rows: int, columns: int) -> Any:
    """(piece, g, k) → g · piece, and for each column Σ over rows of g · piece · k."""
    piece, vector, sums = _floats(rows * columns), _floats(rows), _floats(columns)
    result = types.Tuple((piece, sums))

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        state, k = _members(builder, args[0], rows * columns), _members(builder, args[2], rows)
        after = [builder.fmul(value, args[1]) for value in state]
        parts = [
            context.make_tuple(builder, piece, after),
            context.make_tuple(builder, sums, _column_sums(builder, after, k, columns)),
        ]
        return context.make_tuple(builder, result, parts)

    return typed_intrinsic(result(piece, f32, vector), codegen)


@cache
def correct_and_read(rows: int, columns: int) -> Any:
    """(piece, k, d, q) → piece + k ⊗ d, and for each column Σ over rows of that · q."""
    piece, vector, sums = _floats(rows * columns), _floats(rows), _floats(columns)
    result = types.Tuple((piece, sums))

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        state, k = _members(builder, args[0], rows * columns), _members(builder, args[1], rows)
        d, q = _members(builder, args[2], columns), _members(builder, args[3], rows)
        after = [
            builder.fma(k[i // columns], d[i % columns], value) for i, value in enumerate(state)
        ]
        parts = [
            context.make_tuple(builder, piece, after),
            context.make_tuple(builder, sums, _column_sums(builder, after, q, columns)),
        ]
        return context.make_tuple(builder, result, parts)

    return typed_intrinsic(result(piece, vector, sums, vector), codegen)


def _column_sums(builder: Any, state: list[Any], factors: list[Any], columns: int) -> list[Any]:
    sums = []
    for column in range(columns):
        total = builder.fmul(state[column], factors[0])
        for row, factor in enumerate(factors[1:], 1):
            total = builder.fma(state[row * columns + column], factor, total)
        sums.append(total)
    return sums


@cache
def push_and_read(rows: int, columns: int) -> Any:
    """(piece, g, u, b, c) → g · piece + u ⊗ b, and for each row Σ over columns of that · c."""
    piece, by_row, by_column = _floats(rows * columns), _floats(rows), _floats(columns)
    result = types.Tuple((piece, by_row))

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        state, u = _members(builder, args[0], rows * columns), _members(builder, args[2], rows)
        b, c = (_members(builder, arg, columns) for arg in args[3:])
        after, sums = [], []
        for i, value in enumerate(state):
            row, column = divmod(i, columns)
            after.append(builder.fma(u[row], b[column], builder.fmul(value, args[1])))
            if column:
                sums[row] = builder.fma(after[i], c[column], sums[row])
            else:
                sums.append(builder.fmul(after[i], c[0]))
        parts = [
            context.make_tuple(builder, piece, after),
            context.make_tuple(builder, by_row, sums),
        ]
        return context.make_tuple(builder, result, parts)

    return typed_intrinsic(result(piece, f32, by_row, by_column, by_column), codegen)


@cache
def sum_over_lanes(count: int, masks: tuple[int, ...]) -> Any:
    """(values) → each summed over the lanes that differ in the bits of ``masks``, in that order."""
    vector = _floats(count)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values = _members(builder, args[0], count)
        for mask in masks:
            values = [builder.fadd(value, _exchange(builder, value, mask)) for value in values]
        return context.make_tuple(builder, vector, values)

    return typed_intrinsic(vector(vector), codegen)


@cache
def gather_sums(count: int) -> Any:
    """(values, lane) → the sum over the warp of one of ``count`` values: that of ``sum_owner``.

    At each distance 16, 8, … a lane keeps half of the values and gives the others away; then, with
    one value left, the sum is a butterfly.
    """
    vector = _floats(count)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values, zero = _members(builder, args[0], count), ir.Constant(_INT, 0)
        for mask in (16, 8, 4, 2, 1):
            half = len(values) // 2
            if not half:
                values = [builder.fadd(values[0], _exchange(builder, values[0], mask))]
                continue
            bit = builder.and_(args[1], ir.Constant(_INT, mask))
            upper = builder.icmp_signed("!=", bit, zero)
            kept = []
            for low, high in zip(values[:half], values[half:], strict=True):
                own, other = builder.select(upper, high, low), builder.select(upper, low, high)
                kept.append(builder.fadd(own, _exchange(builder, other, mask)))
            values = kept
        return values[0]

    return typed_intrinsic(f32(vector, i32), codegen)
