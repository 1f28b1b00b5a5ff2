"""Vectors of neighbouring elements: loaded from any activation type, float32 in registers.

An ``Access`` is how a kernel reads and writes its activations: ``width`` elements at once, as a
tuple of float32. Kernels are written once over it and compiled for bf16 and float32, in the widest
form (8 elements) and, for rows that are not aligned to it, element by element (``_scalar``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from atlas_kernels import ptx_memory as memory
from atlas_kernels._cuda import device
from atlas_kernels.ptx_math import (
    from_bf16,
    from_f16,
    pack_bf16,
    pack_f16,
    to_bf16,
    to_f16,
    unpack_bf16,
    unpack_f16,
    vector_add,
    vector_add_squares,
    vector_mul,
    vector_scale,
    vector_zero,
)

ITEM_BYTES = {"bf16": 2, "f16": 2, "f32": 4}


@dataclass(frozen=True, slots=True)
class Access:
    """Reading and writing ``width`` elements of one type.

    Attributes
    ----------
    type : "bf16", "f16" or "f32"
    width : 8, 4, 2 or 1
    item_bytes : int
    load, load_constant : (address) → tuple of float32
        Plain and constant loads (see ``ptx_memory``); the address is a multiple of
        min(16, width · item_bytes).
    store : (address, tuple)
        Rounds to nearest even.
    round : (tuple) → tuple
        What would be read back after a store.
    zero : () → tuple
    add, mul : (tuple, tuple) → tuple
    scale : (tuple, float32) → tuple
    add_squares : (float32, tuple) → float32
    """

    type: str
    width: int
    item_bytes: int
    load: Any
    load_constant: Any
    store: Any
    round: Any
    zero: Any
    add: Any
    mul: Any
    scale: Any
    add_squares: Any


@cache
def access(type: str, width: int = 8) -> Access:
    """The access of a type and width."""
    load, load_constant, store, round = _FORMS[type == "f32", width](type)
    return Access(
        type,
        width,
        ITEM_BYTES[type],
        load,
        load_constant,
        store,
        round,
        vector_zero(width),
        vector_add(width),
        vector_mul(width),
        vector_scale(width),
        vector_add_squares(width),
    )


def row_variants(width: int = 8, *others: Any) -> dict[str, tuple[Any, ...]]:
    """Variants of a kernel over activations: ``bf16``, ``f32`` and their ``_scalar`` forms."""
    return {
        f"{type}{suffix}": (access(type, elements), *others)
        for type in ("bf16", "f32")
        for elements, suffix in ((width, ""), (1, "_scalar"))
    }


def _halves8(type: str) -> tuple[Any, Any, Any, Any]:
    unpack, pack = (unpack_bf16, pack_bf16) if type == "bf16" else (unpack_f16, pack_f16)

    def loader(words: Any) -> Any:
        @device
        def load(address):
            w = words(address)
            a, b = unpack(w[0])
            c, d = unpack(w[1])
            e, f = unpack(w[2])
            g, h = unpack(w[3])
            return a, b, c, d, e, f, g, h

        return load

    store_words = memory.store_b32x4

    @device
    def store(address, v):
        words = (pack(v[0], v[1]), pack(v[2], v[3]), pack(v[4], v[5]), pack(v[6], v[7]))
        store_words(address, words)

    @device
    def round(v):
        a, b = unpack(pack(v[0], v[1]))
        c, d = unpack(pack(v[2], v[3]))
        e, f = unpack(pack(v[4], v[5]))
        g, h = unpack(pack(v[6], v[7]))
        return a, b, c, d, e, f, g, h

    return loader(memory.load_b32x4), loader(memory.load_constant_b32x4), store, round


def _halves4(type: str) -> tuple[Any, Any, Any, Any]:
    unpack, pack = (unpack_bf16, pack_bf16) if type == "bf16" else (unpack_f16, pack_f16)

    def loader(words: Any) -> Any:
        @device
        def load(address):
            w = words(address)
            a, b = unpack(w[0])
            c, d = unpack(w[1])
            return a, b, c, d

        return load

    store_words = memory.store_b32x2

    @device
    def store(address, v):
        store_words(address, (pack(v[0], v[1]), pack(v[2], v[3])))

    @device
    def round(v):
        a, b = unpack(pack(v[0], v[1]))
        c, d = unpack(pack(v[2], v[3]))
        return a, b, c, d

    return loader(memory.load_b32x2), loader(memory.load_constant_b32x2), store, round


def _halves2(type: str) -> tuple[Any, Any, Any, Any]:
    unpack, pack = (unpack_bf16, pack_bf16) if type == "bf16" else (unpack_f16, pack_f16)

    def loader(word: Any) -> Any:
        return device(lambda address: unpack(word(address)))

    store_word = memory.store_b32

    @device
    def store(address, v):
        store_word(address, pack(v[0], v[1]))

    round = device(lambda v: unpack(pack(v[0], v[1])))
    return loader(memory.load_b32), loader(memory.load_constant_b32), store, round


def _halves1(type: str) -> tuple[Any, Any, Any, Any]:
    widen, narrow = (from_bf16, to_bf16) if type == "bf16" else (from_f16, to_f16)

    def loader(half: Any) -> Any:
        return device(lambda address: (widen(half(address)),))

    store_half = memory.store_b16

    @device
    def store(address, v):
        store_half(address, narrow(v[0]))

    round = device(lambda v: (widen(narrow(v[0])),))
    return loader(memory.load_b16), loader(memory.load_constant_b16), store, round


_same = device(lambda v: v)


def _floats8(type: str) -> tuple[Any, Any, Any, Any]:
    def loader(floats: Any) -> Any:
        @device
        def load(address):
            a, b, c, d = floats(address)
            e, f, g, h = floats(address + 16)
            return a, b, c, d, e, f, g, h

        return load

    store_floats = memory.store_f32x4

    @device
    def store(address, v):
        store_floats(address, (v[0], v[1], v[2], v[3]))
        store_floats(address + 16, (v[4], v[5], v[6], v[7]))

    return loader(memory.load_f32x4), loader(memory.load_constant_f32x4), store, _same


def _floats4(type: str) -> tuple[Any, Any, Any, Any]:
    return memory.load_f32x4, memory.load_constant_f32x4, memory.store_f32x4, _same


def _floats2(type: str) -> tuple[Any, Any, Any, Any]:
    return memory.load_f32x2, memory.load_constant_f32x2, memory.store_f32x2, _same


def _floats1(type: str) -> tuple[Any, Any, Any, Any]:
    def loader(number: Any) -> Any:
        return device(lambda address: (number(address),))

    store_number = memory.store_f32

    @device
    def store(address, v):
        store_number(address, v[0])

    return loader(memory.load_f32), loader(memory.load_constant_f32), store, _same


_FORMS = {
    (False, 8): _halves8,
    (False, 4): _halves4,
    (False, 2): _halves2,
    (False, 1): _halves1,
    (True, 8): _floats8,
    (True, 4): _floats4,
    (True, 2): _floats2,
    (True, 1): _floats1,
}
