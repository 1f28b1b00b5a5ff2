"""Kernels of encoder-decoders: a row's bits depend on its source, not on who shares the launch."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import numpy as np
import pytest

from atlas.ops import OPS
from tests.kernels.launches import Bench
from tests.kernels.op_launches import BenchQueue, run_op
from tests.ops.cases import Case

Array = np.ndarray[Any, Any]


def _run(bench: Bench, op: str, args: tuple[Any, ...], **out: Array) -> dict[str, Array]:
    """The op's launches over ``bench``; what they wrote."""
    file = OPS[op].__module__.rpartition(".")[2]
    call = getattr(importlib.import_module(f"atlas.backends.cuda.{file}"), op)
    queue = BenchQueue(bench, getattr(bench.memory, "arch", "sm_80"))
    names = list(inspect.signature(OPS[op]).parameters)
    return run_op(queue, op, call, names, Case("", args, out, out))


def _normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def _ends(*counts: int) -> Array:
    return np.cumsum([0, *counts]).astype(np.int32)


def test_encoder_rows_do_not_depend_on_the_batch(bench: Bench) -> None:
    """Each source alone, among others, and with padding rows behind that belong to nobody."""
    lengths, padding = (5, 70, 0, 130), 6
    ends = _ends(*lengths)
    q, k, v = (_normal(int(ends[-1]) + padding, 1, 64, seed=seed) for seed in range(3))
    out = np.full_like(q, 7.0)
    together = _run(bench, "encoder_attention", (q, k, v, ends, 0.125), out=out)["out"]
    np.testing.assert_array_equal(together[ends[-1] :], 7.0)
    for n, length in enumerate(lengths):
        rows = slice(ends[n], ends[n + 1])
        if length:
            part = tuple(array[rows] for array in (q, k, v))
            alone = _run(
                bench,
                "encoder_attention",
                (*part, _ends(length), 0.125),
                out=np.empty_like(q[rows]),
            )
            np.testing.assert_array_equal(alone["out"], together[rows])


def test_a_source_s_rows_do_not_depend_on_each_other(bench: Bench) -> None:
    """Beams alone or together, in the narrow tile and the wide one; NaN lies behind the sources."""
    lens, counts = np.array([24, 530, 16], np.int32), (20, 2, 0)
    blocks = [-(-int(length) // 16) for length in lens]
    tables, order = np.full((3, 40), 2**31 - 1, np.int32), _ends(*blocks)
    shuffled = np.random.default_rng(0).permutation(int(order[-1])).astype(np.int32)
    for n, count in enumerate(blocks):
        tables[n, :count] = shuffled[order[n] : order[n + 1]]
    k_pool, v_pool = (_normal(int(order[-1]), 1, 16, 64, seed=seed) for seed in (1, 2))
    for n, length in enumerate(lens):
        for pool in (k_pool, v_pool):
            pool[tables[n, (length - 1) // 16], :, (length - 1) % 16 + 1 :] = np.nan
    pools = (k_pool.swapaxes(2, 3), v_pool)
    ends, q = _ends(*counts), _normal(sum(counts), 1, 64)
    args = (q, *pools, tables, ends, 20, lens, 0.125)
    together = _run(bench, "cross_attention", args, out=np.empty_like(q))["out"]
    assert np.isfinite(together).all()
    for source, row in ((0, 0), (0, 17), (1, 21)):
        one = (q[row : row + 1], *pools, tables[source : source + 1], _ends(1), 1)
        one = (*one, lens[source : source + 1], 0.125)
        alone = _run(bench, "cross_attention", one, out=np.empty_like(q[:1]))["out"]
        np.testing.assert_array_equal(alone[0], together[row])


@pytest.mark.parametrize("k", [8, 33])
def test_candidates_of_a_row_do_not_depend_on_others(bench: Bench, k: int) -> None:
    """Alone, among rows that are not finite, and with more candidates than are looked at."""
    logits = _normal(4, 5001) * np.float32(3)
    logits[1, 4097] = np.nan
    best = np.argsort(-logits[2], kind="stable")[: 2 * k].astype(np.int32)
    bans = _ends(0, 0, len(best), 0)

    def candidates(rows: slice, banned: Array, cu_banned: Array) -> dict[str, Array]:
        count = len(logits[rows])
        return _run(
            bench,
            "top_candidates",
            (logits[rows], banned, cu_banned),
            ids=np.zeros((count, k), np.int32),
            values=np.zeros((count, k), np.float32),
            totals=np.zeros(count, np.float32),
        )

    together = candidates(slice(0, 4), best, bans)
    assert not np.isin(together["ids"][2], best).any()
    assert (together["ids"][1] == -1).all()
    for row in (0, 2, 3):
        banned = best if row == 2 else best[:0]
        alone = candidates(slice(row, row + 1), banned, _ends(len(banned)))
        for name, values in alone.items():
            np.testing.assert_array_equal(values[0], together[name][row], err_msg=name)
