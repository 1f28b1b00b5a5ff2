"""Runs PTX on NumPy, one thread block at a time, so that kernels are tested without a GPU.

All threads of a block are one array. The threads furthest behind run next, which is how threads of
a branch meet again; barriers, shuffles and memory are checked more strictly than a GPU does:
an access must be aligned and inside one allocation, a constant load (``ld.global.nc``) must not see
what this kernel wrote, before ``griddepcontrol.wait`` nothing else is read and nothing is written,
and a shuffle needs its whole warp. It knows the instructions that this package's kernels have, and
refuses others. Approximations (``rsqrt``, ``ex2``) are exact here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.kernels.ptx_barrier import Barriers, without_loops
from tests.kernels.ptx_tensor import Copies16, ldmatrix, mma, warps_of

WARP = 32
_BASE = 1 << 20
_GUARD = 256  # bytes between allocations
Array = np.ndarray[Any, Any]
_NOTHING_TO_DO = (
    "griddepcontrol.launch_dependents",
    "bar.warp.sync",
    "fence.acq_rel.gpu",
    "fence.mbarrier_init.release.cluster",
    "prefetch.global.L2",
)


@dataclass
class Memory:
    """Device memory: allocations with gaps in between, filled with NaN bits."""

    data: Array = field(default_factory=lambda: np.full(1 << 22, 0xFF, np.uint8))
    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    constants: set[int] = field(default_factory=set)
    """Addresses of allocations that may be read before ``griddepcontrol.wait``: constants, and what
    no kernel of the step writes before it is read."""

    def put(self, values: Array, shift: int = 0) -> int:
        """Copy an array in; its address, ``shift`` bytes past a multiple of 256."""
        start = (self.ends[-1] if self.ends else 0) + _GUARD
        start += -start % _GUARD + shift
        raw = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
        self.starts.append(start)
        self.ends.append(start + raw.size)
        self.data[start : start + raw.size] = raw
        return _BASE + start

    def get(self, address: int, like: Array) -> Array:
        """A copy of what lies at an address, with the shape and type of ``like``."""
        start = address - _BASE
        raw = self.data[start : start + like.nbytes].copy()
        return raw.view(like.dtype).reshape(like.shape)

    def are_constant(self, addresses: Array) -> bool:
        """Whether accesses lie in ``constants``."""
        owner = np.searchsorted(self.starts, addresses.astype(np.int64) - _BASE, side="right") - 1
        return {_BASE + self.starts[i] for i in np.unique(owner)} <= self.constants

    def indices(self, addresses: Array, size: int) -> Array:
        """[threads, size] positions in ``data`` of accesses, all of them checked."""
        offsets = addresses.astype(np.int64) - _BASE
        owner = np.searchsorted(self.starts, offsets, side="right") - 1
        inside = (owner >= 0) & (offsets + size <= np.asarray(self.ends)[owner])
        if not inside.all():
            raise AssertionError(
                f"access of {size} bytes outside every allocation: {offsets[~inside]}"
            )
        if (offsets % size).any():
            raise AssertionError(f"access of {size} bytes not aligned")
        return offsets[:, None] + np.arange(size)


def launch(
    ptx: str,
    grid: tuple[int, int],
    threads: int,
    args: list[Any],
    memory: Memory,
    order: int = 0,
    shared_bytes: int = 0,
) -> None:
    """Run a kernel over a grid; ``args`` are integers and np.float32.

    ``shared_bytes`` is the dynamic shared memory.
    ``order`` 0 runs all warps of a block together. 1 and −1 run one warp as far as it goes before
    the next or the previous one, which a missing barrier does not survive.
    """
    program = _Program(ptx, args, shared_bytes)
    written = np.zeros(memory.data.size, bool)
    for y in range(grid[1]):
        for x in range(grid[0]):
            _Block(program, memory, written, threads, grid, (x, y)).run(order)


class _Program:
    def __init__(self, ptx: str, args: list[Any], shared_bytes: int) -> None:
        text = without_loops(re.sub(r"//[^\n]*", "", ptx))
        head, body = text.split(".entry", 1)[1].split("\n{", 1)
        names = re.findall(r"\.param \.\w+ (\w+)", head)
        assert len(names) == len(args), (names, args)
        bits = [v.view(np.uint32) if isinstance(v, np.float32) else v & (1 << 64) - 1 for v in args]
        self.parameters = {name: int(value) for name, value in zip(names, bits, strict=True)}
        self.shared: dict[str, int] = {}
        self.shared_bytes = 0
        if dynamic := re.search(r"\.extern \.shared \.align \d+ \.b8 (\w+)\[\]", text):
            self.shared[dynamic[1]] = 0
            self.shared_bytes = shared_bytes
        self.labels: dict[str, int] = {}
        self.code: list[tuple[str, bool, str, list[str]]] = []
        for statement in re.split(";", re.sub(r"(\$L\w+):", r"\1:;", body)):
            self._add(statement.lstrip("{} \t\n").rstrip())

    def _add(self, statement: str) -> None:
        if label := re.fullmatch(r"(\$L\w+):", statement):
            self.labels[label[1]] = len(self.code)
        elif shared := re.match(r"\.shared \.align (\d+) \.b8 (\w+)\[(\d+)\]", statement):
            self.shared[shared[2]] = self.shared_bytes
            self.shared_bytes += int(shared[3]) + -int(shared[3]) % 16
        elif statement and not statement.startswith((".reg", ".pragma")):
            guard = re.match(r"@(!?)(%p\d+)\s+", statement)
            predicate, negated = (guard[2], guard[1] == "!") if guard else ("", False)
            statement = statement[guard.end() :] if guard else statement
            opcode, *rest = statement.split(None, 1)
            operands = re.findall(r"\{[^}]*\}|[^,\s][^,]*", rest[0] if rest else "")
            self.code.append((predicate, negated, opcode, [o.strip() for o in operands]))


class _Block:
    def __init__(
        self,
        program: _Program,
        memory: Memory,
        written: Array,
        threads: int,
        grid: tuple[int, int],
        block: tuple[int, int],
    ) -> None:
        self.program, self.memory, self.written = program, memory, written
        self.shared = np.full(program.shared_bytes, 0xFF, np.uint8)
        self.pc = np.zeros(threads, np.int64)
        self.registers: dict[str, Array] = {}
        lanes = np.arange(threads, dtype=np.uint64)
        full = np.full_like
        self.special = {
            "%tid.x": lanes,
            "%laneid": lanes % np.uint64(WARP),
            "%ntid.x": full(lanes, threads),
            "%ctaid.x": full(lanes, block[0]),
            "%ctaid.y": full(lanes, block[1]),
            "%nctaid.x": full(lanes, grid[0]),
            "%nctaid.y": full(lanes, grid[1]),
        }
        self.copies = Copies16(threads // WARP)
        self.barriers = Barriers()
        self.waited = False
        self.waiting = np.zeros(threads, bool)

    def run(self, order: int) -> None:
        end = len(self.program.code)
        rank = order * (np.arange(self.pc.size) // WARP)
        while (self.pc < end).any():
            ready = (self.pc < end) & ~self.waiting
            if not ready.any():
                self.waiting[:] = False  # all that are left have reached the barrier
                continue
            ready &= rank == rank[ready].min()
            now = int(self.pc[ready].min())
            active = ready & (self.pc == now)
            predicate, negated, opcode, operands = self.program.code[now]
            self.pc[active] += 1
            if predicate:
                active = active & (self.registers[predicate].astype(bool) != negated)
            if active.any():
                with np.errstate(all="ignore"):
                    self._step(opcode, operands, active, end)

    def _step(self, opcode: str, operands: list[str], active: Array, end: int) -> None:
        parts = opcode.split(".")
        name = parts[0]
        if name == "ret":
            self.pc[active] = end
        elif name == "bra":
            self.pc[active] = self.program.labels[operands[0]]
        elif opcode == "griddepcontrol.wait":
            self.waited = True
        elif opcode == "bar.sync":
            self._wait(active, end)
        elif name in ("ld", "st"):
            self._access(parts, operands, active)
        elif name in ("mma", "ldmatrix"):
            self._tensor(name, parts, operands, active)
        else:
            self._step_data(opcode, operands, active)

    def _step_data(self, opcode: str, operands: list[str], active: Array) -> None:
        parts = opcode.split(".")
        name = parts[0]
        if opcode.startswith("cp.async.bulk"):
            self._bulk_copy(operands, active)
        elif name == "mbarrier":
            self._barrier(parts[1], operands, active)
        elif name == "cp":
            self._copy(opcode, operands, active)
        elif name == "atom":
            self._atomic_add(parts[1], operands, active)
        elif name == "shfl":
            warps_of(active)
            lane, own = self._read(operands[2]).astype(np.int64), np.arange(active.size)
            lane = own ^ lane if parts[2] == "bfly" else own // WARP * WARP + lane % WARP
            self._write(operands[0], self._read(operands[1])[lane], active)
        elif name == "vote":
            self._ballot(operands, active)
        elif name == "mov":
            self._move(parts, operands, active)
        elif opcode not in _NOTHING_TO_DO:
            sources = [self._read(operand) for operand in operands[1:]]
            self._write(operands[0], _compute(parts, sources), active)

    def _wait(self, active: Array, end: int) -> None:
        """Arrive at ``bar.sync``; those that wait already must wait at the same one."""
        assert (self.pc < end).all(), "a barrier after some threads have left"
        together = active | self.waiting
        assert np.unique(self.pc[together]).size == 1, "two barriers at once"
        self.waiting = together

    def _read(self, operand: str) -> Array:
        """Raw bits, as uint64, of a register, a literal or a shared variable's address."""
        if operand in self.special:
            return self.special[operand]
        if operand in self.registers:
            return self.registers[operand]
        if operand == "WARP_SZ":
            value = 32
        elif operand.startswith("0f"):
            value = int(operand[2:], 16)
        elif operand in self.program.shared:
            value = self.program.shared[operand]
        else:
            value = int(operand, 0)
        return np.full(self.pc.size, value & (1 << 64) - 1, np.uint64)

    def _write(self, register: str, value: Array, active: Array) -> None:
        old = self.registers.setdefault(register, np.zeros(self.pc.size, np.uint64))
        old[active] = value.astype(np.uint64)[active]

    def _move(self, parts: list[str], operands: list[str], active: Array) -> None:
        target, source = operands
        half = np.uint64(int(parts[1][1:]) // 2) if parts[1][1:].isdigit() else np.uint64(0)
        if source.startswith("{"):
            low, high = (self._read(name) for name in _names(source))
            self._write(target, low & _ones(half) | high << half, active)
        elif target.startswith("{"):
            low_name, high_name = _names(target)
            value = self._read(source)
            self._write(low_name, value & _ones(half), active)
            self._write(high_name, value >> half, active)
        else:
            self._write(target, self._read(source), active)

    def _access(self, parts: list[str], operands: list[str], active: Array) -> None:
        is_load, space, kind = parts[0] == "ld", parts[1], parts[-1]
        targets = operands[0] if is_load else operands[1]
        inside = re.fullmatch(r"\[(.+)\]", operands[1] if is_load else operands[0])
        assert inside is not None
        names = _names(targets) if targets.startswith("{") else [targets]
        size = int(kind[1:]) // 8
        if space == "param":
            value = np.full(self.pc.size, self.program.parameters[inside[1]], np.uint64)
            self._write(names[0], _sign(value, size) if kind[0] == "s" else value, active)
            return
        addresses = self._address(inside[1])[active]
        if space == "global":
            data, at = self.memory.data, self.memory.indices(addresses, size * len(names))
            constant = "nc" in parts
            early = not (self.waited or constant or self.memory.are_constant(addresses))
            assert not early, "an access before griddepcontrol.wait"
            assert not (constant and self.written[at].any()), "a constant load of written memory"
            if not is_load:
                self.written[at] = True
        else:
            data, at = (
                self.shared,
                addresses.astype(np.int64)[:, None] + np.arange(size * len(names)),
            )
        for i, name in enumerate(names):
            piece = at[:, i * size : (i + 1) * size]
            if is_load:
                raw = np.zeros((len(piece), 8), np.uint8)
                raw[:, :size] = data[piece]
                value = np.zeros(self.pc.size, np.uint64)
                value[active] = raw.view(np.uint64)[:, 0]
                self._write(name, value, active)
            else:
                raw = self._read(name)[active].copy().view(np.uint8).reshape(-1, 8)
                data[piece] = raw[:, :size]

    def _address(self, text: str) -> Array:
        """Of an operand, a register with an offset perhaps."""
        register, _, offset = text.strip("[]").partition("+")
        return self._read(register.strip()) + np.uint64(int(offset or 0))

    def _tensor(self, name: str, parts: list[str], operands: list[str], active: Array) -> None:
        targets, sources = _names(operands[0]), [_names(operand) for operand in operands[1:]]
        results = [np.zeros(self.pc.size, np.uint64) for _ in targets]
        for warp in warps_of(active):
            at = slice(warp * WARP, (warp + 1) * WARP)
            if name == "ldmatrix":
                addresses = self._address(operands[1])[at]
                transposed = "trans" in parts
                values = ldmatrix(self.shared, addresses, len(targets), transposed=transposed)
            else:
                a, b, c = ([self._read(register)[at] for register in group] for group in sources)
                sums = mma([_typed(value, "f32") for value in c], a, b)
                values = [_raw(value, "f32") for value in sums]
            for result, value in zip(results, values, strict=True):
                result[at] = value
        for register, result in zip(targets, results, strict=True):
            self._write(register, result, active)

    def _copy(self, opcode: str, operands: list[str], active: Array) -> None:
        if opcode == "cp.async.commit_group":
            self.copies.commit(active)
        elif opcode == "cp.async.wait_group":
            self.copies.wait(active, int(operands[0]), self.shared)
        else:
            width = int(operands[2])
            sizes = self._read(operands[3])[active] if len(operands) > 3 else np.full(1, width)
            places = self._address(operands[0])[active].astype(np.int64)
            data = np.zeros((places.size, width), np.uint8)
            full = np.broadcast_to(sizes == width, places.shape)
            addresses = self._address(operands[1])[active][full]
            early = not self.waited and not self.memory.are_constant(addresses)
            assert not early, "a copy before griddepcontrol.wait"
            data[full] = self.memory.data[self.memory.indices(addresses, width)]
            self.copies.copy(active, places, data)

    def _ballot(self, operands: list[str], active: Array) -> None:
        votes = self._read(operands[1]).astype(bool).reshape(-1, WARP)
        warps_of(active)
        words = (votes.astype(np.uint64) << np.arange(WARP, dtype=np.uint64)).sum(axis=1)
        self._write(operands[0], np.repeat(words, WARP), active)

    def _bulk_copy(self, operands: list[str], active: Array) -> None:
        sizes = self._read(operands[2])[active].astype(np.int64)
        places = self._address(operands[0])[active].astype(np.int64)
        sources = self._address(operands[1])[active]
        barriers = self._address(operands[3])[active].astype(np.int64)
        early = not self.waited and not self.memory.are_constant(sources)
        assert not early, "a copy before griddepcontrol.wait"
        for barrier, place, source, size in zip(barriers, places, sources, sizes, strict=True):
            first = self.memory.indices(np.array([source]), 16)[0, 0]
            self.memory.indices(np.array([source + np.uint64(size - 16)]), 16)
            self.barriers.copy(int(barrier), int(place), self.memory.data[first : first + size])

    def _barrier(self, operation: str, operands: list[str], active: Array) -> None:
        if operands[0] == "_":  # an arrival whose state is not kept
            operands = operands[1:]
        addresses = self._address(operands[0])[active].astype(np.int64)
        numbers = self._read(operands[1])[active].astype(np.int64)
        if operation == "init":
            self.barriers.init(addresses, numbers)
        elif operation == "arrive":
            self.barriers.expect(addresses, numbers)
        else:
            self.barriers.wait(addresses, numbers, self.shared)

    def _atomic_add(self, space: str, operands: list[str], active: Array) -> None:
        old = np.zeros(self.pc.size, np.uint64)
        addresses, addends = self._address(operands[1]), self._read(operands[2])
        for thread in np.flatnonzero(active):
            if space == "shared":
                data, at = self.shared, int(addresses[thread]) + np.arange(4)
            else:
                data, at = self.memory.data, self.memory.indices(addresses[[thread]], 4)[0]
            word = data[at].view(np.uint32)
            old[thread] = word[0]
            data[at] = (word + addends[thread].astype(np.uint32)).view(np.uint8)
        self._write(operands[0], old, active)


def _names(braces: str) -> list[str]:
    return [name.strip() for name in braces.strip("{}").split(",")]


def _ones(bits: Any) -> Any:
    return (np.uint64(1) << np.uint64(bits)) - np.uint64(1)


def _sign(value: Array, size: int) -> Array:
    """Sign-extended to 64 bits from ``size`` bytes."""
    return value.astype(f"u{size}").view(f"i{size}").astype(np.int64).view(np.uint64)


def _typed(value: Array, kind: str) -> Array:
    """Raw bits as numbers: ``f32``, ``f16``, ``s64``, ``u32``, ``b16`` …"""
    size = int(kind[1:]) // 8
    letter = {"f": "f", "s": "i"}.get(kind[0], "u")
    return value.astype(f"u{size}").view(f"{letter}{size}")


def _raw(value: Array, kind: str) -> Array:
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


def _compute(parts: list[str], sources: list[Array]) -> Array:
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
        value = _typed(sources[0], kind)
        return _raw(operation(value, sources[1].astype(value.dtype)), kind)
    numbers = [_typed(source, kind) for source in sources]
    if name == "setp":
        return _COMPARE[parts[1]](*numbers).astype(np.uint64)
    if name == "mul" and parts[1] == "wide":
        wide = kind[0] + "64"
        return _raw(numbers[0].astype(np.int64) * numbers[1].astype(np.int64), wide)
    if name == "mad":
        return _raw(numbers[0] * numbers[1] + numbers[2], kind)
    if name == "prmt":
        return _permute(*sources)
    if name == "bfi":
        field, word, start, length = sources
        mask = _ones(length) << start
        return _raw(_typed(word & ~mask | field << start & mask, kind), kind)
    if name == "fma":
        return _raw(_fused(*numbers, down=parts[1] == "rm"), kind)
    table = _UNARY if len(numbers) == 1 else _BINARY
    return _raw(table[name](*numbers), kind)


def _permute(low: Array, high: Array, selector: Array) -> Array:
    """Four of the eight bytes of (low, high), by the selector's nibbles below 8."""
    word, byte = low & _ones(32) | high << np.uint64(32), np.uint64(255)
    result = np.zeros_like(word)
    for i in range(4):
        nibble = selector >> np.uint64(4 * i) & np.uint64(15)
        assert (nibble < 8).all()
        result |= (word >> nibble * np.uint64(8) & byte) << np.uint64(8 * i)
    return result


def _convert(parts: list[str], sources: list[Array]) -> Array:
    target, source = parts[-2], parts[-1]
    value = _typed(sources[-1], source)
    if target in ("bf16x2", "f16x2"):
        narrow = _bf16 if target == "bf16x2" else _f16
        return narrow(value) | narrow(_typed(sources[0], source)) << np.uint64(16)
    if target in ("bf16", "f16"):
        return (_bf16 if target == "bf16" else _f16)(value)
    if "sat" in parts:
        return _raw(np.clip(value, 0, 1), target)
    return _raw(value, target)
