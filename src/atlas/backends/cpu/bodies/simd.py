"""The SIMD vocabulary: 16 float32 or int32 lanes, and 64 bytes, as Numba values.

Every operation is one LLVM vector operation, which LLVM splits where the machine's registers are
narrower: the same body serves AVX-512, AVX2 and plain targets. Only ``dot4`` (int8 dot products)
names instructions, chosen by ``atlas.backends.cpu.target``. Nothing reassociates: a lane's result
depends on that lane's inputs and the written order alone.
"""

# mypy: ignore-errors
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, models, register_model

from atlas.backends.cpu.target import simd_level

LANES = 16


class Vector(types.Type):
    """Numba type of a vector: ``element`` is f32, i32, i8 (bytes) or i1 (a mask)."""

    def __init__(self, element: str, lanes: int) -> None:
        self.element = element
        self.lanes = lanes
        super().__init__(name=f"{element}x{lanes}")


_ELEMENTS = {
    "f32": ir.FloatType(),
    "i32": ir.IntType(32),
    "i8": ir.IntType(8),
    "i1": ir.IntType(1),
}


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Vector) -> None:
        super().__init__(dmm, fe_type, ir.VectorType(_ELEMENTS[fe_type.element], fe_type.lanes))


f32x16 = Vector("f32", 16)
i32x16 = Vector("i32", 16)
u8x64 = Vector("i8", 64)
mask16 = Vector("i1", 16)

_F32, _I32, _I16, _I8 = ir.FloatType(), ir.IntType(32), ir.IntType(16), ir.IntType(8)
_F32V = ir.VectorType(_F32, 16)
_I32V = ir.VectorType(_I32, 16)
_I8V = ir.VectorType(_I8, 64)

device = numba.njit(error_model="numpy", no_cpython_wrapper=True, inline="never")
"""Decorator of functions that bodies call; LLVM inlines them."""

Builder = Callable[[ir.IRBuilder, Any], Any]


def _operation(result: types.Type, *arguments: types.Type) -> Callable[[Builder], Any]:
    """An intrinsic with the given signature whose code is what the decorated builder emits."""

    def decorate(build: Builder) -> Any:
        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
            out = build(builder, values)
            return context.get_dummy_value() if result == types.void else out

        names = ", ".join(f"a{i}" for i in range(len(arguments)))
        scope = {"codegen": codegen, "result": result, "arguments": arguments}
        source = f"def {build.__name__}(typing_context{', ' if names else ''}{names}):\n"
        source += "    return result(*arguments), codegen\n"
        exec(source, scope)  # Numba wants one named parameter for each argument
        function = scope[build.__name__]
        function.__module__ = __name__
        return intrinsic(function)

    return decorate


def _pointer(builder: ir.IRBuilder, address: ir.Value, pointee: ir.Type) -> ir.Value:
    return builder.inttoptr(address, pointee.as_pointer())


def _splat(builder: ir.IRBuilder, scalar: ir.Value, lanes: int) -> ir.Value:
    vector = ir.VectorType(scalar.type, lanes)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, _I32(0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(_I32, lanes), [0] * lanes))


def _constant(element: ir.Type, lanes: int, value: float | int) -> ir.Constant:
    return ir.Constant(ir.VectorType(element, lanes), [value] * lanes)


def _call(builder: ir.IRBuilder, name: str, result: ir.Type, *values: ir.Value) -> ir.Value:
    signature = ir.FunctionType(result, [value.type for value in values])
    function = cgutils.get_or_insert_function(builder.module, signature, name)
    return builder.call(function, values)


# -- scalars ----------------------------------------------------------------------------------


def _scalar_load(name: str, result: types.Type, stored: ir.Type, widen: str | None) -> Any:
    def build(builder: ir.IRBuilder, values: Any) -> Any:
        value = builder.load(_pointer(builder, values[0], stored), align=1)
        return getattr(builder, widen)(value, ir.IntType(64)) if widen else value

    build.__name__ = name
    return _operation(result, types.int64)(build)


