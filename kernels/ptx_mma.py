"""Tensor cores of sm_80 and newer: ``mma.sync`` m16n8k16 and the loads that feed it.

Fragments of a warp, with g = lane / 4 and t = lane % 4; two 16-bit values a register, low half
first:

- A (16 × 16, rows of the product), 4 registers: (row g, k 2t), (g + 8, 2t), (g, 2t + 8),
  (g + 8, 2t + 8), each with the k after it;
- B (16 × 8), 2 registers: (k 2t, column g), (k 2t + 8, column g), each with the k after it;
- C (16 × 8), 4 float32: (row g, column 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1).
"""

from __future__ import annotations

from functools import cache
from typing import Any

from atlas_kernels._cuda import f32, types
from atlas_kernels.ptx import instruction, typed_intrinsic
from atlas_kernels.ptx_math import vector_zero


def _mma(element: str) -> Any:
    text = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{element}.{element}.f32"
        " {$0, $1, $2, $3}, {$8, $9, $10, $11}, {$12, $13}, {$4, $5, $6, $7};"
    )
    # Not ordered: it touches no memory, and the scheduler may place it freely.
    return instruction("+f4", "r4 r2", text, ordered=False, collective=True)


mma_bf16 = _mma("bf16")
mma_f16 = _mma("f16")
"""(c, a, b) → c + a · b: float32 accumulators, 16-bit factors. The tensor core sums the 16 products
in an order of its own; the same operands give the same bits on one architecture."""

mma_zero = vector_zero(4)
"""() → a C fragment of zeros."""


def _ldmatrix(count: int, modifier: str) -> Any:
    outputs = ", ".join(f"${i}" for i in range(count))
    text = f"ldmatrix.sync.aligned.m8n8.x{count}{modifier}.shared.b16 {{{outputs}}}, [${count}];"
    return instruction(f"r{count}", "r", text, collective=True)


ldmatrix_x2, ldmatrix_x4 = _ldmatrix(2, ""), _ldmatrix(4, "")
"""2 or 4 matrices of 8 rows of 16 bytes. Lane 8 i + j gives the shared address of row j of matrix
i; register i of lane l holds elements 2 (l % 4) and the next of row l / 4 of matrix i."""
ldmatrix_x2_transposed, ldmatrix_x4_transposed = _ldmatrix(2, ".trans"), _ldmatrix(4, ".trans")
"""The same with each 8 × 8 matrix transposed: V as the B of P · V."""

stmatrix_x4 = instruction(
    "",
    "r r4",
    "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};",
    collective=True,
)
"""The reverse of ``ldmatrix_x4``: (address, registers). sm_90 and newer."""


def _pack_rows(element: str) -> Any:
    conversion = f"cvt.rn.{element}x2.f32"
    text = f"{conversion} $0, $3, $2; {conversion} $1, $5, $4;"
    return instruction("r2", "f4", text, ordered=False)


mma_pack_bf16 = _pack_rows("bf16")
mma_pack_f16 = _pack_rows("f16")
"""A C fragment as 16-bit pairs (row g, row g + 8): the layout of A's registers for 8 of its 16 k,
so a product feeds the next one without an exchange between lanes."""


def _rows(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    values = []
    for i in range(4):
        factor = args[1] if i < 2 else args[2]
        values.append(builder.fmul(builder.extract_value(args[0], i), factor))
    return context.make_tuple(builder, signature.return_type, values)


_FRAGMENT = types.UniTuple(f32, 4)
mma_scale_rows = typed_intrinsic(_FRAGMENT(_FRAGMENT, f32, f32), _rows)
"""(c, s, z) → row g of a C fragment times s, row g + 8 times z."""


@cache
def mma_columns(n: int, element: str = "bf16") -> Any:
    """(c, a, b) → c + a · b for n columns: n / 2 accumulators, n / 4 registers of B.

    C's number 4 j + e is row g (+ 8 for e ≥ 2), column 8 j + 2 t + e % 2, as in ``wgmma``.
    """
    count = n // 2
    a = ", ".join(f"${2 * count + i}" for i in range(4))
    lines = []
    for j in range(n // 8):
        c = ", ".join(f"${4 * j + i}" for i in range(4))
        first = 2 * count + 4 + 2 * j
        lines.append(
            f"mma.sync.aligned.m16n8k16.row.col.f32.{element}.{element}.f32"
            f" {{{c}}}, {{{a}}}, {{${first}, ${first + 1}}}, {{{c}}};"
        )
    words = f"r4 r{n // 4}"
    return instruction(f"+f{count}", words, "\n".join(lines), ordered=False, collective=True)


@cache
def ldmatrix_columns(n: int, row_bytes: int) -> Any:
    """(address) → B's registers for n columns of x in shared memory, ``row_bytes`` a column.

    ``address`` is the lane's, of row ``lane % 8`` (+ 8 for lane ≥ 16, when n > 8) and of the 16
    bytes of k 0 … 7, or 8 … 15 where ``lane & 8``; a swizzle of period 8 rows leaves the rest to
    constant offsets.
    """
    if n == 8:
        return ldmatrix_x2
    lines = []
    for i in range(n // 16):
        registers = ", ".join(f"${4 * i + j}" for j in range(4))
        offset = f"${n // 4} + {16 * row_bytes * i}"
        lines.append(f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{registers}}}, [{offset}];")
    return instruction(f"r{n // 4}", "r", "\n".join(lines), collective=True)
