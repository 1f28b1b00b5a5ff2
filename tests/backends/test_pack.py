"""Packed weights: layout facts that every body relies on, and the memory that packing takes."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from atlas.backends.cpu.pack import LANES, pack, packed_format, tile_bytes
from atlas.errors import ShapeError
from atlas.ops.blocks import FORMATS, HostMatrix
from tests.ops.cases import random_matrix


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 48])
def test_tiles_are_aligned_and_complete(rng: np.random.Generator, name: str, rows: int) -> None:
    packed = pack([random_matrix(rng, name, rows, 256)])
    assert packed.format == packed_format(name)
    assert packed.source_format == name
    assert (packed.rows, packed.cols, packed.groups) == (rows, 256, 1)
    assert packed.data.shape == (-(-rows // LANES), tile_bytes(packed.format, 256))
    assert packed.data.ctypes.data % 64 == 0
    assert packed.data.flags.c_contiguous
    # A vector may read 64 bytes past the last tile.
    assert packed.data.base is not None
    end = packed.data.ctypes.data + packed.nbytes
    assert packed.data.base.ctypes.data + packed.data.base.nbytes - end >= 64


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_do_not_depend_on_what_else_is_packed(rng: np.random.Generator, name: str) -> None:
    """Neighbours, stacking and groups move tiles, and change none."""
    a, b = (random_matrix(rng, name, 32, 256) for _ in range(2))
    alone = [pack([part]).data for part in (a, b)]
    np.testing.assert_array_equal(pack([a, b]).data, np.concatenate(alone))
    both = HostMatrix(name, 64, 256, np.concatenate([a.data, b.data]))
    np.testing.assert_array_equal(pack([both], groups=2).data, np.concatenate(alone))
    # Group g of the result stacks group g of every part.
    halves = pack([a, b], groups=2).data
    np.testing.assert_array_equal(halves[:2], np.stack([alone[0][0], alone[1][0]]))


@pytest.mark.parametrize("name", ["f32", "f16", "bf16"])
def test_float_tiles_hold_columns_of_sixteen_rows(rng: np.random.Generator, name: str) -> None:
    matrix = random_matrix(rng, name, 18, 32)
    packed = pack([matrix])
    tiles = packed.data.view(FORMATS[name].dtype).reshape(2, -1)
    padded = np.zeros((32, 32), FORMATS[name].dtype)
    padded[:18] = matrix.data.reshape(18, 32)
    for tile in range(2):
        rows = padded[16 * tile : 16 * tile + 16]
        # Whatever the order within a tile, each stored element is there exactly once.
        np.testing.assert_array_equal(np.sort(tiles[tile]), np.sort(rows, axis=None))


def test_formats_without_a_kernel_become_the_eight_bit_form() -> None:
    kept = {name for name in FORMATS if packed_format(name) == name}
    assert kept == {"f32", "f16", "bf16", "q4_0", "q4_1", "q8_0", "q4_k", "q6_k"}
    assert {packed_format(name) for name in FORMATS.keys() - kept} == {"b8_16", "b8_32"}


def test_only_like_matrices_stack(rng: np.random.Generator) -> None:
    matrix = random_matrix(rng, "q8_0", 16, 64)
    for other in (random_matrix(rng, "q4_0", 16, 64), random_matrix(rng, "q8_0", 16, 96)):
        with pytest.raises(ShapeError, match="must agree"):
            pack([matrix, other])
    with pytest.raises(ShapeError, match="do not divide into 3 groups"):
        pack([matrix], groups=3)


@pytest.mark.parametrize("name", ["q4_1", "q6_k", "f32"])
def test_packing_takes_little_more_than_the_result(rng: np.random.Generator, name: str) -> None:
    matrix = random_matrix(rng, name, 64, 256)
    large = HostMatrix(name, 64 * 512, 256, np.tile(matrix.data, (512, 1)))
    tracemalloc.start()
    try:
        packed = pack([large])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < packed.nbytes + (48 << 20)
