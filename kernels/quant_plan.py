"""How quantised weights lie in device memory, and the step GEMM's tiles over them.

Needs no compiler and no GPU. A matrix [n, k] is cut into *units* of 32 rows, a unit into *cells*
of 128 k, which follow one another; rows and k past the end are zeros. A cell is what a bulk copy
brings and four warps multiply: codes in the order in which their threads hold them as the A operand
of a tensor core, then the rows' scales.

Thread 4 r + t of 128 has row r's weights k = 8 p + 2 t + h of each block of 32 (p < 4, h < 2):

- 4-bit codes: [128 threads][4 blocks] words, code (p, h) at bit 4 p + 16 h;
- 8-bit codes: [2 pairs of blocks][128 threads][2 blocks][4 p][2 h] bytes;
- 6-bit codes: [2 pairs of blocks][3][128 threads] words; of a pair's 16 codes (block, p, h) code i
  is at bit 6 (i mod 5) of word i / 5, and the last one's bits 2 w and 2 w + 1 at the top of word w.

Scales by format, each [32 rows] …:

- Q8_0, Q4_0: d of the 4 blocks, float16. Q4_1: (d, m) of the 4 blocks, float16.
- Q4_K: (d, −dmin), float16; then the blocks' 4 multipliers of d, bytes; then 4 of −dmin.
- Q6_K: 8 signed multipliers, one for 16 weights; then d, float16.
- b8_32, b8_16: (scale, minimum), float32, for 32 or 16 weights: formats without a kernel of their
  own, with the integers of the file in 8 bits (``atlas.ops.blocks.integers``).
"""

from __future__ import annotations

from dataclasses import dataclass

from atlas_kernels.gemm_step_plan import MmaTile

CELL_ROWS, CELL_K = 32, 128


@dataclass(frozen=True, slots=True)
class Cell:
    """Bytes of a cell: its codes', and a row's scales."""

    code_bytes: int
    scale_bytes: int

    @property
    def nbytes(self) -> int:
        """A multiple of 16, as bulk copies want it."""
        return self.code_bytes + CELL_ROWS * self.scale_bytes


CELLS: dict[str, Cell] = {
    "q8_0": Cell(4096, 8),
    "q4_0": Cell(2048, 8),
    "q4_1": Cell(2048, 16),
    "q4_k": Cell(2048, 12),
    "q6_k": Cell(3072, 10),
    "b8_32": Cell(4096, 32),
    "b8_16": Cell(4096, 64),
}
"""Cells by format. 8.5, 4.5, 5, 4.75 (4.5 in the file), 6.625 (6.5625), 10 and 12 bits a weight."""

WIDENED = {
    "q5_0": "b8_32",
    "q5_1": "b8_32",
    "q5_k": "b8_32",
    "iq4_nl": "b8_32",
    "iq4_xs": "b8_32",
    "q2_k": "b8_16",
    "q3_k": "b8_16",
}
"""Formats of files that become one of ``CELLS``."""


