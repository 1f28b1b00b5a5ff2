"""Logits: views of the arena, and how they are read."""

from __future__ import annotations

import numpy as np
import pytest

from atlas.errors import (
    InvalidArgumentError,
    NonFiniteLogitsError,
    ShapeError,
    StaleHandleError,
)
from atlas.model import Model
from atlas.model.load import LoadedModel
from atlas.model.logits_view import LogitsView
from atlas.model.records import NON_FINITE, PrefillSlice
from tests.helpers.random_model import CONFIGS, RandomCheckpoint, random_model
from tests.model.checks import OTHER, PROMPT, assert_logits, prefilled
from tests.model.conftest import Expected

V = CONFIGS["dense"].vocab_size


def decoded(model: Model, count: int = 3) -> LogitsView:
    """The view of a decode step of ``count`` new sequences."""
    seqs = [prefilled(model, PROMPT[: 3 + i]) for i in range(count)]
    return model.forward.decode_batch(list(range(1, count + 1)), seqs)


def written(loaded: LoadedModel, values: np.ndarray) -> LogitsView:
    """A view whose rows hold ``values``, put there behind the model's back."""
    view = decoded(loaded.model, len(values))
    loaded.core.arena.rows[: len(values)] = values
    return view


@pytest.mark.contract("logits.vocab_size")
def test_vocab_size(model: Model) -> None:
    assert model.logits.vocab_size == V
    assert decoded(model).shape == (3, V)


@pytest.mark.contract("logits.to_host")
def test_to_host_copies(model: Model, expected: Expected) -> None:
    view = decoded(model)
    rows = model.logits.to_host(view)
    assert (rows.shape, rows.dtype) == ((3, V), np.dtype(np.float32))
    wanted = np.stack([expected([*PROMPT[: 3 + i], i + 1])[-1] for i in range(3)])
    np.testing.assert_allclose(rows, wanted, atol=1e-4 * np.abs(wanted).max())
    kept = rows.copy()
    decoded(model)
    np.testing.assert_array_equal(rows, kept)  # a copy: later steps do not show


@pytest.mark.contract("logits.to_host")
def test_to_host_fills_out(model: Model) -> None:
    view = decoded(model)
    out = np.full((3, V), np.nan, np.float32)
    assert model.logits.to_host(view, out) is out
    np.testing.assert_array_equal(out, view.numpy())


@pytest.mark.contract("logits.to_host")
@pytest.mark.parametrize(
    "out",
    [
        np.zeros((2, V), np.float32),
        np.zeros((3, V), np.float64),
        np.zeros((V, 3), np.float32).T,
        np.zeros((3, 2 * V), np.float32)[:, ::2],
    ],
    ids=["rows", "dtype", "transposed", "strided"],
)
def test_to_host_refuses_another_out(model: Model, out: np.ndarray) -> None:
    with pytest.raises(ShapeError, match="allowed"):
        model.logits.to_host(decoded(model), out)
    assert not out.any()


@pytest.mark.contract("logits.buffer")
def test_buffer_is_the_whole_arena(loaded: LoadedModel, expected: Expected) -> None:
    model = loaded.model
    decoded(model)
    buffer = model.logits.buffer
    assert buffer.shape == (64, V)
    assert_logits(buffer[1], expected([*PROMPT[:4], 2])[-1:])
    seq = prefilled(model, PROMPT)
    buffer = model.logits.buffer
    model.verify.decode_verify(OTHER, seq)
    with pytest.raises(StaleHandleError):
        buffer.numpy()
    assert_logits(model.logits.buffer[6], expected([*PROMPT, *OTHER])[-1:])


@pytest.mark.contract("logits.is_fp32")
def test_is_fp32(model: Model) -> None:
    assert model.logits.is_fp32(decoded(model)) is True


@pytest.mark.contract("logits.argmax")
def test_argmax(model: Model, expected: Expected) -> None:
    view = model.forward.prefill(PROMPT, model.lifecycle.alloc_sequence())
    assert view is not None
    assert model.logits.argmax(view) == int(np.argmax(expected(PROMPT)[-1]))


@pytest.mark.contract("logits.argmax")
def test_ties_go_to_the_lowest_id(loaded: LoadedModel) -> None:
    values = np.zeros((1, V), np.float32)
    values[0, [202, 64, 63, 17]] = 3.0
    assert loaded.model.logits.argmax(written(loaded, values)) == 17


@pytest.mark.contract("logits.argmax")
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 100, V - 1])
def test_argmax_reports_a_row_that_is_not_finite(loaded: LoadedModel, bad: float, at: int) -> None:
    values = np.zeros((1, V), np.float32)
    values[0, at] = bad
    with pytest.raises(NonFiniteLogitsError, match="row 0"):
        loaded.model.logits.argmax(written(loaded, values))


