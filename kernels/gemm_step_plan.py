"""Which step-GEMM kernel a matrix gets for a number of rows; needs no compiler and no GPU.

A weight matrix has *one* order of summation, whatever the rows, tiles and kernels. A *chain* is a
sum of k16 steps, ascending, in one float32 accumulator of the tensor core. Most matrices are one
chain; small ones of bf16 are ``CHAINS`` of equal length (``chain_length``), whose sums are added in
ascending order: the first and the second, then the third, then the fourth.

A chain's product waits for the one before, 13 to 16 ns. With one row, what takes longest of a small
matrix, whose weights have come beforehand, is its chain. Warps of their own take chains side by
side.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

RUNGS = (8, 16, 32, 64, 128)
"""Rows of activations that a kernel has room for."""
BOX_K = 64
"""Elements of K in a box of the tensor maps: 128 bytes, the width of the swizzle."""
NUM_SMS = 132
"""Of the GPU that the tiles are made for, an H200."""
CHAINS = 4
"""Of a matrix that has more than one."""
_CHAINED_K = 2048  # the shortest rows that are worth it; chains are multiples of a stage's 256
_FEW_ROWS_OF_W, _SMALL = 16 * NUM_SMS, 22_000_000
_MOST_ROWS_OF_W = 48 * NUM_SMS


def chain_length(n: int, k: int) -> int:
    """Elements of K that a chain of a bf16 matrix [n, k] sums: all of them, or a quarter.

    A quarter where thread blocks of one row would wait for products rather than for memory: of so
    few columns each that their weights do not come faster, or so few bytes that they have come.
    Gated matrices, [gate; up], are one chain.
    """
    is_small = n <= _FEW_ROWS_OF_W or (n <= _MOST_ROWS_OF_W and 2 * n * k <= _SMALL)
    return k // CHAINS if is_small and k >= _CHAINED_K and k % (256 * CHAINS) == 0 else k


class TensorView(NamedTuple):
    """How a tensor map sees a matrix of bf16: a box, the whole and strides, outermost axis first.

    Strides in bytes, without the innermost. Blocks of ``BOX_K`` elements of K are an axis of their
    own, so that one copy brings several.
    """

    box: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def matrix_view(rows: int, k: int, stride: int, box_rows: int, boxes: int) -> TensorView:
    """Boxes of ``boxes`` blocks of ``box_rows`` rows of [rows, k]; k is a multiple of ``BOX_K``."""
    shape = (k // BOX_K, rows, BOX_K)
    return TensorView((boxes, box_rows, BOX_K), shape, (2 * BOX_K, stride))


def gated_view(rows: int, k: int, stride: int, box_rows: int, boxes: int) -> TensorView:
    """The same of [gate; up], ``rows`` each: in a block, the gates' rows, then the ups'."""
    shape, strides = (k // BOX_K, 2, rows, BOX_K), (2 * BOX_K, rows * stride, stride)
    return TensorView((boxes, 2, box_rows, BOX_K), shape, strides)


@dataclass(frozen=True, slots=True)
class StepTile:
    """A tile of the output and what is in flight for it.

    Attributes
    ----------
    rows : int
        Rows of activations it has room for: the N of the tensor-core instruction.
    columns : int
        Rows of the weight matrix, a multiple of 8; 64, or what is left, for each warp group.
    k_block, stages : int
        Elements of K in a stage of shared memory (64, 128 or 256), and stages.
    gated : bool
        The matrix holds gate rows, then as many up rows; the tile takes ``columns / 2`` of each.
    sharers : int
        Thread blocks of a cluster. They have the same columns, for ``rows`` rows each.
    chains : int
        Chains that warps of their own take side by side, with ``mma.sync``; stages are of each in
        turn. 1: a warp group takes all, one after the other.
    adds : bool
        The warp group may have several to add; else a matrix has one.
    """

    rows: int
    columns: int
    k_block: int
    stages: int
    gated: bool = False
    sharers: int = 1
    chains: int = 1
    adds: bool = False

    @property
    def box_rows(self) -> int:
        """Columns of the output."""
        return self.columns // 2 if self.gated else self.columns

    @property
    def weight_box(self) -> int:
        """Of the rows of W that the tile takes, or of its gates: what this thread block loads."""
        return self.box_rows // self.sharers

    def weight_view(self, n: int, k: int) -> TensorView:
        """What the tensor map of W [n, k] sees: a stage, or a thread block's part of a block."""
        if self.gated:
            return gated_view(n // 2, k, 2 * k, self.box_rows, self.k_block // BOX_K)
        boxes = self.k_block // BOX_K if self.sharers == 1 else 1
        return matrix_view(n, k, 2 * k, self.weight_box, boxes)

    def row_view(self, m: int, k: int, stride: int) -> TensorView:
        """What that of x [m, k] sees, rows ``stride`` bytes apart: a stage."""
        return matrix_view(m, k, stride, self.rows, self.k_block // BOX_K)

    @property
    def covered(self) -> int:
        """Rows of W that products read: 64 for each warp group, or 16 for each warp of a chain."""
        unit = 64 if self.chains == 1 else 16
        return unit * -(-self.columns // unit)

    @property
    def consumers(self) -> int:
        """Threads that multiply."""
        return 2 * self.covered * self.chains

    @property
    def threads(self) -> int:
        """And the warp that asks for memory."""
        return self.consumers + 32

    @property
    def row_bytes(self) -> int:
        """Shared memory of a stage's activations."""
        return self.rows * self.k_block * 2

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a stage: weights, then activations."""
        return self.columns * self.k_block * 2 + self.row_bytes

    @property
    def rows_offset(self) -> int:
        """Where a stage's activations lie in it."""
        return self.columns * self.k_block * 2

    @property
    def pitch(self) -> int:
        """Bytes between rows of the float32 tile; 4 floats modulo 32, against bank conflicts."""
        return (self.covered + 4) * 4

    @property
    def sums_bytes(self) -> int:
        """Of a chain's float32 tile, or of that of all chains added."""
        return self.rows * self.pitch

    @property
    def barrier_offset(self) -> int:
        """Where the barriers lie: after the stages, which the float32 tiles take over."""
        return max(self.stages * self.stage_bytes, self.chains * self.sums_bytes)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a thread block.

        Products read ``covered`` rows of W where a box may have fewer. What lies behind makes sums
        that nobody looks at; behind the last stage, too, it must be there.
        """
        behind = (self.covered - self.columns) * 128 - self.row_bytes
        return max(self.barrier_offset + 16 * self.stages, self.stages * self.stage_bytes + behind)

    def grid(self, n: int) -> int:
        """Thread blocks for a matrix of ``n`` rows."""
        return -(-(n // 2 if self.gated else n) // self.box_rows) * self.sharers


@dataclass(frozen=True, slots=True)
class MmaTile:
    """A tile of ``gemm_step_mma``.

    Attributes
    ----------
    rows, gated
        As in ``StepTile``.
    warps : int
        Each takes 16 rows of the weight matrix.
    line_bytes : int
        Bytes of 64 elements of a row of W: 128 in bf16.
    """

    rows: int
    warps: int
    gated: bool = False
    line_bytes: int = 128

    @property
    def threads(self) -> int:
        """Of a thread block."""
        return 32 * self.warps

    @property
    def columns(self) -> int:
        """Rows of the weight matrix."""
        return 16 * self.warps

    @property
    def box_rows(self) -> int:
        """Columns of the output."""
        return self.columns // 2 if self.gated else self.columns

    @property
    def weights_offset(self) -> int:
        """Where a stage's weights lie, after its activations."""
        return self.rows * 128

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a stage: 64 k of x, then of W."""
        return self.weights_offset + self.columns * self.line_bytes

    @property
    def stages(self) -> int:
        """As many as 96 KiB hold, which every GPU since sm_80 has; eight at most."""
        return min(8, 98304 // self.stage_bytes)

    @property
    def pitch(self) -> int:
        """Bytes between rows of the float32 tile, as in ``StepTile``."""
        return (self.columns + 4) * 4

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory; the float32 tile takes over the stages'."""
        return max(self.stages * self.stage_bytes, self.rows * self.pitch)

    def grid(self, n: int) -> int:
        """Thread blocks for a matrix of ``n`` rows."""
        return -(-n // self.columns)


COLUMNS = (16, 32, 48, 64, 96, 128)
"""Columns of the tiles ``c16`` … ``c128``, one thread block an SM: a matrix gets the first with
which its tiles fit the SMs of an H200. What has more rows than that, and is not gated, is ``wide``.
"""
FEW_ROWS = 32
"""Rows up to which there are tiles for widths between: more SMs have something to do."""
FEW_COLUMNS = (16, 24, 32, 40, 48, 56, 64, 72, 80, 96, 112, 128)
BESIDE_ATTENTION = 145 << 10
"""Shared memory of a thread block that finds room beside one of decode attention: an SM has 228 KB,
each thread block takes 1 KB more than it asks for, and ``attention_step`` asks for up to 81."""
_ALONE = 200 << 10


def _stages(columns: int, rows: int, room: int) -> tuple[int, int]:
    """``k_block`` and stages: the longest with which there are five.

    Between two stages the tensor core pauses for some 60 clocks, and it takes 420 for 256 of K.
    """
    for k_block in (256, 128, 64):
        stages = room // ((columns + rows) * k_block * 2)
        if stages >= 5:
            break
    return k_block, stages


def in_chains(tile: StepTile, room: int) -> StepTile:
    """A tile of one chain as one with warps for each of several.

    A place in the ring is always the same chain's: whoever waits for a stage has seen all those
    before it at its place, or the parity of its barrier would say nothing. ``mma.sync`` does not
    pause between stages, so they are short, and more fit.
    """
    tile = replace(tile, k_block=128, chains=CHAINS)
    return replace(tile, stages=room // tile.stage_bytes // CHAINS * CHAINS)


def _column_tile(columns: int, rows: int) -> StepTile:
    """A tile of ``c<columns>``. 128 rows are bound by what an SM takes in, the least for tiles as
    wide as they are high."""
    adds = NUM_SMS * columns <= _MOST_ROWS_OF_W and rows > RUNGS[0]
    if rows < 128:
        room = BESIDE_ATTENTION - 1024  # for barriers
        tile = StepTile(rows, columns, *_stages(columns, rows, room), adds=adds)
        while tile.shared_bytes > BESIDE_ATTENTION:  # with what lies behind the last stage
            tile = replace(tile, stages=tile.stages - 1)
        return tile
    if columns <= 64:
        stages = _stages(2 * columns, 64, _ALONE)
        return StepTile(64, 2 * columns, *stages, sharers=2, adds=adds)
    return StepTile(128, columns, *_stages(columns, 128, _ALONE))


# Found by timing whole sweeps of an 8B model's weights on an H200: see benchmarks/NOTES.md. wide
# and gated have two or three thread blocks an SM, or one of 192 columns where each reading the rows
# costs more than it gains; pair (gated, of few columns and rows) two.
TILES: dict[str, StepTile] = {
    f"c{columns}_{rows}": _column_tile(columns, rows) for columns in COLUMNS for rows in RUNGS
}
TILES |= {
    f"c{columns}_{rows}": _column_tile(columns, rows)
    for columns in FEW_COLUMNS
    for rows in RUNGS
    if rows <= FEW_ROWS
}
TILES |= {
    f"{form}_{rows}": StepTile(rows, columns, k_block, stages, form in ("gated", "pair"))
    for form, by_rows in (
        ("wide", ((64, 64, 8), (64, 64, 7), (64, 128, 4), (128, 128, 4), (128, 64, 7))),
        ("gated", ((64, 64, 8), (64, 64, 7), (192, 64, 7), (64, 64, 4), (192, 64, 5))),
        ("pair", ((64, 128, 6), (64, 128, 5), (64, 128, 4))),
    )
    for rows, (columns, k_block, stages) in zip(RUNGS, by_rows, strict=False)
}
TILES |= {
    f"split{columns}_8": in_chains(TILES[f"c{columns}_8"], BESIDE_ATTENTION - 1024)
    for columns in FEW_COLUMNS
    if NUM_SMS * columns <= _MOST_ROWS_OF_W
}
"""Tiles by variant: ``gemm_step_bf16_<variant>`` is the kernel of one. ``split<columns>`` are those
of matrices of several chains, for few rows."""


MMA_TILES: dict[str, MmaTile] = {
    # Many rows of activations are read for more rows of W at once.
    f"{form}_{rows}": MmaTile(rows, 2 * warps if rows >= 64 else warps, form == "gated")
    for form, warps in (("narrow", 2), ("wide", 4), ("gated", 4))
    for rows in RUNGS
}
"""Tiles of the ``mma.sync`` form: ``gemm_step_mma_bf16_<variant>``."""


def form(n: int, rows: int, *, gated: bool = False, chained: bool = False) -> str:
    """The family of ``TILES`` of a matrix of ``n`` rows, for ``rows`` rows of activations.

    ``chained``: it has several chains; such a matrix is not gated.
    """
    if gated:
        fits = rows <= FEW_ROWS and TILES[f"pair_{RUNGS[0]}"].grid(n) <= 2 * NUM_SMS
        return "pair" if fits else "gated"
    widths = FEW_COLUMNS if rows <= FEW_ROWS else COLUMNS
    columns = next((columns for columns in widths if n <= NUM_SMS * columns), None)
    if columns is None:
        return "wide"
    return f"split{columns}" if chained and rows <= RUNGS[0] else f"c{columns}"


def mma_form(n: int, *, gated: bool = False) -> str:
    """The family of ``MMA_TILES``."""
    if gated:
        return "gated"
    return "narrow" if n <= NUM_SMS * 64 else "wide"


def rung(rows: int) -> int:
    """The smallest of ``RUNGS`` with room for ``rows``."""
    for size in RUNGS:
        if rows <= size:
            return size
    raise ValueError(f"{rows} rows; the step GEMM takes 1 to {RUNGS[-1]}")


def variant(n: int, rows: int, *, gated: bool = False, chained: bool = False) -> str:
    """The key of ``TILES`` for ``rows`` rows of activations and a matrix as ``form`` takes it."""
    return f"{form(n, rows, gated=gated, chained=chained)}_{rung(rows)}"
