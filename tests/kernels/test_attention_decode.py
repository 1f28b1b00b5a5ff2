"""Paged decode attention against the op's definition, and bit by bit against itself."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.launches import Bench, close
from tests.kernels.sequences import Sequences, decode, put_pools

CASES = [
    (Sequences([40, 300], 4, 1, 64), [[38, 39], [299]], 16),
    (Sequences([540, 17], 2, 2, 80, window=100), [[539], [15, 16]], 32),
    (Sequences([33], 3, 1, 96, softcap=20.0), [[32]], 16),
    (Sequences([530, 16, 1], 8, 2, 128), [[528, 529], [15], [0]], 16),
    (Sequences([300], 6, 1, 128, window=40, softcap=5.0), [[297, 298, 299]], 32),
    (Sequences([520], 2, 1, 256), [[511, 512, 519]], 16),
]


@pytest.mark.parametrize(("given", "rows", "tile"), CASES, ids=range(len(CASES)))
def test_decode(bench: Bench, given: Sequences, rows: list[list[int]], tile: int) -> None:
    got = decode(bench, given, put_pools(bench, given), rows, tile)
    want = given.definition([(n, at) for n, positions in enumerate(rows) for at in positions])
    close(got, want, "bf16", 4e-3)


def test_a_rows_bits_depend_on_its_position_alone(bench: Bench) -> None:
    """Alone or with other rows and sequences, whatever the tile and the number of workers."""
    given = Sequences([530, 30], 6, 1, 64)
    pools = put_pools(bench, given)
    together = decode(bench, given, pools, [[510, 511, 512, 529], [29]], 32, workers=3)
    for i, at in enumerate([510, 511, 512, 529]):
        alone = decode(bench, given, pools, [[at], []], 16, workers=1)
        np.testing.assert_array_equal(alone[0], together[i])
    np.testing.assert_array_equal(decode(bench, given, pools, [[], [29]])[0], together[4])
