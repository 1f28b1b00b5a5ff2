"""Counter-based random numbers: a draw is a function of its key, never of what was drawn before."""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from atlas.errors import InvalidArgumentError

_MASK = 0xFFFFFFFF
_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_1 = 0xCD9E8D57
_WEYL_0 = 0x9E3779B9  # golden ratio
_WEYL_1 = 0xBB67AE85  # √3 − 1
_NUM_ROUNDS = 10


class Purpose(IntEnum):
    """What a random number decides. Each purpose has its own stream at every position."""

    DRAW = 0
    XTC = 1
    ACCEPT = 2
    RESIDUAL = 3


def philox4x32(
    counter: tuple[int, int, int, int], key: tuple[int, int]
) -> tuple[int, int, int, int]:
    """Ten rounds of Philox 4×32.

    Parameters
    ----------
    counter : four unsigned 32-bit words
    key : two unsigned 32-bit words

    Returns
    -------
    four unsigned 32-bit words

    Source
    ------
    Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        product_0 = _MULTIPLIER_0 * c0
        product_1 = _MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (
            (product_1 >> 32) ^ c1 ^ k0,
            product_1 & _MASK,
            (product_0 >> 32) ^ c3 ^ k1,
            product_0 & _MASK,
        )
        k0 = (k0 + _WEYL_0) & _MASK
        k1 = (k1 + _WEYL_1) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, sample_index: int, position: int, purpose: Purpose) -> np.float32:
    """A number in [0, 1), a multiple of 2**-24, fixed by its four arguments.

    Parameters
    ----------
    seed : int
        0 … 2**64 − 1, the request's; its low word is the first word of the Philox key.
    sample_index : int
        0 … 2**32 − 1, which of the request's ``n`` samples.
    position : int
        0 … 2**32 − 1, the index in the sequence of the token that is decided.
    purpose : Purpose

    Returns
    -------
    float32
        The top 24 bits of the first word of Philox(counter = (position, sample_index, purpose, 0)).

    Raises
    ------
    InvalidArgumentError
        An argument is outside its range.
    """
    for name, value, bits in (
        ("seed", seed, 64),
        ("sample_index", sample_index, 32),
        ("position", position, 32),
    ):
        if not 0 <= value < 1 << bits:
            raise InvalidArgumentError(f"{name} is {value!r}; allowed: 0 … 2**{bits} - 1")
    word, _, _, _ = philox4x32(
        (position, sample_index, int(purpose), 0), (seed & _MASK, seed >> 32)
    )
    return np.float32((word >> 8) * 2.0**-24)
