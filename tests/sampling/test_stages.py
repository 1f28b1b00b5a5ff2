"""Temperature, filters and draw of the definition, on distributions computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from atlas.ops.elementary import LANES, exp32
from atlas.ops.sampling import (
    draw,
    exclude_top_choices,
    filtered,
    min_p,
    sample,
    scale,
    top_k,
    top_n_sigma,
    top_p,
    typical_p,
)
from atlas.sampling import SamplingParams

# Out of order, so that positions and ranks differ: ranks are ids 1, 3, 0, 2.
PROBABILITIES = np.array([0.2, 0.4, 0.1, 0.3])


def x_of(probabilities: np.ndarray) -> np.ndarray:
    return scale(np.log(probabilities).astype(np.float32), 1.0)


X = x_of(PROBABILITIES)
W = exp32(X)


def kept(keep: np.ndarray) -> list[int]:
    return np.flatnonzero(keep).tolist()


def left(probabilities: np.ndarray, xtc_u: float | None = None, **fields: float) -> list[int]:
    params = SamplingParams(**{"temperature": 1.0, **fields})
    u = None if xtc_u is None else np.float32(xtc_u)
    return filtered(np.log(probabilities).astype(np.float32), params, u).ids.tolist()


def test_scale_is_zero_at_the_maximum_and_divides_by_temperature() -> None:
    logits = np.array([3.0, 1.0, 3.0], np.float32)
    assert scale(logits, 1.0).tolist() == [0.0, -2.0, 0.0]
    assert scale(logits, 0.5).tolist() == [0.0, -4.0, 0.0]
    assert scale(logits, 4.0).tolist() == [0.0, -0.5, 0.0]


@pytest.mark.filterwarnings("error")
def test_scale_does_not_overflow_at_the_ends_of_the_range() -> None:
    logits = np.array([3e38, -3e38, 2.9e38], np.float32)
    for temperature in (1e-6, 1.0, 1e6):
        x = scale(logits, temperature)
        assert x[0] == 0.0
        assert (x <= 0.0).all()


@pytest.mark.parametrize(
    ("k", "expected"), [(1, [1]), (2, [1, 3]), (3, [0, 1, 3]), (9, [*range(4)])]
)
def test_top_k(k: int, expected: list[int]) -> None:
    assert kept(top_k(X, k)) == expected


def test_top_k_breaks_ties_by_id() -> None:
    assert kept(top_k(np.array([-1, 0, -1, -1], np.float32), 2)) == [0, 1]


@pytest.mark.parametrize(
    ("p", "expected"),
    [
        (1e-9, [1]),
        (0.39, [1]),
        (0.41, [1, 3]),
        (0.69, [1, 3]),
        (0.71, [0, 1, 3]),
        (0.95, [*range(4)]),
    ],
)
def test_top_p(p: float, expected: list[int]) -> None:
    assert kept(top_p(X, W, p)) == expected


def test_top_p_breaks_ties_by_id() -> None:
    x = x_of(np.full(4, 0.25))
    assert kept(top_p(x, exp32(x), 0.5)) == [0, 1]


@pytest.mark.parametrize(
    ("p", "expected"), [(1.0, [1]), (0.74, [1, 3]), (0.49, [0, 1, 3]), (0.2, [*range(4)])]
)
def test_min_p_is_relative_to_the_highest(p: float, expected: list[int]) -> None:
    assert kept(min_p(W, p)) == expected


def test_top_n_sigma() -> None:
    x = np.array([0.0, -2.0, -4.0, -6.0], np.float32)  # σ = √5
    assert kept(top_n_sigma(x, 0.8)) == [0]
    assert kept(top_n_sigma(x, 0.9)) == [0, 1]
    assert kept(top_n_sigma(x, 1.8)) == [0, 1, 2]
    assert kept(top_n_sigma(x * np.float32(0.1), 1.8)) == [0, 1, 2]  # whatever the temperature


@pytest.mark.filterwarnings("error")
def test_top_n_sigma_keeps_everything_where_sigma_overflows() -> None:
    assert kept(top_n_sigma(np.array([0, -3e38, -np.inf], np.float32), 1.0)) == [0, 1, 2]


def test_typical_p_may_leave_out_the_most_probable() -> None:
    # Entropy 1.39 nats; −log p: 0.69, 2.30 (five times). Distances 0.69, 0.92.
    assert left(np.array([0.5, 0.1, 0.1, 0.1, 0.1, 0.1]), typical_p=0.4) == [0]
    # Entropy 1.96; −log p: 1.20, 2.30 (seven times). Distances 0.77, 0.34: the seven come first.
    skewed = np.array([0.3, *[0.1] * 7])
    assert left(skewed, typical_p=0.19) == [1, 2]
    assert left(skewed, typical_p=0.65) == [1, 2, 3, 4, 5, 6, 7]
    assert left(skewed, typical_p=0.75) == [*range(8)]


@pytest.mark.filterwarnings("error")
def test_typical_p_counts_a_vanished_probability_as_nothing() -> None:
    x = np.array([0.0, -200.0, -np.inf], np.float32)
    assert kept(typical_p(x, exp32(x), 0.9)) == [0]


@pytest.mark.parametrize(
    ("threshold", "expected"),
    [(0.5, [*range(4)]), (0.35, [*range(4)]), (0.25, [0, 2, 3]), (0.15, [0, 2]), (0.05, [2])],
)
def test_xtc_keeps_the_least_probable_above_its_threshold(
    threshold: float, expected: list[int]
) -> None:
    assert kept(exclude_top_choices(X, W, threshold)) == expected


def test_xtc_acts_when_its_random_number_is_below_the_probability() -> None:
    fields = {"xtc_probability": 0.5, "xtc_threshold": 0.15}
    assert left(PROBABILITIES, xtc_u=0.49, **fields) == [0, 2]
    assert left(PROBABILITIES, xtc_u=0.5, **fields) == [*range(4)]
    assert left(PROBABILITIES, xtc_u=None, **fields) == [*range(4)]


@pytest.mark.parametrize("size", [1, 4, LANES, LANES + 1, 5 * LANES + 7])
def test_draw_inverts_the_cumulative_weight_lane_by_lane(size: int) -> None:
    rng = np.random.default_rng(size)
    w = (rng.integers(0, 4, size) / 4).astype(np.float32)  # exact sums
    w[size // 2] = 1.0
    order = [i for lane in range(LANES) for i in range(lane, size, LANES)]
    cumulative = np.cumsum(w[order])
    for u in (0.0, 0.25, 0.5, 0.9, 1 - 2.0**-24):
        expected = order[int(np.argmax(cumulative > np.float32(u) * cumulative[-1]))]
        assert draw(w, np.float32(u)) == expected
        assert w[expected] > 0


def test_top_k_comes_before_top_p() -> None:
    # Of the two most probable the first has 4/7 of the mass; of all it has 0.4.
    assert left(PROBABILITIES, top_k=2, top_p=0.5) == [1]
    assert left(PROBABILITIES, top_p=0.5) == [1, 3]


def test_temperature_comes_before_the_filters() -> None:
    assert left(PROBABILITIES, top_p=0.5) == [1, 3]
    assert left(PROBABILITIES, top_p=0.5, temperature=0.2) == [1]
    assert left(PROBABILITIES, min_p=0.7) == [1, 3]
    assert left(PROBABILITIES, min_p=0.7, temperature=4.0) == [0, 1, 2, 3]


def test_top_n_sigma_comes_before_top_k() -> None:
    # σ over all eight values is 4.9; over the two that top_k leaves it would be 0.5.
    row = np.array([0, -1, -11, -11, -11, -11, -11, -11], np.float32)
    params = SamplingParams(temperature=1.0, top_n_sigma=1.0, top_k=2)
    assert filtered(row, params, None).ids.tolist() == [0, 1]
    assert kept(top_n_sigma(row[:2], 1.0)) == [0]


def test_typical_p_comes_before_top_p_and_min_p() -> None:
    skewed = np.array([0.3, *[0.1] * 7])
    assert left(skewed, typical_p=0.65, top_p=0.25) == [1, 2]
    assert left(skewed, typical_p=0.65, min_p=0.9) == [*range(1, 8)]
    assert left(skewed, top_p=0.25) == left(skewed, min_p=0.9) == [0]


def test_top_p_comes_before_xtc() -> None:
    fields = {"xtc_probability": 1.0, "xtc_threshold": 0.05}
    assert left(PROBABILITIES, xtc_u=0.0, **fields) == [2]
    assert left(PROBABILITIES, xtc_u=0.0, top_p=0.5, **fields) == [3]
    assert left(PROBABILITIES, xtc_u=0.0, min_p=0.6, **fields) == [3]


def test_greedy_takes_the_lowest_id_of_the_greatest_logit() -> None:
    logits = np.array([1, 5, 5, 2], np.float32)
    assert sample(logits, SamplingParams(), prompt_ids=[0], position=1).token_id == 1
    params = SamplingParams(logit_bias={1: -1.0})
    assert sample(logits, params, prompt_ids=[0], position=1).token_id == 2
