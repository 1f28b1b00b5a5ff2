"""Arithmetic of PTX on NumPy: the data instructions of the PTX machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def names_of(braces: str) -> list[str]:
    return [name.strip() for name in braces.strip("{}").split(",")]


def ones(bits: Any) -> Any:
    return (np.uint64(1) << np.uint64(bits)) - np.uint64(1)


def sign(value: Array, size: int) -> Array:
    """Sign-extended to 64 bits from ``size`` bytes."""
    return value.astype(f"u{size}").view(f"i{size}").astype(np.int64).view(np.uint64)


def typed(value: Array, kind: str) -> Array:
    """Raw bits as numbers: ``f32``, ``f16``, ``s64``, ``u32``, ``b16`` …"""
    size = int(kind[1:]) // 8
    letter = {"f": "f", "s": "i"}.get(kind[0], "u")
    return value.astype(f"u{size}").view(f"{letter}{size}")


def raw_bits(value: Array, kind: str) -> Array:
    size = int(kind[1:]) // 8
    letter = {"f": "f", "s": "i"}.get(kind[0], "u")
    return value.astype(f"{letter}{size}").view(f"u{size}").astype(np.uint64)


def _bf16(value: Array) -> Array:
    """Float32 rounded to nearest even, as 16 bits."""
    bits = value.view(np.uint32).astype(np.uint64)
    rounded = bits + np.uint64(0x7FFF) + (bits >> np.uint64(16) & np.uint64(1)) >> np.uint64(16)
    return np.where(np.isnan(value), np.uint64(0x7FFF), rounded)


def _f16(value: Array) -> Array:
    return value.astype(np.float16).view(np.uint16).astype(np.uint64)


def _fused(a: Array, b: Array, c: Array, down: bool) -> Array:
    exact = a.astype(np.float64) * b + c
    nearest = exact.astype(np.float32)
    return (
        np.where(nearest > exact, np.nextafter(nearest, np.float32(-np.inf)), nearest)
        if down
        else nearest
    )


_POWERS = np.uint32(1) << np.arange(32, dtype=np.uint32)


def _bits_of(value: Array) -> Array:
    """The 32 bits of each word, lowest first."""
    return value[:, None] >> np.arange(32, dtype=np.uint32) & np.uint32(1)


_COMPARE: dict[str, Callable[..., Array]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
    "leu": lambda a, b: ~(a > b),
    "geu": lambda a, b: ~(a < b),
    "ltu": lambda a, b: ~(a >= b),
    "gtu": lambda a, b: ~(a <= b),
    "neu": np.not_equal,
    "equ": lambda a, b: ~((a < b) | (a > b)),
}
_BINARY: dict[str, Callable[..., Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "rem": np.remainder,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "copysign": lambda sign, value: np.copysign(value, sign),
}
_UNARY: dict[str, Callable[..., Array]] = {
    "abs": np.abs,
    "neg": np.negative,
    "not": np.invert,
    "popc": np.bitwise_count,
    "brev": lambda x: _bits_of(x)[:, ::-1] @ _POWERS,
    "clz": lambda x: 32 - (np.frexp(x.astype(np.float64))[1]),
    "sqrt": np.sqrt,
    "rsqrt": lambda x: np.float32(1) / np.sqrt(x),
    "rcp": lambda x: np.float32(1) / x,
    "ex2": np.exp2,
    "lg2": np.log2,
}


def _fused_pairs(a: Array, b: Array, c: Array) -> Array:
    """a · b + c of two bf16 a word, each rounded once: float64 holds any such sum, nearly."""
    result = np.zeros_like(a)
    for shift in (np.uint64(0), np.uint64(16)):
        values = [
            ((word >> shift & ones(16)) << np.uint64(16)).astype(np.uint32).view(np.float32)
            for word in (a, b, c)
        ]
        x, y, z = (value.astype(np.float64) for value in values)
        exact = x * y + z
        single = exact.astype(np.float32)
        # Rounded to odd in float32 first, so that the rounding to bf16 is the only one.
        bits = single.view(np.uint32)
        inexact = (single.astype(np.float64) != exact) & np.isfinite(single)
        away = inexact & (np.abs(single.astype(np.float64)) > np.abs(exact))
        bits = (bits - away.astype(np.uint32)) | inexact.astype(np.uint32)
        result |= _bf16(bits.view(np.float32)) << shift
    return result


def compute(parts: list[str], sources: list[Array]) -> Array:
    name, kind = parts[0], parts[-1]
    if kind == "pred":
        return (~sources[0].astype(bool) if name == "not" else _BINARY[name](*sources)).astype(
            np.uint64
        )
    if name == "cvt":
        return _convert(parts, sources)
    if name == "selp":
        return np.where(sources[2].astype(bool), sources[0], sources[1])
    if name in ("shl", "shr"):
        operation = np.left_shift if name == "shl" else np.right_shift
        value = typed(sources[0], kind)
        return raw_bits(operation(value, sources[1].astype(value.dtype)), kind)
    if kind == "bf16x2":
        assert name == "fma"
        return _fused_pairs(*sources)
    numbers = [typed(source, kind) for source in sources]
    if name == "setp":
        found = _COMPARE[parts[1]](*numbers[:2]).astype(np.uint64)
        return found & sources[2] if parts[2] == "and" else found
    if name == "mul" and parts[1] == "wide":
        wide = kind[0] + "64"
        return raw_bits(numbers[0].astype(np.int64) * numbers[1].astype(np.int64), wide)
    if name == "mul" and parts[1] == "hi":
        exact = [number.astype(object) for number in numbers]  # Python's integers have no end
        return raw_bits((exact[0] * exact[1] >> int(kind[1:])).astype(numbers[0].dtype), kind)
    if name == "mad":
        return raw_bits(numbers[0] * numbers[1] + numbers[2], kind)
    if name in _BITS:
        return raw_bits(typed(_BITS[name](*sources), kind), kind)
    if name == "fma":
        return raw_bits(_fused(*numbers, down=parts[1] == "rm"), kind)
    table = _UNARY if len(numbers) == 1 else _BINARY
    return raw_bits(table[name](*numbers), kind)


def _lop3(a: Array, b: Array, c: Array, table: Array) -> Array:
    """Each bit by the truth table of the bits of a, b, c."""
    result, one = np.zeros_like(a), ones(32)
    for case in range(8):
        chosen = one
        for word, bit in ((a, 4), (b, 2), (c, 1)):
            chosen = chosen & (word if case & bit else ~word & one)
        result |= np.where(table >> np.uint64(case) & np.uint64(1), chosen, np.uint64(0))
    return result & one


def _funnel(low: Array, high: Array, count: Array) -> Array:
    """The low word of (low, high) shifted right."""
    both = low & ones(32) | high << np.uint64(32)
    return both >> (count & np.uint64(31)) & ones(32)


def _insert(field: Array, word: Array, start: Array, length: Array) -> Array:
    mask = ones(length) << start
    return word & ~mask | field << start & mask


def _permute(low: Array, high: Array, selector: Array) -> Array:
    """Four of the eight bytes of (low, high), by the selector's nibbles below 8."""
    word, byte = low & ones(32) | high << np.uint64(32), np.uint64(255)
    result = np.zeros_like(word)
    for i in range(4):
        nibble = selector >> np.uint64(4 * i) & np.uint64(15)
        assert (nibble < 8).all()
        result |= (word >> nibble * np.uint64(8) & byte) << np.uint64(8 * i)
    return result


_BITS: dict[str, Callable[..., Array]] = {
    "lop3": _lop3,
    "shf": _funnel,
    "prmt": _permute,
    "bfi": _insert,
}


def _convert(parts: list[str], sources: list[Array]) -> Array:
    target, source = parts[-2], parts[-1]
    value = typed(sources[-1], source)
    if target in ("bf16x2", "f16x2"):
        narrow = _bf16 if target == "bf16x2" else _f16
        return narrow(value) | narrow(typed(sources[0], source)) << np.uint64(16)
    if target in ("bf16", "f16"):
        return (_bf16 if target == "bf16" else _f16)(value)
    if "sat" in parts:
        return raw_bits(np.clip(value, 0, 1), target)
    return raw_bits(value, target)
