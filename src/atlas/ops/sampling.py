"""From one row of logits to a token: the NumPy definition of every stage and of their order.

`atlas.ops.penalties` holds the stages up to DRY. `scale` turns their row into
x = (logit − max) / temperature ≤ 0 with weights w = exp32(x); each filter returns which candidates
it keeps, and the list of candidates, always in ascending order of ids, is compacted after it. A
weight is relative to the row's maximum, and a probability is w / tree_sum(w over the present list).
Parameters are rounded to float32 first. "By probability" means by x, descending, then by id,
ascending.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from atlas.ops.elementary import F32, LANES, exp32, lane_sums, log32, prefix_sum, tree_sum
from atlas.ops.penalties import adjust
from atlas.ops.random import Purpose, uniform
from atlas.sampling import SamplingParams

Keep = NDArray[np.bool_]
Order = NDArray[np.int64]


class Sampled(NamedTuple):
    """A chosen token; without ``logprobs``, ``logprob`` is None and ``top`` is empty."""

    token_id: int
    logprob: float | None = None
    top: list[tuple[int, float]] = []  # noqa: RUF012 - never changed; (id, logprob), highest first


class Candidates(NamedTuple):
    """The tokens that are still in the draw, in ascending order of ids."""

    ids: Order
    x: F32  # scaled logits, at most 0
    w: F32  # exp32(x)

    def keeping(self, keep: Keep | Order) -> Candidates:
        """Those at a filter's True values, or at indices in ascending order."""
        index = np.flatnonzero(keep) if keep.dtype == np.bool_ else keep
        return Candidates(self.ids.take(index), self.x.take(index), self.w.take(index))


def scale(logits: F32, temperature: float) -> F32:
    """x = (logit − max) / temperature, so that x ≤ 0 whatever the logits' size."""
    with np.errstate(over="ignore"):
        x: F32 = logits - logits.max()
        return x if temperature == 1.0 else cast(F32, x / np.float32(temperature))


def by_probability(x: F32) -> Order:
    """Indices by x, descending; equal x by index, ascending."""
    return np.argsort(-x, kind="stable")


def most_probable(x: F32, count: int) -> Order:
    """The first ``count`` indices by probability."""
    return by_probability(x)[:count]


def count_to_mass(weights: F32, target: np.float32) -> int:
    """How many leading weights reach the target by `prefix_sum`; more than there are if none do."""
    return int(np.searchsorted(prefix_sum(weights), target, side="left")) + 1


def top_n_sigma(x: F32, num_sigmas: float) -> Keep:
    """x ≥ max − n · σ, with σ the population standard deviation of x.

    Source: Tang et al., "Top-nσ: Not All Logits Are You Need" (2024), arXiv 2411.07641. If σ is not
    finite (logits near the ends of float32) everything stays.
    """
    size = np.float32(x.size)
    with np.errstate(over="ignore", invalid="ignore"):
        deviation = x - tree_sum(x) / size
        sigma = np.sqrt(tree_sum(deviation * deviation) / size)
        return cast(Keep, ~(x < x.max() - np.float32(num_sigmas) * sigma))


def top_k(x: F32, k: int) -> Keep:
    """The k most probable."""
    keep = np.zeros(x.size, np.bool_)
    keep[most_probable(x, k)] = True
    return keep


def typical_p(x: F32, w: F32, p: float) -> Keep:
    """The least set nearest to the entropy H = −Σ pᵢ log pᵢ whose mass reaches p.

    Ordered by |−log pᵢ − H|, then by probability.

    Source: Meister et al., "Locally Typical Sampling" (2022), arXiv 2202.00666.
    """
    total = tree_sum(w)
    distance = distance_from_entropy(x, w, total)
    order = np.lexsort((-x, distance))
    keep = np.zeros(x.size, np.bool_)
    keep[order[: count_to_mass(w[order], np.float32(p) * total)]] = True
    return keep


def distance_from_entropy(x: F32, w: F32, total: np.float32) -> F32:
    """|−log pᵢ − H|; see `typical_p`."""
    surprise = log32(total) - x
    # 0 · log 0 counts as 0, also where x overflowed to -inf.
    entropy = tree_sum(w * np.minimum(surprise, np.finfo(np.float32).max)) / total
    return cast(F32, np.abs(surprise - entropy))


def top_p(x: F32, w: F32, p: float) -> Keep:
    """The fewest most probable whose mass reaches p; at least one.

    Source: Holtzman et al., "The Curious Case of Neural Text Degeneration" (2020), arXiv
    1904.09751.
    """
    order = by_probability(x)
    keep = np.zeros(x.size, np.bool_)
    keep[order[: count_to_mass(w[order], np.float32(p) * tree_sum(w))]] = True
    return keep


