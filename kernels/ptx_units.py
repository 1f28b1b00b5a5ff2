"""Units of eight neighbouring bf16, several of several rows to a thread, as intrinsics unroll them.

A thread has ``count`` units of each row, ``step`` apart; unit i of a row lies at ``address`` + i ·
``step`` (bytes), and exists where ``left`` > i · ``step``: ``left`` is what there is from
``address`` on, 0 or less for a thread that has none. Tuples hold row after row. Arithmetic is that
of ``vector.access("bf16")``.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from atlas_kernels._cuda import f32, i32, i64, types
from atlas_kernels.ptx import flatten, typed_intrinsic
from llvmlite import ir

_FLOAT, _INT = ir.FloatType(), ir.IntType(32)


def _words(count: int) -> Any:
    return types.UniTuple(i32, count)


def _floats(count: int) -> Any:
    return types.UniTuple(f32, count)


def _statement(builder: Any, out: Any, text: str, constraints: str, args: list[Any]) -> Any:
    kind = ir.FunctionType(out, [arg.type for arg in args])
    return builder.call(ir.InlineAsm(kind, text, constraints, side_effect=True), args)


def _load_four(builder: Any, member: Any, kind: str, args: list[Any], at: int) -> list[Any]:
    """Four registers from (address, left), ``at`` bytes on, or zeros."""
    letter = "f" if member is _FLOAT else "r"
    outs, constraints = ir.LiteralStructType([member] * 4), f"={letter}," * 4 + "l,r,~{memory}"
    text = (
        "{ .reg .pred p; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;"
        f" setp.gt.s32 p, $5, {at};"
        f" @p ld.global{kind} {{$0, $1, $2, $3}}, [$4+{at}]; }}"
    )
    loaded = _statement(builder, outs, text, constraints, args)
    return [builder.extract_value(loaded, i) for i in range(4)]


@cache
def load_units(rows: int, count: int, step: int) -> Any:
    """(address, row stride, rows that exist, left) → words, or zeros, by plain loads.

    All loads stand before the first use.
    """
    result = _words(4 * rows * count)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, stride, existing, left = args
        values: list[Any] = []
        for row in range(rows):
            is_there = builder.icmp_signed(">", existing, ir.Constant(_INT, row))
            own = [address, builder.select(is_there, left, ir.Constant(_INT, 0))]
            for i in range(count):
                values += _load_four(builder, _INT, ".v4.b32", own, i * step)
            address = builder.add(address, stride)
        return context.make_tuple(builder, result, values)

    return typed_intrinsic(result(i64, i64, i32, i32), codegen)


@cache
def load_weights(count: int, step: int) -> Any:
    """(address, left) → eight float32 for each unit, which no kernel writes, or zeros."""
    result = _floats(8 * count)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values: list[Any] = []
        for at in (i * step + half for i in range(count) for half in (0, 16)):
            values += _load_four(builder, _FLOAT, ".nc.v4.f32", list(args), at)
        return context.make_tuple(builder, result, values)

    return typed_intrinsic(result(i64, i32), codegen)


def _unpacked(builder: Any, words: list[Any]) -> list[Any]:
    """The bf16 values of words, exactly."""
    values = []
    for word in words:
        low = builder.shl(word, ir.Constant(_INT, 16))
        high = builder.and_(word, ir.Constant(_INT, -65536))
        values += [builder.bitcast(bits, _FLOAT) for bits in (low, high)]
    return values


@cache
def unit_squares(count: int) -> Any:
    """(sums, words) → each unit's sum + Σ x², one fused multiply-add an element, ascending."""
    sums = _floats(count)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        totals = flatten(builder, signature.args[:1], args[:1])
        values = _unpacked(builder, flatten(builder, signature.args[1:], args[1:]))
        for i, value in enumerate(values):
            totals[i // 8] = builder.fma(value, value, totals[i // 8])
        return context.make_tuple(builder, sums, totals)

    return typed_intrinsic(sums(sums, _words(4 * count)), codegen)


@cache
def unit_products(rows: int, count: int) -> Any:
    """(words, a factor for each row, weights) → words of x · factor · weight.

    From left to right, and rounded.
    """
    words = _words(4 * rows * count)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values, factors, weights = (
            flatten(builder, signature.args[i : i + 1], args[i : i + 1]) for i in range(3)
        )
        scaled = [
            builder.fmul(builder.fmul(value, factors[i // len(weights)]), weights[i % len(weights)])
            for i, value in enumerate(_unpacked(builder, values))
        ]
        packed = [
            _statement(builder, _INT, "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", scaled[i : i + 2])
            for i in range(0, len(scaled), 2)
        ]
        return context.make_tuple(builder, words, packed)

    return typed_intrinsic(words(words, _floats(rows), _floats(8 * count)), codegen)


@cache
def store_units(rows: int, count: int, row_step: int, step: int) -> Any:
    """(shared address, left, words), the rows ``row_step`` bytes apart."""
    words = _words(4 * rows * count)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values = flatten(builder, signature.args[2:], args[2:])
        for number in range(rows * count):
            row, i = divmod(number, count)
            text = (
                f"{{ .reg .pred p; setp.gt.s32 p, $1, {i * step};"
                f" @p st.shared.v4.b32 [$0+{row * row_step + i * step}], {{$2, $3, $4, $5}}; }}"
            )
            unit = [*args[:2], *values[4 * number : 4 * number + 4]]
            _statement(builder, ir.VoidType(), text, "r,r,r,r,r,r,~{memory}", unit)
        return context.get_dummy_value()

    return typed_intrinsic(types.void(i32, i32, words), codegen)


@cache
def store_sums(rows: int, count: int, row_step: int, step: int) -> Any:
    """(shared address, sums): float32, a row's ``step`` bytes apart."""
    sums = _floats(rows * count)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        for number, value in enumerate(flatten(builder, signature.args[1:], args[1:])):
            row, i = divmod(number, count)
            text = f"st.shared.f32 [$0+{row * row_step + i * step}], $1;"
            _statement(builder, ir.VoidType(), text, "r,f,~{memory}", [args[0], value])
        return context.get_dummy_value()

    return typed_intrinsic(types.void(i32, sums), codegen)


@cache
def load_sums(rows: int, row_step: int) -> Any:
    """(shared address) → a float32 of each row."""
    sums = _floats(rows)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values = [
            _statement(
                builder, _FLOAT, f"ld.shared.f32 $0, [$1+{row * row_step}];", "=f,r,~{memory}", args
            )
            for row in range(rows)
        ]
        return context.make_tuple(builder, sums, values)

    return typed_intrinsic(sums(i32), codegen)
