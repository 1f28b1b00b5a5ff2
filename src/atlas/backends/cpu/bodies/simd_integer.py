"""The SIMD vocabulary: 16 int32 lanes, 64 bytes, and int8 dot products.

Only the dot products name instructions, chosen by ``atlas.backends.cpu.target``; their sums are
exact on every target.
"""

# mypy: ignore-errors
from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types

from atlas.backends.cpu.bodies.vectors import (
    I8,
    I8V,
    I16,
    I32,
    I32V,
    LANES,
    call,
    constant_vector,
    fold,
    i32x16,
    operation,
    pointer_to,
    repeat,
    u8x64,
)
from atlas.backends.cpu.target import simd_level


@operation(i32x16, types.int64)
def splat_i32(builder, values):
    return repeat(builder, builder.trunc(values[0], I32), LANES)


@operation(i32x16, types.int64)
def broadcast_i32(builder, values):
    """The four bytes at an address in every lane."""
    return repeat(builder, builder.load(pointer_to(builder, values[0], I32), align=1), LANES)


@operation(i32x16, i32x16, i32x16)
def add_i32(builder, values):
    return builder.add(*values)


@operation(i32x16, i32x16, i32x16)
def mul_i32(builder, values):
    return builder.mul(*values)


def _byte_lanes(name: str, widen: str) -> Any:
    def build(builder: ir.IRBuilder, values: Any) -> Any:
        stored = builder.load(pointer_to(builder, values[0], ir.VectorType(I8, LANES)), align=1)
        return getattr(builder, widen)(stored, I32V)

    build.__name__ = name
    return operation(i32x16, types.int64)(build)


load_u8_lanes = _byte_lanes("load_u8_lanes", "zext")
load_i8_lanes = _byte_lanes("load_i8_lanes", "sext")


@operation(types.void, types.int64, i32x16)
def store_i8_lanes(builder, values):
    """The low byte of each lane, 16 bytes."""
    stored = ir.VectorType(I8, LANES)
    builder.store(builder.trunc(values[1], stored), pointer_to(builder, values[0], stored), align=1)


@operation(types.int64, i32x16)
def sum_i32(builder, values):
    return builder.sext(fold(builder, values[0], builder.add), ir.IntType(64))


@operation(u8x64, types.int64)
def load_bytes(builder, values):
    return builder.load(pointer_to(builder, values[0], I8V), align=1)


@operation(u8x64, u8x64)
def low_nibbles(builder, values):
    return builder.and_(values[0], constant_vector(I8, 64, 15))


@operation(u8x64, u8x64)
def high_nibbles(builder, values):
    return builder.lshr(values[0], constant_vector(I8, 64, 4))


def _bit_pair(shift: int) -> Any:
    def build(builder: ir.IRBuilder, values: Any) -> Any:
        pair = builder.and_(
            builder.lshr(values[0], constant_vector(I8, 64, shift)), constant_vector(I8, 64, 3)
        )
        return builder.shl(pair, constant_vector(I8, 64, 4))

    build.__name__ = f"bit_pair_{shift}"
    return operation(u8x64, u8x64)(build)


bit_pair_0, bit_pair_2, bit_pair_4, bit_pair_6 = (_bit_pair(shift) for shift in (0, 2, 4, 6))
"""Two bits of each byte, moved to bits 4 and 5."""


@operation(u8x64, u8x64, u8x64)
def or_bytes(builder, values):
    return builder.or_(*values)


@operation(i32x16, i32x16, u8x64, i32x16)
def dot4(builder, values):
    """sum + Σ₄ u8·s8 by 32-bit lane; exact on every target."""
    total, unsigned, signed = values
    if simd_level() == "avx512":
        unsigned = builder.bitcast(unsigned, I32V)
        name = "llvm.x86.avx512.vpdpbusd.512"
        return call(builder, name, I32V, total, unsigned, signed)
    return builder.add(total, _dot4_pairs(builder, unsigned, signed))


