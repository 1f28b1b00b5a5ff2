"""The SIMD vocabulary: scalars, 16 float32 lanes, masks (``simd_integer``: integers and bytes).

Every operation is one LLVM vector operation, which LLVM splits where the machine's registers are
narrower: the same body serves AVX-512, AVX2 and plain targets. Nothing reassociates: a lane's
result depends on that lane's inputs and the written order alone.
"""

# mypy: ignore-errors
from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types

from atlas.backends.cpu.bodies.vectors import (
    F32,
    F32V,
    I8,
    I16,
    I32,
    I32V,
    LANES,
    call,
    constant_vector,
    f32x16,
    fold,
    i32x16,
    mask16,
    operation,
    pointer_to,
    repeat,
)
from atlas.backends.cpu.target import simd_level

# -- scalars ----------------------------------------------------------------------------------


def _scalar_load(name: str, result: types.Type, stored: ir.Type, widen: str | None) -> Any:
    def build(builder: ir.IRBuilder, values: Any) -> Any:
        value = builder.load(pointer_to(builder, values[0], stored), align=1)
        return getattr(builder, widen)(value, ir.IntType(64)) if widen else value

    build.__name__ = name
    return operation(result, types.int64)(build)


load_f32 = _scalar_load("load_f32", types.float32, F32, None)
load_i32 = _scalar_load("load_i32", types.int64, I32, "sext")
load_u8 = _scalar_load("load_u8", types.int64, I8, "zext")
load_i8 = _scalar_load("load_i8", types.int64, I8, "sext")
load_i64 = _scalar_load("load_i64", types.int64, ir.IntType(64), None)


def _widen_half(builder: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    """float32 of i16 lanes that hold float16. Without F16C, fpext would be a library call."""
    vector = isinstance(bits.type, ir.VectorType)
    lanes = bits.type.count if vector else 1
    single = ir.VectorType(F32, lanes) if vector else F32
    if simd_level() != "plain":
        half = ir.VectorType(ir.HalfType(), lanes) if vector else ir.HalfType()
        return builder.fpext(builder.bitcast(bits, half), single)

    def constant(kind: ir.Type, value: float | int) -> ir.Constant:
        return constant_vector(kind, lanes, value) if vector else ir.Constant(kind, value)

    wide = builder.zext(bits, ir.VectorType(I32, lanes) if vector else I32)
    sign = builder.shl(builder.and_(wide, constant(I32, 0x8000)), constant(I32, 16))
    size = builder.shl(builder.and_(wide, constant(I32, 0x7FFF)), constant(I32, 13))
    finite = builder.fmul(builder.bitcast(size, single), constant(F32, 2.0**112))
    special = builder.icmp_unsigned(">=", size, constant(I32, 0x7C00 << 13))
    infinite = builder.or_(size, constant(I32, 0x7F800000))
    magnitude = builder.select(special, infinite, builder.bitcast(finite, size.type))
    return builder.bitcast(builder.or_(sign, magnitude), single)


@operation(types.float32, types.int64)
def load_f16_scalar(builder, values):
    return _widen_half(builder, builder.load(pointer_to(builder, values[0], I16), align=2))


@operation(types.float32, types.int64)
def load_bf16_scalar(builder, values):
    wide = builder.zext(builder.load(pointer_to(builder, values[0], I16), align=2), I32)
    return builder.bitcast(builder.shl(wide, I32(16)), F32)


@operation(types.void, types.int64, types.float32)
def store_f32(builder, values):
    builder.store(values[1], pointer_to(builder, values[0], F32), align=4)


@operation(types.void, types.int64, types.int64)
def store_i32(builder, values):
    builder.store(builder.trunc(values[1], I32), pointer_to(builder, values[0], I32), align=4)


@operation(types.void, types.int64, types.int64)
def store_i8(builder, values):
    builder.store(builder.trunc(values[1], I8), pointer_to(builder, values[0], I8), align=1)


@operation(types.float32, types.int64)
def bits_f32(builder, values):
    """The float32 whose bits are the low half of an argument."""
    return builder.bitcast(builder.trunc(values[0], I32), F32)


def _scalar_round(kind: str) -> Any:
    def build(builder: ir.IRBuilder, values: Any) -> Any:
        return call(builder, f"llvm.{kind}.f32", F32, values[0])

    build.__name__ = f"{kind}_f32"
    return operation(types.float32, types.float32)(build)


sqrt_f32 = _scalar_round("sqrt")
rint_f32 = _scalar_round("rint")


@operation(types.float32, types.float32, types.float32, types.float32)
def fma_f32(builder, values):
    """x·y + z, rounded once where the machine can (else product and sum are rounded)."""
    return _multiply_add(builder, values, F32, "f32")


def _multiply_add(builder: ir.IRBuilder, values: Any, kind: ir.Type, suffix: str) -> ir.Value:
    if simd_level() == "plain":  # without the instruction llvm.fma is a library call a lane
        return builder.fadd(builder.fmul(values[0], values[1]), values[2])
    return call(builder, f"llvm.fma.{suffix}", kind, *values)


@operation(types.void, types.int64)
def prefetch(builder, values):
    """Ask for the cache line of an address, which may be anything."""
    pointer = pointer_to(builder, values[0], I8)
    # A read, to stay in every cache level, of data.
    call(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, I32(0), I32(3), I32(1))


# -- float32 lanes ----------------------------------------------------------------------------


@operation(f32x16)
def zeros(builder, values):
    return constant_vector(F32, LANES, 0.0)


@operation(f32x16, types.float32)
def splat(builder, values):
    return repeat(builder, values[0], LANES)


@operation(f32x16, types.int64)
def load(builder, values):
    return builder.load(pointer_to(builder, values[0], F32V), align=4)


@operation(f32x16, types.int64)
def load_f16(builder, values):
    stored = builder.load(pointer_to(builder, values[0], ir.VectorType(I16, LANES)), align=2)
    return _widen_half(builder, stored)


@operation(f32x16, types.int64)
def load_bf16(builder, values):
    stored = builder.load(pointer_to(builder, values[0], ir.VectorType(I16, LANES)), align=2)
    wide = builder.shl(builder.zext(stored, I32V), constant_vector(I32, LANES, 16))
    return builder.bitcast(wide, F32V)


@operation(types.void, types.int64, f32x16)
def store(builder, values):
    builder.store(values[1], pointer_to(builder, values[0], F32V), align=4)


@operation(types.void, types.int64, types.float32)
def store_f16_scalar(builder, values):
    """Round to nearest even; needs F16C (the launch refuses float16 pools on plain targets)."""
    half = builder.fptrunc(values[1], ir.HalfType())
    builder.store(half, pointer_to(builder, values[0], ir.HalfType()), align=2)


def _binary(name: str, method: str) -> Any:
    def build(builder: ir.IRBuilder, values: Any) -> Any:
        return getattr(builder, method)(*values)

    build.__name__ = name
    return operation(f32x16, f32x16, f32x16)(build)


add = _binary("add", "fadd")
sub = _binary("sub", "fsub")
mul = _binary("mul", "fmul")
div = _binary("div", "fdiv")


@operation(f32x16, f32x16, f32x16, f32x16)
def fma(builder, values):
    """x·y + z by lane, rounded once where the machine can."""
    return _multiply_add(builder, values, F32V, "v16f32")


@operation(f32x16, f32x16, f32x16)
def maximum(builder, values):
    """The greater by lane; the second operand where either is NaN."""
    return builder.select(builder.fcmp_ordered(">", *values), *values)


@operation(f32x16, f32x16, f32x16)
def minimum(builder, values):
    return builder.select(builder.fcmp_ordered("<", *values), *values)


@operation(f32x16, f32x16)
def absolute(builder, values):
    return call(builder, "llvm.fabs.v16f32", F32V, values[0])


@operation(f32x16, f32x16)
def rint(builder, values):
    """Nearest integer, halves to even."""
    return call(builder, "llvm.rint.v16f32", F32V, values[0])


@operation(i32x16, f32x16)
def to_i32(builder, values):
    return builder.fptosi(values[0], I32V)


@operation(f32x16, i32x16)
def to_f32(builder, values):
    return builder.sitofp(values[0], F32V)


@operation(f32x16, i32x16)
def power_of_two(builder, values):
    """2ⁿ by lane, −126 ≤ n ≤ 127."""
    biased = builder.add(values[0], constant_vector(I32, LANES, 127))
    return builder.bitcast(builder.shl(biased, constant_vector(I32, LANES, 23)), F32V)


@operation(types.float32, f32x16)
def sum_lanes(builder, values):
    """Σ of the lanes: i and i + 8 first, then + 4, + 2, + 1."""
    return fold(builder, values[0], builder.fadd)


@operation(types.float32, f32x16)
def max_lane(builder, values):
    return fold(
        builder, values[0], lambda a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b)
    )


