"""Recurrent ops on the CPU: any split of a sequence, and any batch, gives the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atlas.backends.cpu.device import CpuDevice, Queue
from atlas.ops.select import bind, implementations

ROWS = 150


@cache
def _ops() -> Any:
    return bind(implementations("cpu"), Queue(CpuDevice(2)))


def _normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


def _ranges(rows: slice) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Slots, row ranges and positions of one sequence whose rows these are."""
    count = rows.stop - rows.start
    positions = np.arange(rows.start, rows.stop, dtype=np.int32)
    return np.array([0], np.int32), np.array([0, count], np.int32), positions


def _conv(kind: str, rows: slice, tails: np.ndarray) -> np.ndarray:
    x, out = _normal(ROWS, 40)[rows], np.empty((rows.stop - rows.start, 40), np.float32)
    args = (x, _normal(4, 40), _normal(40), *_ranges(rows))
    getattr(_ops(), f"causal_conv_{kind}")(*args, tails=tails, out=out)
    return out


def _gated_delta(kind: str, rows: slice, states: np.ndarray) -> np.ndarray:
    out = np.empty((rows.stop - rows.start, 4, 80), np.float32)
    qkv, a, b = _normal(ROWS, 2 * 2 * 32 + 4 * 80), _normal(ROWS, 4), _normal(1 + ROWS, 4)[1:]
    args = (qkv[rows], a[rows], b[rows], _normal(4), _normal(4), *_ranges(rows))
    getattr(_ops(), f"gated_delta_{kind}")(*args, states=states, out=out)
    return out


def _mamba2(kind: str, rows: slice, states: np.ndarray) -> np.ndarray:
    out = np.empty((rows.stop - rows.start, 4, 24), np.float32)
    x, b, c, dt = (_normal(ROWS, *shape)[rows] for shape in ((4, 24), (2, 40), (2, 40), (4,)))
    vectors = (_normal(4), _normal(1, 4)[0], _normal(2, 4)[1])
    args = (x, b, c, dt, *vectors, 0.0, float("inf"), *_ranges(rows))
    getattr(_ops(), f"mamba2_{kind}")(*args, states=states, out=out)
    return out


STATES = {_conv: (1, 3, 40), _gated_delta: (1, 4, 32, 80), _mamba2: (1, 4, 24, 40)}


def _whole(run: Any) -> tuple[bytes, bytes]:
    state = np.zeros(STATES[run], np.float32)
    return run("prefill", slice(0, ROWS), state).tobytes(), state.tobytes()


def _pieces(run: Any, ends: Sequence[int], kinds: Sequence[str]) -> tuple[bytes, bytes]:
    state, outputs, start = np.zeros(STATES[run], np.float32), b"", 0
    for end, kind in zip([*ends, ROWS], kinds, strict=True):
        outputs += run(kind, slice(start, end), state).tobytes()
        start = end
    return outputs, state.tobytes()


@pytest.mark.parametrize("run", STATES, ids=lambda run: run.__name__)
def test_every_split_is_one_pass(run: Any) -> None:
    whole = _whole(run)
    for end in range(1, ROWS):
        assert _pieces(run, [end], ["prefill", "step"]) == whole


@pytest.mark.parametrize("run", STATES, ids=lambda run: run.__name__)
@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_any_pieces_are_one_pass(run: Any, data: st.DataObject) -> None:
    ends = sorted(data.draw(st.sets(st.integers(1, ROWS - 1), max_size=40)))
    kinds = [data.draw(st.sampled_from(["prefill", "step"])) for _ in range(len(ends) + 1)]
    assert _pieces(run, ends, kinds) == _whole(run)


@pytest.mark.parametrize("run", STATES, ids=lambda run: run.__name__)
def test_rows_one_by_one_are_one_pass(run: Any) -> None:
    assert _pieces(run, range(1, ROWS), ["step"] * ROWS) == _whole(run)
