"""Which step-GEMM kernel a matrix gets for a number of rows; needs no compiler and no GPU.

A weight matrix has *one* order of summation, whatever the rows, tiles and kernels: K is cut into
``k_splits`` contiguous ranges of ``range_len`` elements; a range is summed in k16 steps, ascending,
in one float32 accumulator of the tensor core; the ranges' sums are added in ascending order.
"""

from __future__ import annotations

from dataclasses import dataclass

RUNGS = (8, 16, 32, 64, 128)
"""Rows that a tile has room for: the N of the tensor-core instruction."""
BOX_K = 64
"""Elements of K in a box of the tensor maps: 128 bytes, the width of the swizzle."""
SHORT_K = 4096
"""Columns of a matrix whose ``narrow`` tile may be ``short``."""
OUTPUT_FORM = "short"
"""The family of tiles that takes their place."""
RANGE_STEP = 128
"""A range of K is a multiple of this, so that every tile's ``k_block`` divides it."""


@dataclass(frozen=True, slots=True)
class StepTile:
    """A tile of the output and what is in flight for it.

    Attributes
    ----------
    rows : int
        Rows of activations it has room for, of ``RUNGS``.
    columns : int
        Rows of the weight matrix: a multiple of 64, or of 128 when there are two warp groups.
    k_block, stages : int
        Elements of K in a stage of shared memory (64 or 128), and stages.
    k_splits : int
        Ranges of K, each with a thread block of the cluster.
    gated : bool
        The matrix holds gate rows, then as many up rows; the tile takes ``columns / 2`` of each.
    overlap : bool
        A stage's products run while the next stage is waited for.
    early : int
        Stages of weights asked for before the kernels in front have ended; 0 means all.
    """

    rows: int
    columns: int
    k_block: int
    stages: int
    k_splits: int
    gated: bool = False
    overlap: bool = False
    early: int = 0

    @property
    def early_stages(self) -> int:
        """Stages of weights asked for before the wait."""
        return self.early or self.stages

    @property
    def box_rows(self) -> int:
        """Rows of a box of the weights' tensor map; a box of the activations' has ``rows``."""
        return self.columns // 2 if self.gated else self.columns

    @property
    def threads(self) -> int:
        """A warp group for 64 columns, and the warp that asks for memory."""
        return 2 * self.columns + 32

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a stage: weights, then activations."""
        return (self.columns + self.rows) * self.k_block * 2

    @property
    def rows_offset(self) -> int:
        """Where a stage's activations lie in it."""
        return self.columns * self.k_block * 2

    @property
    def pitch(self) -> int:
        """Bytes between rows of the float32 tile; 4 floats modulo 32, against bank conflicts."""
        return (self.columns + 4) * 4

    @property
    def barrier_offset(self) -> int:
        """Where the barriers lie: after the stages, which the float32 tile takes over."""
        return max(self.stages * self.stage_bytes, self.rows * self.pitch)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a thread block."""
        return self.barrier_offset + 16 * self.stages

    def grid(self, n: int) -> int:
        """Thread blocks for a matrix of ``n`` rows."""
        return -(-(n // 2 if self.gated else n) // self.box_rows) * self.k_splits


@dataclass(frozen=True, slots=True)
class MmaTile:
    """A tile of ``gemm_step_mma``: 16 rows of W in one range of K for each warp.

    Attributes
    ----------
    rows, k_splits, gated
        As in ``StepTile``.
    line_bytes : int
        Bytes of 64 elements of a row of W: 128 in bf16.
    """

    rows: int
    k_splits: int
    gated: bool = False
    line_bytes: int = 128

    @property
    def warps(self) -> int:
        """Many rows of activations are read for more rows of W at once."""
        return 8 if self.rows >= 64 else 4

    @property
    def threads(self) -> int:
        """Of a thread block."""
        return 32 * self.warps

    @property
    def columns(self) -> int:
        """Rows of the weight matrix."""
        return 16 * self.warps // self.k_splits

    @property
    def box_rows(self) -> int:
        """Columns of the output."""
        return self.columns // 2 if self.gated else self.columns

    @property
    def weights_offset(self) -> int:
        """Where a stage's weights lie, after its activations."""
        return self.k_splits * self.rows * 128

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a stage: 64 k of every range."""
        return self.weights_offset + self.k_splits * self.columns * self.line_bytes

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
        """Dynamic shared memory; the float32 tiles of all ranges take over the stages'."""
        return max(self.stages * self.stage_bytes, self.k_splits * self.rows * self.pitch)

    def grid(self, n: int) -> int:
        """Thread blocks for a matrix of ``n`` rows."""
        return -(-n // self.columns)


# Found by timing whole sweeps of an 8B model's weights on an H200: see benchmarks/NOTES.md. narrow
# has one thread block an SM, and most of its half of K in flight; wide and gated two or three.
# short is narrow with fewer stages: a thread block of attention_step fits beside it on an SM.
# early1, early3 and early6 are narrow with so many stages asked for before the wait; they are on
# trial, and only benchmarks/gpu_step_parts.py runs them.
TILES: dict[str, StepTile] = {
    f"{form}_{rows}": StepTile(
        rows,
        columns,
        k_block,
        stages,
        k_splits,
        form == "gated",
        form == "narrow" and rows >= 64,
        int(form[5:]) if form.startswith("early") else 0,
    )
    for form, k_splits, by_rows in (
        ("narrow", 2, ((64, 128, 12), (64, 128, 11), (64, 128, 9), (64, 128, 7), (64, 64, 9))),
        ("short", 2, ((64, 128, 8), (64, 128, 7), (64, 128, 6))),
        ("early1", 2, ((64, 128, 12),)),
        ("early3", 2, ((64, 128, 12),)),
        ("early6", 2, ((64, 128, 12),)),
        ("medium", 2, ((64, 128, 6), (64, 64, 11), (128, 64, 11), (128, 64, 9), (128, 64, 7))),
        ("wide", 1, ((128, 64, 4), (64, 64, 7), (64, 128, 4), (128, 128, 4), (128, 64, 7))),
        ("gated", 1, ((64, 64, 8), (64, 64, 7), (64, 64, 6), (64, 64, 4), (192, 64, 5))),
    )
    for rows, (columns, k_block, stages) in zip(RUNGS, by_rows, strict=False)
}
"""Tiles by variant: ``gemm_step_bf16_<variant>`` is the kernel of one."""

MMA_TILES: dict[str, MmaTile] = {
    f"{form}_{rows}": MmaTile(rows, k_splits, form == "gated")
    for form, k_splits in (("narrow", 2), ("wide", 1), ("gated", 1))
    for rows in RUNGS
}
"""Tiles of the ``mma.sync`` form: ``gemm_step_mma_bf16_<variant>``; medium matrices take narrow's.
"""


def form(n: int, *, gated: bool = False) -> str:
    """The family of tiles of a matrix of ``n`` rows; it alone decides the order of summation.

    Up to 128 tiles of 64 columns leave SMs of a large GPU without work; two thread blocks a tile
    give each half of K.
    """
    if gated:
        return "gated"
    if n <= 4224:
        return "narrow"
    return "medium" if n <= 8192 else "wide"


def k_splits(n: int, *, gated: bool = False) -> int:
    """Ranges of K into which the sums of a matrix are cut, at every number of rows."""
    return TILES[f"{form(n, gated=gated)}_8"].k_splits


def range_len(k: int, splits: int) -> int:
    """Elements of K in a range; the last one has what is left."""
    per_range = -(-k // splits)
    return -(-per_range // RANGE_STEP) * RANGE_STEP


def rung(rows: int) -> int:
    """The smallest of ``RUNGS`` with room for ``rows``."""
    for size in RUNGS:
        if rows <= size:
            return size
    raise ValueError(f"{rows} rows; the step GEMM takes 1 to {RUNGS[-1]}")


def variant(n: int, rows: int, *, gated: bool = False) -> str:
    """The key of ``TILES`` for ``rows`` rows of activations and a matrix of ``n`` rows."""
    return f"{form(n, gated=gated)}_{rung(rows)}"


def shortened(variant: str, k: int) -> str:
    """``narrow``'s key, or ``short``'s for a matrix of up to ``SHORT_K`` columns: the same sums.

    Such a matrix mostly is attention's output product. Its thread blocks ask for weights while
    attention still runs, so they must not wait for the SMs that attention is on.
    """
    short = variant.replace("narrow", OUTPUT_FORM)
    return short if k <= SHORT_K and short in TILES else variant