@pytest.mark.contract("logits.argmax")
def test_argmax_is_of_one_row(model: Model) -> None:
    view = decoded(model)
    with pytest.raises(ShapeError, match="3 rows"):
        model.logits.argmax(view)
    rows = model.logits.to_host(view)
    assert [model.logits.argmax(view[i]) for i in (0, 1, 2, -1)] == [
        *rows.argmax(-1),
        int(rows[2].argmax()),
    ]


@pytest.mark.contract("logits.argmax_batch")
def test_argmax_batch(loaded: LoadedModel) -> None:
    values = np.random.default_rng(0).standard_normal((4, V)).astype(np.float32)
    values[1, 7] = np.nan
    values[2, [9, 4, 200]] = 9.0
    best = loaded.model.logits.argmax_batch(written(loaded, values), 4)
    assert best.dtype == np.int32
    assert best.tolist() == [values[0].argmax(), NON_FINITE, 4, values[3].argmax()]
    view = written(loaded, values)
    assert loaded.model.logits.argmax_batch(view, 1).tolist() == [values[0].argmax()]
    for n in (0, 5, -1):
        with pytest.raises(InvalidArgumentError, match=f"n is {n}"):
            loaded.model.logits.argmax_batch(view, n)


@pytest.mark.contract("logits.hidden_after_norm")
def test_hidden_after_norm_gives_the_logits(model: Model) -> None:
    config = CONFIGS["dense"]
    head = RandomCheckpoint(config).matrix("head").data
    seqs = [prefilled(model, PROMPT), prefilled(model, OTHER)]
    fresh = model.lifecycle.alloc_sequence()
    view = model.forward.decode_batch([1, 2], seqs)
    hidden = model.logits.hidden_after_norm()
    assert (hidden.shape, hidden.dtype) == ((2, config.hidden_size), np.dtype(np.float32))
    np.testing.assert_allclose(hidden @ head.T, view.numpy(), atol=1e-4)
    model.forward.prefill(OTHER, fresh)
    with pytest.raises(StaleHandleError, match="overwrote"):
        model.logits.hidden_after_norm()
    assert np.abs(hidden).max() > 0  # a copy


@pytest.mark.contract("logits.hidden_after_norm")
@pytest.mark.parametrize("count", [1, 3])
def test_hidden_after_norm_is_what_the_head_reads(loaded: LoadedModel, count: int) -> None:
    model = loaded.model
    decoded(model, count)
    wanted = loaded.core.buffers.normed[:count].copy()
    for _ in range(2):
        np.testing.assert_array_equal(model.logits.hidden_after_norm(), wanted)
    seqs = [prefilled(model, PROMPT[: 3 + i]) for i in range(count)]
    prompt = model.lifecycle.alloc_sequence()
    piece = PrefillSlice(PROMPT, prompt, 0, len(PROMPT), True)
    model.forward.mixed_forward(list(range(1, count + 1)), seqs, piece)
    np.testing.assert_array_equal(model.logits.hidden_after_norm(), wanted)


@pytest.mark.contract("logits.hidden_after_norm")
def test_hidden_after_norm_needs_a_decode(model: Model) -> None:
    with pytest.raises(StaleHandleError, match="no decode"):
        model.logits.hidden_after_norm()
    prefilled(model, PROMPT)
    with pytest.raises(StaleHandleError, match="no decode"):
        model.logits.hidden_after_norm()


def test_an_overwritten_view_says_so(model: Model) -> None:
    seq = prefilled(model, PROMPT)
    old = model.forward.decode(1, seq)
    row = old[0]
    new = model.forward.decode(2, seq)
    for view in (old, row):
        for read in (
            lambda view=view: np.asarray(view),
            lambda view=view: view.numpy(),
            lambda view=view: view[0],
            lambda view=view: view.topk(3),
            lambda view=view: model.logits.to_host(view),
            lambda view=view: model.logits.argmax(view),
            lambda view=view: model.logits.argmax_batch(view, 1),
        ):
            with pytest.raises(StaleHandleError, match="overwritten"):
                read()
        assert "stale" in repr(view)
    assert new.topk(1)[0][0][0] == model.logits.argmax(new)


def test_a_view_survives_calls_that_write_other_rows(model: Model) -> None:
    kept = decoded(model)
    before = np.asarray(kept)
    seq = model.lifecycle.alloc_sequence()
    model.forward.prefill(PROMPT, seq, logits="none")
    np.testing.assert_array_equal(np.asarray(kept), before)
    assert "valid" in repr(kept)


def test_views_of_another_model_are_refused(model: Model) -> None:
    with random_model("dense", threads=1) as other:
        foreign = decoded(other.model)
        for call in (
            lambda: model.logits.to_host(foreign),
            lambda: model.logits.is_fp32(foreign),
            lambda: model.logits.argmax(foreign[0]),
            lambda: model.logits.argmax_batch(foreign, 1),
        ):
            with pytest.raises(StaleHandleError, match="another model"):
                call()
