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
UNIT = 16
"""Rows of weights that a warp of a decode kernel takes at a time."""
NOT_YET = -(1 << 31)
"""In place of an id: the choice is about to be made."""
NO_UNIT = 1 << 24
"""The first unit of a warp that only helps to list experts."""
# Shared memory of a thread block, sm_90, so that an SM holds one.
_FULL = 227 * 1024

ROUTE_VARIANTS = {"e128": 4, "e256": 8, "e512": 16, "e1024": 32}
"""``moe_route_<variant>``: experts that a lane has in registers."""

ROUTED_VARIANTS = {name: ROUTE_VARIANTS[name] for name in ("e128", "e256", "e512")}
"""Those for which ``moe_gate_up`` makes the choice itself."""


def route_variant(experts: int) -> str | None:
    """The routing kernel for a number of experts, or None above 1,024."""
    return next((name for name, n in ROUTE_VARIANTS.items() if experts <= 32 * n), None)


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """A thread block of a decode kernel: each warp has a ring of stages of its own.

    Attributes
    ----------
    rows : int
        Rows of activations, at most 8.
    warps : int
        Those that have a ring.
    chunk : int
        Elements of K in a stage: 64, 128 or 256.
    stages : int
        Stages of a warp's ring.
    blocks_per_sm : int
        Thread blocks of the kernel on an SM. With two, the next kernel's come as they leave.
    shared_bytes : int
        Dynamic shared memory of a thread block. If it leaves room, the next kernel's are on the SM
        as well, with their weights on the way.
    """

    rows: int
    warps: int
    chunk: int
    stages: int
    blocks_per_sm: int
    shared_bytes: int

    @property
    def threads(self) -> int:
        """Of a thread block: its warps, and enough to list a choice each."""
        return 32 * max(self.warps, self.rows)

    @property
    def stage_bytes(self) -> int:
        """A unit's rows: a multiple of 1,024, the period of the swizzle."""
        return UNIT * 2 * self.chunk

    @property
    def gate_up_box(self) -> tuple[int, ...]:
        """Of the tensor map of experts [E, D / 64, 2, F, 64]: 8 rows of gate, 8 of up."""
        return (1, self.chunk // 64, 2, UNIT // 2, 64)

    @property
    def down_box(self) -> tuple[int, ...]:
        """Of that of experts [F / 64, E · D, 64]."""
        return (self.chunk // 64, UNIT, 64)

    @property
    def ring_bytes(self) -> int:
        """Of all warps."""
        return self.warps * self.stages * self.stage_bytes

    @property
    def max_pairs(self) -> int:
        """Choices of all rows."""
        return self.rows * MAX_SLOTS

    @property
    def barriers_at(self) -> int:
        """The stages' barriers, after what ``moe_lists`` has in front."""
        return (64 + 4 * (3 * self.max_pairs + 1) + 63) // 64 * 64

    @property
    def list_bytes(self) -> int:
        """In front: a barrier, counts, ids and weights of the choices, experts to read; barriers of
        the stages."""
        return self.barriers_at + (8 * self.warps * self.stages + 63) // 64 * 64

    @property
    def places(self) -> int:
        """Thread blocks of this size, of this kernel or the next one, that fit an SM."""
        return (_FULL + 1024) // (self.shared_bytes + 1024)

    def has_room(self, area: int) -> bool:
        """Whether ``area`` bytes of activations fit beside the rings, which begin at a multiple of
        1,024."""
        return -(-(self.list_bytes + area) // 1024) * 1024 + self.ring_bytes <= self.shared_bytes


@dataclass(frozen=True, slots=True)
class DownTile(DecodeTile):
    """A thread block of ``moe_down``; ``warps`` is at least ``rows``.

    Attributes
    ----------
    ahead : int
        Stages asked for before the wait, of those that fit. More, and weights come sooner than they
        can be used, instead of the last ones of ``moe_gate_up``.
    """

    ahead: int


def gate_up_view(experts: int, dim: int, inner: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides (bytes, without the innermost) of experts' [2F, D] for their tensor map."""
    return (experts, dim // 64, 2, inner, 64), (4 * inner * dim, 128, 2 * inner * dim, 2 * dim)


def down_view(rows: int, inner: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The same of experts' [D, F], ``rows`` in all."""
    return (inner // 64, rows, 64), (128, 2 * inner)


def gate_up_area(rows: int, dim: int) -> int:
    """Bytes of activations in shared memory, of ``moe_gate_up``."""
    return rows * (2 * dim + 16)


def down_area(rows: int, slots: int, inner: int) -> int:
    """Of ``moe_down``: activations, and the outputs of each choice."""
    return rows * slots * (2 * inner + 16 + 2 * UNIT)


GATE_UP_TILES: dict[str, DecodeTile] = {
    "r1": DecodeTile(1, 3, 256, 4, 2, 102 * 1024),
    "r2": DecodeTile(2, 4, 128, 5, 2, 98 * 1024),
    "r8": DecodeTile(8, 11, 128, 4, 1, _FULL),
}
"""``moe_gate_up_bf16_<variant>``, fewest rows first; ``…_<experts>`` makes the choice itself."""

DOWN_TILES: dict[str, DownTile] = {
    "r1": DownTile(1, 9, 128, 3, 1, 122 * 1024, 2),  # beside one thread block of moe_gate_up
    "r2": DownTile(2, 9, 128, 3, 1, 148 * 1024, 3),
    "r8": DownTile(8, 8, 128, 3, 1, _FULL, 3),
}
"""``moe_down_bf16_<variant>``."""


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
    names = (n for n in GATE_UP_TILES if fits(n, rows, dim=dim, inner=inner, slots=slots))
    return next(names, None)


def fits(name: str, rows: int, *, dim: int, inner: int, slots: int) -> bool:
    """Whether the decode kernels of a name have room for rows of a shape."""
    gate_up, down = GATE_UP_TILES[name], DOWN_TILES[name]
    has_room = gate_up.has_room(gate_up_area(rows, dim))
    return has_room and down.has_room(down_area(rows, slots, inner)) and rows <= gate_up.rows


def decode_kernels(name: str) -> tuple[str, str]:
    """The kernels of a decode variant."""
    return f"moe_gate_up_bf16_{name}", f"moe_down_bf16_{name}"


def routed_kernel(name: str, experts: int) -> str | None:
    """``moe_gate_up`` that makes the choice of a number of experts itself, or None above 512."""
    routed = route_variant(experts)
    return f"{decode_kernels(name)[0]}_{routed}" if routed in ROUTED_VARIANTS else None


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
