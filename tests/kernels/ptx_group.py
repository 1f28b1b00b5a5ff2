"""Warp groups, named barriers and tensor maps of sm_90 for the PTX machine.

A ``wgmma`` is computed as late as it may be, at the wait for its group, from what registers and
shared memory hold then; its accumulators hold NaN until then. So a tile that is released too early
shows, a register written too early, and a missing wait. Products are summed in float64, k
ascending, and rounded once for each 16.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.kernels.ptx_compute import names_of

Array = np.ndarray[Any, Any]
GROUP = 128
_THREAD = np.arange(GROUP)
_ROW = _THREAD // 32 * 16 + _THREAD % 32 // 4
_COLUMN = _THREAD % 4 * 2
_NAN = np.full(GROUP, 0x7FC00000, np.uint64)


def swizzled(addresses: Array, width: int) -> Array:
    """Where TMA and ``wgmma`` put what has these addresses: 16-byte units of a row exchanged."""
    return addresses ^ ((addresses >> 7 & (width // 16 - 1)) << 4)


class NamedBarriers:
    """``bar.sync`` and ``bar.arrive`` with a number: threads that have arrived, and who waits."""

    def __init__(self, threads: int) -> None:
        self.arrived: dict[int, int] = {}
        self.held = np.zeros(threads, np.int64)

    def arrive(self, numbers: Array, counts: Array, active: Array, *, wait: bool) -> None:
        """Whole warps arrive, at barriers from 1 on, each for a number of threads."""
        for number in np.unique(numbers[active]).tolist():
            mine = active & (numbers == number)
            assert number > 0, "barrier 0 is the thread block's"
            if wait:
                self.held[mine] = number
            arrived = self.arrived.get(number, 0) + int(mine.sum())
            expected = int(counts[mine][0])
            assert arrived <= expected, f"{arrived} threads at barrier {number} of {expected}"
            self.arrived[number] = arrived % expected
            if arrived == expected:
                self.held[self.held == number] = 0


@dataclass
class Product:
    """One ``wgmma`` under way: the registers that it names, and the sums that it began with."""

    sums: list[str]
    a: list[str] | int
    b: int
    begun: list[Array]
    is_fresh: bool
    a_transposed: bool
    b_transposed: bool
    follows: Product | None = None
    """The one under way whose sums it adds to."""
    result: list[Array] = field(default_factory=list)
    moved: list[tuple[str, str]] = field(default_factory=list)
    """Registers that a sum was moved to while the product was under way (loops do so), and whence:
    the assembler gives them one place."""

    def names(self) -> set[str]:
        """All registers that stand for its sums."""
        return {*self.sums, *(target for target, _ in self.moved)}


@dataclass
class WarpGroup:
    """Products of four warps: not committed, and committed in groups."""

    open: list[Product] = field(default_factory=list)
    groups: list[list[Product]] = field(default_factory=list)

    def issue(self, product: Product) -> None:
        sums = set(product.sums)
        product.follows = next((p for p in self.under_way()[::-1] if p.names() >= sums), None)
        self.open.append(product)

    def under_way(self) -> list[Product]:
        """Products that no wait has completed."""
        return [product for group in [*self.groups, self.open] for product in group]

    def move(self, target: str, source: str) -> None:
        """A register is moved to another one, which stands for the same sum if it is one."""
        for product in self.under_way():
            if target not in product.sums and source in product.names():
                product.moved.append((target, source))

    def commit(self) -> None:
        self.groups.append(self.open)
        self.open = []

    def wait(
        self,
        pending: int,
        read: Callable[[str], Array],
        write: Callable[[str, Array], None],
        shared: Array,
    ) -> None:
        """Complete all groups but the ``pending`` newest."""
        while len(self.groups) > pending:
            for product in self.groups.pop(0):
                begun = product.follows.result if product.follows else product.begun
                product.follows = None
                product.result = _multiply(product, begun, read, shared)
                for name, value in zip(product.sums, product.result, strict=True):
                    write(name, value)
                for target, source in product.moved:
                    write(target, read(source))


def issued(
    operands: list[str], read: Callable[[str], Array], write: Callable[[str, Array], None]
) -> Product:
    """The product that a group's ``wgmma`` names; its accumulators become NaN."""
    sums = names_of(operands[0])
    registers = operands[1].startswith("{")
    wanted = [bool(value) for value in read(operands[3])]
    assert len(set(wanted)) == 1, "a wgmma of threads that disagree"
    a = names_of(operands[1]) if registers else _uniform(read(operands[1]))
    flags = [int(operand) for operand in operands[6:]]
    assert operands[4:6] == ["1", "1"], "negated operands"
    begun = [read(name).copy() for name in sums] if wanted[0] else []
    for name in sums:
        write(name, _NAN)
    b, transposed = _uniform(read(operands[2])), not registers and bool(flags[0])
    return Product(sums, a, b, begun, not wanted[0], transposed, bool(flags[-1]))


def _uniform(values: Array) -> int:
    assert (values == values[0]).all(), "a descriptor that threads disagree on"
    return int(values[0])