load_f32 = _scalar_load("load_f32", types.float32, _F32, None)
load_i32 = _scalar_load("load_i32", types.int64, _I32, "sext")
load_u8 = _scalar_load("load_u8", types.int64, _I8, "zext")
load_i8 = _scalar_load("load_i8", types.int64, _I8, "sext")
load_i64 = _scalar_load("load_i64", types.int64, ir.IntType(64), None)


def _widen_half(builder: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    """float32 of i16 lanes that hold float16. Without F16C, fpext would be a library call."""
    vector = isinstance(bits.type, ir.VectorType)
    lanes = bits.type.count if vector else 1
    single = ir.VectorType(_F32, lanes) if vector else _F32
    if simd_level() != "plain":
        half = ir.VectorType(ir.HalfType(), lanes) if vector else ir.HalfType()
        return builder.fpext(builder.bitcast(bits, half), single)

    def constant(kind: ir.Type, value: float | int) -> ir.Constant:
        return _constant(kind, lanes, value) if vector else ir.Constant(kind, value)

    wide = builder.zext(bits, ir.VectorType(_I32, lanes) if vector else _I32)
    sign = builder.shl(builder.and_(wide, constant(_I32, 0x8000)), constant(_I32, 16))
    size = builder.shl(builder.and_(wide, constant(_I32, 0x7FFF)), constant(_I32, 13))
    finite = builder.fmul(builder.bitcast(size, single), constant(_F32, 2.0**112))
    special = builder.icmp_unsigned(">=", size, constant(_I32, 0x7C00 << 13))
    infinite = builder.or_(size, constant(_I32, 0x7F800000))
    magnitude = builder.select(special, infinite, builder.bitcast(finite, size.type))
    return builder.bitcast(builder.or_(sign, magnitude), single)


@_operation(types.float32, types.int64)
def load_f16_scalar(builder, values):
    return _widen_half(builder, builder.load(_pointer(builder, values[0], _I16), align=2))


@_operation(types.float32, types.int64)
def load_bf16_scalar(builder, values):
    wide = builder.zext(builder.load(_pointer(builder, values[0], _I16), align=2), _I32)
    return builder.bitcast(builder.shl(wide, _I32(16)), _F32)


@_operation(types.void, types.int64, types.float32)
def store_f32(builder, values):
    builder.store(values[1], _pointer(builder, values[0], _F32), align=4)


@_operation(types.void, types.int64, types.int64)
def store_i32(builder, values):
    builder.store(builder.trunc(values[1], _I32), _pointer(builder, values[0], _I32), align=4)


@_operation(types.void, types.int64, types.int64)
def store_i8(builder, values):
    builder.store(builder.trunc(values[1], _I8), _pointer(builder, values[0], _I8), align=1)


@_operation(types.float32, types.int64)
def bits_f32(builder, values):
    """The float32 whose bits are the low half of an argument."""
    return builder.bitcast(builder.trunc(values[0], _I32), _F32)


def _scalar_round(kind: str) -> Any:
    def build(builder: ir.IRBuilder, values: Any) -> Any:
        return _call(builder, f"llvm.{kind}.f32", _F32, values[0])

    build.__name__ = f"{kind}_f32"
    return _operation(types.float32, types.float32)(build)


sqrt_f32 = _scalar_round("sqrt")
rint_f32 = _scalar_round("rint")


@_operation(types.float32, types.float32, types.float32, types.float32)
def fma_f32(builder, values):
    """x·y + z, rounded once where the machine can (else product and sum are rounded)."""
    return _multiply_add(builder, values, _F32, "f32")


def _multiply_add(builder: ir.IRBuilder, values: Any, kind: ir.Type, suffix: str) -> ir.Value:
    if simd_level() == "plain":  # without the instruction llvm.fma is a library call a lane
        return builder.fadd(builder.fmul(values[0], values[1]), values[2])
    return _call(builder, f"llvm.fma.{suffix}", kind, *values)


@_operation(types.void, types.int64)
def prefetch(builder, values):
    """Ask for the cache line of an address, which may be anything."""
    pointer = _pointer(builder, values[0], _I8)
    # A read, to stay in every cache level, of data.
    _call(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, _I32(0), _I32(3), _I32(1))


# -- float32 lanes ----------------------------------------------------------------------------


@_operation(f32x16)
def zeros(builder, values):
    return _constant(_F32, LANES, 0.0)


@_operation(f32x16, types.float32)
def splat(builder, values):
    return _splat(builder, values[0], LANES)


@_operation(f32x16, types.int64)
def load(builder, values):
    return builder.load(_pointer(builder, values[0], _F32V), align=4)


@_operation(f32x16, types.int64)
def load_f16(builder, values):
    stored = builder.load(_pointer(builder, values[0], ir.VectorType(_I16, LANES)), align=2)
    return _widen_half(builder, stored)


@_operation(f32x16, types.int64)
def load_bf16(builder, values):
    stored = builder.load(_pointer(builder, values[0], ir.VectorType(_I16, LANES)), align=2)
    wide = builder.shl(builder.zext(stored, _I32V), _constant(_I32, LANES, 16))
    return builder.bitcast(wide, _F32V)


@_operation(types.void, types.int64, f32x16)
def store(builder, values):
    builder.store(values[1], _pointer(builder, values[0], _F32V), align=4)


@_operation(types.void, types.int64, types.float32)
def store_f16_scalar(builder, values):
    """Round to nearest even; needs F16C (the launch refuses float16 pools on plain targets)."""
    half = builder.fptrunc(values[1], ir.HalfType())
    builder.store(half, _pointer(builder, values[0], ir.HalfType()), align=2)


def _binary(name: str, method: str) -> Any:
    def build(builder: ir.IRBuilder, values: Any) -> Any:
        return getattr(builder, method)(*values)

    build.__name__ = name
    return _operation(f32x16, f32x16, f32x16)(build)


add = _binary("add", "fadd")
sub = _binary("sub", "fsub")
mul = _binary("mul", "fmul")
div = _binary("div", "fdiv")


@_operation(f32x16, f32x16, f32x16, f32x16)
def fma(builder, values):
    """x·y + z by lane, rounded once where the machine can."""
    return _multiply_add(builder, values, _F32V, "v16f32")


@_operation(f32x16, f32x16, f32x16)
def maximum(builder, values):
    """The greater by lane; the second operand where either is NaN."""
    return builder.select(builder.fcmp_ordered(">", *values), *values)


@_operation(f32x16, f32x16, f32x16)
def minimum(builder, values):
    return builder.select(builder.fcmp_ordered("<", *values), *values)


@_operation(f32x16, f32x16)
def absolute(builder, values):
    return _call(builder, "llvm.fabs.v16f32", _F32V, values[0])


@_operation(f32x16, f32x16)
def rint(builder, values):
    """Nearest integer, halves to even."""
    return _call(builder, "llvm.rint.v16f32", _F32V, values[0])


@_operation(i32x16, f32x16)
def to_i32(builder, values):
    return builder.fptosi(values[0], _I32V)


@_operation(f32x16, i32x16)
def to_f32(builder, values):
    return builder.sitofp(values[0], _F32V)


@_operation(f32x16, i32x16)
def power_of_two(builder, values):
    """2ⁿ by lane, −126 ≤ n ≤ 127."""
    biased = builder.add(values[0], _constant(_I32, LANES, 127))
    return builder.bitcast(builder.shl(biased, _constant(_I32, LANES, 23)), _F32V)


def _fold(builder: ir.IRBuilder, vector: ir.Value, combine: Any) -> ir.Value:
    """Lanes i and i + 8, then + 4, + 2, + 1: the one order of every horizontal reduction."""
    width = vector.type.count
    while width > 1:
        width //= 2
        low = ir.Constant(ir.VectorType(_I32, width), list(range(width)))
        high = ir.Constant(ir.VectorType(_I32, width), list(range(width, 2 * width)))
        vector = combine(
            builder.shuffle_vector(vector, vector, low),
            builder.shuffle_vector(vector, vector, high),
        )
    return builder.extract_element(vector, _I32(0))


@_operation(types.float32, f32x16)
def sum_lanes(builder, values):
    """Σ of the lanes: i and i + 8 first, then + 4, + 2, + 1."""
    return _fold(builder, values[0], builder.fadd)


@_operation(types.float32, f32x16)
def max_lane(builder, values):
    return _fold(
        builder, values[0], lambda a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b)
    )


