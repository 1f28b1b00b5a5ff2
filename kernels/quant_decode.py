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
from atlas_kernels.ptx_math import bits_float, from_f16, permute_bytes, unpack_f16
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
from atlas_kernels.ptx_warp import quad_values
from atlas_kernels.quant_plan import CELL_ROWS, CELLS

quad_0, quad_1, quad_2, quad_3 = quad_values


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

_REGISTERS = "{ .reg .b32 n, c, e, c12; .reg .b16 x, y; .reg .f32 q, r, s, m, k, w<8>;"
_OUTS = {True: 8, False: 16}  # results of two blocks


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


def _nibble(i: int, offset: int) -> str:
    """q = code i of the word c, less ``offset``; c12 is c shifted right by 12."""
    place = 4 * (i // 2) + 16 * (i % 2)
    suffix, at = ("", place) if place <= 16 else ("12", place - 12)
    text = f"lop3.b32 n, c{suffix}, {15 << at:#x}, {(150 - at) << 23:#x}, 0xEA;"
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
    """(codes, d, m). A code is a subnormal float16, 2**-24 or 2**-20 of itself; two in a word."""
    lines = [f"mul.f32 s, s, {_number(2.0**24)}; mul.f32 r, s, {_number(2.0**-4)};"]
    for p in range(4):
        if p == 2:
            lines.append("shr.u32 c, c, 8;")
        mask, scale = ("0x000F000F", "s") if p % 2 == 0 else ("0x00F000F0", "r")
        lines.append(f"and.b32 n, c, {mask}; mov.b32 {{x, y}}, n;")
        for h in range(2):
            lines.append(f"cvt.f32.f16 q, {'xy'[h]}; fma.rn.f32 w{2 * p + h}, q, {scale}, m;")
    return _decoder("r f f", "c s m", lines, as_words=as_words)


@cache
def _q6_k(as_words: bool) -> Any:
    """(three words, four scales): both blocks, 16 weights; the last code is in all words' ends."""
    text = ["{ .reg .b32 n, c, e; .reg .f32 q, w<16>;"]
    magic = f"{150 << 23:#x}"
    for word in range(3):
        text.append(f"mov.b32 c, ${_OUTS[as_words] + word}; shr.u32 e, c, 12;")
        for slot in range(5):
            i = 5 * word + slot
            source, at = ("c", 6 * slot) if slot < 3 else ("e", 6 * slot - 12)
            text.append(f"lop3.b32 n, {source}, {63 << at:#x}, {(150 - at) << 23:#x}, 0xEA;")
            text.append(f"mov.b32 q, n; sub.f32 q, q, {_number(2.0 ** (23 - at) + 32)};")
            text.append(f"mul.f32 w{i}, q, ${_OUTS[as_words] + 3 + i // 4};")
    first = _OUTS[as_words]
    text.append(
        f"shr.u32 n, ${first}, 30; shr.u32 c, ${first + 1}, 28; shr.u32 e, ${first + 2}, 26;"
    )
    text.append(f"lop3.b32 n, c, 12, n, 0xEA; lop3.b32 n, e, 48, n, 0xEA; or.b32 n, n, {magic};")
    text.append(
        f"mov.b32 q, n; sub.f32 q, q, {_number(2.0**23 + 32)}; mul.f32 w15, q, ${first + 6};"
    )
    if as_words:
        text += [f"cvt.rn.bf16x2.f32 ${p}, w{2 * p + 1}, w{2 * p};" for p in range(8)]
    else:
        text += [f"mov.f32 ${i}, w{i};" for i in range(16)]
    return instruction("r8" if as_words else "f16", "r3 f4", "\n".join(text) + " }")


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
    load : (address of the cell, thread of 128, half) → its codes
    scales : (address of the cell, thread of 128, half) → its row's scales
    all_scales : (address of the cell, thread of 128) → those of both halves
        By whole warps: the four threads of a row may share the work.
    decode : (codes, scales) → its weights
        Blocks ascending; in each (p, h) as ``quant_plan`` has it: words of two bf16, or floats.
        In words: k16 steps ascending, in each the thread's k 2 t, then 2 t + 8.
    """

    load: Any
    scales: Any
    all_scales: Any
    decode: Any


@cache
def decoder(type: str, space: Space, *, as_words: bool) -> Decoder:
    """The decoder of a format; the cell lies in global or shared memory."""
    find_scales, find_decode = _FORMS[type]
    load = (_bytes if CELLS[type].code_bytes == 4096 else _nibbles)(space)
    if type == "q6_k":
        load = _sixes(space)
    scales, all_scales = find_scales(CELLS[type].code_bytes, space)
    join = _joined(i32, 4) if as_words else _joined(f32, 8)
    return Decoder(load, scales, all_scales or _one_by_one(scales), find_decode(join, as_words))


def _joined(element: Any, count: int) -> Any:
    """(a, b), tuples of ``count`` → one tuple."""
    part, whole = types.UniTuple(element, count), types.UniTuple(element, 2 * count)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.make_tuple(builder, whole, flatten(builder, signature.args, args))

    return typed_intrinsic(whole(part, part), codegen)


def _one_by_one(scales: Any) -> Any:
    return device(lambda cell, thread: (scales(cell, thread, 0), scales(cell, thread, 1)))


def _bytes(space: Space) -> Any:
    load16 = space.load16
    return device(lambda cell, thread, half: load16(cell + half * 2048 + thread * 16))


def _nibbles(space: Space) -> Any:
    load8 = space.load8
    return device(lambda cell, thread, half: load8(cell + thread * 16 + half * 8))


def _sixes(space: Space) -> Any:
    load4 = space.load4

    @device
    def load(cell, thread, half):
        at = cell + half * 1536 + thread * 4
        return load4(at), load4(at + 512), load4(at + 1024)

    return load


# Scales by format: (where they begin, memory) → the functions ``scales`` and ``all_scales``.


def _d_scales(at: int, space: Space) -> tuple[Any, Any]:
    load4 = space.load4

    @device
    def scales(cell, thread, half):
        return unpack_f16(load4(cell + at + (thread >> 2) * 8 + half * 4))

    return scales, None


def _d_m_scales(at: int, space: Space) -> tuple[Any, Any]:
    load8 = space.load8

    @device
    def scales(cell, thread, half):
        words = load8(cell + at + (thread >> 2) * 16 + half * 8)
        d, m = unpack_f16(words[0])
        e, n = unpack_f16(words[1])
        return d, m, e, n

    return scales, None


_EXPONENT = 0x4B000000  # a byte below these bits is the float32 2**23 + byte
_BIAS = 2.0**23


@device
def _of_byte(word, selector, offset):
    """The float of a byte, less ``offset``; 0x7440 selects the lowest."""
    return bits_float(permute_bytes(word, _EXPONENT, selector)) - f32(_BIAS + offset)


def _q4_k_scales(at: int, space: Space) -> tuple[Any, Any]:
    load4 = space.load4
    multipliers_at, minima_at = at + 4 * CELL_ROWS, at + 8 * CELL_ROWS

    @device
    def scales(cell, thread, half):
        row, first = (thread >> 2) * 4, i32(0x7440 + 2 * half)
        d, m = unpack_f16(load4(cell + at + row))
        a, b = load4(cell + multipliers_at + row), load4(cell + minima_at + row)
        return (
            d * _of_byte(a, first, 0), m * _of_byte(b, first, 0),
            d * _of_byte(a, i32(first + 1), 0), m * _of_byte(b, i32(first + 1), 0),
        )  # fmt: skip

    @device
    def all_scales(cell, thread):
        row, own = (thread >> 2) * 4, i32(0x7440 + (thread & 3))
        d, m = unpack_f16(load4(cell + at + row))
        d = d * _of_byte(load4(cell + multipliers_at + row), own, 0)
        m = m * _of_byte(load4(cell + minima_at + row), own, 0)
        return (
            (quad_0(d), quad_0(m), quad_1(d), quad_1(m)),
            (quad_2(d), quad_2(m), quad_3(d), quad_3(m)),
        )

    return scales, all_scales


def _q6_k_scales(at: int, space: Space) -> tuple[Any, Any]:
    load2, load4, d_at = space.load2, space.load4, at + 8 * CELL_ROWS

    @device
    def row_of(cell, thread, word):
        """d, and four multipliers as signed bytes plus 128."""
        row = thread >> 2
        a = i32(load4(cell + at + row * 8 + word * 4) ^ 0x80808080)
        return from_f16(load2(cell + d_at + row * 2)), a

    @device
    def scales(cell, thread, half):
        d, a = row_of(cell, thread, half)
        return (
            d * _of_byte(a, 0x7440, 128), d * _of_byte(a, 0x7441, 128),
            d * _of_byte(a, 0x7442, 128), d * _of_byte(a, 0x7443, 128),
        )  # fmt: skip

    @device
    def all_scales(cell, thread):
        d, a = row_of(cell, thread, (thread >> 1) & 1)
        own = i32(0x7440 + 2 * (thread & 1))
        e, f = d * _of_byte(a, own, 128), d * _of_byte(a, i32(own + 1), 128)
        return (
            (quad_0(e), quad_0(f), quad_1(e), quad_1(f)),
            (quad_2(e), quad_2(f), quad_3(e), quad_3(f)),
        )

    return scales, all_scales


def _b8_32_scales(at: int, space: Space) -> tuple[Any, Any]:
    floats4 = space.floats4

    @device
    def scales(cell, thread, half):
        s = floats4(cell + at + (thread >> 2) * 32 + half * 16)
        return (s[0], s[1], s[0], s[1]), (s[2], s[3], s[2], s[3])

    return scales, None


def _b8_16_scales(at: int, space: Space) -> tuple[Any, Any]:
    floats4 = space.floats4

    @device
    def scales(cell, thread, half):
        row = cell + at + (thread >> 2) * 64 + half * 32
        return floats4(row), floats4(row + 16)

    return scales, None


# Weights by format: (joins two blocks, words or floats) → ``decode``.


def _decode_q8_0(join: Any, as_words: bool) -> Any:
    block = _q8_0(as_words)
    return device(lambda c, d: join(block(c[0], c[1], d[0]), block(c[2], c[3], d[1])))


def _decode_q4_0(join: Any, as_words: bool) -> Any:
    block = _q4_0(as_words)
    return device(lambda c, d: join(block(c[0], d[0]), block(c[1], d[1])))


def _decode_q4_1(join: Any, as_words: bool) -> Any:
    block = _q4_1(as_words)
    return device(lambda c, s: join(block(c[0], s[0], s[1]), block(c[1], s[2], s[3])))


def _decode_q6_k(join: Any, as_words: bool) -> Any:
    blocks = _q6_k(as_words)
    return device(lambda c, s: blocks(c, s))


def _decode_b8(join: Any, as_words: bool) -> Any:
    block = _b8(as_words)

    @device
    def decode(c, scales):
        s, t = scales
        return join(
            block(c[0], c[1], s[0], s[1], s[2], s[3]), block(c[2], c[3], t[0], t[1], t[2], t[3])
        )

    return decode


_FORMS: dict[str, tuple[Callable[..., tuple[Any, Any]], Callable[..., Any]]] = {
    "q8_0": (_d_scales, _decode_q8_0),
    "q4_0": (_d_scales, _decode_q4_0),
    "q4_1": (_d_m_scales, _decode_q4_1),
    "q4_k": (_q4_k_scales, _decode_q4_1),
    "q6_k": (_q6_k_scales, _decode_q6_k),
    "b8_32": (_b8_32_scales, _decode_b8),
    "b8_16": (_b8_16_scales, _decode_b8),
}


def _interleaved() -> Any:
    half, whole = types.UniTuple(i32, 8), types.UniTuple(i32, 16)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        words = flatten(builder, signature.args, args)
        pairs = [words[i + n] for i in range(8) for n in (0, 8)]
        return context.make_tuple(builder, whole, pairs)

    return typed_intrinsic(whole(half, half), codegen)


interleaved = _interleaved()
"""(upper, lower): words of a thread's two rows → the A operand of four k16 steps."""
eight_zeros = tuple(
    instruction("r8", "r", " ".join(f"shr.u32 ${i}, $8, {first + i};" for i in range(8)))
    for first in (8, 16)
)
"""Twice (m) → zeros for rows of A that are not there: a number below 256, shifted right.

The assembler does not know that they are zeros, nor that they are equal. So it keeps them where the
tensor core wants them, and does not fill the same registers again for every product.
"""
