"""Rotary position embedding."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from atlas.ops.spec import op

Float = NDArray[np.float32]


def pair_axes(sections: tuple[int, int, int], half: int) -> NDArray[np.int32]:
    """The axis (0 time, 1 height, 2 width) whose position turns each of ``half`` pairs."""
    pair = np.arange(half)
    ends = np.array(sections)[pair % 3] * 3
    return np.where(pair < ends, pair % 3, 0).astype(np.int32)


def _turns(
    positions: NDArray[np.int32], table: Float, sections: tuple[int, int, int] | None
) -> tuple[Float, Float]:
    """Cosines and sines [T, 1, R/2] of every row."""
    if sections is None:
        rows = table[positions]
    else:
        half = table.shape[2]
        by_axis = table[positions]  # [3, T, 2, R/2]
        rows = by_axis[pair_axes(sections, half), :, :, np.arange(half)].transpose(1, 2, 0)
    return rows[:, 0, None, :], rows[:, 1, None, :]


@op
def rope(
    x: Float,
    positions: NDArray[np.int32],
    table: Float,
    sections: tuple[int, int, int] | None = None,
) -> None:
    """Rotate pairs (i, i + R/2) of each head's first R dimensions, in place.

    Parameters
    ----------
    x : float32 [T, H, K]
        Updated in place; rows may be strided.
    positions : int32 [T] or [3, T]
        Below P, checked by the caller. With ``sections``, a row's time, height and width; a row
        of text has three times the same.
    table : float32 [P, 2, R/2]
        Cosines, then sines, of every position.
    sections : (int, int, int), optional
        Pairs of each axis, interleaved: pair i turns by the height if i mod 3 is 1 and
        i < 3 · sections[1], by the width if i mod 3 is 2 and i < 3 · sections[2], else by the time.

    Source
    ------
    Su et al., "RoFormer" (2021), arXiv 2104.09864, eq. 34, with rotate-half pairing; Bai et al.,
    "Qwen3-VL" (2025), arXiv 2511.21631, for interleaved axes.
    """
    half = table.shape[2]
    cos, sin = _turns(positions, table, sections)
    first, second = x[..., :half].copy(), x[..., half : 2 * half].copy()
    x[..., :half] = first * cos - second * sin
    x[..., half : 2 * half] = second * cos + first * sin