# -- masks ------------------------------------------------------------------------------------


@_operation(mask16, types.int64, types.int64)
def lanes_between(builder, values):
    """Lanes i with low ≤ i < high."""
    lanes = ir.Constant(_I32V, list(range(LANES)))
    low, high = (_splat(builder, builder.trunc(value, _I32), LANES) for value in values)
    return builder.and_(
        builder.icmp_signed(">=", lanes, low), builder.icmp_signed("<", lanes, high)
    )


@_operation(f32x16, mask16, f32x16, f32x16)
def select(builder, values):
    return builder.select(*values)


@_operation(f32x16, types.int64, types.int64)
def load_first(builder, values):
    """The first ``count`` lanes from memory, zeros in the others."""
    pointer = _pointer(builder, values[0], _F32V)
    name = "llvm.masked.load.v16f32.p0"
    zero = _constant(_F32, LANES, 0.0)
    return _call(builder, name, _F32V, pointer, _I32(4), _first(builder, values[1]), zero)


@_operation(types.void, types.int64, f32x16, types.int64)
def store_first(builder, values):
    """The first ``count`` lanes to memory."""
    pointer = _pointer(builder, values[0], _F32V)
    mask = _first(builder, values[2])
    name = "llvm.masked.store.v16f32.p0"
    _call(builder, name, ir.VoidType(), values[1], pointer, _I32(4), mask)