@operation(i32x16, i32x16, u8x64, i32x16)
def dot4_small(builder, values):
    """``dot4`` on AVX2, of bytes up to 127: sums of two products fit its 16 bits."""
    total, unsigned, signed = values
    return builder.add(total, _dot4_bytes(builder, unsigned, builder.bitcast(signed, I8V)))


@operation(i32x16, i32x16, u8x64, i32x16)
def dot4_offset(builder, values):
    """sum + Σ₄ (u8 − 128)·s8 on AVX2, s8 not −128: sizes times turned signs fit as well."""
    total, unsigned, signed = values
    weights = builder.xor(unsigned, constant_vector(I8, 64, -128))  # u8 − 128
    signed = builder.bitcast(signed, I8V)
    zeros = constant_vector(I8, 64, 0)
    is_negative = builder.icmp_signed("<", weights, zeros)
    sizes = builder.select(is_negative, builder.sub(zeros, weights), weights)  # up to 128
    parts = []
    for start in (0, 32):
        part = ir.Constant(ir.VectorType(I32, 32), list(range(start, start + 32)))
        x, w = (builder.shuffle_vector(v, v, part) for v in (signed, weights))
        parts.append(call(builder, "llvm.x86.avx2.psign.b", ir.VectorType(I8, 32), x, w))
    turned = builder.shuffle_vector(*parts, ir.Constant(ir.VectorType(I32, 64), list(range(64))))
    return builder.add(total, _dot4_bytes(builder, sizes, turned))


def _dot4_bytes(builder: ir.IRBuilder, unsigned: ir.Value, signed: ir.Value) -> ir.Value:
    """Fours of u8·s8, whose sums of two fit 16 bits, by ``pmaddubsw`` and ``pmaddwd``."""
    ones, parts = constant_vector(I16, 16, 1), []
    for start in (0, 32):
        part = ir.Constant(ir.VectorType(I32, 32), list(range(start, start + 32)))
        x, y = (builder.shuffle_vector(v, v, part) for v in (unsigned, signed))
        pairs = call(builder, "llvm.x86.avx2.pmadd.ub.sw", ir.VectorType(I16, 16), x, y)
        parts.append(call(builder, "llvm.x86.avx2.pmadd.wd", ir.VectorType(I32, 8), pairs, ones))
    return builder.shuffle_vector(*parts, ir.Constant(I32V, list(range(16))))


def _dot4_pairs(builder: ir.IRBuilder, unsigned: ir.Value, signed: ir.Value) -> ir.Value:
    """Even and odd bytes widened to 16 bits, multiplied and added in pairs: never saturates."""
    halves = ir.VectorType(I16, 32)
    a, b = builder.bitcast(unsigned, halves), builder.bitcast(signed, halves)
    eight = constant_vector(I16, 32, 8)
    even = _pair_sum(
        builder,
        builder.and_(a, constant_vector(I16, 32, 255)),
        builder.ashr(builder.shl(b, eight), eight),
    )
    odd = _pair_sum(builder, builder.lshr(a, eight), builder.ashr(b, eight))
    return builder.add(even, odd)


def _pair_sum(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """i16 pairs: a₀b₀ + a₁b₁ in 32 bits (``pmaddwd`` on AVX2, generic operations elsewhere)."""
    if simd_level() == "avx2":
        parts = []
        for start in (0, 16):
            part = ir.Constant(ir.VectorType(I32, 16), list(range(start, start + 16)))
            x, y = builder.shuffle_vector(a, a, part), builder.shuffle_vector(b, b, part)
            parts.append(call(builder, "llvm.x86.avx2.pmadd.wd", ir.VectorType(I32, 8), x, y))
        return builder.shuffle_vector(*parts, ir.Constant(I32V, list(range(16))))
    products = []
    for parity in (0, 1):
        lanes = ir.Constant(ir.VectorType(I32, 16), list(range(parity, 32, 2)))
        x, y = builder.shuffle_vector(a, a, lanes), builder.shuffle_vector(b, b, lanes)
        products.append(builder.mul(builder.sext(x, I32V), builder.sext(y, I32V)))
    return builder.add(*products)
