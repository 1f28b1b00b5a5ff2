"""Which mixture-of-experts kernels a number of rows gets; needs no compiler and no GPU.

Order of a (row, expert) product, the same in every kernel: k16 steps of the tensor core, ascending,
in one float32 accumulator. What a product leaves (gate, up, the expert's output) is rounded to
bf16, as if it had been stored. A row's experts are added in the order of its ``slots`` by fused
multiply-add from 0, then the residual, then one rounding: bits depend on the row alone.

A *slot* is one of a row's choices; its *pair* is ``row · slots + slot``. A shared expert is the
last slot of every row, with the number of routed experts as its id. A negative id is no choice.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_SLOTS = 32
"""Choices of a row, the shared expert included."""
COLUMNS = 16
"""Columns of the output that a thread block of ``moe_down`` takes at once."""
LIST_BYTES = 4096
"""Shared memory in front: barriers, the rows' choices, the experts to read."""
MAX_PAIRS = 8 * MAX_SLOTS
_FULL = 227 * 1024  # the most shared memory of a thread block, sm_90
_HALF = 113 * 1024  # two thread blocks on an SM


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """What a warp of the decode kernels has in flight: a ring of stages of its own.

    Attributes
    ----------
    rows : int
        Rows of activations, at most 8.
    warps : int
    chunk : int
        Elements of K in a stage, which holds 8 rows of weights.
    shared_bytes : int
        Of a thread block: lists, activations, rings. With half of an SM's, ``moe_down`` starts
        beside ``moe_gate_up`` and has its weights on the way when that one ends.
    """

    rows: int
    warps: int
    chunk: int
    shared_bytes: int

    @property
    def threads(self) -> int:
        """Of a thread block."""
        return 32 * self.warps

    @property
    def pitch(self) -> int:
        """Bytes between rows of a stage: an odd multiple of 16, against bank conflicts."""
        return 2 * self.chunk + 16

    @property
    def stage_bytes(self) -> int:
        """8 rows."""
        return 8 * self.pitch

    @property
    def blocks_per_sm(self) -> int:
        """Thread blocks that an SM holds."""
        return 2 if self.shared_bytes <= _HALF else 1

    def stages(self, dim: int, inner: int, slots: int, rows: int) -> int:
        """Stages that ``moe_down``, the hungrier kernel, leaves a warp; 2 are needed."""
        del dim
        taken = LIST_BYTES + rows * slots * (2 * inner + 16 + 2 * COLUMNS)
        return (self.shared_bytes - taken) // (self.warps * self.stage_bytes)


DECODE_TILES: dict[str, DecodeTile] = {
    "r2": DecodeTile(2, 8, 256, _HALF),
    "r8": DecodeTile(8, 8, 256, _FULL),
}
"""``moe_gate_up_bf16_<variant>`` and ``moe_down_bf16_<variant>``."""


def decode_variant(rows: int, *, dim: int, inner: int, slots: int) -> str | None:
    """The decode kernels for a number of rows, or None: then the grouped ones.

    Parameters
    ----------
    rows : int
    dim, inner : int
        D and F; both must be multiples of 64.
    slots : int
        Choices of a row, the shared expert included.
    """
    if dim % 64 or inner % 64 or not 1 <= slots <= MAX_SLOTS:
        return None
    for name, tile in DECODE_TILES.items():
        x_bytes = LIST_BYTES + rows * (2 * dim + 16)
        ring = 2 * tile.warps * tile.stage_bytes
        fits = x_bytes + ring <= tile.shared_bytes and tile.stages(dim, inner, slots, rows) >= 2
        if rows <= tile.rows and fits:
            return name
    return None


@dataclass(frozen=True, slots=True)
class GroupedTile:
    """A tile of the grouped kernels: rows that chose one expert, by columns of its output.

    Attributes
    ----------
    rows, columns : int
        Rows of the sorted pairs, rows of the weight matrix (half gate, half up where gated).
    warp_rows, warp_columns : int
        A warp's part of the tile.
    stages : int
        Stages of 64 elements of K.
    """

    rows: int
    columns: int
    warp_rows: int
    warp_columns: int
    stages: int

    @property
    def warps(self) -> int:
        """Of a thread block."""
        return (self.rows // self.warp_rows) * (self.columns // self.warp_columns)

    @property
    def threads(self) -> int:
        """Of a thread block."""
        return 32 * self.warps

    @property
    def stage_bytes(self) -> int:
        """Activations, then weights: lines of 128 bytes."""
        return (self.rows + self.columns) * 128

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory."""
        return self.stages * self.stage_bytes

    def tiles(self, pairs: int, experts: int) -> int:
        """Entries of the table that ``moe_sort`` writes; a shared expert counts as one."""
        return pairs // self.rows + experts


GROUPED_TILES: dict[str, GroupedTile] = {
    "r16": GroupedTile(16, 128, 16, 16, 5),
    "r64": GroupedTile(64, 128, 32, 32, 4),
    "r128": GroupedTile(128, 128, 64, 32, 3),
}
"""``moe_grouped_gate_up_bf16_<variant>`` and ``moe_grouped_down_bf16_<variant>``."""


def grouped_variant(rows: int, *, experts: int, slots: int) -> str:
    """The grouped kernels for a number of rows: by how many choose an expert on average."""
    average = rows * slots / experts
    if average <= 16:
        return "r16"
    return "r64" if average <= 96 else "r128"
