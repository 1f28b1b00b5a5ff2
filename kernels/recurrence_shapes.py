"""Shapes of the recurrent kernels that whoever launches them must know; needs no compiler."""

from __future__ import annotations

CHUNK = 64
"""Rows of a chunk of a prompt: a part of the order, so of the bits. Chunks begin at multiples of
it."""


def row_pitch(dim: int) -> int:
    """Bytes from a row of bf16 of a chunk to the next, an odd multiple of 16."""
    return 2 * dim + 16


def matrix_bytes(dim: int) -> int:
    """Of a chunk's rows, as they lie in global and in shared memory."""
    return CHUNK * row_pitch(dim)


CONV_TAPS = 4
"""Taps of the convolution's fast form; the other takes any number from 2 on."""
CONV_THREADS = 128
CONV_WIDTH = 4
"""Neighbouring channels of a thread, where rows are aligned to them."""
CONV_TILE = 32
"""Rows of a sequence that a thread of the convolution takes."""

MAMBA2_THREADS = 128
MAMBA2_WARPS = MAMBA2_THREADS // 32
MAMBA2_VARIANTS = {
    f"n{size}_{type}": (size, channels, type)
    for size, channels in ((64, 16), (128, 16), (256, 8))
    for type in ("bf16", "f32")
}
"""State size, channels of a warp, type of the rows, by variant of ``mamba2_step``."""

NORM_THREADS = 128
NORM_HEADS = {64: 16, 128: 8, 256: 4}
"""Heads that a warp of ``gated_rmsnorm_heads`` takes, by their size."""