# -- masks ------------------------------------------------------------------------------------


@operation(mask16, types.int64, types.int64)
def lanes_between(builder, values):
    """Lanes i with low ≤ i < high."""
    lanes = ir.Constant(I32V, list(range(LANES)))
    low, high = (repeat(builder, builder.trunc(value, I32), LANES) for value in values)
    return builder.and_(
        builder.icmp_signed(">=", lanes, low), builder.icmp_signed("<", lanes, high)
    )


@operation(f32x16, mask16, f32x16, f32x16)
def select(builder, values):
    return builder.select(*values)


@operation(f32x16, types.int64, types.int64)
def load_first(builder, values):
    """The first ``count`` lanes from memory, zeros in the others."""
    pointer = pointer_to(builder, values[0], F32V)
    name = "llvm.masked.load.v16f32.p0"
    zero = constant_vector(F32, LANES, 0.0)
    return call(builder, name, F32V, pointer, I32(4), _first(builder, values[1]), zero)


@operation(types.void, types.int64, f32x16, types.int64)
def store_first(builder, values):
    """The first ``count`` lanes to memory."""
    pointer = pointer_to(builder, values[0], F32V)
    mask = _first(builder, values[2])
    name = "llvm.masked.store.v16f32.p0"
    call(builder, name, ir.VoidType(), values[1], pointer, I32(4), mask)


def _first(builder: ir.IRBuilder, count: ir.Value) -> ir.Value:
    lanes = ir.Constant(I32V, list(range(LANES)))
    return builder.icmp_signed("<", lanes, repeat(builder, builder.trunc(count, I32), LANES))


@operation(types.float32, f32x16)
def first_lane(builder, values):
    return builder.extract_element(values[0], I32(0))


@operation(mask16, f32x16, f32x16)
def less(builder, values):
    return builder.fcmp_ordered("<", *values)
