"""Sinusoidal positions as M2M100 counts them."""

from __future__ import annotations

import math

import numpy as np

from atlas.layers.step import Array


def sinusoid_table(num_positions: int, size: int, padding_id: int) -> Array:
    """float32 [num_positions, size]: row p is the vector of the token at position p.

    The family counts from the padding token's id: position p turns by p + padding_id + 1. The
    first half of a row is sin(angle · 10000^(−i / (size/2 − 1))), the second cos; an odd size ends
    with a zero. Angles are rounded to float32 on the way, as the reference does.

    Source
    ------
    Vaswani et al., "Attention Is All You Need" (2017), arXiv 1706.03762, section 3.5, with halves
    in place of alternating columns, as tensor2tensor has it.
    """
    half = size // 2
    step = -math.log(10000.0) / max(half - 1, 1)
    rates = np.exp(np.arange(half, dtype=np.float32) * np.float32(step))
    turns = np.arange(num_positions, dtype=np.float32) + np.float32(padding_id + 1)
    angles = turns[:, None] * rates
    table = np.zeros((num_positions, size), np.float32)
    table[:, :half], table[:, half : 2 * half] = np.sin(angles), np.cos(angles)
    return table
