"""Streams and events exist on the CPU, in order, and belong to the model that made them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from atlas.errors import StaleHandleError
from atlas.model import Model
from atlas.model.records import Event, PrefillSlice, Stream
from tests.helpers.random_model import random_model
from tests.model.checks import OTHER, PROMPT, prefilled, unchanged


@pytest.mark.contract("streams.default")
def test_the_default_stream_is_what_none_means(model: Model) -> None:
    seq = prefilled(model, PROMPT)
    rows = np.asarray(model.forward.decode(1, seq))
    model.lifecycle.rewind(seq, len(PROMPT))
    default = model.streams.default
    assert default is not None
    assert np.asarray(model.forward.decode(1, seq, stream=default)).tobytes() == rows.tobytes()


@pytest.mark.contract("streams.create_stream")
def test_work_runs_on_a_stream_of_the_model(model: Model) -> None:
    first, second = model.streams.create_stream(), model.streams.create_stream()
    assert len({first, second, model.streams.default}) == 3
    seq = prefilled(model, PROMPT)
    view = model.forward.decode(1, seq, stream=first)
    assert model.logits.argmax(view, stream=second) == int(np.asarray(view)[0].argmax())
    model.streams.synchronize(first)


@pytest.mark.contract("streams.create_event")
def test_an_event_orders_two_streams(model: Model) -> None:
    stream, event = model.streams.create_stream(), model.streams.create_event()
    assert event != model.streams.create_event()
    seq = prefilled(model, PROMPT)
    view = model.forward.decode(1, seq, stream=stream)
    model.streams.record_event(event, stream)
    model.streams.wait_event(model.streams.default, event)
    assert model.logits.argmax(view) >= 0


def foreign_handles(model: Model) -> tuple[Stream, Event]:
    """A stream and an event that another model made."""
    with random_model("dense", threads=1) as other:
        return other.model.streams.create_stream(), other.model.streams.create_event()


@pytest.mark.contract("streams.record_event")
def test_record_event_refuses_foreign_handles(model: Model) -> None:
    stream, event = foreign_handles(model)
    with pytest.raises(StaleHandleError, match="stream"):
        model.streams.record_event(model.streams.create_event(), stream)
    with pytest.raises(StaleHandleError, match="event"):
        model.streams.record_event(event, model.streams.default)


@pytest.mark.contract("streams.wait_event")
def test_wait_event_refuses_foreign_handles(model: Model) -> None:
    stream, event = foreign_handles(model)
    with pytest.raises(StaleHandleError, match="stream"):
        model.streams.wait_event(stream, model.streams.create_event())
    with pytest.raises(StaleHandleError, match="event"):
        model.streams.wait_event(model.streams.default, event)


@pytest.mark.contract("streams.synchronize")
def test_synchronize_refuses_foreign_handles(model: Model) -> None:
    stream, _ = foreign_handles(model)
    with pytest.raises(StaleHandleError, match="stream"):
        model.streams.synchronize(stream)
    with pytest.raises(StaleHandleError, match="stream"):
        model.streams.synchronize(Stream(-1))


def test_every_call_refuses_a_foreign_stream(model: Model) -> None:
    stream, _ = foreign_handles(model)
    seq, fresh = prefilled(model, PROMPT), model.lifecycle.alloc_sequence()
    view = model.forward.decode(1, seq)
    window = PrefillSlice(OTHER, fresh, 0, len(OTHER), True)
    forward = model.forward
    calls: list[Callable[[], object]] = [
        lambda: forward.prefill(OTHER, fresh, stream=stream),
        lambda: forward.prefill_chunk(OTHER, fresh, 0, 2, False, stream=stream),
        lambda: forward.decode(1, seq, stream=stream),
        lambda: forward.decode_batch([1], [seq], stream=stream),
        lambda: forward.mixed_forward([1], [seq], window, stream=stream),
        lambda: forward.mixed_forward_batch([1], [seq], [window], stream=stream),
        lambda: forward.prefill_batch_chunk([window], stream=stream),
        lambda: model.verify.decode_verify([1], seq, stream=stream),
        lambda: model.logits.argmax(view, stream=stream),
        lambda: model.logits.argmax_batch(view, 1, stream=stream),
    ]
    with unchanged(model, seq, fresh):
        for call in calls:
            with pytest.raises(StaleHandleError, match="stream"):
                call()
    assert view.numpy().shape[0] == 1


@pytest.mark.contract("streams.handle")
def test_the_backend_s_own_handle(model: Model) -> None:
    """0 on the CPU, for every stream of the model; a foreign one has none."""
    assert model.streams.handle(model.streams.default) == 0
    assert model.streams.handle(model.streams.create_stream()) == 0
    stream, _ = foreign_handles(model)
    with pytest.raises(StaleHandleError, match="stream"):
        model.streams.handle(stream)
