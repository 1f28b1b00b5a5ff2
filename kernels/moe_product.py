"""Products of a mixture of experts: 8 rows of weights, straight from global memory.

A *group* is 64 elements of K of 8 rows of weights. Lane (g, t) = (lane / 4, lane % 4) holds of row
g the 8 elements from 8 t, and the 8 from 32 + 8 t: two loads of 16 bytes. Of 32 elements, lanes 0
and 1 have the first k16 step and lanes 2 and 3 the second; before they become the tensor core's B,
lane t exchanges half of its 8 with lane t xor 2. The activations' A is loaded as that leaves them,
8 bytes a step. A warp keeps ``depth`` groups of weights in registers or on their way there, and of
activations ``ahead``: one where they lie in shared memory, more where they come from the L2 cache.
"""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import device, i32
from atlas_kernels.moe_plan import STAGED_GAP
from atlas_kernels.ptx import instruction
from atlas_kernels.ptx_async import copy16, copy_commit
from atlas_kernels.ptx_math import quotient
from atlas_kernels.ptx_memory import prefetch_l2
from atlas_kernels.ptx_warp import lanes, num_threads_x, thread_x

GROUP = 64
"""Elements of K."""
GROUP_BYTES = 2 * GROUP

_WEIGHTS = "ld.global.nc.L1::no_allocate.L2::256B.v4.b32"  # read once: past L1
_ROWS = {False: "ld.global.v2.b32", True: "ld.shared.v2.b32"}
_MMA = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"


