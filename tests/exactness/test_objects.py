"""A compiled body shows nothing but its entry, so that objects of several processes do not mix.

Numba numbers the functions that a body calls by the order of compilation in its process: equal
weak names mean different functions in two cached objects, and a linker keeps the first it meets.
"""

from __future__ import annotations

import struct

import pytest

from atlas.backends.cpu.compiler import compile_body

_SYMBOL_TABLE, _UNDEFINED, _LOCAL = 2, 0, 0


def visible_symbols(elf: bytes) -> list[str]:
    """Names that a 64-bit object file defines and other objects can see (ELF gABI, chapter 4)."""
    assert elf[:6] == b"\x7fELF\x02\x01"
    (at,) = struct.unpack_from("<Q", elf, 0x28)
    size, count = struct.unpack_from("<HH", elf, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", elf, at + i * size) for i in range(count)]
    found = []
    for _, kind, _, _, offset, length, link, _, _, _ in sections:
        if kind != _SYMBOL_TABLE:
            continue
        names = sections[link][4]
        for entry in range(offset, offset + length, 24):
            name, info, _, section = struct.unpack_from("<IBBH", elf, entry)
            if info >> 4 != _LOCAL and section != _UNDEFINED:
                start = names + name
                found.append(elf[start : elf.index(b"\0", start)].decode())
    return found


@pytest.mark.parametrize("name", ["linear.q4_0", "moe.linear_q4_k", "attention.fused_f32"])
def test_only_the_entry_is_visible(name: str) -> None:
    assert visible_symbols(compile_body(name)) == ["atlas_body_" + name.replace(".", "_")]