def min_p(w: F32, p: float) -> Keep:
    """w ≥ p · max w.

    Source: Nguyen et al., "Turning Up the Heat: Min-p Sampling" (2024), arXiv 2407.01082.
    """
    return cast(Keep, w >= np.float32(p) * w.max())


def exclude_top_choices(x: F32, w: F32, threshold: float) -> Keep:
    """Of the tokens with probability ≥ threshold all but the least probable go.

    Source: P. E. Weidmann, "XTC" (2024), text-generation-webui pull request 6335.
    """
    high = np.flatnonzero(w >= np.float32(threshold) * tree_sum(w))
    keep = np.ones(x.size, np.bool_)
    keep[high[by_probability(x[high])[:-1]]] = False
    return keep


def draw(w: F32, u: np.float32) -> int:
    """The index at which the cumulative weight first exceeds u · total.

    The cumulative weight runs along lane 0, then along lane 1 … (see `lane_sums`), each value being
    (the lanes before, added in order) + (the weights of this lane so far, added in order). An index
    of weight 0 is never drawn.
    """
    ends = np.add.accumulate(lane_sums(w))
    target = u * ends[-1]
    lane = int(np.searchsorted(ends, target, side="right"))
    before = ends[lane - 1] if lane else np.float32(0.0)
    within = before + np.add.accumulate(w[lane::LANES])
    return lane + LANES * int(np.searchsorted(within, target, side="right"))


def logprobs(
    ids: Order, x: F32, total: np.float32, chosen: int, ranked: Iterable[int]
) -> tuple[float, list[tuple[int, float]]]:
    """log pᵢ = xᵢ − log32(total) of the chosen index, and (id, log p) of the ranked ones."""
    log_total = log32(total)
    top = [(int(ids[index]), float(x[index] - log_total)) for index in ranked]
    return float(x[chosen] - log_total), top


def candidates(row: F32, temperature: float = 1.0) -> Candidates:
    """All tokens of an adjusted row that are not forbidden."""
    allowed = np.flatnonzero(row > -np.inf)
    x = scale(row[allowed], temperature)
    return Candidates(allowed, x, exp32(x))


def filtered(row: F32, params: SamplingParams, xtc_u: np.float32 | None) -> Candidates:
    """The candidates that an adjusted row leaves after temperature and the filters, in order.

    ``xtc_u`` is the random number that decides whether XTC acts, None where it is off.
    """
    left = candidates(row, params.temperature)
    if params.top_n_sigma > 0.0:
        left = left.keeping(top_n_sigma(left.x, params.top_n_sigma))
    if params.top_k > 0:
        left = left.keeping(top_k(left.x, params.top_k))
    if params.typical_p < 1.0:
        left = left.keeping(typical_p(left.x, left.w, params.typical_p))
    if params.top_p < 1.0:
        left = left.keeping(top_p(left.x, left.w, params.top_p))
    if params.min_p > 0.0:
        left = left.keeping(min_p(left.w, params.min_p))
    if xtc_u is not None and xtc_u < np.float32(params.xtc_probability):
        left = left.keeping(exclude_top_choices(left.x, left.w, params.xtc_threshold))
    return left


def sample(
    logits: F32,
    params: SamplingParams,
    *,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int] = (),
    eos_token_ids: Iterable[int] = (),
    position: int,
    sample_index: int = 0,
    mask: NDArray[np.int32] | None = None,
) -> Sampled:
    """Choose the token that follows ``prompt_ids`` and ``output_ids``.

    Parameters
    ----------
    logits : float32 [C]
        Finite; not changed.
    params : SamplingParams
        Without unresolved texts; with a seed unless greedy.
    position : int
        Index of the new token in the sequence: part of the random numbers' key.
    mask : int32 [⌈C/32⌉] or None
        Allowed ids, one bit each.

    Returns
    -------
    Sampled
        With temperature 0 the lowest id of the greatest adjusted logit, else a draw.
    """
    row = adjust(
        logits,
        params,
        prompt_ids=prompt_ids,
        output_ids=output_ids,
        eos_token_ids=eos_token_ids,
        mask=mask,
    )
    if params.greedy:
        left = candidates(row)
        chosen = int(np.argmax(left.x))
    else:
        seed = cast(int, params.seed)
        xtc_u = None
        if params.xtc_probability > 0.0:
            xtc_u = uniform(seed, sample_index, position, Purpose.XTC)
        left = filtered(row, params, xtc_u)
        chosen = draw(left.w, uniform(seed, sample_index, position, Purpose.DRAW))
    token_id = int(left.ids[chosen])
    if params.logprobs is None:
        return Sampled(token_id)
    if params.logprobs_mode == "raw":
        left, chosen = candidates(logits), token_id
    ranked = most_probable(left.x, params.logprobs)
    return Sampled(token_id, *logprobs(left.ids, left.x, tree_sum(left.w), chosen, ranked))
