"""Quantised weights to floats, in registers: what one thread holds of a cell.

``quant_plan`` says where codes and scales lie. A weight's value is the definition's
(``atlas.ops.blocks``): d · q (+ m) in float32, an operation at a time, for a product rounded once
to bf16. d · q is exact in float32 in every format, so ``fma`` has the same bits; a −0 may come as
+0, which no sum notices. Scales are finite.

A code that lies in the mantissa of a power of two is that power plus the code: no conversion.
Decoding is ordered: its results are registers of products that a wait must have ended.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from atlas_kernels._cuda import device, f32, i32, types
from atlas_kernels.ptx import flatten, instruction, typed_intrinsic
from atlas_kernels.ptx_math import bits_float, from_f16, permute_bytes, shift_right, unpack_f16
from atlas_kernels.ptx_memory import (
    load_constant_b16,
    load_constant_b32,
    load_constant_b32x2,
    load_constant_b32x4,
    load_constant_f32x4,
    load_shared_b16,
    load_shared_b32,
    load_shared_b32x2,
    load_shared_b32x4,
    load_shared_f32x4,
)
from atlas_kernels.quant_plan import CELL_ROWS, CELLS
from llvmlite import ir

_NOTHING = ir.Constant(ir.IntType(32), 0)


@dataclass(frozen=True, slots=True)
class Space:
    """Loads of 2, 4, 8 and 16 bytes of constants, from global or from shared memory."""

    load2: Any
    load4: Any
    load8: Any
    load16: Any
    floats4: Any


GLOBAL = Space(
    load_constant_b16,
    load_constant_b32,
    load_constant_b32x2,
    load_constant_b32x4,
    load_constant_f32x4,
)
SHARED = Space(
    load_shared_b16, load_shared_b32, load_shared_b32x2, load_shared_b32x4, load_shared_f32x4
)

# -- a block's eight weights -------------------------------------------------------------------

_REGISTERS = "{ .reg .b32 n, c, e, c12, u, u12; .reg .f32 q, r, s, m, k, w<8>;"


def _number(value: float) -> str:
    """A float32 literal."""
    return "0f" + struct.pack(">f", value).hex().upper()


def _decoder(ins: str, names: str, lines: list[str], *, as_words: bool) -> Any:
    """Eight floats, or four words of bf16, from PTX that leaves them in w0 … w7.

    ``names`` are the registers that the arguments are moved to.
    """
    outs, count = ("r4", 4) if as_words else ("f8", 8)
    text = [_REGISTERS]
    text += [f"mov.b32 {name}, ${count + i};" for i, name in enumerate(names.split())] + lines
    if as_words:
        text += [f"cvt.rn.bf16x2.f32 ${p}, w{2 * p + 1}, w{2 * p};" for p in range(4)]
    else:
        text += [f"mov.f32 ${i}, w{i};" for i in range(8)]
    return instruction(outs, ins, "\n".join(text) + " }")


def _byte(i: int) -> str:
    """q = 2**15 + byte i of the words c, e."""
    word, selector = "ce"[i // 4], 0x7504 | i % 4 << 4
    return f"prmt.b32 n, {word}, 0x47000000, {selector:#x}; mov.b32 q, n;"


def _nibble(i: int, offset: int, *, has_upper: bool = False) -> str:
    """q = code i of the word c, less ``offset``; c12 is c shifted right by 12.

    ``has_upper``: bits 4 and 5 of the code are those of the word u, 4 bits further up.
    """
    place = 4 * (i // 2) + 16 * (i % 2)
    suffix, at = ("", place) if place <= 16 else ("12", place - 12)
    text = f"lop3.b32 n, c{suffix}, {15 << at:#x}, {(150 - at) << 23:#x}, 0xEA;"
    if has_upper:
        text += f" lop3.b32 n, u{suffix}, {3 << at + 4:#x}, n, 0xEA;"
    return f"{text} mov.b32 q, n; sub.f32 q, q, {_number(2.0 ** (23 - at) + offset)};"


@cache
def _q8_0(as_words: bool) -> Any:
    """(codes, codes, d); d · (2**15 + 128) is exact too."""
    lines = [f"mul.f32 m, s, {_number(-(2.0**15) - 128)};"]
    lines += [f"{_byte(i)} fma.rn.f32 w{i}, q, s, m;" for i in range(8)]
    return _decoder("r r f", "c e s", lines, as_words=as_words)


@cache
def _b8(as_words: bool) -> Any:
    """(codes, codes, scale and minimum of the first 16 weights, of the others)."""
    lines = [
        f"{_byte(i)} sub.f32 q, q, {_number(2.0**15)}; fma.rn.f32 w{i}, q, {'sr'[i // 4]},"
        f" {'mk'[i // 4]};"
        for i in range(8)
    ]
    return _decoder("r r f f f f", "c e s m r k", lines, as_words=as_words)


@cache
def _q4_1(as_words: bool) -> Any:
    """(codes, d, m)."""
    lines = ["shr.u32 c12, c, 12;"]
    lines += [f"{_nibble(i, 0)} fma.rn.f32 w{i}, q, s, m;" for i in range(8)]
    return _decoder("r f f", "c s m", lines, as_words=as_words)


@cache
def _q6_k(as_words: bool, block: int) -> Any:
    """(codes, upper bits, scale of the first 16 weights, of the others); block of a pair."""
    lines = [f"shr.u32 c12, c, 12; shf.r.wrap.b32 u, u, u, {2 * block};"]
    lines += ["shf.r.wrap.b32 u12, u, u, 12;"]
    lines += [
        f"{_nibble(i, 32, has_upper=True)} mul.f32 w{i}, q, {'sr'[i // 4]};" for i in range(8)
    ]
    return _decoder("r r f f", "c u s r", lines, as_words=as_words)


@cache
def _q4_0(as_words: bool) -> Any:
    """(codes, d)."""
    if not as_words:
        lines = ["shr.u32 c12, c, 12;"]
        lines += [f"{_nibble(i, 8)} mul.f32 w{i}, q, s;" for i in range(8)]
        return _decoder("r f", "c s", lines, as_words=False)
    # Two weights an instruction. d = u + v with 8 and 3 bits, so q · v is exact in bf16 and
    # fma(q, u, q · v) is q · d rounded once.
    text = [
        "{ .reg .b32 n, u, v, one, bias, zero; .reg .f32 f; .reg .b16 x, y;",
        "mov.b32 one, 0x3F803F80;",
        "mov.b32 bias, 0xC308C308; mov.b32 zero, 0x80008000;",
        "mov.b32 u, $5; and.b32 u, u, 0xFFFF0000; mov.b32 f, u; sub.f32 f, $5, f; mov.b32 v, f;",
        "mov.b32 {x, y}, u; mov.b32 u, {y, y}; mov.b32 {x, y}, v; mov.b32 v, {y, y};",
    ]
    for p in range(4):
        text += [
            f"shr.u32 n, $4, {4 * p}; lop3.b32 n, n, 0x000F000F, 0x43004300, 0xEA;",  # 128 + code
            "fma.rn.bf16x2 n, n, one, bias;",  # − 136
            f"fma.rn.bf16x2 ${p}, n, v, zero; fma.rn.bf16x2 ${p}, n, u, ${p};",
        ]
    return instruction("r4", "r f", "\n".join(text) + " }")


# -- half a cell -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Decoder:
    """How a thread gets its 16 weights of half a cell, which is two blocks.

    Attributes
    ----------
    load : (address of the cell, thread of 128, half) → its codes and scales
    decode : (codes and scales) → its weights
        Blocks ascending; in each (p, h) as ``quant_plan`` has it: words of two bf16, or floats.
        In words: k16 steps ascending, in each the thread's k 2 t, then 2 t + 8.
    """

    load: Any
    decode: Any


@cache
def decoder(type: str, space: Space, *, as_words: bool) -> Decoder:
    """The decoder of a format; the cell lies in global or shared memory."""
    join = _joined(i32, 4) if as_words else _joined(f32, 8)
    return _HALVES[type](CELLS[type].code_bytes, space, join, as_words)


def _joined(element: Any, count: int) -> Any:
    """(a, b), tuples of ``count`` → one tuple."""
    part, whole = types.UniTuple(element, count), types.UniTuple(element, 2 * count)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.make_tuple(builder, whole, flatten(builder, signature.args, args))

    return typed_intrinsic(whole(part, part), codegen)


def _halves_q8_0(scales_at: int, space: Space, join: Any, as_words: bool) -> Decoder:
    load4, load16, block = space.load4, space.load16, _q8_0(as_words)

    @device
    def load(cell, thread, half):
        c = load16(cell + half * 2048 + thread * 16)
        return c, unpack_f16(load4(cell + scales_at + (thread >> 2) * 8 + half * 4))

    @device
    def decode(held):
        c, d = held
        return join(block(c[0], c[1], d[0]), block(c[2], c[3], d[1]))

    return Decoder(load, decode)


def _halves_q4_0(scales_at: int, space: Space, join: Any, as_words: bool) -> Decoder:
    load4, load8, block = space.load4, space.load8, _q4_0(as_words)

    @device
    def load(cell, thread, half):
        c = load8(cell + thread * 16 + half * 8)
        return c, unpack_f16(load4(cell + scales_at + (thread >> 2) * 8 + half * 4))

    @device
    def decode(held):
        c, d = held
        return join(block(c[0], d[0]), block(c[1], d[1]))

    return Decoder(load, decode)


def _halves_q4_1(scales_at: int, space: Space, join: Any, as_words: bool) -> Decoder:
    load8, block = space.load8, _q4_1(as_words)

    @device
    def load(cell, thread, half):
        c = load8(cell + thread * 16 + half * 8)
        d = load8(cell + scales_at + (thread >> 2) * 16 + half * 8)
        return c, unpack_f16(d[0]), unpack_f16(d[1])

    @device
    def decode(held):
        c, d, e = held
        return join(block(c[0], d[0], d[1]), block(c[1], e[0], e[1]))

    return Decoder(load, decode)


_EXPONENT = 0x4B000000  # a byte below these bits is the float32 2**23 + byte
_BIAS = 2.0**23


@device
def _of_byte(word, selector, offset):
    """The float of a byte, less ``offset``."""
    return bits_float(permute_bytes(word, _EXPONENT, selector)) - f32(_BIAS + offset)


def _halves_q4_k(scales_at: int, space: Space, join: Any, as_words: bool) -> Decoder:
    load4, load8, block = space.load4, space.load8, _q4_1(as_words)
    multipliers_at, minima_at = scales_at + 4 * CELL_ROWS, scales_at + 8 * CELL_ROWS

    @device
    def load(cell, thread, half):
        c, row = load8(cell + thread * 16 + half * 8), (thread >> 2) * 4
        d, m = unpack_f16(load4(cell + scales_at + row))
        a = shift_right(load4(cell + multipliers_at + row), half * 16)
        b = shift_right(load4(cell + minima_at + row), half * 16)
        return c, d, m, a, b

    @device
    def decode(held):
        c, d, m, a, b = held
        return join(
            block(c[0], d * _of_byte(a, 0x7440, 0), m * _of_byte(b, 0x7440, 0)),
            block(c[1], d * _of_byte(a, 0x7441, 0), m * _of_byte(b, 0x7441, 0)),
        )

    return Decoder(load, decode)


def _halves_q6_k(scales_at: int, space: Space, join: Any, as_words: bool) -> Decoder:
    load2, load4, load8 = space.load2, space.load4, space.load8
    even, odd = _q6_k(as_words, 0), _q6_k(as_words, 1)
    d_at = scales_at + 8 * CELL_ROWS

    @device
    def load(cell, thread, half):
        c, row = load8(cell + thread * 16 + half * 8), thread >> 2
        u = load4(cell + 2048 + thread * 8 + half * 4)
        a = i32(load4(cell + scales_at + row * 8 + half * 4) ^ 0x80808080)  # signed bytes + 128
        return c, u, a, from_f16(load2(cell + d_at + row * 2))

    @device
    def decode(held):
        c, u, a, d = held
        return join(
            even(c[0], u, d * _of_byte(a, 0x7440, 128), d * _of_byte(a, 0x7441, 128)),
            odd(c[1], u, d * _of_byte(a, 0x7442, 128), d * _of_byte(a, 0x7443, 128)),
        )

    return Decoder(load, decode)


def _halves_b8_32(scales_at: int, space: Space, join: Any, as_words: bool) -> Decoder:
    load16, floats4, block = space.load16, space.floats4, _b8(as_words)

    @device
    def load(cell, thread, half):
        c = load16(cell + half * 2048 + thread * 16)
        return c, floats4(cell + scales_at + (thread >> 2) * 32 + half * 16)

    @device
    def decode(held):
        c, s = held
        return join(
            block(c[0], c[1], s[0], s[1], s[0], s[1]), block(c[2], c[3], s[2], s[3], s[2], s[3])
        )

    return Decoder(load, decode)


def _halves_b8_16(scales_at: int, space: Space, join: Any, as_words: bool) -> Decoder:
    load16, floats4, block = space.load16, space.floats4, _b8(as_words)

    @device
    def load(cell, thread, half):
        c = load16(cell + half * 2048 + thread * 16)
        row = cell + scales_at + (thread >> 2) * 64 + half * 32
        return c, floats4(row), floats4(row + 16)

    @device
    def decode(held):
        c, s, t = held
        return join(
            block(c[0], c[1], s[0], s[1], s[2], s[3]), block(c[2], c[3], t[0], t[1], t[2], t[3])
        )

    return Decoder(load, decode)


_HALVES: dict[str, Callable[[int, Space, Any, bool], Decoder]] = {
    "q8_0": _halves_q8_0,
    "q4_0": _halves_q4_0,
    "q4_1": _halves_q4_1,
    "q4_k": _halves_q4_k,
    "q6_k": _halves_q6_k,
    "b8_32": _halves_b8_32,
    "b8_16": _halves_b8_16,
}


def _operand(codegen_pairs: Callable[[list[Any]], list[Any]], count: int) -> Any:
    half, whole = types.UniTuple(i32, 8), types.UniTuple(i32, 16)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        words = codegen_pairs(flatten(builder, signature.args, args))
        return context.make_tuple(builder, whole, words)

    return typed_intrinsic(whole(*[half] * count), codegen)


interleaved = _operand(lambda words: [words[i + n] for i in range(8) for n in (0, 8)], 2)
"""(upper, lower): words of a thread's two rows → the A operand of four k16 steps."""
over_zeros = _operand(lambda words: [w for word in words for w in (word, _NOTHING)], 1)
"""(upper): the same with zeros in the lower row."""
