"""A step's integers fetched from pinned memory, tokens fed, words copied out."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest

from tests.kernels.launches import Bench

LIMIT = 20  # the ids of a vocabulary


# 200 rows take two thread blocks of a piece; 5 columns of 7, and tables shorter than the rows.
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 5), (60, 7), (200, 2)])
def test_what_a_step_needs_is_fetched_and_its_tokens_fed(
    bench: Bench, rows: int, columns: int
) -> None:
    rng = np.random.default_rng(rows)
    shapes = [(300,), (300,), (65,), (64, 7)]  # the last piece alone has columns
    starts = np.cumsum([0, *(-(-prod(shape) // 16) * 16 for shape in shapes)])
    source = rng.integers(-2 - LIMIT, LIMIT, starts[-1]).astype(np.int32)
    want = np.full_like(source, -7)
    chosen = rng.integers(0, 1 << 20, LIMIT + 1).astype(np.int32)
    for at, shape in zip(starts[:-1], shapes, strict=True):
        wide = shape if len(shape) == 2 else (*shape, 1)
        part = (slice(rows + 1), slice(columns))
        values, out = (a[at : at + prod(shape)].reshape(wide) for a in (source, want))
        out[part] = values[part]
    ids = want[: rows + 1]
    ids[:] = np.where(ids <= -2, chosen[np.maximum(-2 - ids, 0)], ids)

    table = [(at, shape[0], prod(shape[1:])) for at, shape in zip(starts, shapes, strict=False)]
    target = bench.put_ints(np.full_like(source, -7))
    args = [bench.put_early(source), target, bench.put_early(table), bench.put_ints(chosen)]
    blocks = 3 * -(-(rows + 1) // 128) + -(-min(rows + 1, 64) * columns // 128)
    bench.run("fetch_inputs", (blocks, 1), [*args, 4, rows, columns])
    np.testing.assert_array_equal(bench.memory.get(target, want), want)


@pytest.mark.parametrize("count", [1, 128, 300])
def test_words_are_copied(bench: Bench, count: int) -> None:
    source = np.arange(400, dtype=np.int32)
    target = bench.put_ints(np.full_like(source, -7))
    at = bench.put_ints(source)
    bench.run("copy_words", (-(-count // 128), 1), [at + 4, target, count])
    want = np.full_like(source, -7)
    want[:count] = source[1 : count + 1]
    np.testing.assert_array_equal(bench.memory.get(target, want), want)


def test_tokens_are_fed_in_place(bench: Bench) -> None:
    ids, chosen = np.array([5, -2, -1, -4, 0], np.int32), np.array([70, 80, 90], np.int32)
    at = bench.put_ints(ids)
    bench.run("feed_tokens", (1, 1), [at, bench.put_ints(chosen), 4])
    np.testing.assert_array_equal(bench.memory.get(at, ids), [5, 70, -1, 90, 0])
