"""Which attention kernel a layer gets, and over which grid; needs no compiler and no GPU."""

from __future__ import annotations

SPLIT = 512
"""Keys of a split of decode attention: a part of the order, so of the bits. 256 cost 3 to 6 % of
the speed at long contexts, in partial results, and won nothing at short ones."""
STEP_DIMS = (64, 80, 96, 128, 256)
"""Dimensions of a head that the kernels take."""
HELD_DIMS = (64, 128)
"""Those for which a warp of ``attention_step_…_held`` has a block of keys and values in registers,
beyond those in its buffers; the blocks behind come into L2 before the kernel's wait. Of a second
one, registers were too few at 128 dimensions."""
WORKERS_PER_SM = 2
"""Thread blocks that share out a step's splits, for each SM."""
PREFILL_SHAPES = {64: (64, 2), 80: (64, 2), 96: (32, 2), 128: (32, 2), 256: (16, 1)}
"""Keys of a step and tiles of 16 rows of a warp, by dimension, of ``attention_prefill``."""

WGMMA_ROWS = 128
"""Rows that a thread block of ``attention_prefill_wgmma`` takes."""
WGMMA_KEYS = {64: 128, 96: 128, 128: 128, 256: 80}
"""Keys of its tiles, by dimension."""


LOOP, DOWN_TO_OUTPUT = 1, 2
"""How far a thread block of decode attention goes through its code while it waits."""
_LONG_PRODUCT = 32 << 20


def rehearsal(weight_bytes: int, *, few: bool, is_early: bool) -> int:
    """How far, behind a product that reads so many bytes; 0 stands for another kernel.

    The whole way takes a thread block some 8 µs, as 32 MB of weights do: behind fewer it would be
    late, and so it is where thread blocks share an SM (not ``few``). Where kernels do not start
    before the one in front has ended (not ``is_early``), all of it would be late: 0, not at all.
    """
    if not is_early:
        return 0
    is_late = 0 < weight_bytes < _LONG_PRODUCT or not few
    return LOOP if is_late else DOWN_TO_OUTPUT


def step_tiles(dim: int) -> int:
    """The most tiles of 16 rows that decode attention has registers for."""
    return 1 if dim == 256 else 2


def fresh_rows(dim: int, tile_rows: int) -> int:
    """Rows of a sequence that ``attention_step`` takes; with 128 dimensions and 16 rows, more would
    cost an SM its third thread block, with 256 the room beside a product's (``BESIDE_ATTENTION``).
    """
    if dim == 256:
        return 6
    return 4 if (dim, tile_rows) == (128, 16) else 8


def is_few(columns: int, num_sms: int) -> bool:
    """Whether so few thread blocks stand beside each other, each with a part of the keys to itself,
    that what counts is how long one takes."""
    return 2 * columns <= num_sms


def step_variant(dim: int, tile_rows: int, columns: int, *, arch: str, num_sms: int) -> str:
    """The variant of ``attention_step`` for ``columns`` thread blocks beside each other."""
    is_held = arch == "sm_90a" and tile_rows == 16 and dim in HELD_DIMS
    return f"d{dim}_r{tile_rows}" + "_held" * (is_held and is_few(columns, num_sms))


def prefill_variant(dim: int) -> str:
    """The variant of ``attention_prefill``."""
    return f"d{dim}_k{PREFILL_SHAPES[dim][0]}"


def prefill_rows(dim: int) -> int:
    """Rows that a thread block of ``attention_prefill`` takes."""
    return 64 * PREFILL_SHAPES[dim][1]


def wgmma_variant(dim: int, *, capped: bool) -> str:
    """The variant of ``attention_prefill_wgmma``."""
    return f"d{dim}_cap" if capped else f"d{dim}"


def wgmma_tiles(rows: int, sequences: int) -> int:
    """Tiles of 128 positions that ``rows`` of ``sequences`` chunks may touch, at most."""
    return (rows - 2 * sequences) // WGMMA_ROWS + 2 * sequences


def part_columns(dim: int) -> int:
    """Dimensions of a head that lie together in its shared memory, in one row of the swizzle."""
    return 64 if dim % 64 == 0 else 32


def pool_view(dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Box and strides in bytes, outermost first, of a pool's tensor map: a head of a block a box.

    Dimensions: block · HK + KV head, 8 rows, part of the head, row, column. The innermost is
    contiguous and has no stride; its width is that of the swizzle.
    """
    columns = part_columns(dim)
    return (1, 2, dim // columns, 8, columns), (32 * dim, 16 * dim, 2 * columns, 2 * dim)