def num_units(rows: int) -> int:
    """Units of a matrix of so many rows."""
    return -(-rows // CELL_ROWS)


def unit_bytes(format: str, cols: int) -> int:
    """Bytes from a unit to the next."""
    return -(-cols // CELL_K) * CELLS[format].nbytes


@dataclass(frozen=True, slots=True)
class QuantTile:
    """A tile of ``gemm_step_tiles``; a stage is 128 k of it.

    Attributes
    ----------
    type : str
        Of ``CELLS``.
    rows : int
        Rows of activations it has room for: the N of ``wgmma``.
    groups : int
        Warp groups, each with products of its own.
    units : int
        Units of a group: with one, half of the 64 rows that ``wgmma`` multiplies are zeros, and
        twice as many thread blocks have work; with two of a gated matrix, one of gate rows and
        the one of up rows beside it.
    gated : bool
    budget : int
        Bytes of shared memory to fill with stages.
    """

    type: str
    rows: int
    groups: int
    units: int
    gated: bool
    budget: int

    @property
    def columns(self) -> int:
        """Columns of the output."""
        return CELL_ROWS * self.groups * (1 if self.gated else self.units)

    @property
    def threads(self) -> int:
        """The warp groups, and the warp that asks for memory."""
        return 128 * self.groups + 32

    @property
    def cell_bytes(self) -> int:
        """Of a unit's stage."""
        return CELLS[self.type].nbytes

    @property
    def weight_bytes(self) -> int:
        """Of a stage."""
        return self.groups * self.units * self.cell_bytes

    @property
    def row_bytes(self) -> int:
        """Of a stage's activations, two boxes of 64 k."""
        return self.rows * CELL_K * 2

    @property
    def stage_bytes(self) -> int:
        """What the barrier of a stage waits for."""
        return self.weight_bytes + self.row_bytes

    @property
    def stages(self) -> int:
        """As many as the budget holds, 3 to 24."""
        return max(3, min(24, self.budget // self.stage_bytes))

    @property
    def pitch(self) -> int:
        """Bytes between rows of the float32 tile; 4 floats modulo 32, against bank conflicts."""
        return (64 * self.groups + 4) * 4

    @property
    def weights_offset(self) -> int:
        """Where the stages' weights lie, behind all activations."""
        return self.stages * self.row_bytes

    @property
    def barrier_offset(self) -> int:
        """Where the barriers lie: after the stages, which the float32 tile takes over."""
        return max(self.weights_offset + self.stages * self.weight_bytes, self.rows * self.pitch)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a thread block."""
        return self.barrier_offset + 16 * self.stages

    @property
    def min_blocks(self) -> int:
        """Thread blocks that an SM shall hold: what shared memory allows, four at most."""
        return min(4, 227 * 1024 // (self.shared_bytes + 1024))

    def grid(self, n: int) -> int:
        """Thread blocks for a matrix of ``n`` rows."""
        return -(-(n // 2 if self.gated else n) // self.columns)


QUANT_RUNGS = (8, 32, 128)
_KIB = 1024
_FORMS = {
    # form: rung → groups, units, shared memory for stages
    "narrow": {8: (1, 1, 104 * _KIB), 32: (1, 1, 104 * _KIB), 128: (1, 2, 200 * _KIB)},
    "wide": {8: (1, 2, 72 * _KIB), 32: (1, 2, 72 * _KIB), 128: (3, 2, 200 * _KIB)},
    "gated": {8: (1, 2, 72 * _KIB), 32: (1, 2, 72 * _KIB), 128: (3, 2, 200 * _KIB)},
}
_MOST_GROUPS = {"q6_k": 2, "b8_32": 2, "b8_16": 2}  # with three their scales spill
QUANT_TILES: dict[str, QuantTile] = {
    f"{type}_{form}_{rows}": QuantTile(
        type, rows, min(groups, _MOST_GROUPS.get(type, 3)), units, form == "gated", budget
    )
    for type in CELLS
    for form, by_rows in _FORMS.items()
    for rows, (groups, units, budget) in by_rows.items()
}
"""Tiles of ``gemm_step_<type>_<form>_<rows>``."""


QUANT_MMA_TILES: dict[str, MmaTile] = {
    f"{type}_{form}_{rows}": MmaTile(rows, 8 if rows >= 64 else 4, form == "gated", line_bytes=0)
    for type in CELLS
    for form in ("plain", "gated")
    for rows in QUANT_RUNGS
}
"""Tiles of ``gemm_step_mma_<type>_<form>_<rows>``; no weights in shared memory."""


def quant_form(n: int, *, gated: bool = False) -> str:
    """The family of tiles of a matrix of ``n`` rows; all of them sum alike."""
    if gated:
        return "gated"
    return "narrow" if n <= 8192 else "wide"


def quant_rung(rows: int) -> int:
    """The smallest of ``QUANT_RUNGS`` with room for ``rows``."""
    for size in QUANT_RUNGS:
        if rows <= size:
            return size
    raise ValueError(f"{rows} rows; the step GEMM takes 1 to {QUANT_RUNGS[-1]}")
