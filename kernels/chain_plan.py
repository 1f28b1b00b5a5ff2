"""A chain of products that follow each other in a step: what one cooperative kernel runs.

``gemm_chain`` has a thread block an SM. Each takes its columns of one product after the other, and
all meet between two of them, while the weights of what comes next are on their way already. What
it runs is a program: an array of ``ChainStep`` in device memory.
"""

from __future__ import annotations

import struct
from collections import namedtuple
from dataclasses import dataclass

from atlas_kernels.gemm_step_plan import (
    BESIDE_ATTENTION,
    BOX_K,
    TensorView,
    gated_view,
    matrix_view,
)

WIDTH = 128
"""Rows of W, at most, that a thread block multiplies at once: 64 for each of two warp groups."""
CONSUMERS = 2 * WIDTH
THREADS = CONSUMERS + 64
"""Threads that multiply, and a warp each that asks for weights and for activations."""
MAX_STEPS = 16
"""Of a program."""
SLOTS = 16
"""Of the ring, at most; a power of two."""
SLOT_BYTES = 20480
"""Of a slot, about: several blocks of few columns, one of many."""
RUNGS = (8, 16, 32)
"""Rows of activations that a kernel has room for."""
NORM_WARPS, ROLE_WARPS = 8, 16
"""Warps that normalise, and warps of ``rmsnorm`` whose parts they play."""

NORM, GATED, OWN_NORM = 1, 2, 4
"""Bits of ``ChainStep.kind``: no product but a norm of each row; the matrix is [gate; up]; every
thread block first normalises the one row itself."""
FIELDS = (
    "kind", "map_w", "map_x", "bias", "residual", "out", "residual_stride", "out_stride", "option",
    "columns", "k", "box", "units", "blocks", "source", "source_stride", "norm", "target",
    "target_stride", "eps",
)  # fmt: skip
"""Words of a step, 64 bits each."""
STEP_BYTES = 8 * len(FIELDS)
AT = namedtuple("AT", FIELDS)(*range(0, STEP_BYTES, 8))
"""Bytes from the beginning of a step to a field; kernels read it as constants."""


@dataclass(frozen=True, slots=True)
class ChainTile:
    """Shared memory of ``gemm_chain``.

    Attributes
    ----------
    rows : int
        Rows of activations: the N of the tensor-core instruction.
    ring_bytes : int
        Of the ring, which slots of any size go round.
    """

    rows: int
    ring_bytes: int

    @property
    def pitch(self) -> int:
        """Bytes between rows of the float32 tile; 4 floats modulo 32, against bank conflicts."""
        return (WIDTH + 4) * 4

    @property
    def barrier_offset(self) -> int:
        """Behind the float32 tile, two barriers for each slot, full and empty."""
        return self.ring_bytes + self.rows * self.pitch

    @property
    def normed_offset(self) -> int:
        """The barrier for a normalised row."""
        return self.barrier_offset + 16 * SLOTS

    @property
    def goal_offset(self) -> int:
        """What the counters of the grid's barriers will show."""
        return self.normed_offset + 8

    @property
    def program_offset(self) -> int:
        """The program."""
        return self.goal_offset + 8

    @property
    def parts_offset(self) -> int:
        """Sums of a row's parts."""
        return self.program_offset + MAX_STEPS * STEP_BYTES

    @property
    def sizes_offset(self) -> int:
        """What each of the two that ask knows of the slots: their bytes."""
        return self.parts_offset + 4 * ROLE_WARPS

    @property
    def shared_bytes(self) -> int:
        """Of a thread block."""
        return self.sizes_offset + 2 * 4 * SLOTS

    def blocks(self, columns: int) -> int:
        """Blocks of 64 k in a slot, for ``columns`` rows of W: 1, 2 or 4."""
        return next((n for n in (4, 2) if n * self.block_bytes(columns) <= SLOT_BYTES), 1)

    def block_bytes(self, columns: int) -> int:
        """Of W and of x."""
        return (columns + self.rows) * BOX_K * 2


def _tile(rows: int) -> ChainTile:
    """With as much of a ring as there is room for beside attention."""
    rest = ChainTile(rows, 0).shared_bytes
    return ChainTile(rows, (BESIDE_ATTENTION - rest) // 1024 * 1024)


CHAIN_TILES = {rows: _tile(rows) for rows in RUNGS}


def chain_rung(rows: int) -> int | None:
    """The smallest of ``RUNGS`` with room for ``rows``, if any."""
    return next((size for size in RUNGS if rows <= size), None)


def unit_columns(columns: int, num_blocks: int, *, gated: bool) -> int:
    """Columns of the output that a thread block takes at once: what leaves the most of them busy.

    A multiple of 8, of which the slowest thread block has the fewest; the widest such.
    """
    most = WIDTH // 2 if gated else WIDTH

    def slowest(box: int) -> int:
        units = -(-columns // box)
        return -(-units // num_blocks) * box

    return min(range(most, 0, -8), key=slowest)


def weight_view(n: int, k: int, box: int, blocks: int, *, gated: bool) -> TensorView:
    """What the tensor map of W [n, k] sees: a slot's rows."""
    if gated:
        return gated_view(n // 2, k, 2 * k, box, blocks)
    return matrix_view(n, k, 2 * k, box, blocks)


def row_view(m: int, k: int, stride: int, tile: ChainTile, blocks: int, copies: int) -> TensorView:
    """What that of x [m, k] sees: a slot's blocks of one of ``copies`` of x, one after another."""
    box, shape, strides = matrix_view(m, k, stride, tile.rows, blocks)
    return TensorView((1, *box), (copies, *shape), (m * stride, *strides))


@dataclass(frozen=True, slots=True)
class ChainStep:
    """One product, or a norm of all rows; addresses, strides in bytes.

    A product: ``out`` [m, columns] = x · Wᵀ + bias + residual, as in ``gemm_step``; ``map_w`` and
    ``map_x`` see ``weight_view`` and ``row_view``. With ``OWN_NORM`` x is row ``source``, which
    every thread block normalises into a row of its own of ``target``.
    A norm: rows of ``source`` to rows of ``target``.
    """

    kind: int = 0
    map_w: int = 0
    map_x: int = 0
    bias: int = 0
    residual: int = 0
    out: int = 0
    residual_stride: int = 0
    out_stride: int = 0
    option: int = 0
    columns: int = 0
    k: int = 0
    box: int = 0
    units: int = 0
    blocks: int = 0
    source: int = 0
    source_stride: int = 0
    norm: int = 0
    target: int = 0
    target_stride: int = 0
    eps: float = 0.0

    def words(self) -> list[int]:
        """The step as the kernel reads it."""
        values = [getattr(self, name) for name in FIELDS[:-1]]
        return [*values, struct.unpack("<I", struct.pack("<f", self.eps))[0]]