def _first(builder: ir.IRBuilder, count: ir.Value) -> ir.Value:
    lanes = ir.Constant(_I32V, list(range(LANES)))
    return builder.icmp_signed("<", lanes, _splat(builder, builder.trunc(count, _I32), LANES))


@_operation(types.float32, f32x16)
def first_lane(builder, values):
    return builder.extract_element(values[0], _I32(0))


@_operation(mask16, f32x16, f32x16)
def less(builder, values):
    return builder.fcmp_ordered("<", *values)


# -- integers and bytes -----------------------------------------------------------------------


@_operation(i32x16, types.int64)
def splat_i32(builder, values):
    return _splat(builder, builder.trunc(values[0], _I32), LANES)


@_operation(i32x16, types.int64)
def broadcast_i32(builder, values):
    """The four bytes at an address in every lane."""
    return _splat(builder, builder.load(_pointer(builder, values[0], _I32), align=1), LANES)


@_operation(i32x16, i32x16, i32x16)
def add_i32(builder, values):
    return builder.add(*values)


@_operation(i32x16, i32x16, i32x16)
def mul_i32(builder, values):
    return builder.mul(*values)


def _byte_lanes(name: str, widen: str) -> Any:
    def build(builder: ir.IRBuilder, values: Any) -> Any:
        stored = builder.load(_pointer(builder, values[0], ir.VectorType(_I8, LANES)), align=1)
        return getattr(builder, widen)(stored, _I32V)

    build.__name__ = name
    return _operation(i32x16, types.int64)(build)


load_u8_lanes = _byte_lanes("load_u8_lanes", "zext")
load_i8_lanes = _byte_lanes("load_i8_lanes", "sext")


