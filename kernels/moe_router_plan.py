"""Which router kernel a layer gets; needs no compiler and no GPU."""

from __future__ import annotations

from dataclasses import dataclass

ROUTER_ROWS = 8
"""Rows that ``moe_router`` takes: as many as the tensor core's product has for them, and a warp
each. More rows go through the norm, the step GEMM and ``moe_route``, which give the same bits."""
ROUTER_COLUMNS = 8
"""Experts of a thread block: the columns of a product of the tensor core."""


@dataclass(frozen=True, slots=True)
class RouterTile:
    """A form of ``moe_router``.

    Attributes
    ----------
    vectors : int
        Vectors of 8 elements of a row that a lane has, a power of two, at most 16: then no thread
        of ``rmsnorm`` has two of them, and its sums are those of the vectors.
    scores : int
        A row's scores that a lane has, a power of two, or 0: without the choice.
    """

    vectors: int
    scores: int

    @property
    def dim(self) -> int:
        """The longest row."""
        return 256 * self.vectors

    @property
    def experts(self) -> int:
        """The most experts."""
        return 32 * self.scores

    @property
    def rows_at(self) -> int:
        """Where the normalised rows lie: after the thread block's 8 rows of the router."""
        return 16 * self.dim

    @property
    def norm_at(self) -> int:
        """Where the norm's weights lie, after those."""
        return 32 * self.dim

    @property
    def choice_at(self) -> int:
        """Where a row's choice is made, 128 bytes a warp: among the norm's weights, which nobody
        needs by then, and out of reach of a warp whose loads run ahead of its last products."""
        return self.norm_at + 1024

    @property
    def sums_at(self) -> int:
        """Where chains' sums meet, 256 bytes a warp, behind that."""
        return self.norm_at + 2048

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory."""
        return 36 * self.dim


ROUTER_TILES: dict[str, RouterTile] = {
    f"d{dim}_e{experts}": RouterTile(dim // 256, experts // 32)
    for dim in (2048, 4096)
    for experts in (128, 256, 512)
}
"""``moe_router_<variant>``."""

SCORES_TILES: dict[str, RouterTile] = {f"d{dim}": RouterTile(dim // 256, 0) for dim in (2048, 4096)}
"""``moe_scores_<variant>``: norm and product alone."""


def router_variant(rows: int, *, dim: int, experts: int, shared_bytes: int) -> str | None:
    """The kernel for a number of rows, or None: then those that it stands for.

    Parameters
    ----------
    rows : int
    dim : int
        Of a row; 128 elements are a step of its loop.
    experts : int
        Without the shared one; 0 for ``moe_scores``, which leaves the choice to ``moe_gate_up``.
    shared_bytes : int
        Dynamic shared memory that a thread block may have.
    """
    if rows > ROUTER_ROWS or dim % 128:
        return None
    tiles = ROUTER_TILES if experts else SCORES_TILES
    for name, tile in tiles.items():
        if dim <= tile.dim and experts <= tile.experts and tile.shared_bytes <= shared_bytes:
            return name
    return None
