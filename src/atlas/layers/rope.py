"""Tables of cos and sin for rotary position embedding.

Angles grow with the position, and float32 rounds a position of 8,000 times a frequency by up to
2e-4. To agree with transformers, whose tables are the reference, the arithmetic here rounds to
float32 where transformers does; only powers, cos and sin are computed in float64 and rounded
once, so that the table does not depend on the machine's float32 math library.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from atlas.config import RopeConfig
from atlas.errors import InvalidArgumentError

Floats = NDArray[np.float32]

_CHUNK_ROWS = 4096
_F32 = np.float32


def rope_table(config: RopeConfig, head_dim: int, max_len: int) -> Floats:
    """cos and sin of every position and frequency.

    Parameters
    ----------
    config : RopeConfig
        Its ``rotary_dim`` (`head_dim` where None) dimensions of a head are rotated: dimension j
        with dimension j + rotary_dim / 2.
    head_dim, max_len : int

    Returns
    -------
    float32 [max_len, 2, rotary_dim / 2]
        Row p holds the cosines, then the sines, of ``p * inverse_frequency``, multiplied by
        YaRN's attention factor.

    Raises
    ------
    InvalidArgumentError
        The rotary dimension is odd or exceeds the head, `max_len` is not positive, or the
        number of divisors is not half the rotary dimension.
    """
    rotary_dim = head_dim if config.rotary_dim is None else config.rotary_dim
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise InvalidArgumentError(
            f"rotary_dim is {rotary_dim}; allowed: even, from 2 to head_dim {head_dim}"
        )
    if max_len < 1:
        raise InvalidArgumentError(f"max_len is {max_len}; allowed: 1 or more")
    frequencies = inverse_frequencies(config, rotary_dim)
    factor = _F32(config.attention_factor if config.scaling == "yarn" else 1.0)
    table = np.empty((max_len, 2, rotary_dim // 2), dtype=np.float32)
    for start in range(0, max_len, _CHUNK_ROWS):
        positions = np.arange(start, min(start + _CHUNK_ROWS, max_len), dtype=np.float32)
        angles = (positions[:, None] * frequencies).astype(np.float64)
        rows = table[start : start + len(positions)]
        rows[:, 0] = np.cos(angles).astype(np.float32) * factor
        rows[:, 1] = np.sin(angles).astype(np.float32) * factor
    return table


def no_rotation(max_len: int) -> Floats:
    """A table that leaves heads as they are, bit for bit: float32 [max_len, 2, 2].

    It serves attention without position embedding. Two columns, since kernels rotate by pairs.
    """
    table = np.zeros((max_len, 2, 2), np.float32)
    table[:, 0] = 1
    return table


def inverse_frequencies(config: RopeConfig, rotary_dim: int) -> Floats:
    """Radians per position of each pair of dimensions: float32 [rotary_dim / 2].

    Unscaled, ``theta ** (-2j / rotary_dim)`` (RoFormer, arXiv 2104.09864). ``divisors`` divide
    the result of any scaling.
    """
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / _F32(rotary_dim)
    powers = np.power(config.theta, exponents.astype(np.float64)).astype(np.float32)
    frequencies: Floats = _F32(1) / powers
    if config.scaling == "linear":
        frequencies = frequencies / _F32(config.factor)
    elif config.scaling == "llama3":
        frequencies = _llama3(config, frequencies)
    elif config.scaling == "yarn":
        frequencies = _yarn(config, powers, rotary_dim)
    if config.divisors is not None:
        if len(config.divisors) != rotary_dim // 2:
            raise InvalidArgumentError(
                f"{len(config.divisors)} rope divisors; allowed: {rotary_dim // 2}"
            )
        divisors: Floats = np.array(config.divisors, dtype=np.float32)
        frequencies = frequencies / divisors
    return frequencies


def _llama3(config: RopeConfig, frequencies: Floats) -> Floats:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended.

    Source: Llama 3.1's reference code; the bounds are ``original_max_seq_len`` over
    ``low_freq_factor`` and over ``high_freq_factor``.
    """
    wavelengths = _F32(2 * math.pi) / frequencies
    longest = config.original_max_seq_len / config.low_freq_factor
    shortest = config.original_max_seq_len / config.high_freq_factor
    stretched = frequencies / _F32(config.factor)
    keep = _F32(config.original_max_seq_len) / wavelengths - _F32(config.low_freq_factor)
    keep = keep / _F32(config.high_freq_factor - config.low_freq_factor)
    blended = (1 - keep) * frequencies / _F32(config.factor) + keep * frequencies
    scaled = np.where(wavelengths > _F32(longest), stretched, frequencies)
    between = (wavelengths >= _F32(shortest)) & (wavelengths <= _F32(longest))
    return np.where(between, blended, scaled).astype(np.float32)


def _yarn(config: RopeConfig, powers: Floats, rotary_dim: int) -> Floats:
    """Dimensions that turn often are kept, those that turn rarely stretched, a ramp between.

    Source: YaRN (arXiv 2309.00071), section 3.2; the ramp runs over the dimensions that turn
    ``beta_fast`` to ``beta_slow`` times within ``original_max_seq_len``.
    """

    def dimension_turning(turns: float) -> float:
        ratio = config.original_max_seq_len / (turns * 2 * math.pi)
        return rotary_dim * math.log(ratio) / (2 * math.log(config.theta))

    first, last = dimension_turning(config.beta_fast), dimension_turning(config.beta_slow)
    if config.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    width = last - first if last != first else 0.001  # a step instead of a ramp
    dimensions = np.arange(rotary_dim // 2, dtype=np.float32)
    keep = 1 - np.clip((dimensions - _F32(first)) / _F32(width), _F32(0), _F32(1))
    stretched = _F32(1) / (_F32(config.factor) * powers)
    frequencies: Floats = stretched * (1 - keep) + _F32(1) / powers * keep
    return frequencies