@_operation(types.void, types.int64, i32x16)
def store_i8_lanes(builder, values):
    """The low byte of each lane, 16 bytes."""
    stored = ir.VectorType(_I8, LANES)
    builder.store(builder.trunc(values[1], stored), _pointer(builder, values[0], stored), align=1)


@_operation(types.int64, i32x16)
def sum_i32(builder, values):
    return builder.sext(_fold(builder, values[0], builder.add), ir.IntType(64))


@_operation(u8x64, types.int64)
def load_bytes(builder, values):
    return builder.load(_pointer(builder, values[0], _I8V), align=1)


@_operation(u8x64, u8x64)
def low_nibbles(builder, values):
    return builder.and_(values[0], _constant(_I8, 64, 15))


@_operation(u8x64, u8x64)
def high_nibbles(builder, values):
    return builder.lshr(values[0], _constant(_I8, 64, 4))


def _bit_pair(shift: int) -> Any:
    def build(builder: ir.IRBuilder, values: Any) -> Any:
        pair = builder.and_(
            builder.lshr(values[0], _constant(_I8, 64, shift)), _constant(_I8, 64, 3)
        )
        return builder.shl(pair, _constant(_I8, 64, 4))

    build.__name__ = f"bit_pair_{shift}"
    return _operation(u8x64, u8x64)(build)


bit_pair_0, bit_pair_2, bit_pair_4, bit_pair_6 = (_bit_pair(shift) for shift in (0, 2, 4, 6))
"""Two bits of each byte, moved to bits 4 and 5."""


@_operation(u8x64, u8x64, u8x64)
def or_bytes(builder, values):
    return builder.or_(*values)


@_operation(i32x16, i32x16, u8x64, i32x16)
def dot4(builder, values):
    """sum + Σ₄ u8·s8 by 32-bit lane; exact on every target."""
    total, unsigned, signed = values
    if simd_level() == "avx512":
        unsigned = builder.bitcast(unsigned, _I32V)
        name = "llvm.x86.avx512.vpdpbusd.512"
        return _call(builder, name, _I32V, total, unsigned, signed)
    return builder.add(total, _dot4_pairs(builder, unsigned, signed))


def _dot4_pairs(builder: ir.IRBuilder, unsigned: ir.Value, signed: ir.Value) -> ir.Value:
    """Even and odd bytes widened to 16 bits, multiplied and added in pairs: never saturates."""
    halves = ir.VectorType(_I16, 32)
    a, b = builder.bitcast(unsigned, halves), builder.bitcast(signed, halves)
    eight = _constant(_I16, 32, 8)
    even = _pair_sum(
        builder,
        builder.and_(a, _constant(_I16, 32, 255)),
        builder.ashr(builder.shl(b, eight), eight),
    )
    odd = _pair_sum(builder, builder.lshr(a, eight), builder.ashr(b, eight))
    return builder.add(even, odd)


def _pair_sum(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """i16 pairs: a₀b₀ + a₁b₁ in 32 bits (``pmaddwd`` on AVX2, generic operations elsewhere)."""
    if simd_level() == "avx2":
        parts = []
        for start in (0, 16):
            part = ir.Constant(ir.VectorType(_I32, 16), list(range(start, start + 16)))
            x, y = builder.shuffle_vector(a, a, part), builder.shuffle_vector(b, b, part)
            parts.append(_call(builder, "llvm.x86.avx2.pmadd.wd", ir.VectorType(_I32, 8), x, y))
        return builder.shuffle_vector(*parts, ir.Constant(_I32V, list(range(16))))
    products = []
    for parity in (0, 1):
        lanes = ir.Constant(ir.VectorType(_I32, 16), list(range(parity, 32, 2)))
        x, y = builder.shuffle_vector(a, a, lanes), builder.shuffle_vector(b, b, lanes)
        products.append(builder.mul(builder.sext(x, _I32V), builder.sext(y, _I32V)))
    return builder.add(*products)
