"""Tensor cores of sm_90a: ``wgmma`` m64nNk16 with float32 accumulators in a tuple.

A warp group (4 warps, from a multiple of 4) multiplies 64 rows of A by N columns of B. Thread
32 w + l holds N / 2 accumulators: number 4 j + e is row 16 w + l / 4 (+ 8 for e ≥ 2), column
8 j + 2 (l % 4) + e % 2.

Rules that keep ``wgmma`` asynchronous (ptxas serialises it otherwise, warnings C7504 … C7514):

- a stage's products stand in one statement with fence and commit, so that no register is moved in
  between (``wgmma_stage``);
- accumulators are never indexed at run time: work on them in intrinsics, or element by constant;
- after a wait, ``settle`` the accumulators before they are read;
- kernels that use ``setmaxnreg`` are linked from LTO-IR (``lto=True``): nvJitLink assembles PTX as
  relocatable code, in which ptxas ignores it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from atlas_kernels._cuda import f32, types
from atlas_kernels.ptx import flatten, instruction, typed_intrinsic
from atlas_kernels.ptx_math import vector_zero


def _warp_group(text: str) -> Any:
    return instruction("", "", text, collective=True)


wgmma_fence = _warp_group("wgmma.fence.sync.aligned;")
"""Orders register and shared writes before the products that read them."""
wgmma_commit = _warp_group("wgmma.commit_group.sync.aligned;")
"""Closes a group of products."""
wgmma_wait0 = _warp_group("wgmma.wait_group.sync.aligned 0;")
wgmma_wait1 = _warp_group("wgmma.wait_group.sync.aligned 1;")
"""Waits until at most 0 or 1 groups are in flight."""

_SWIZZLES = {0: 0, 64: 2, 128: 1}


def descriptor(stride_bytes: int, leading_bytes: int = 16, *, swizzle: int = 128) -> int:
    """The constant part of a shared-memory descriptor, as a signed 64-bit number.

    Parameters
    ----------
    stride_bytes : int
        From one group of 8 rows to the next: 8 · ``swizzle`` when rows lie one after another.
    leading_bytes : int
        Swizzled K-major tiles ignore it. MN-major ones (V): from one row's width of columns to the
        next. Without a swizzle: from 8 rows of 8 elements to the same rows of the next 8 elements.
    swizzle : 128, 64 or 0
        Bytes of a row, and the swizzle that TMA wrote them with; 0: 8 rows of 8 elements, K-major,
        lie one after another, 16 bytes each.

    Notes
    -----
    In a kernel: ``DESCRIPTOR | ((address & 0x3FFFF) >> 4)``. In a cluster, higher address bits
    carry the thread block's rank, hence the mask.
    """
    mode = _SWIZZLES[swizzle]
    return (mode - 4 * (mode >> 1)) << 62 | (stride_bytes >> 4) << 32 | (leading_bytes >> 4) << 16


@cache
def wgmma_zero(n: int) -> Any:
    """() → N / 2 zeros."""
    return vector_zero(n // 2)


@cache
def settle(n: int) -> Any:
    """(acc) → acc, after a wait: no use of the result can be moved above it."""
    return instruction(f"+f{n // 2}", "", "", collective=True)


@cache
def wgmma_stage(
    n: int,
    a_steps: tuple[int, ...],
    b_steps: tuple[int, ...],
    *,
    element: str = "bf16",
    accumulate: bool = True,
    b_transposed: bool = False,
    wait: bool = False,
    blocks: tuple[int, ...] = (0,),
) -> Any:
    """(acc, a, b) → acc + A · B for a stage of shared memory, k ascending.

    Parameters
    ----------
    n : int
        Columns: a multiple of 8 up to 256.
    a_steps, b_steps : tuple of int
        Byte offsets of each k16 step from the descriptors ``a`` and ``b`` (int64).
    element : "bf16" or "f16"
    accumulate : bool
        False: the accumulators' old value is ignored, and the call takes (a, b) only.
    b_transposed : bool
        B lies MN-major, as V does in P · V.
    wait : bool
        End with ``wgmma_wait0``; otherwise the caller waits and settles.
    blocks : tuple of int
        Byte offsets of blocks of 64 rows of A, which all multiply the same B; N / 2 accumulators of
        each, one block's after the other's.
    """
    count = n // 2 * len(blocks)
    first = 2 * count if accumulate else count
    lines = [
        "{ .reg .pred p; .reg .b64 a, b; .reg .b32 la, ha, lb, hb, t;",
        f"mov.b64 {{la, ha}}, ${first}; mov.b64 {{lb, hb}}, ${first + 1};",
        # One lane's value is uniform to the assembler: it adds offsets in uniform registers, and
        # does not bring a descriptor there for each product, which takes longer than a product.
        "shfl.sync.idx.b32 la, la, 0, 31, 0xffffffff; shfl.sync.idx.b32 lb, lb, 0, 31, 0xffffffff;",
        "wgmma.fence.sync.aligned;",
    ]
    for step, (a, b) in enumerate(zip(a_steps, b_steps, strict=True)):
        lines.append(
            f"setp.ne.b32 p, {int(accumulate or step > 0)}, 0;"
            f" add.u32 t, lb, {b >> 4}; mov.b64 b, {{t, hb}};"
        )
        for i, block in enumerate(blocks):
            registers = ", ".join(f"${n // 2 * i + j}" for j in range(n // 2))
            lines.append(
                f"add.u32 t, la, {(a + block) >> 4}; mov.b64 a, {{t, ha}};"
                f" wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{element}.{element}"
                f" {{{registers}}}, a, b, p, 1, 1, 0, {int(b_transposed)};"
            )
    lines.append("wgmma.commit_group.sync.aligned;")
    lines.append("wgmma.wait_group.sync.aligned 0; }" if wait else "}")
    outs = f"+f{count}" if accumulate else f"f{count}"
    return instruction(outs, "l l", "\n".join(lines), collective=True)


@cache
def wgmma_stage_registers(
    n: int, b_steps: tuple[int, ...], *, element: str = "bf16", b_transposed: bool = False
) -> Any:
    """(acc, a, b) → acc + A · B with A in registers: four 32-bit words for each k16 step.

    A's words are accumulator pairs converted by ``pack_accumulators``, so that P · V follows Q · Kᵀ
    without an exchange. The caller waits and settles.
    """
    count, steps = n // 2, len(b_steps)
    registers = ", ".join(f"${i}" for i in range(count))
    b_register = 2 * count + 4 * steps
    lines = [
        "{ .reg .pred p; .reg .b64 b; .reg .b32 low, high, t; setp.ne.b32 p, 1, 0;",
        f"mov.b64 {{low, high}}, ${b_register}; shfl.sync.idx.b32 low, low, 0, 31, 0xffffffff;",
        "wgmma.fence.sync.aligned;",
    ]
    for step, b in enumerate(b_steps):
        words = ", ".join(f"${2 * count + 4 * step + i}" for i in range(4))
        lines.append(
            f"add.u32 t, low, {b >> 4}; mov.b64 b, {{t, high}};"
            f" wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{element}.{element}"
            f" {{{registers}}}, {{{words}}}, b, p, 1, 1, {int(b_transposed)};"
        )
    lines.append("wgmma.commit_group.sync.aligned; }")
    return instruction(f"+f{count}", f"r{4 * steps} l", "\n".join(lines), collective=True)


@cache
def pack_accumulators(n: int, element: str = "bf16") -> Any:
    """(acc) → N / 4 words of 16-bit pairs, in the order of A's registers.

    Ordered: it stays below the wait for a product that still reads the previous words, which may
    have been given the same registers (warning C7513).
    """
    count = n // 2
    lines = [
        f"cvt.rn.{element}x2.f32 ${i}, ${count // 2 + 2 * i + 1}, ${count // 2 + 2 * i};"
        for i in range(count // 2)
    ]
    return instruction(f"r{count // 2}", f"f{count}", "\n".join(lines))


def store_accumulators(n: int, row_bytes: int) -> Any:
    """(acc, address): accumulators as float32 to shared memory, [column][row], ``row_bytes`` apart.

    ``address`` is the int32 address of (column 2 (lane % 4), row 16 warp + lane / 4). A pitch of
    4 floats modulo 16 avoids bank conflicts.
    """
    count = n // 2
    lines = []
    for i in range(count):
        offset = (8 * (i // 4) + (i & 1)) * row_bytes + (i >> 1 & 1) * 32
        lines.append(f"st.shared.f32 [${count} + {offset}], ${i};")
    return instruction("", f"f{count} r", "\n".join(lines))


def scale_accumulator_rows(n: int) -> Any:
    """(acc, s, z) → the thread's first row times s, its second (8 below) times z."""
    accumulators = types.UniTuple(f32, n // 2)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        *values, upper, lower = flatten(builder, signature.args, args)
        scaled = [
            builder.fmul(value, lower if i >> 1 & 1 else upper) for i, value in enumerate(values)
        ]
        return context.make_tuple(builder, accumulators, scaled)

    return typed_intrinsic(accumulators(accumulators, f32, f32), codegen)


def set_max_registers(count: int, *, more: bool) -> Any:
    """(): give registers of the warp group back, or take more; needs ``lto=True`` (see above)."""
    return _warp_group(f"setmaxnreg.{'inc' if more else 'dec'}.sync.aligned.u32 {count};")
