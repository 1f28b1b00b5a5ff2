"""Runs PTX on NumPy, one thread block at a time, so that kernels are tested without a GPU.

All threads of a block are one array. The threads furthest behind run next, which is how threads of
a branch meet again; barriers, shuffles and memory are checked more strictly than a GPU does:
an access must be aligned and inside one allocation, a constant load (``ld.global.nc``) must not see
what this kernel wrote, before ``griddepcontrol.wait`` nothing else is read and nothing is written,
and a shuffle needs its whole warp. It knows the instructions that this package's kernels have, and
refuses others. Approximations (``rsqrt``, ``ex2``) are exact here.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.kernels.ptx_barrier import Barriers, without_loops
from tests.kernels.ptx_compute import compute, names_of, ones, raw_bits, sign, typed
from tests.kernels.ptx_group import GROUP, NamedBarriers, TensorMap, WarpGroup, coordinates, issued
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
    "wgmma.fence.sync.aligned",
    "fence.proxy.async.shared::cta",
    "fence.proxy.tensormap::generic.acquire.gpu",
    "setmaxnreg.inc.sync.aligned.u32",
    "setmaxnreg.dec.sync.aligned.u32",
)


@dataclass
class Memory:
    """Device memory: allocations with gaps in between, filled with NaN bits."""

    data: Array = field(default_factory=lambda: np.full(1 << 23, 0xFF, np.uint8))
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
        while self.ends[-1] > self.data.size:
            self.data = np.concatenate([self.data, np.full_like(self.data, 0xFF)])
        self.data[start : start + raw.size] = raw
        return _BASE + start

    def tensor_map(
        self,
        address: int,
        shape: tuple[int, ...],
        box: tuple[int, ...],
        strides: tuple[int, ...] | None = None,
    ) -> bytes:
        """As ``Gpu.tensor_map``, in this machine's own form."""
        if strides is None:
            strides = tuple(2 * math.prod(shape[i:]) for i in range(1, len(shape)))
        order = (list(sizes[::-1]) for sizes in (shape, strides, box))
        return TensorMap(address, *order).encode()

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
    the next or the previous one, which a missing barrier does not survive. A greater number is the
    seed of chance: it says which warp goes on, and which bulk copy comes once all wait.
    """
    program = _Program(ptx, args, shared_bytes)
    written = np.zeros(memory.data.size, bool)
    for y in range(grid[1]):
        for x in range(grid[0]):
            turns = np.random.default_rng([order, x, y]) if order > 1 else None
            _Block(program, memory, written, threads, grid, (x, y), turns).run(order)


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
            guard = re.match(r"@(!?)(%?\w+)\s+", statement)
            predicate, negated = (guard[2], guard[1] == "!") if guard else ("", False)
            statement = statement[guard.end() :] if guard else statement
            opcode, *rest = statement.split(None, 1)
            operands = re.findall(r"\[[^\]]*\]|\{[^}]*\}|[^,\s][^,]*", rest[0] if rest else "")
            self.code.append((predicate, negated, opcode, [o.strip() for o in operands]))


_UNDEFINED = 0x7FC17FC17FC17FC1  # a NaN of any type, so that a result that it reaches shows it


class _Block:
    def __init__(
        self,
        program: _Program,
        memory: Memory,
        written: Array,
        threads: int,
        grid: tuple[int, int],
        block: tuple[int, int],
        turns: np.random.Generator | None,
    ) -> None:
        self.turns, self.turn = turns, 0  # the warp that goes on
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
        self.barriers = Barriers(turns)
        self.waited = False
        self.waiting = np.zeros(threads, bool)
        self.named = NamedBarriers(threads)
        self.groups = [WarpGroup() for _ in range(threads // GROUP)]
        self.stalled = np.zeros(threads, bool)  # at an instruction that waits for other threads

    def run(self, order: int) -> None:
        end = len(self.program.code)
        warp = np.arange(self.pc.size) // WARP
        rank = order * warp
        has_moved = True
        while (self.pc < end).any():
            left = (self.pc < end) & (self.named.held == 0)
            ready = left & ~self.waiting & ~self.stalled
            if not ready.any():
                if self.stalled.any():
                    assert has_moved or self.barriers.bring(), "a wait that nothing ends"
                    self.stalled[:] = has_moved = False
                else:
                    assert left.any(), "a barrier that not all reach"
                    self.waiting[:] = False  # all that are left have reached the barrier
                continue
            if self.turns is None:
                ready &= rank == rank[ready].min()
            else:
                ready &= warp == self._next(np.unique(warp[ready]))
            now = int(self.pc[ready].min())
            active = ready & (self.pc == now)
            predicate, negated, opcode, operands = self.program.code[now]
            self.pc[active] += 1
            if predicate:
                active = active & (self.registers[predicate].astype(bool) != negated)
            if active.any():
                with np.errstate(all="ignore"):
                    self._step(opcode, operands, active, end)
                has_moved |= bool((active & ~self.stalled).any())
        self.barriers.end()

    def _next(self, warps: Array) -> int:
        """The warp of ``warps`` that goes on: the same for some instructions, then any."""
        assert self.turns is not None
        if self.turn not in warps or self.turns.random() < 0.05:
            self.turn = int(self.turns.choice(warps))
        return self.turn

    def _step(self, opcode: str, operands: list[str], active: Array, end: int) -> None:
        parts = opcode.split(".")
        name = parts[0]
        if name == "ret":
            self.pc[active] = end
        elif name == "bra":
            self.pc[active] = self.program.labels[operands[0]]
        elif opcode == "griddepcontrol.wait":
            self.waited = True
        elif opcode == "bar.sync" and operands == ["0"]:
            self._wait(active, end)
        elif name == "bar" and parts[1] in ("sync", "arrive"):
            warps_of(active)
            numbers, counts = (self._read(operand).astype(np.int64) for operand in operands)
            self.named.arrive(numbers, counts, active, wait=parts[1] == "sync")
        elif name == "wgmma" and parts[1] != "fence":
            self._multiply(parts[1], operands, active)
        elif name in ("ld", "st"):
            self._access(parts, operands, active)
        elif name in ("mma", "ldmatrix"):
            self._tensor(name, parts, operands, active)
        else:
            self._step_data(opcode, operands, active)

    def _step_data(self, opcode: str, operands: list[str], active: Array) -> None:
        parts = opcode.split(".")
        name = parts[0]
        if opcode.startswith("cp.async.bulk.tensor"):
            self._tensor_copy(operands, active)
        elif opcode.startswith("cp.async.bulk"):
            self._bulk_copy(opcode, operands, active)
        elif name == "mbarrier":
            self._barrier(parts[1], operands, active)
        elif name == "cp":
            self._copy(opcode, operands, active)
        elif name == "prefetch":  # moves nothing here, but must not ask for what is nowhere
            self.memory.indices(self._address(operands[0])[active], 1)
        elif name == "atom":
            self._atomic_add(parts[1], operands, active)
        elif name == "shfl":
            warps_of(active)
            lane, own = self._read(operands[2]).astype(np.int64), np.arange(active.size)
            if parts[2] == "bfly":
                lane = own ^ lane
            else:  # within segments of as many lanes as the mask in bits 8 to 12 leaves
                kept = int(operands[3], 0) >> 8 & 31
                lane = own // WARP * WARP + (own & kept | lane & 31 & ~kept)
            self._write(operands[0], self._read(operands[1])[lane], active)
        elif name in ("vote", "redux"):
            self._agree(parts, operands, active)
        elif name == "mov":
            self._move(parts, operands, active)
        elif opcode not in _NOTHING_TO_DO:
            sources = [self._read(operand) for operand in operands[1:]]
            self._write(operands[0], compute(parts, sources), active)

    def _stall(self, threads: Array) -> None:
        """Let threads come to this instruction again once others have moved."""
        self.pc[threads] -= 1
        self.stalled |= threads

    def _multiply(self, operation: str, operands: list[str], active: Array) -> None:
        """``wgmma`` instructions of each warp group that is there as a whole."""
        here = int(self.pc[active][0]) - 1
        earlier = self.stalled & (self.pc == here)
        num_groups = active.size // GROUP  # the warps behind have no part in products
        whole = (active | earlier)[: num_groups * GROUP].reshape(-1, GROUP).all(axis=1)
        together = np.zeros(active.size, bool)
        together[: num_groups * GROUP] = np.repeat(whole, GROUP)
        self._stall(active & ~together)
        self.stalled &= ~(earlier & together)
        self.pc[earlier & together] += 1
        for number in np.flatnonzero(whole):
            group, at = self.groups[number], slice(number * GROUP, (number + 1) * GROUP)

            def read(name: str, at: slice = at) -> Array:
                return self._read(name)[at]

            def write(name: str, value: Array, at: slice = at) -> None:
                self.registers.setdefault(name, np.zeros(self.pc.size, np.uint64))[at] = value

            if operation == "mma_async":
                group.issue(issued(operands, read, write))
            elif operation == "commit_group":
                group.commit()
            else:
                group.wait(int(operands[0]), read, write, self.shared)

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
        elif operand.startswith("%"):
            value = _UNDEFINED  # what no instruction has written
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
            low, high = (self._read(name) for name in names_of(source))
            self._write(target, low & ones(half) | high << half, active)
        elif target.startswith("{"):
            low_name, high_name = names_of(target)
            value = self._read(source)
            self._write(low_name, value & ones(half), active)
            self._write(high_name, value >> half, active)
        else:
            for number, group in enumerate(self.groups):
                if active[number * GROUP : (number + 1) * GROUP].any():
                    group.move(target, source)
            self._write(target, self._read(source), active)

    def _access(self, parts: list[str], operands: list[str], active: Array) -> None:
        if parts[1] == "relaxed":  # with a scope: all threads see one memory here
            parts = [parts[0], *parts[3:]]
        is_load, space, kind = parts[0] == "ld", parts[1], parts[-1]
        targets = operands[0] if is_load else operands[1]
        inside = re.fullmatch(r"\[(.+)\]", operands[1] if is_load else operands[0])
        assert inside is not None
        names = names_of(targets) if targets.startswith("{") else [targets]
        size = int(kind[1:]) // 8
        if space == "param":
            value = np.full(self.pc.size, self.program.parameters[inside[1]], np.uint64)
            self._write(names[0], sign(value, size) if kind[0] == "s" else value, active)
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
        targets, sources = names_of(operands[0]), [names_of(operand) for operand in operands[1:]]
        results = [np.zeros(self.pc.size, np.uint64) for _ in targets]
        for warp in warps_of(active):
            at = slice(warp * WARP, (warp + 1) * WARP)
            if name == "ldmatrix":
                addresses = self._address(operands[1])[at]
                transposed = "trans" in parts
                values = ldmatrix(self.shared, addresses, len(targets), transposed=transposed)
            else:
                a, b, c = ([self._read(register)[at] for register in group] for group in sources)
                sums = mma([typed(value, "f32") for value in c], a, b)
                values = [raw_bits(value, "f32") for value in sums]
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
            if "cache_hint" in opcode:  # a policy, the last operand
                operands = operands[:-1]
            sizes = self._read(operands[3])[active] if len(operands) > 3 else np.full(1, width)
            places = self._address(operands[0])[active].astype(np.int64)
            data = np.zeros((places.size, width), np.uint8)
            full = np.broadcast_to(sizes == width, places.shape)
            addresses = self._address(operands[1])[active][full]
            early = not self.waited and not self.memory.are_constant(addresses)
            assert not early, "a copy before griddepcontrol.wait"
            data[full] = self.memory.data[self.memory.indices(addresses, width)]
            self.copies.copy(active, places, data)

    def _agree(self, parts: list[str], operands: list[str], active: Array) -> None:
        """One word for a warp: its votes, its greatest value, or the sum."""
        warps_of(active)
        values, bits = self._read(operands[1]).reshape(-1, WARP), np.arange(WARP, dtype=np.uint64)
        if parts[0] == "vote":
            words = (values.astype(bool).astype(np.uint64) << bits).sum(axis=1)
        else:
            combine = {"max": np.max, "add": np.sum}[parts[2]]
            words = raw_bits(combine(typed(values, parts[3]), axis=1), parts[3])
        self._write(operands[0], np.repeat(words, WARP), active)

    def _bulk_copy(self, opcode: str, operands: list[str], active: Array) -> None:
        if "prefetch" in opcode:  # as ``prefetch``: from the first byte to the last
            sizes = self._read(operands[1])[active].astype(np.uint64)
            for end in (np.uint64(0), sizes - np.uint64(16)):
                self.memory.indices(self._address(operands[0])[active] + end, 16)
            return
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

    def _tensor_copy(self, operands: list[str], active: Array) -> None:
        name, corner = coordinates(operands[1])
        where = [self._read(register).astype(np.uint32).view(np.int32) for register in corner]
        places, maps = self._address(operands[0]), self._read(name)
        barriers = self._address(operands[2])

        def read(addresses: Array) -> Array:
            early = not self.waited and not self.memory.are_constant(addresses)
            assert not early, "a copy before griddepcontrol.wait"
            return self.memory.data[self.memory.indices(addresses, 16)]

        for thread in np.flatnonzero(active):
            raw = self.memory.data[self.memory.indices(maps[[thread]], 128)[0]]
            place, box = int(places[thread]), TensorMap.decode(raw)
            data = box.box_at([int(index[thread]) for index in where], place, read)
            self.shared[place : place + data.size] = 0xFF  # from now on it may change
            self.barriers.copy(int(barriers[thread]), place, data)

    def _barrier(self, operation: str, operands: list[str], active: Array) -> None:
        if operands[0] == "_":  # an arrival whose state is not kept
            operands = operands[1:]
        addresses = self._address(operands[0])[active].astype(np.int64)
        numbers = self._read(operands[1] if len(operands) > 1 else "0")[active].astype(np.int64)
        if operation == "init":
            self.barriers.init(addresses, numbers)
        elif operation == "arrive":
            self.barriers.expect(addresses, numbers)
        else:
            is_over = np.zeros(active.size, bool)
            is_over[active] = self.barriers.wait(addresses, numbers, self.shared)
            self._stall(active & ~is_over)

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
