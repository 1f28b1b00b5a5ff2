"""The stated polynomials and sums: accuracy, edges, and the order that the docstrings promise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atlas.backends.cpu.compiler import BodyCompiler
from atlas.backends.cpu.sampling import CompiledWeights
from atlas.ops.elementary import (
    EXP_HIGH,
    EXP_LOW,
    LANES,
    exp32,
    lane_sums,
    log32,
    prefix_sum,
    tree_sum,
)

SIZES = [1, 2, 255, 256, 257, 511, 512, 513, 1000, 4096, 20_011]


def bits(x: object) -> np.ndarray:
    return np.atleast_1d(np.asarray(x, np.float32)).view(np.uint32)


def ulps(got: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Error in units of the spacing of float32 at the exact value."""
    spacing = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
    return np.abs(got.astype(np.float64) - exact) / spacing


def row(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random(size, np.float32) ** 8


def test_exp_is_within_2_ulp_over_its_range() -> None:
    dense = np.linspace(EXP_LOW, EXP_HIGH, 600_001, dtype=np.float32)
    near_zero = np.float32(2.0) ** np.arange(-149, 0, dtype=np.float32)
    x = np.concatenate([dense, near_zero, -near_zero])
    x = x[(x >= EXP_LOW) & (x <= EXP_HIGH)]
    value = exp32(x)
    assert ulps(value, np.exp(x.astype(np.float64))).max() <= 2.0
    assert value.min() >= 2.0**-126  # never subnormal


def test_exp_edges() -> None:
    x = np.array([0.0, -0.0, -np.inf, np.inf, np.nextafter(EXP_LOW, np.float32(-90))], np.float32)
    assert exp32(x).tolist() == [1.0, 1.0, 0.0, np.inf, 0.0]
    assert exp32(np.nextafter(EXP_HIGH, np.float32(90))) == np.inf
    assert np.isnan(exp32(np.array([1.0, np.nan], np.float32))).tolist() == [False, True]
    assert np.isfinite(exp32(np.array([EXP_LOW, EXP_HIGH]))).all()
    assert exp32(np.zeros((2, 3), np.float32)).shape == (2, 3)
    assert exp32(np.zeros(0, np.float32)).size == 0


def test_exp_of_an_element_does_not_depend_on_its_neighbours() -> None:
    x = np.linspace(-200, 100, 40_000, dtype=np.float32)  # more than one piece, clamped and not
    alone = np.array([exp32(x[i : i + 1])[0] for i in range(0, x.size, 97)])
    np.testing.assert_array_equal(bits(exp32(x)[::97]), bits(alone))


def test_log_is_within_2_ulp_over_its_range() -> None:
    rng = np.random.default_rng(0)
    anywhere = rng.integers(1, 0x7F800000, 600_000).astype(np.uint32).view(np.float32)
    near_one = np.linspace(0.5, 2.0, 600_001, dtype=np.float32)
    x = np.concatenate([anywhere, near_one[near_one != 1.0]])
    assert ulps(log32(x), np.log(x.astype(np.float64))).max() <= 2.0


def test_log_edges() -> None:
    x = np.array([0.0, -0.0, 1.0, np.inf, 2.0**-149], np.float32)
    assert log32(x)[:4].tolist() == [-np.inf, -np.inf, 0.0, np.inf]
    assert log32(x)[4] == pytest.approx(-149 * np.log(2), rel=1e-6)
    assert np.isnan(log32(np.array([-1.0, -np.inf, np.nan], np.float32))).all()


@pytest.mark.parametrize("size", SIZES)
def test_lane_sums_add_each_lane_from_left_to_right(size: int) -> None:
    x = row(size)
    lanes = x[:LANES].copy()
    for i in range(LANES, size):
        lanes[i % LANES] += x[i]
    np.testing.assert_array_equal(bits(lane_sums(x)), bits(lanes))


@pytest.mark.parametrize("size", SIZES)
def test_tree_sum_adds_the_lanes_from_left_to_right(size: int) -> None:
    x = row(size)
    total = np.float32(0.0)
    for lane in lane_sums(x):
        total += lane
    assert bits(tree_sum(x)) == bits(total)
    assert tree_sum(x) == pytest.approx(x.sum(dtype=np.float64), rel=1e-5)
    assert tree_sum(np.zeros(0, np.float32)) == 0.0


@pytest.mark.parametrize("size", SIZES)
def test_prefix_sum_adds_blocks_and_elements_from_left_to_right(size: int) -> None:
    x = row(size)
    expected = np.empty_like(x)
    before = np.float32(0.0)
    for start in range(0, size, LANES):
        within = np.float32(0.0)
        for i in range(start, min(start + LANES, size)):
            within += x[i]
            expected[i] = before + within
        before += within
    np.testing.assert_array_equal(bits(prefix_sum(x)), bits(expected))


@given(size=st.integers(1, 3000), cut=st.integers(1, 3000), seed=st.integers(0, 2**32 - 1))
def test_prefix_sums_rise_and_depend_on_what_precedes_alone(size: int, cut: int, seed: int) -> None:
    x = row(size, seed)
    whole = prefix_sum(x)
    assert (np.diff(whole) >= 0).all()
    np.testing.assert_array_equal(bits(prefix_sum(x[:cut])), bits(whole[:cut]))


@pytest.fixture(scope="module")
def compiled() -> CompiledWeights:
    return CompiledWeights(BodyCompiler())


@pytest.mark.parametrize("size", [1, 16, 33, 63, 64, 100, 4097, 49_152])
@pytest.mark.parametrize("spread", [1.0, 30.0, 1e30])
def test_compiled_weights_have_the_bits_of_exp32(
    compiled: CompiledWeights, size: int, spread: float
) -> None:
    x = -np.abs(np.random.default_rng(size).standard_normal(size) * spread).astype(np.float32)
    edges = [0.0, -np.inf, EXP_LOW, np.nextafter(EXP_LOW, np.float32(-90)), -(2.0**-149)]
    x[: len(edges)] = edges[:size]
    np.testing.assert_array_equal(bits(compiled(x)), bits(exp32(x)))
