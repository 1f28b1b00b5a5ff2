"""Which products take RMS normalisation of their rows into their kernel, and the tiles for it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from atlas_kernels.gemm_step_plan import (
    BESIDE_ATTENTION,
    BOX_K,
    FEW_COLUMNS,
    NUM_SMS,
    StepTile,
    form,
)

NORM_K = 5120
"""Widest rows that the kernels have room for; a multiple of 128."""
NORM_ROWS = 4
"""Rows up to which a norm in every thread block is less work than a kernel of its own."""
NORM_WARPS = 8
"""Warps of a thread block that normalise, whatever its number of columns."""
ROLE_WARPS = 16
"""Warps of ``rmsnorm``, whose parts those of this kernel play: the order of a row's sum is one."""
UNIT = 8
"""Elements that a thread takes at once, and that a k8 column of ``wgmma`` has of a row."""


@dataclass(frozen=True, slots=True)
class NormTile(StepTile):
    """A ``StepTile`` whose stages hold weights alone: normalised rows have a place of their own.

    They lie there for all of K, units of 8 elements of each row side by side, ``unit_pitch`` bytes
    from one unit to the next. Unswizzled ``wgmma`` reads 8 rows of a unit at once. Those past
    ``held`` are then elements of the next units: they make sums that nobody looks at.

    Attributes
    ----------
    held : int
        Rows that there is room for: 1, 2, 4 or 8.
    min_blocks : int
        Thread blocks that an SM's registers shall hold.
    """

    held: int = 1
    min_blocks: int = 1

    @property
    def row_bytes(self) -> int:
        """Of a stage: none."""
        return 0

    @property
    def asker(self) -> int:
        """The first thread behind those that normalise or multiply: it asks for memory."""
        return max(self.consumers, 32 * NORM_WARPS)

    @property
    def threads(self) -> int:
        """Of a thread block."""
        return self.asker + 32

    @property
    def unit_pitch(self) -> int:
        """An odd number of 16 bytes: threads that store neighbouring units meet no bank twice."""
        return 16 * (self.held | 1)

    @property
    def room(self) -> int:
        """Bytes of the normalised rows, before the ring."""
        return -(-NORM_K // UNIT * self.unit_pitch // 1024) * 1024

    @property
    def sums_offset(self) -> int:
        """In the ring: where ``ROLE_WARPS`` sums of each row lie, behind the barriers."""
        return self.barrier_offset + 16 * self.stages

    @property
    def behind(self) -> int:
        """Bytes behind the last stage that ``wgmma`` reads, 64 rows of W where a box has fewer."""
        return (self.consumers // 2 - self.columns) * 128

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: rows, ring and sums; what ``wgmma`` reads must be there."""
        ring = self.sums_offset + 4 * ROLE_WARPS * self.held
        return self.room + max(ring, self.stages * self.stage_bytes + self.behind)


def _tile(columns: int, held: int, room: int, *, gated: bool = False, blocks: int = 1) -> NormTile:
    """As many stages as fit, of the longest with which there are five."""
    for k_block in (256, 128, 64):
        tile = NormTile(8, columns, k_block, 1, gated, held=held, min_blocks=blocks)
        tile = replace(tile, stages=(room - tile.room - tile.behind) // tile.stage_bytes)
        if tile.stages >= 5:
            break
    return tile


NORM_TILES: dict[str, NormTile] = {
    f"c{columns}_{held}": _tile(columns, held, BESIDE_ATTENTION - 1024)
    for columns in FEW_COLUMNS
    for held in (1, NORM_ROWS)
}
# One row: three thread blocks an SM, as the product alone. More: one, which normalises them once.
NORM_TILES |= {
    "gated_1": _tile(64, 1, 74 << 10, gated=True, blocks=3),
    f"gated_{NORM_ROWS}": _tile(192, NORM_ROWS, 200 << 10, gated=True, blocks=1),
}
"""Tiles by variant: ``gemm_step_norm_bf16_<variant>`` is the kernel of one."""


def norm_variant(n: int, k: int, rows: int, *, gated: bool = False) -> str | None:
    """The key of ``NORM_TILES`` for ``rows`` rows and a matrix [n, k]; None: two kernels do it.

    Several rows are not normalised by more thread blocks than there are SMs.
    """
    if rows > 1 or k > NORM_K or k % BOX_K:
        return None
    held = 1 if rows == 1 else NORM_ROWS
    if not gated:
        family = form(n, rows)
        return None if family == "wide" else f"{family}_{held}"
    tile = NORM_TILES[name := f"gated_{held}"]
    return name if held == 1 or tile.grid(n) <= NUM_SMS else None
