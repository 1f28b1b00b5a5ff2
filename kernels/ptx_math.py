"""Arithmetic whose rounding is stated, and bit-level conversions.

Kernels are compiled with contraction off: ``a * b + c`` rounds twice, ``fma`` once. The functions
named ``fast_*`` are the hardware's approximations: the same bits on every GPU of one architecture,
not promised between architectures. For ``exp`` and ``tanh`` to 1–2 ulp use ``math``.
"""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import device, f32, i32, i64, types
from atlas_kernels.ptx import instruction, typed_intrinsic
from llvmlite import ir


def _pure(outs: str, ins: str, text: str) -> Any:
    return instruction(outs, ins, text, ordered=False)


fma = _pure("f", "f f f", "fma.rn.f32 $0, $1, $2, $3;")
"""a · b + c, rounded once."""
add = _pure("f", "f f", "add.rn.f32 $0, $1, $2;")
mul = _pure("f", "f f", "mul.rn.f32 $0, $1, $2;")
"""a + b and a · b rounded to nearest even: as the operators do, but spelled out."""
maximum = _pure("f", "f f", "max.f32 $0, $1, $2;")
minimum = _pure("f", "f f", "min.f32 $0, $1, $2;")
"""The greater or lesser of two numbers; of a number and a NaN, the number."""

fast_exp2 = _pure("f", "f", "ex2.approx.ftz.f32 $0, $1;")
"""2 to the x, within 2 ulp; 0 for a subnormal result and for −inf."""
fast_log2 = _pure("f", "f", "lg2.approx.ftz.f32 $0, $1;")
"""log2 x, absolute error below 2**-22 for x in [0.5, 2]."""
fast_rsqrt = _pure("f", "f", "rsqrt.approx.ftz.f32 $0, $1;")
"""1 / √x, relative error at most 2**-22.9."""
fast_reciprocal = _pure("f", "f", "rcp.approx.ftz.f32 $0, $1;")
"""1 / x, within 1 ulp."""
fast_tanh = _pure("f", "f", "tanh.approx.f32 $0, $1;")
"""tanh x, relative error at most 2**-11: enough before a rounding to bf16, not for float32."""

divide = _pure(
    "f",
    "f f",
    "{ .reg .f32 d, r, e, q; neg.f32 d, $2; rcp.approx.ftz.f32 r, $2;"
    " fma.rn.f32 e, d, r, 0f3F800000; fma.rn.f32 r, r, e, r;"
    " mul.rn.f32 q, $1, r; fma.rn.f32 e, d, q, $1; fma.rn.f32 $0, e, r, q; }",
)
"""a / b for b in [2**-100, 2**126], rounded to nearest where nothing is subnormal. It has no slow
path: ``/`` is a call for the assembler, which serialises ``wgmma`` in the same kernel."""

float_bits = _pure("r", "f", "mov.b32 $0, $1;")
bits_float = _pure("f", "r", "mov.b32 $0, $1;")
"""The 32 bits of a float32, and back."""

pack_bf16 = _pure("r", "f f", "cvt.rn.bf16x2.f32 $0, $2, $1;")
pack_f16 = _pure("r", "f f", "cvt.rn.f16x2.f32 $0, $2, $1;")
"""Two float32 (first, second) rounded to nearest even, the first in the low half."""
to_bf16 = _pure("h", "f", "cvt.rn.bf16.f32 $0, $1;")
to_f16 = _pure("h", "f", "cvt.rn.f16.f32 $0, $1;")
from_f16 = _pure("f", "h", "cvt.f32.f16 $0, $1;")
from_bf16 = _pure("f", "h", "{ .reg .b16 zero; mov.b16 zero, 0; mov.b32 $0, {zero, $1}; }")
"""One value, as 16 bits."""
unpack_f16 = _pure(
    "f2",
    "r",
    "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }",
)
unpack_bf16 = _pure("f2", "r", "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;")
"""The two values of a word, exactly."""

opaque = instruction("r", "r", "mov.b32 $0, $1;")
"""A number as it is, unknown to the compiler: what is computed from it is computed there, not held
in registers from before a loop."""

