"""Which mixture-of-experts kernels a number of rows gets; needs no compiler and no GPU.

Order of a (row, expert) product, the same in every kernel: k16 steps of the tensor core, ascending,
in one float32 accumulator. Decode kernels give a step its 16 products in another order; the tensor
core must have the same bits for it, which ``benchmarks/gpu_moe.py`` and the tests check on a GPU.

What a product leaves (gate, up, the expert's output) is rounded to bf16, as if it had been stored.
A row's experts are added in the order of its ``slots`` by fused multiply-add from 0, then the
residual, then one rounding: bits depend on the row alone.

A *slot* is one of a row's choices; its *pair* is ``row · slots + slot``. A shared expert is the
last slot of every row, with the number of routed experts as its id. A negative id is no choice.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_SLOTS = 32
"""Choices of a row, the shared expert included."""
MAX_ROWS = 8
"""Of the decode kernels."""
MAX_PAIRS = MAX_ROWS * MAX_SLOTS
STAGED_GAP = 32
"""Bytes between staged rows: then 8 rows of 32 bytes lie in different banks, four at a time."""
COLUMNS = 8
"""Columns of the output that a thread block of ``moe_down`` takes."""

ROUTE_VARIANTS = {"e128": 4, "e256": 8, "e512": 16, "e1024": 32}
"""``moe_route_<variant>``: experts that a lane has in registers."""


def route_variant(experts: int) -> str | None:
    """The routing kernel for a number of experts, or None above 1,024."""
    return next((name for name, n in ROUTE_VARIANTS.items() if experts <= 32 * n), None)


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """A thread block of a decode kernel, whose warps work by themselves.

    Attributes
    ----------
    rows : int
        Rows of activations, at most 8.
    warps : int
    depth : int
        Groups of 64 elements of K, of 8 rows of weights, that a warp has on their way: a KB and 8
        registers a thread each.
    blocks_per_sm : int
        Thread blocks of the kernel on an SM.
    shared_bytes : int
        Dynamic shared memory for the activations; 0 where they come from global memory.
    ahead : int
        Groups of activations in registers or on their way there; ``depth`` is a multiple of it.
    """

    rows: int
    warps: int
    depth: int
    blocks_per_sm: int
    shared_bytes: int = 0
    ahead: int = 1

    @property
    def threads(self) -> int:
        """Of a thread block."""
        return 32 * self.warps

    @property
    def is_staged(self) -> bool:
        """Whether activations are copied into shared memory first."""
        return self.shared_bytes > 0


_STAGED = 40 * 1024
"""Two thread blocks of either kernel then ask for the same part of an SM's first-level cache, 100
KB, and one of each fits into it: blocks of ``moe_down`` need not wait until an SM is empty."""

GATE_UP_TILES: dict[str, DecodeTile] = {
    "r1": DecodeTile(1, 6, 8, 2, _STAGED),
    "r1b": DecodeTile(1, 6, 16, 2, _STAGED),
    "r1c": DecodeTile(1, 8, 10, 2, _STAGED),
    "r8": DecodeTile(8, 6, 10, 2, _STAGED),
    "r8b": DecodeTile(8, 8, 8, 2, _STAGED),
    "r8w": DecodeTile(8, 6, 8, 2, 0, 4),  # rows too wide for shared memory
}
"""``moe_gate_up_bf16_<variant>``; those in b and c are on trial, ``gpu_moe.py --tune``."""

DOWN_TILES: dict[str, DecodeTile] = {
    "r1": DecodeTile(1, 9, 6, 2, _STAGED),  # 8 experts and a shared one: a warp each
    "r1b": DecodeTile(1, 9, 4, 2, _STAGED),
    "r1c": DecodeTile(1, 8, 8, 2, _STAGED),
    "r8": DecodeTile(8, 6, 8, 2, 0, 4),
    "r8b": DecodeTile(8, 8, 6, 2, 0, 2),
    "r8w": DecodeTile(8, 6, 8, 2, 0, 4),
}
"""``moe_down_bf16_<variant>``."""

CHOSEN = ("r1", "r8", "r8w")
"""Those of which ``decode_variant`` takes the first that fits."""


def staged_bytes(rows: int, width: int) -> int:
    """Shared memory of rows of activations."""
    return rows * (2 * width + STAGED_GAP)


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
    names = (n for n in CHOSEN if fits(n, rows, dim=dim, inner=inner, slots=slots))
    return next(names, None)


def fits(name: str, rows: int, *, dim: int, inner: int, slots: int) -> bool:
    """Whether the decode kernels of a name have threads for the choices of the rows, and room."""
    gate_up, down = GATE_UP_TILES[name], DOWN_TILES[name]
    has_room = not gate_up.is_staged or staged_bytes(rows, dim) <= gate_up.shared_bytes
    down_bytes = staged_bytes(rows * slots, inner)
    has_room = has_room and (not down.is_staged or down_bytes <= down.shared_bytes)
    has_threads = rows == 1 or rows * slots <= min(gate_up.threads, down.threads)
    return has_room and has_threads and rows <= gate_up.rows


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


HALF_ROWS, ROW_BOX = 128, 32
"""Rows of a box of the tensor maps: of weights, half a tile, and of activations; 64 columns."""


@dataclass(frozen=True, slots=True)
class WgmmaTile:
    """A tile of ``moe_grouped_wgmma`` and the memory that its thread block works with.

    It has two halves of ``HALF_ROWS`` rows of the weight matrix (gate and up where gated), and of
    each half 64 rows for a warp group.

    Attributes
    ----------
    rows : int
        Rows of the sorted pairs that it has room for.
    stages : int
        Stages of 64 elements of K.
    """

    rows: int
    stages: int

    @property
    def threads(self) -> int:
        """Two warp groups that multiply, one that brings memory."""
        return 384

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows that a product may have: the N of the tensor-core instruction."""
        return tuple(range(16, self.rows + 1, 16))

    @property
    def weights_bytes(self) -> int:
        """A stage's weights, at its beginning; activations follow."""
        return 2 * HALF_ROWS * 128

    @property
    def stage_bytes(self) -> int:
        """Lines of 128 bytes."""
        return self.weights_bytes + self.rows * 128

    @property
    def pitch(self) -> int:
        """Bytes between rows of a group's buffer; 4 floats modulo 32, against bank conflicts."""
        return (128 + 4) * 4

    @property
    def buffers_at(self) -> int:
        """Two buffers through which sums are written, after the stages."""
        return self.stages * self.stage_bytes

    @property
    def buffer_bytes(self) -> int:
        """16 rows of float32 sums of one group."""
        return 16 * self.pitch

    @property
    def rows_at(self) -> int:
        """Addresses of the rows to gather, or the pairs to write to for each group."""
        return self.buffers_at + 2 * self.buffer_bytes

    @property
    def notes_at(self) -> int:
        """For each stage 16 bytes on the tile that begins with it."""
        return self.rows_at + 8 * self.rows

    @property
    def barriers_at(self) -> int:
        """For each stage one that it is there, then for each one that it is free."""
        return self.notes_at + 16 * self.stages

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory."""
        return self.barriers_at + 16 * self.stages

    @property
    def lag(self) -> int:
        """Stages of gathered rows on the way: a consumer gives a stage back once it has the next.

        Were it greater, the producers would wait for a stage whose successor they hold back.
        """
        return self.stages - 2

    def tiles(self, pairs: int, experts: int) -> int:
        """Entries of the table, as ``GroupedTile.tiles``."""
        return pairs // self.rows + experts


WGMMA_TILES: dict[str, WgmmaTile] = {"w160": WgmmaTile(160, 4)}
"""``moe_grouped_wgmma_<part>_bf16_<variant>``."""


def wgmma_variant(rows: int, *, experts: int, slots: int) -> str | None:
    """The ``wgmma`` kernels for a number of rows, or None: too few, then ``grouped_variant``."""
    return "w160" if rows * slots / experts > 16 else None
