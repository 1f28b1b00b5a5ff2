"""Quantised weights to floats, in registers: what one thread holds of half a cell.

``quant_plan`` says where codes and scales lie, ``quant_blocks`` what they stand for. A product's
kernel and the one that dequantises rows differ in where the cell lies and in what they want of it.
"""

from __future__ import annotations

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
from atlas_kernels.quant_blocks import (
    b8_weights,
    q4_0_weights,
    q4_1_weights,
    q6_k_weights,
    q8_0_weights,
)
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
    block = q8_0_weights(as_words)
    return device(lambda c, d: join(block(c[0], c[1], d[0]), block(c[2], c[3], d[1])))


def _decode_q4_0(join: Any, as_words: bool) -> Any:
    block = q4_0_weights(as_words)
    return device(lambda c, d: join(block(c[0], d[0]), block(c[1], d[1])))


def _decode_q4_1(join: Any, as_words: bool) -> Any:
    block = q4_1_weights(as_words)
    return device(lambda c, s: join(block(c[0], s[0], s[1]), block(c[1], s[2], s[3])))


def _decode_q6_k(join: Any, as_words: bool) -> Any:
    blocks = q6_k_weights(as_words)
    return device(lambda c, s: blocks(c, s))


def _decode_b8(join: Any, as_words: bool) -> Any:
    block = b8_weights(as_words)

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
