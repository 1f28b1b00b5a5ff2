"""Records refuse values outside the contract; batch rungs are as stated."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atlas.errors import InvalidArgumentError, ShapeError
from atlas.model.records import (
    PADDED_BATCH_SIZES,
    BeamRequest,
    FeedSource,
    PrefillSlice,
    PrefixReclaim,
    RowExclusion,
    VisionItem,
    metadata_rows,
    padded_batch,
)

SEQ: Any = object()  # records carry a sequence and never look into it


@pytest.mark.parametrize(
    ("n", "rung"), [(1, 2), (3, 4), (9, 12), (17, 24), (33, 48), (97, 128), (129, 129)]
)
def test_padded_batch_rungs(n: int, rung: int) -> None:
    assert padded_batch(n) == rung


@given(st.integers(1, 300))
def test_padded_batch_is_the_least_rung(n: int) -> None:
    rung = padded_batch(n)
    assert rung >= n
    assert padded_batch(rung) == rung
    assert not [size for size in PADDED_BATCH_SIZES if n <= size < rung]


@given(st.integers(1, 300))
def test_metadata_covers_the_padded_batch(max_running: int) -> None:
    assert metadata_rows(max_running) == max(32, padded_batch(max_running))


@pytest.mark.parametrize("n", [0, -1])
def test_padded_batch_refuses_less_than_one(n: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"n is {n}"):
        padded_batch(n)


@given(st.integers(1, 40), st.integers(-2, 42), st.integers(-2, 42), st.booleans())
def test_prefill_slice_accepts_exactly_windows_of_the_prompt(
    prompt_len: int, start: int, length: int, is_last: bool
) -> None:
    end = start + length
    allowed = start >= 0 and length >= 1 and end <= prompt_len and is_last == (end == prompt_len)
    try:
        PrefillSlice(list(range(prompt_len)), SEQ, start, length, is_last)
    except InvalidArgumentError:
        assert not allowed
    else:
        assert allowed


def test_records_are_frozen() -> None:
    reclaim = PrefixReclaim(freed=1, reusable=2, satisfied=True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        reclaim.freed = 2  # type: ignore[misc]


@pytest.mark.parametrize("values", [{}, {"token": 1, "cell": 2}, {"token": -1}, {"cell": -1}])
def test_feed_source_is_one_place(values: dict[str, int]) -> None:
    with pytest.raises(InvalidArgumentError):
        FeedSource(**values)


def test_feed_source_accepts_zero() -> None:
    assert FeedSource(token=0) == FeedSource(token=0) != FeedSource(cell=0)


@pytest.mark.parametrize("ids", [(1, 2, 3), (-1,)])
def test_row_exclusion_has_at_most_two_ids(ids: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgumentError):
        RowExclusion(ids)


@pytest.mark.parametrize("ids", [(), (0,), (5, 7)])
def test_row_exclusion_keeps_its_ids(ids: tuple[int, ...]) -> None:
    assert RowExclusion(ids).token_ids == ids


@pytest.mark.parametrize(
    ("shape", "dtype", "grid"),
    [
        ((6, 8), np.float64, (2, 3)),
        ((6,), np.float32, (2, 3)),
        ((6, 0), np.float32, (2, 3)),
        ((7, 8), np.float32, (2, 3)),
        ((0, 8), np.float32, (2, 3)),
    ],
)
def test_vision_item_refuses_other_shapes(
    shape: tuple[int, ...], dtype: type, grid: tuple[int, int]
) -> None:
    with pytest.raises(ShapeError):
        VisionItem(np.zeros(shape, dtype), *grid)


def test_vision_item_takes_whole_grids() -> None:
    assert VisionItem(np.zeros((12, 8), np.float32), 2, 3).grid_w == 3
    with pytest.raises(InvalidArgumentError, match="grid_h is 0"):
        VisionItem(np.zeros((12, 8), np.float32), 0, 3)


BEAM: dict[str, Any] = {
    "prompt_tokens": [5, 6],
    "src_lang_id": 0,
    "tgt_lang_id": 7,
    "adapter_slot": -1,
    "num_beams": 4,
    "max_new": 32,
    "length_penalty": 1.0,
    "early_stopping": True,
}


def test_beam_request_defaults() -> None:
    request = BeamRequest(**BEAM)
    assert (request.no_repeat_ngram, request.num_return) == (0, 1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prompt_tokens", []),
        ("src_lang_id", -1),
        ("tgt_lang_id", -1),
        ("adapter_slot", -2),
        ("num_beams", 0),
        ("max_new", 0),
        ("length_penalty", float("nan")),
        ("length_penalty", 5.1),
        ("length_penalty", -1e300),
        ("length_penalty", 10**400),
        ("length_penalty", True),
        ("length_penalty", "1"),
        ("early_stopping", 1),
        ("early_stopping", np.True_),
        ("early_stopping", "false"),
        ("early_stopping", np.array([1, 2])),
        ("no_repeat_ngram", -1),
        ("num_return", 0),
        ("num_return", 5),
    ],
)
def test_beam_request_names_the_bad_value(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=name):
        BeamRequest(**{**BEAM, name: value})