def _loads(operation: str, first: int, at: int, guard: str = "") -> list[str]:
    """Eight registers of 128 bytes, from the address in register ``first`` on."""
    count = int(operation[operation.index(".v") + 2])
    lines = []
    for i in range(8 // count):
        registers = ", ".join(f"${count * i + j}" for j in range(count))
        lines.append(f"{guard}{operation} {{{registers}}}, [${first} + {at + 16 * count * i}];")
    return lines


def _load(operation: str, space: str, group: int) -> Any:
    """(address of group 0) → group ``group``."""
    return instruction("r8", space, "\n".join(_loads(operation, 8, group * GROUP_BYTES)))


def _load_if(operation: str, space: str, group: int, *, kept: bool = True) -> Any:
    """(registers, address of group 0, number of groups) → group ``group``, if there is such a one.

    Else the registers stay as they are, or are undefined where none is ``kept``. It is no branch.
    """
    first = 16 if kept else 8
    lines = [f"{{ .reg .pred p; setp.gt.s32 p, ${first + 1}, {group};"]
    lines += [*_loads(operation, first, group * GROUP_BYTES, "@p "), "}"]
    return instruction("+r8" if kept else "r8", f"{space} r", "\n".join(lines))


def _multiply(place: int | None = None) -> Any:
    """(sums, activations, weights, 0, groups) → sums with a group: four k16 steps, ascending.

    With a place only if there is such a group. A's lower 8 rows are zeros.
    """
    guard = "" if place is None else "@p "
    lines = ["{ .reg .pred p, q; .reg .b32 t, s, u, v, a, b, c, d;"]
    lines.append("mov.u32 t, %laneid; and.b32 t, t, 2; setp.ne.s32 q, t, 0;")
    if place is not None:
        lines.append(f"setp.gt.s32 p, $25, {place};")
    for half in range(2):
        w = [f"${16 + 4 * half + i}" for i in range(4)]
        for given, kept, taken in ((0, 2, "u"), (1, 3, "v")):
            lines.append(f"selp.b32 s, {w[given]}, {w[kept]}, q;")
            lines.append(f"shfl.sync.bfly.b32 {taken}, s, 2, 31, 0xffffffff;")
        lines.append(f"selp.b32 a, u, {w[0]}, q; selp.b32 b, v, {w[1]}, q;")
        lines.append(f"selp.b32 c, {w[2]}, u, q; selp.b32 d, {w[3]}, v, q;")
        for step, pair in enumerate(("a, b", "c, d")):
            x = 8 + 4 * half + 2 * step
            words = f"{{${x}, $24, ${x + 1}, $24}}, {{{pair}}}"
            lines.append(f"{guard}{_MMA} {{$0, $1, $2, $3}}, {words}, {{$0, $1, $2, $3}};")
    text = "\n".join([*lines, "}"])
    return instruction("+f4", "r8 r8 r r", text, ordered=False, collective=True)


@device
def row_place(lane):
    """Bytes from a group of activations to what a lane has of its first step."""
    return i32((lane & 1) * 16 + (lane & 2) * 4)


def _pieces(load: Any, places: range) -> Any:
    """(address, groups) → load(place)(address, groups) of each place."""
    first = load(places[0])
    if len(places) == 1:
        return device(lambda source, groups: (first(source, groups),))
    rest = _pieces(load, places[1:])
    return device(lambda source, groups: (first(source, groups), *rest(source, groups)))


def load_rows(ahead: int, *, staged: bool) -> Any:
    """(address, groups) → the first groups of activations, from shared memory if ``staged``."""
    space = "r" if staged else "l"
    return _pieces(lambda i: _load_if(_ROWS[staged], space, i, kept=False), range(ahead))


def _ask_always(place: int) -> Any:
    load = _load(_WEIGHTS, "l", place)
    return device(lambda source, groups: load(source))


def ask_groups(depth: int) -> Any:
    """(address, groups) → a ring: ask for the first ``depth`` groups of a unit, if it has them.

    Where it has them all, as in most shapes, the loads leave without a question between them.
    """
    every = _pieces(_ask_always, range(depth))
    some = _pieces(lambda i: _load_if(_WEIGHTS, "l", i, kept=False), range(depth))

    @device
    def ask(source, groups):
        if groups >= depth:
            return every(source, groups)
        return some(source, groups)

    return ask


def bring_groups(first: int) -> Any:
    """(address, lane, groups): bring those from ``first`` on into the second-level cache."""

    @device
    def bring(source, lane, groups):
        piece = i32((lane & 3) * 64)  # two groups of 8 rows at a time, 64 bytes a lane
        at, step = i32(first * GROUP_BYTES + piece), i32(lanes() * 8)
        while at < groups * GROUP_BYTES:
            prefetch_l2(source + (at - (lane & 3) * 16))
            at = i32(at + step)

    return bring


def _put(count: int, place: int) -> Any:
    """(tuple of ``count``, value) → the tuple with the value at ``place``."""
    if count == 1:
        return device(lambda values, value: (value,))
    if place == 0:
        return device(lambda values, value: (value, *values[1:]))
    put = _put(count - 1, place - 1)
    return device(lambda values, value: (values[0], *put(values[1:], value)))


def multiply_groups(depth: int, ahead: int, place: int = 0, *, staged: bool) -> Any:
    """Multiply a ring of groups, an even number, and ask for new ones as soon as two are used.

    (sums, ring, activations, their address, groups left of the unit, address and number of those to
    ask for) → (sums, ring, activations). Each group of activations that is used makes room for the
    one ``ahead`` of it, at its own place: ``depth`` is a multiple of ``ahead``. The assembler
    gathers loads at the end of a block of code, so here branches set them apart.
    """
    if place == depth:
        return device(lambda total, ring, held, rows, left, source, count: (total, ring, held))
    first, second = _multiply(), _multiply(place + 1)
    one, two = _load(_WEIGHTS, "l", place), _load_if(_WEIGHTS, "l", place + 1)
    space, a, b = "r" if staged else "l", place % ahead, (place + 1) % ahead
    next_one, next_two = (_load_if(_ROWS[staged], space, place + ahead + i) for i in (0, 1))
    put_one, put_two = _put(ahead, a), _put(ahead, b)
    rest = multiply_groups(depth, ahead, place + 2, staged=staged)

    @device
    def turn(total, ring, held, rows, left, source, count):
        if left > place:
            total = first(total, held[a], ring[0], i32(0), left)
            held = put_one(held, next_one(held[a], rows, left))
            total = second(total, held[b], ring[1], i32(0), left)
            held = put_two(held, next_two(held[b], rows, left))
        v, w = ring[0], ring[1]
        if count > place:
            v, w = one(source), two(w, source, count)
        return rest(total, (*ring[2:], v, w), held, rows, left, source, count)

    return turn


@device
def stage_rows(base, source, stride, rows, row_bytes):
    """By all threads: ask for rows of activations, which come into shared memory with gaps.

    They are there once ``copy_wait`` and a barrier are over.
    """
    p, step, pieces = thread_x(), num_threads_x(), i32(row_bytes >> 4)
    while p < rows * pieces:
        row = quotient(p, pieces)
        at = i32((p - row * pieces) * 16)
        copy16(i32(base + row * (row_bytes + STAGED_GAP) + at), source + row * stride + at)
        p = i32(p + step)
    copy_commit()
