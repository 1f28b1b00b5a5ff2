"""Which products take RMS normalisation of their row into their kernel, and the tiles for it.

One row alone: a thread block that normalises more of them has no room beside attention, and is
slower than a kernel of its own for them (see benchmarks/NOTES.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from atlas_kernels.gemm_step_plan import (
    BESIDE_ATTENTION,
    BOX_K,
    FEW_COLUMNS,
    TILES,
    StepTile,
    chain_length,
    form,
    in_chains,
)

NORM_K = 5120
"""Widest row that the kernels have room for; a multiple of 512."""
ROW_BYTES = 2 * NORM_K
"""Shared memory of the normalised row, before the ring."""
NORM_WARPS = 8
"""Warps of a thread block that normalise, whatever its number of columns."""
ROLE_WARPS = 2 * NORM_WARPS
"""Warps of ``rmsnorm``, whose parts those of this kernel play: the order of a row's sum is one."""
UNIT = 8
"""Elements that a thread takes at once, and that a k8 column of ``wgmma`` has of a row."""


@dataclass(frozen=True, slots=True)
class NormTile(StepTile):
    """A ``StepTile`` whose stages hold weights alone: the normalised row has a place of its own.

    It lies there for all of K, element after element. Unswizzled ``wgmma`` reads 8 rows of a unit
    at once, 16 bytes apart: those past the first are the next units, and make sums that nobody
    looks at.
    """

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
    def min_blocks(self) -> int:
        """Thread blocks that an SM's registers shall hold, of gated ones the most there are."""
        return 3 if self.gated else 1

    @property
    def sums_offset(self) -> int:
        """In the ring: where the row's ``ROLE_WARPS`` sums lie, behind the barriers."""
        return self.barrier_offset + 16 * self.stages

    @property
    def behind(self) -> int:
        """Bytes behind the last stage that products read, of more rows of W than a box has."""
        return (self.covered - self.columns) * 128

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: row, ring and sums; what ``wgmma`` reads must be there."""
        ring = self.sums_offset + 4 * ROLE_WARPS
        return ROW_BYTES + max(ring, self.stages * self.stage_bytes + self.behind)


def _tile(columns: int, room: int, *, gated: bool = False) -> NormTile:
    """As many stages as fit, of the longest with which there are five."""
    for k_block in (256, 128, 64):
        tile = NormTile(8, columns, k_block, 1, gated)
        tile = replace(tile, stages=(room - ROW_BYTES - tile.behind) // tile.stage_bytes)
        if tile.stages >= 5:
            break
    return tile


NORM_TILES: dict[str, NormTile] = {
    f"c{columns}": _tile(columns, BESIDE_ATTENTION - 1024) for columns in FEW_COLUMNS
}
NORM_TILES |= {
    f"split{columns}": in_chains(NORM_TILES[f"c{columns}"], BESIDE_ATTENTION - 2048 - ROW_BYTES)
    for columns in FEW_COLUMNS
    if f"split{columns}_8" in TILES
}
NORM_TILES["gated"] = _tile(64, 74 << 10, gated=True)
NORM_TILES["pair"] = _tile(64, 110 << 10, gated=True)
"""Tiles by variant: ``gemm_step_norm_bf16_<variant>`` is the kernel of one."""


_SHORT_PRODUCT, _IN_FLIGHT = 32 << 20, 48 << 10


def pace(tile: NormTile, weight_bytes: int) -> int:
    """Stages of weights that a thread block has on their way at a time; 0: as many as it has.

    A short product is over before the kernel behind it has made ready. What that one loads, one
    address after the other, comes the later the more requests stand in the memory's queues; 6 MB
    in flight keep the memory busy.
    """
    return max(1, _IN_FLIGHT // tile.stage_bytes) if weight_bytes < _SHORT_PRODUCT else 0


def norm_variant(n: int, k: int, rows: int, *, gated: bool = False) -> str | None:
    """The key of ``NORM_TILES`` for ``rows`` rows and a matrix [n, k]; None: two kernels do it."""
    if rows != 1 or k > NORM_K or k % BOX_K:
        return None
    name = form(n, rows, gated=gated, chained=not gated and chain_length(n, k) < k)
    return name if name in NORM_TILES else None
