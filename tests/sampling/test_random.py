"""The counter-based generator: known answers, ranges, and independence of its keys."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atlas.errors import InvalidArgumentError
from atlas.ops.random import Purpose, philox4x32, uniform

ONES = 0xFFFFFFFF
# The known-answer vectors that the authors publish with Random123 (philox4x32, 10 rounds).
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_gives_the_published_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    assert philox4x32(counter, key) == expected


def test_uniform_is_the_top_of_the_first_word() -> None:
    seed = 0xA4093822_00000007
    for position in range(32):
        word = philox4x32((position, 3, Purpose.XTC, 0), (7, 0xA4093822))[0]
        assert uniform(seed, 3, position, Purpose.XTC) == np.float32((word >> 8) / 2**24)


@given(
    seed=st.integers(0, 2**64 - 1),
    sample_index=st.integers(0, 2**32 - 1),
    position=st.integers(0, 2**32 - 1),
    purpose=st.sampled_from(Purpose),
)
def test_uniform_is_below_one_and_has_24_bits(
    seed: int, sample_index: int, position: int, purpose: Purpose
) -> None:
    u = uniform(seed, sample_index, position, purpose)
    assert u.dtype == np.float32
    assert 0.0 <= u < 1.0
    assert float(u) * 2**24 == int(float(u) * 2**24)
    assert u == uniform(seed, sample_index, position, purpose)


def test_each_part_of_the_key_changes_the_stream() -> None:
    def stream(seed: int, sample_index: int, purpose: Purpose) -> list[float]:
        return [float(uniform(seed, sample_index, i, purpose)) for i in range(64)]

    streams = [
        stream(seed, sample_index, purpose)
        for seed in (0, 1, 2**32, 2**63)
        for sample_index in (0, 1)
        for purpose in Purpose
    ]
    assert len({tuple(values) for values in streams}) == len(streams)
    correlations = np.corrcoef(streams) - np.eye(len(streams))
    assert np.abs(correlations).max() < 0.55  # 64 values: σ = 0.125


def test_uniform_fills_its_range_evenly() -> None:
    values = [uniform(5, 0, position, Purpose.DRAW) for position in range(20_000)]
    counts = np.histogram(values, bins=50, range=(0, 1))[0]
    assert ((counts - 400) ** 2 / 400).sum() < 85.4  # χ², 49 degrees, p = 0.001


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("seed", (-1, 0, 0)),
        ("seed", (2**64, 0, 0)),
        ("sample_index", (0, 2**32, 0)),
        ("position", (0, 0, -1)),
        ("position", (0, 0, 2**32)),
    ],
)
def test_uniform_refuses_what_its_key_cannot_hold(
    name: str, arguments: tuple[int, int, int]
) -> None:
    with pytest.raises(InvalidArgumentError, match=name):
        uniform(*arguments, Purpose.DRAW)
