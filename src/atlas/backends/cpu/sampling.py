"""The filters of `atlas.ops.sampling` without sorting a vocabulary: the same candidates, bitwise.

A threshold taken from folded maxima keeps a superset of the k greatest values in one pass;
ordering, prefix sums and the rest then see that superset alone. exp32 is elementwise, so that
taking it later and of fewer candidates gives the same weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import log

import numpy as np

from atlas._native.pool import LaunchList, WorkerPool
from atlas.backends.cpu.compiler import BodyCompiler
from atlas.backends.cpu.device import address
from atlas.ops import sampling as ops
from atlas.ops.elementary import F32, exp32, tree_sum
from atlas.ops.sampling import Candidates, Order
from atlas.sampling import SamplingParams

Weights = Callable[[F32], F32]
"""exp32 of x ≤ 0."""

_BODY = "sampling.weights"
_SMALL_WEIGHTS = 32
_SMALL = 1024
"""Candidates up to which the definition itself is as quick."""
_LEAST_MIN_P = 1e-30
"""Below, min_p may round to 0 in float32, where even a weight of 0 stays."""
_FIRST_NUCLEUS = 128
_NUCLEUS_GROWTH = 8


@cache
def _identity(size: int) -> Order:
    ids = np.arange(size)
    ids.flags.writeable = False
    return ids


class CompiledWeights:
    """exp32 of x ≤ 0 as machine code: the bits of `atlas.ops.elementary.exp32`, far quicker.

    Parameters
    ----------
    compiler : BodyCompiler
        Loads the body ``sampling.weights`` from the disk cache or compiles it.

    Notes
    -----
    The body runs on the calling thread: waking the others takes longer than a row.
    """

    def __init__(self, compiler: BodyCompiler) -> None:
        self._compiler = compiler  # owns the code behind the address
        self._entry = compiler.address(_BODY)
        self._pool = WorkerPool(1)

    def __call__(self, x: F32) -> F32:
        if x.size <= _SMALL_WEIGHTS:
            return exp32(x)
        source = np.ascontiguousarray(x)
        out = np.empty_like(source)
        launches = LaunchList()
        args = (address(source), source.size, address(out))
        launches.append(_BODY, self._entry, args, (source, out))
        self._pool.run(launches)
        return out


def candidates(row: F32, temperature: float = 1.0, weights: Weights = exp32) -> Candidates:
    """All tokens of an adjusted row that are not forbidden; see `atlas.ops.sampling.candidates`."""
    ids, x = _scaled(row, temperature)
    return Candidates(ids, x, weights(x))


def most_probable(x: F32, count: int) -> Order:
    """The first ``count`` indices by probability; x ≤ 0."""
    near = _among_greatest(x, count)
    return near[_by_probability(x[near])[:count]]


def filtered(
    row: F32, params: SamplingParams, xtc_u: np.float32 | None, weights: Weights = exp32
) -> Candidates:
    """What temperature and filters leave of an adjusted row; see `atlas.ops.sampling.filtered`."""
    ids, x = _scaled(row, params.temperature)
    if params.top_n_sigma > 0.0:
        kept = np.flatnonzero(ops.top_n_sigma(x, params.top_n_sigma))
        ids, x = ids.take(kept), x.take(kept)
    if 0 < params.top_k < x.size:
        kept = np.sort(most_probable(x, params.top_k))
        ids, x = ids.take(kept), x.take(kept)
    needs_mass = params.typical_p < 1.0 or params.top_p < 1.0
    if params.min_p > _LEAST_MIN_P and not needs_mass and x.size > _SMALL:
        # The greatest x is 0 up to here. The slack is far wider than the error of exp32.
        kept = np.flatnonzero(x >= np.float32(log(params.min_p) - 0.01))
        ids, x = ids.take(kept), x.take(kept)
    left = Candidates(ids, x, weights(x))
    if params.typical_p < 1.0:
        left = _typical_p(left, params.typical_p)
    if params.top_p < 1.0:
        left = _top_p(left, params.top_p)
    if params.min_p > 0.0:
        left = left.keeping(ops.min_p(left.w, params.min_p))
    if xtc_u is not None and xtc_u < np.float32(params.xtc_probability):
        left = left.keeping(ops.exclude_top_choices(left.x, left.w, params.xtc_threshold))
    return left


def _scaled(row: F32, temperature: float) -> tuple[Order, F32]:
    if row.min() > -np.inf:
        return _identity(row.size), ops.scale(row, temperature)
    allowed = np.flatnonzero(row > -np.inf)
    return allowed, ops.scale(row.take(allowed), temperature)


def _among_greatest(values: F32, count: int) -> Order:
    """Ascending indices of every value that is at least as great as some ``count`` others'.

    Folding halves on each other by maximum leaves distinct elements of the row, so that the
    ``count``-th greatest of them bounds the row's own from below.
    """
    if count >= values.size:
        return _identity(values.size)
    if count == 0:
        return _identity(0)
    folded = values
    while folded.size >= max(16 * count, 2 * _SMALL):
        half = folded.size // 2
        folded = np.maximum(folded[:half], folded[half : 2 * half])
    threshold = np.partition(folded, folded.size - count)[folded.size - count]
    return np.flatnonzero(values >= threshold)


def _by_probability(x: F32) -> Order:
    """`atlas.ops.sampling.by_probability` for x ≤ 0: one integer sort of (bits of x, index)."""
    if x.size <= _SMALL:
        return ops.by_probability(x)
    # The bits of a negative float grow with its size; adding 0 turns -0 into 0.
    keys = (x + np.float32(0.0)).view(np.uint32).astype(np.uint64)
    keys <<= np.uint64(32)
    keys |= np.arange(x.size, dtype=np.uint64)
    keys.sort()
    return (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)


def _top_p(left: Candidates, p: float) -> Candidates:
    if left.x.size <= _SMALL:
        return left.keeping(ops.top_p(left.x, left.w, p))
    target = np.float32(p) * tree_sum(left.w)
    count = _FIRST_NUCLEUS
    while True:
        near = _among_greatest(left.x, count)
        order = near[_by_probability(left.x[near])]
        num_kept = ops.count_to_mass(left.w[order], target)
        # A prefix sum depends on what precedes it alone: more candidates would change nothing.
        if num_kept <= order.size or order.size == left.x.size:
            return left.keeping(np.sort(order[:num_kept]))
        count *= _NUCLEUS_GROWTH


def _typical_p(left: Candidates, p: float) -> Candidates:
    if left.x.size <= _SMALL:
        return left.keeping(ops.typical_p(left.x, left.w, p))
    total = tree_sum(left.w)
    target = np.float32(p) * total
    distance = ops.distance_from_entropy(left.x, left.w, total)
    nearness = -distance
    count = _FIRST_NUCLEUS
    while True:
        near = _among_greatest(nearness, count)
        order = near[np.lexsort((-left.x[near], distance[near]))]
        num_kept = ops.count_to_mass(left.w[order], target)
        if num_kept <= order.size or order.size == left.x.size:
            return left.keeping(np.sort(order[:num_kept]))
        count *= _NUCLEUS_GROWTH
