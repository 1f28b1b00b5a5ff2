"""Convolution and the steps of recurrences against the ops, and K rows against K launches."""

from __future__ import annotations

import numpy as np
import pytest

from atlas.ops import OPS
from tests.kernels.launches import TYPES, Bench, close, rounded
from tests.kernels.recurrent import DeltaLayer, MambaLayer, Rows, normal

# Key heads, value heads, dimension, rows of each sequence.
DELTA = [
    (1, 2, 64, [1, 3]),
    (2, 2, 64, [0, 9, 1]),
    (1, 4, 128, [2]),
]


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("shape", DELTA, ids=str)
def test_gated_delta(bench: Bench, shape: tuple[int, int, int, list[int]], type: str) -> None:
    """Fused, and the convolution and the recurrence alone."""
    *sizes, lengths = shape
    layer = DeltaLayer(bench, Rows(bench, lengths), *sizes, type)
    qkv, out, normed, state, tail = layer.defined()
    got = layer.mix()
    close(bench.get(got), normed, type, 4e-6)
    close(bench.get(layer.states), state, "f32", 4e-6)
    np.testing.assert_array_equal(bench.get(layer.tails), tail)
    mixed = bench.get(layer.states)
    layer.restart()
    convolved = layer.convolve()
    close(bench.get(convolved), qkv, "f32", 2e-6)
    np.testing.assert_array_equal(bench.get(layer.tails), tail)
    close(bench.get(layer.step(convolved)), out, "f32", 4e-6)
    # One arithmetic: the fused form has the bits of the parts.
    np.testing.assert_array_equal(bench.get(layer.states), mixed)


def test_rows_of_a_step_are_steps(bench: Bench) -> None:
    """A launch over all rows has the bits of one launch a row, states and tails as well."""
    layer = DeltaLayer(bench, Rows(bench, [10, 4]), 1, 2, 64, "bf16")
    together = bench.get(layer.mix())
    left = [bench.get(buffer) for buffer in (layer.states, layer.tails)]
    layer.restart()
    out = None
    for row in range(10):
        out = layer.mix(row, 1, out)
    assert out is not None
    np.testing.assert_array_equal(bench.get(out), together)
    for buffer, want in zip((layer.states, layer.tails), left, strict=True):
        np.testing.assert_array_equal(bench.get(buffer), want)


def test_a_step_without_a_target_writes_no_state(bench: Bench) -> None:
    layer = DeltaLayer(bench, Rows(bench, [2]), 1, 2, 64, "bf16")
    out = bench.get(layer.mix(write=False))
    np.testing.assert_array_equal(bench.get(layer.states), layer.state)
    np.testing.assert_array_equal(bench.get(layer.tails), layer.tail)
    np.testing.assert_array_equal(bench.get(layer.mix()), out)


@pytest.mark.parametrize(
    ("heads", "groups", "size", "lengths"),
    [(4, 2, 64, [1, 3]), (2, 1, 128, [2]), (2, 2, 256, [0, 2])],
)
def test_mamba2(bench: Bench, heads: int, groups: int, size: int, lengths: list[int]) -> None:
    layer = MambaLayer(bench, Rows(bench, lengths), heads, groups, size)
    want, state = layer.defined()
    close(bench.get(layer.step()), want, "f32", 4e-6)
    close(bench.get(layer.states), state, "f32", 4e-6)


def test_rows_of_a_mamba2_step_are_steps(bench: Bench) -> None:
    layer = MambaLayer(bench, Rows(bench, [5, 2]), 2, 1, 64)
    looked = bench.get(layer.step(write=False))
    np.testing.assert_array_equal(bench.get(layer.states), layer.state)
    together, state = bench.get(layer.step()), bench.get(layer.states)
    np.testing.assert_array_equal(looked, together)
    layer.restart()
    out = None
    for row in range(5):
        out = layer.step(row, 1, out)
    assert out is not None
    np.testing.assert_array_equal(bench.get(out), together)
    np.testing.assert_array_equal(bench.get(layer.states), state)


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize(
    ("name", "taps", "channels", "width"),
    [("", 4, 72, 4), ("_scalar", 4, 37, 1), ("any", 2, 37, 1), ("any", 5, 130, 1)],
)
def test_causal_conv(
    bench: Bench, type: str, name: str, taps: int, channels: int, width: int
) -> None:
    """Tiles, ragged sequences, and tails shorter than what they take in."""
    rows = Rows(bench, [1, 2, 3, 70, 0])
    x, tail = rounded(normal(rows.total, channels), type), normal(5, taps - 1, channels)
    weight, bias = normal(taps, channels), normal(channels)
    buffer, tails = bench.put(x, type, pad=4), bench.put(tail, "f32")
    out = bench.empty((rows.total, channels), "f32", pad=4)
    args = [
        buffer.address,
        *(bench.put(array.reshape(1, -1), "f32").address for array in (weight, bias)),
    ]
    args += [bench.put_ints(rows.slots), *rows.ranges(), tails.address, out.address, channels]
    args += [*([taps] if name == "any" else []), buffer.stride, out.stride]
    kernel = f"causal_conv_any_{type}" if name == "any" else f"causal_conv_{type}{name}"
    bench.run(kernel, (5 * -(-channels // (128 * width)), 3), args)
    want = np.empty((rows.total, channels), np.float32)
    OPS["causal_conv_prefill"](x, weight, bias, *rows.definition(), tails=tail, out=want)
    close(bench.get(out), want, "f32", 2e-6)
    np.testing.assert_array_equal(bench.get(tails), tail)
