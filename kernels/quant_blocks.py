"""Quantised weights to floats, in registers: the weights of blocks that one thread holds.

A weight's value is the definition's (``atlas.ops.blocks``): d · q (+ m) in float32, an operation at
a time, for a product rounded once to bf16. d · q is exact in float32 wherever m follows, so ``fma``
has the same bits; a −0 may come as +0, which no sum notices. Scales are finite.

A code that lies in the mantissa of a power of two is that power plus the code, and one in a
subnormal number is a multiple of it: no conversion. Decoding is ordered: its results are registers
of products that a wait must have ended.
"""

from __future__ import annotations

import struct
from functools import cache
from typing import Any

from atlas_kernels.ptx import instruction

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
def q8_0_weights(as_words: bool) -> Any:
    """(codes, codes, d); d · (2**15 + 128) is exact too."""
    lines = [f"mul.f32 m, s, {_number(-(2.0**15) - 128)};"]
    lines += [f"{_byte(i)} fma.rn.f32 w{i}, q, s, m;" for i in range(8)]
    return _decoder("r r f", "c e s", lines, as_words=as_words)


@cache
def b8_weights(as_words: bool) -> Any:
    """(codes, codes, scale and minimum of the first 16 weights, of the others)."""
    lines = [
        f"{_byte(i)} sub.f32 q, q, {_number(2.0**15)}; fma.rn.f32 w{i}, q, {'sr'[i // 4]},"
        f" {'mk'[i // 4]};"
        for i in range(8)
    ]
    return _decoder("r r f f f f", "c e s m r k", lines, as_words=as_words)


@cache
def q4_1_weights(as_words: bool) -> Any:
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
def q6_k_weights(as_words: bool) -> Any:
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
def q4_0_weights(as_words: bool) -> Any:
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
