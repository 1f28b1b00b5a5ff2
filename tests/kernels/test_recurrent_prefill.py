"""Chunked prefill of recurrences against the ops, and cut at chunk borders against itself."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.launches import Bench
from tests.kernels.recurrent import DeltaLayer, MambaLayer, Rows, delta_chunks

ERROR = 8e-3
"""‖got − want‖ / ‖want‖: a product's factors are rounded to bf16, 2**-9 of each."""


def error(got: np.ndarray, want: np.ndarray) -> float:
    """Relative, in the Frobenius norm; NaN where an element was not written."""
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@pytest.mark.parametrize(
    ("sizes", "type", "form", "lengths"),
    [
        ((1, 2, 64), "bf16", "c16", [128, 64]),
        ((1, 1, 64), "f32", "c32", [64]),
        ((1, 1, 128), "bf16", "c32", [64]),
    ],
)
def test_gated_delta(
    bench: Bench, sizes: tuple[int, int, int], type: str, form: str, lengths: list[int]
) -> None:
    layer = DeltaLayer(bench, Rows(bench, lengths), *sizes, type)
    _, want, _, state, _ = layer.defined()
    out = bench.empty(want.shape, "f32", pad=4)
    delta_chunks(layer, layer.convolve(), [list(range(n // 64)) for n in lengths], out, form)
    assert error(bench.get(out), want) < ERROR
    got = bench.get(layer.states)
    used = layer.rows.slots
    assert error(got[used], state[used]) < ERROR
    unused = np.setdiff1d(np.arange(len(state)), used)
    np.testing.assert_array_equal(got[unused], state[unused])


def test_chunks_in_three_launches_have_the_bits_of_one(bench: Bench) -> None:
    """With other columns, stages and copies, too."""
    layer = DeltaLayer(bench, Rows(bench, [192, 64]), 1, 1, 64, "bf16")
    qkv, shape = layer.convolve(), (256, 1, 64)
    whole, cut = bench.empty(shape, "f32"), bench.empty(shape, "f32")
    delta_chunks(layer, qkv, [[0, 1, 2], [0]], whole)
    state = bench.get(layer.states)
    layer.restart()
    delta_chunks(layer, qkv, [[0], [0]], cut, "c16_s1")
    delta_chunks(layer, qkv, [[1], []], cut, "c32")
    delta_chunks(layer, qkv, [[2], []], cut, "c16_s2")
    np.testing.assert_array_equal(bench.get(cut), bench.get(whole))
    np.testing.assert_array_equal(bench.get(layer.states), state)


@pytest.mark.parametrize(
    ("sizes", "form", "lengths"), [((2, 1, 64), "c16", [128, 64]), ((1, 1, 128), "c32", [64])]
)
def test_mamba2(bench: Bench, sizes: tuple[int, int, int], form: str, lengths: list[int]) -> None:
    layer = MambaLayer(bench, Rows(bench, lengths), *sizes)
    want, state = layer.defined()
    out = layer.empty()
    layer.prefill([list(range(n // 64)) for n in lengths], out, form)
    assert error(bench.get(out), want) < ERROR
    got = bench.get(layer.states)
    assert error(got[layer.rows.slots], state[layer.rows.slots]) < ERROR


def test_mamba2_chunks_in_two_launches_have_the_bits_of_one(bench: Bench) -> None:
    layer = MambaLayer(bench, Rows(bench, [192, 64]), 1, 1, 64)
    whole, cut = layer.empty(), layer.empty()
    layer.prefill([[0, 1, 2], [0]], whole)
    state = bench.get(layer.states)
    layer.restart()
    layer.prefill([[0], [0]], cut, "c16_s1")
    layer.prefill([[1, 2], []], cut, "c16_s2")
    np.testing.assert_array_equal(bench.get(cut), bench.get(whole))
    np.testing.assert_array_equal(bench.get(layer.states), state)


@pytest.mark.parametrize(
    ("lengths", "starts"),
    [([5, 200, 0, 64, 63, 130], [0, 60, 7, 128, 1, 127]), ([128] * 40, [0] * 40)],
)
def test_plan(bench: Bench, lengths: list[int], starts: list[int]) -> None:
    """Single rows to the next multiple of 64, whole chunks, single rows."""
    cu_rows = 3 + np.cumsum([0, *lengths])
    positions = np.zeros(cu_rows[-1], np.int32)
    ranges, rows = [], []
    for n, (length, start) in enumerate(zip(lengths, starts, strict=True)):
        begin, end = cu_rows[n], cu_rows[n + 1]
        positions[begin:end] = np.arange(start, start + length)
        first = min(begin + -start % 64, end)
        count = (end - first) // 64
        ranges.append([begin, first, first + 64 * count, end])
        rows.append([first + 64 * i for i in range(count)])
    count = len(lengths)
    written = [np.full((4, count), -1), np.full(count + 1, -1), np.full(sum(map(len, rows)), -1)]
    addresses = [bench.put_ints(array) for array in written]
    args = [bench.put_ints(cu_rows), bench.put_ints(positions), *addresses, count]
    bench.run("recurrent_plan", (1, 1), args)
    got = [
        bench.memory.get(address, array.astype(np.int32))
        for address, array in zip(addresses, written, strict=True)
    ]
    np.testing.assert_array_equal(got[0], np.transpose(ranges))
    np.testing.assert_array_equal(got[1], np.cumsum([0, *map(len, rows)]))
    np.testing.assert_array_equal(got[2], np.concatenate(rows))
