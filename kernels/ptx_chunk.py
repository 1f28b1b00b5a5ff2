"""Chunks of a recurrence on ``mma.sync``: tuples that these intrinsics unroll.

Fragments and shared memory are those of ``ptx_tile``: C fragments of rows g and g + 8, rows of bf16
``pitch`` bytes apart, an odd multiple of 16. A warp has 16 rows of a chunk of ``CHUNK``.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from atlas_kernels._cuda import f32, i32, i64, types
from atlas_kernels.ptx import typed_intrinsic
from atlas_kernels.ptx_tile import members, pack
from atlas_kernels.recurrence_shapes import CHUNK
from llvmlite import ir

_FLOAT, _INT = ir.FloatType(), ir.IntType(32)
_PAIR = ir.LiteralStructType([_FLOAT] * 2)


def _floats(count: int) -> Any:
    return types.UniTuple(f32, count)


def _shared_pair(builder: Any, address: Any, offset: int) -> list[Any]:
    text = f"ld.shared.v2.f32 {{$0, $1}}, [$2+{offset}];"
    kind = ir.FunctionType(_PAIR, [_INT])
    assembly = ir.InlineAsm(kind, text, "=f,=f,r,~{memory}", side_effect=True)
    return members(builder, builder.call(assembly, [address]), 2)


def _exp2(builder: Any, value: Any) -> Any:
    kind = ir.FunctionType(_FLOAT, [_FLOAT])
    assembly = ir.InlineAsm(kind, "ex2.approx.ftz.f32 $0, $1;", "=f,f", side_effect=False)
    return builder.call(assembly, [value])


@cache
def decay_pairs(strict: bool) -> Any:
    """(scores, upper, lower, logs, column) → scores · 2^(log of its row − log of its column).

    Scores of 16 rows and ``CHUNK`` columns. ``upper`` and ``lower`` are (row, log) of the lane's
    rows as (int32, float32) pairs flattened: row g, log g, row g + 8, log g + 8. ``logs`` is the
    shared address of the columns' logs, ``column`` the lane's first, 2 (lane % 4). Columns after
    the row, with ``strict`` the row's own too, become zero.
    """
    scores = _floats(CHUNK // 2)
    signature = scores(scores, i32, f32, i32, f32, i32, i32)
    operation = "<" if strict else "<="

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows, row_logs = (args[1], args[3]), (args[2], args[4])
        start = builder.add(args[5], builder.shl(args[6], ir.Constant(_INT, 2)))
        zero, values = ir.Constant(_FLOAT, 0.0), []
        flat = members(builder, args[0], CHUNK // 2)
        for i in range(0, len(flat), 4):
            logs = _shared_pair(builder, start, 8 * i)  # 8 columns, 32 bytes, a fragment
            for e in range(4):
                column = builder.add(args[6], ir.Constant(_INT, 2 * i + (e & 1)))
                seen = builder.icmp_signed(operation, column, rows[e >> 1])
                power = _exp2(builder, builder.fsub(row_logs[e >> 1], logs[e & 1]))
                values.append(builder.select(seen, builder.fmul(flat[i + e], power), zero))
        return context.make_tuple(builder, scores, values)

    return typed_intrinsic(signature, codegen)


@cache
def scaled_words(pitch: int) -> Any:
    """(rows, factors) → A's words of 16 rows of ``CHUNK`` float32 in shared memory, as bf16.

    ``rows`` is the address of (row lane / 4, column 2 (lane % 4)), rows ``pitch`` bytes apart;
    ``factors`` that of the same column's factor: each column is multiplied by its own.
    """
    words = types.UniTuple(i32, CHUNK // 4)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        packed = []
        for column in range(0, CHUNK, 8):
            factors = _shared_pair(builder, args[1], 4 * column)
            for row in (0, 8):
                pair = _shared_pair(builder, args[0], row * pitch + 4 * column)
                scaled = [builder.fmul(x, y) for x, y in zip(pair, factors, strict=True)]
                packed.append(pack(builder, *scaled))
        return context.make_tuple(builder, words, packed)

    return typed_intrinsic(words(i32, i32), codegen)


@cache
def row_words(dim: int) -> Any:
    """(values, factor) → a lane's share of a row (``global_row``) times a factor, as bf16 pairs."""
    values, words = _floats(dim // 8), types.UniTuple(i32, dim // 16)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        scaled = [builder.fmul(value, args[1]) for value in members(builder, args[0], dim // 8)]
        packed = [pack(builder, *scaled[i : i + 2]) for i in range(0, len(scaled), 2)]
        return context.make_tuple(builder, words, packed)

    return typed_intrinsic(words(values, f32), codegen)


@cache
def put_row_words(dim: int, space: str) -> Any:
    """(address, words): the share of a row to where it lies in bf16, "global" or "shared"."""
    words, address = types.UniTuple(i32, dim // 16), i64 if space == "global" else i32
    letter = "l" if space == "global" else "r"

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        flat = members(builder, args[1], dim // 16)
        kind = ir.FunctionType(ir.VoidType(), [args[0].type, _INT, _INT])
        for i in range(0, len(flat), 2):
            text = f"st.{space}.v2.b32 [$0+{32 * i}], {{$1, $2}};"
            assembly = ir.InlineAsm(kind, text, f"{letter},r,r,~{{memory}}", side_effect=True)
            builder.call(assembly, [args[0], flat[i], flat[i + 1]])
        return context.get_dummy_value()

    return typed_intrinsic(types.void(address, words), codegen)


@cache
def invert_column(size: int, pitch: int) -> Any:
    """(matrix, column) → a column of (I + A)⁻¹ for a strictly lower A, by forward substitution.

    A is float32 [size, size] in shared memory; each element is Σ over j ascending, one fused
    multiply-add after another, from a register for each element.
    """
    result = _floats(size)
    four = ir.LiteralStructType([_FLOAT] * 4)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        one, zero = ir.Constant(_FLOAT, 1.0), ir.Constant(_FLOAT, 0.0)
        minus = ir.Constant(_FLOAT, -0.0)  # minus zero less x is −x, of a zero too
        kind = ir.FunctionType(four, [_INT])
        values: list[Any] = []
        for row in range(size):
            own = builder.icmp_signed("==", args[1], ir.Constant(_INT, row))
            total = builder.select(own, one, zero)
            for j in range(0, row, 4):
                text = f"ld.shared.v4.f32 {{$0, $1, $2, $3}}, [$4+{row * pitch + 4 * j}];"
                constraints = "=f,=f,=f,=f,r,~{memory}"
                assembly = ir.InlineAsm(kind, text, constraints, side_effect=True)
                factors = members(builder, builder.call(assembly, [args[0]]), 4)
                for factor, value in zip(factors, values[j : min(j + 4, row)], strict=False):
                    total = builder.fma(builder.fsub(minus, factor), value, total)
            values.append(total)
        return context.make_tuple(builder, result, values)

    return typed_intrinsic(result(i32, i32), codegen)


@cache
def store_column(size: int, pitch: int) -> Any:
    """(address, values): a column of float32 in shared memory, rows ``pitch`` bytes apart."""
    vector = _floats(size)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_INT, _FLOAT])
        for row, value in enumerate(members(builder, args[1], size)):
            text = f"st.shared.f32 [$0+{row * pitch}], $1;"
            assembly = ir.InlineAsm(kind, text, "r,f,~{memory}", side_effect=True)
            builder.call(assembly, [args[0], value])
        return context.get_dummy_value()

    return typed_intrinsic(types.void(i32, vector), codegen)