def _multiply(
    product: Product, begun: list[Array], read: Callable[[str], Array], shared: Array
) -> list[Array]:
    columns = 2 * len(product.sums)
    total = np.zeros((64, columns))
    places = [
        (_ROW + 8 * (i >> 1 & 1), 8 * (i // 4) + _COLUMN + (i & 1)) for i in range(columns // 2)
    ]
    if not product.is_fresh:
        for value, place in zip(begun, places, strict=True):
            total[place] = value.astype(np.uint32).view(np.float32)
    if isinstance(product.a, int):
        left = _matrix(product.a, 64, shared, transposed=product.a_transposed)
    else:
        left = np.zeros((64, 16))
        for i, name in enumerate(product.a):
            words = read(name).astype(np.uint32)
            row, k = _ROW + 8 * (i & 1), _COLUMN + 8 * (i >> 1)
            left[row, k] = (words << 16).view(np.float32)
            left[row, k + 1] = (words & np.uint32(0xFFFF0000)).view(np.float32)
    right = _matrix(product.b, columns, shared, transposed=product.b_transposed)
    for k in range(16):
        total += left[:, k, None] * right[:, k]
    single = total.astype(np.float32)
    return [single[place].view(np.uint32).astype(np.uint64) for place in places]


def _matrix(descriptor: int, rows: int, shared: Array, *, transposed: bool) -> Array:
    """[rows, 16] bf16 of shared memory as a descriptor tells; ``transposed``: MN-major."""
    start, leading, stride = ((descriptor >> bit & 0x3FFF) << 4 for bit in (0, 16, 32))
    width = {0: 0, 1: 128, 2: 64, 3: 32}[descriptor >> 62 & 3]
    assert descriptor >> 49 & 7 == 0, "a tile that begins inside a swizzle's pattern"
    n, k = np.arange(rows)[:, None], np.arange(16)
    if width == 0:
        assert not transposed, "not needed so far"
        at = start + n // 8 * stride + n % 8 * 16 + k // 8 * leading + k % 8 * 2
    elif transposed:
        inner = width // 2
        at = start + n // inner * leading + n % inner * 2 + k // 8 * stride + k % 8 * width
    else:
        at = start + n // 8 * stride + n % 8 * width + 2 * k
    at = swizzled(at, width) if width else at
    bits = shared[at].astype(np.uint32) | shared[at + 1].astype(np.uint32) << np.uint32(8)
    return (bits << np.uint32(16)).view(np.float32).astype(np.float64)


@dataclass
class TensorMap:
    """What the 128 bytes of this machine's tensor maps say; sizes innermost first."""

    address: int
    shape: list[int]
    strides: list[int]
    box: list[int]

    def encode(self) -> bytes:
        """The 128 bytes, of what ``cuTensorMapEncodeTiled`` takes."""
        rank = len(self.shape)
        assert 1 <= rank <= 5
        assert rank == len(self.box) == len(self.strides) + 1
        assert self.address % 16 == 0
        assert all(1 <= size <= 1 << 32 for size in self.shape)
        assert all(stride % 16 == 0 and 0 < stride < 1 << 40 for stride in self.strides)
        assert all(1 <= size <= 256 for size in self.box)
        assert self.box[0] in (32, 64), "a row of the 64-byte or the 128-byte swizzle"
        pad = [0] * (5 - rank)
        words = [self.address, rank, *self.shape, *pad, *self.strides, *pad, *self.box, *pad]
        return np.array(words, np.int64).tobytes()

    @classmethod
    def decode(cls, raw: Array) -> TensorMap:
        words = raw.view(np.int64).tolist()
        rank = words[1]
        return cls(words[0], words[2 : 2 + rank], words[7 : 6 + rank], words[11 : 11 + rank])

    def box_at(self, corner: list[int], place: int, read: Callable[[Array], Array]) -> Array:
        """The bytes of a box, swizzled for the shared address ``place``.

        ``read`` gives 16 bytes at each of some global addresses; outside the tensor they are 0.
        """
        width = 2 * self.box[0]
        assert width in (64, 128)
        assert place % (8 * width) == 0, "a box that begins inside a swizzle's pattern"
        at = np.full((1,), self.address, np.int64)
        inside = np.ones(1, bool)
        # From the outermost dimension to 16-byte units of the innermost.
        for axis in range(len(self.shape) - 1, -1, -1):
            units = self.box[axis] if axis else self.box[0] // 8
            scale = 1 if axis else 8
            index = corner[axis] + scale * np.arange(units)
            stride = self.strides[axis - 1] if axis else 2
            assert stride % 16 == 0 or axis == 0
            at = (at[:, None] + index * stride).reshape(-1)
            inside = (inside[:, None] & ((index >= 0) & (index < self.shape[axis]))).reshape(-1)
        units = np.zeros((at.size, 16), np.uint8)
        units[inside] = read(at[inside].astype(np.uint64))
        out = np.empty(at.size * 16, np.uint8)
        linear = place + 16 * np.arange(at.size)
        to = swizzled(linear, width) - place
        out[to[:, None] + np.arange(16)] = units
        return out


def coordinates(operand: str) -> tuple[str, list[str]]:
    """``[map, {c0, c1}]`` → the registers."""
    match = re.fullmatch(r"\[([^,]+), \{([^}]*)\}\]", operand)
    assert match is not None
    return match[1].strip(), names_of(match[2])