popcount = _pure("r", "r", "popc.b32 $0, $1;")
first_bit = _pure("r", "r", "{ .reg .b32 r; brev.b32 r, $1; clz.b32 $0, r; }")
"""Bits that are set, and the number of the lowest of them (32 for 0)."""
dot_i8 = _pure("r", "r r r", "dp4a.s32.s32 $0, $1, $2, $3;")
"""c + the dot product of two words of four signed bytes: (a, b, c)."""
permute_bytes = _pure("r", "r r r", "prmt.b32 $0, $1, $2, $3;")
"""Four bytes out of the eight of (a, b), by the nibbles of a selector."""
shift_right = _pure("r", "r r", "shr.u32 $0, $1, $2;")
"""Logical shift of 32 bits (``>>`` on an int32 keeps the sign)."""


def _division(operation: str) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return getattr(builder, operation)(*args)

    return typed_intrinsic(i32(i32, i32), codegen)


quotient = _division("udiv")
remainder = _division("urem")
"""Unsigned division of int32: ``//`` and ``%`` round to the floor and widen to int64."""
_ONE = 1 << 30


@device
def reciprocal_for(divisor):
    """What ``quotient_by`` takes for a divisor."""
    return i32(quotient(_ONE - 1, divisor) + 1)


@device
def quotient_by(number, reciprocal):
    """``quotient`` in two instructions instead of twenty; exact while number · divisor < 2³⁰."""
    return i32((i64(number) * reciprocal) >> 30)


def _sum(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    total = args[0]
    for i in range(signature.args[1].count):
        total = builder.fadd(total, builder.extract_value(args[1], i))
    return total


def _fused_squares(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    total = args[0]
    for i in range(signature.args[1].count):
        element = builder.extract_value(args[1], i)
        total = builder.fma(element, element, total)
    return total


def _elementwise(operation: str, width: int, *, scalar: bool) -> Any:
    vector = types.UniTuple(f32, width)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values = []
        for i in range(width):
            right = args[1] if scalar else builder.extract_value(args[1], i)
            values.append(getattr(builder, operation)(builder.extract_value(args[0], i), right))
        return context.make_tuple(builder, vector, values)

    return typed_intrinsic(vector(vector, f32 if scalar else vector), codegen)


def vector_zero(width: int) -> Any:
    """() → a tuple of ``width`` zeros."""
    vector = types.UniTuple(f32, width)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        zero = ir.Constant(ir.FloatType(), 0.0)
        return context.make_tuple(builder, vector, [zero] * width)

    return typed_intrinsic(vector(), codegen)


def vector_add(width: int) -> Any:
    """(a, b) → a + b, elementwise on tuples of float32."""
    return _elementwise("fadd", width, scalar=False)


def vector_mul(width: int) -> Any:
    """(a, b) → a · b, elementwise on tuples of float32."""
    return _elementwise("fmul", width, scalar=False)


def vector_scale(width: int) -> Any:
    """(a, s) → a · s, a tuple times a number."""
    return _elementwise("fmul", width, scalar=True)


def vector_fma(width: int) -> Any:
    """(a, b, c) → a · b + c, elementwise, each rounded once."""
    vector = types.UniTuple(f32, width)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        members = [[builder.extract_value(arg, i) for arg in args] for i in range(width)]
        values = [builder.fma(*operands) for operands in members]
        return context.make_tuple(builder, vector, values)

    return typed_intrinsic(vector(vector, vector, vector), codegen)


def vector_add_squares(width: int) -> Any:
    """(s, a) → s + Σ a², one fused multiply-add an element, ascending."""
    return typed_intrinsic(f32(f32, types.UniTuple(f32, width)), _fused_squares)


def vector_shift(width: int) -> Any:
    """(a, s) → a + s, a tuple and a number."""
    return _elementwise("fadd", width, scalar=True)


def vector_sum(width: int) -> Any:
    """(s, a) → s + Σ a, ascending."""
    return typed_intrinsic(f32(f32, types.UniTuple(f32, width)), _sum)
