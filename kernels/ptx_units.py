"""Units of eight neighbouring bf16 of a row, several to a thread, as intrinsics unroll them.

A thread has ``count`` units; unit i lies at ``address`` + i · ``step`` (bytes), and exists where
``left`` > i · ``step``: ``left`` is what there is from ``address`` on, 0 or less for a thread that
has none. Arithmetic is that of ``vector.access("bf16")``.
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
def load_units(count: int, step: int) -> Any:
    """(address, left) → words, or zeros, by plain loads; all stand before the first use."""
    result = _words(4 * count)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values: list[Any] = []
        for i in range(count):
            values += _load_four(builder, _INT, ".v4.b32", list(args), i * step)
        return context.make_tuple(builder, result, values)

    return typed_intrinsic(result(i64, i32), codegen)


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
def unit_products(count: int) -> Any:
    """(words, factor, weights) → words of x · factor · weight, from left to right, and rounded."""
    words = _words(4 * count)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values, weights = (
            flatten(builder, signature.args[i : i + 1], args[i : i + 1]) for i in (0, 2)
        )
        scaled = [
            builder.fmul(builder.fmul(value, args[1]), weight)
            for value, weight in zip(_unpacked(builder, values), weights, strict=True)
        ]
        packed = [
            _statement(builder, _INT, "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", scaled[i : i + 2])
            for i in range(0, len(scaled), 2)
        ]
        return context.make_tuple(builder, words, packed)

    return typed_intrinsic(words(words, f32, _floats(8 * count)), codegen)


@cache
def store_units(count: int, step: int) -> Any:
    """(shared address, left, words)."""
    words = _words(4 * count)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values = flatten(builder, signature.args[2:], args[2:])
        for i in range(count):
            text = (
                f"{{ .reg .pred p; setp.gt.s32 p, $1, {i * step};"
                f" @p st.shared.v4.b32 [$0+{i * step}], {{$2, $3, $4, $5}}; }}"
            )
            unit = [*args[:2], *values[4 * i : 4 * i + 4]]
            _statement(builder, ir.VoidType(), text, "r,r,r,r,r,r,~{memory}", unit)
        return context.get_dummy_value()

    return typed_intrinsic(types.void(i32, i32, words), codegen)
