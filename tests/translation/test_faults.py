"""Faults end the requests they belong to and leave the engine usable."""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from atlas import BeamParams, Engine, SamplingParams
from atlas.errors import (
    CallbackError,
    KernelError,
    KvExhausted,
    ModelBusyError,
    NonFiniteLogitsError,
)
from atlas.model.records import BeamRequest
from tests.helpers.translation_model import SOURCE, TARGET, ReferenceTranslator

LANGUAGES: dict[str, Any] = {"source": SOURCE, "target": TARGET}


@pytest.fixture
def broken(reference: ReferenceTranslator, tmp_path: Path) -> Path:
    """A model whose token 40 turns every later row into NaN."""
    folder = Path(shutil.copytree(reference.directory, tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    name = next(n for n in tensors if "shared" in n or "lm_head" in n)
    tensors[name] = tensors[name].copy()
    tensors[name][40] = np.nan
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_logits_that_are_not_finite(broken: Path) -> None:
    with Engine(broken, threads=1, quiet=True) as engine:
        for params in (BeamParams(), BeamParams(num_beams=1), SamplingParams()):
            with pytest.raises(NonFiniteLogitsError):
                engine.translate([20, 21], params=params, **LANGUAGES)
        found = engine.translate([[20], [21]], **LANGUAGES)
        assert [t.finish_reason for t in found] == ["error", "error"]
        with pytest.raises(NonFiniteLogitsError):
            engine.model.forward.generate_beam_batch(
                [BeamRequest([20], SOURCE, TARGET, -1, 4, 5, 1.0, False)]
            )
        assert engine.metrics().kv_blocks_used == 0


def test_a_kernel_fault_ends_what_was_in_the_sweep(
    engine: Engine, reference: ReferenceTranslator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise KernelError("broken")

    core: Any = engine._loaded.core
    ids = [engine.submit_translation(reference.text(4), **LANGUAGES) for _ in range(2)]
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(core.runtime, "run", fail)
        events = engine.step()
    assert {e.request_id: type(e.error) for e in events} == dict.fromkeys(ids, KernelError)
    with monkeypatch.context() as patch:
        patch.setattr(core.runtime, "run", fail)
        with pytest.raises(KernelError):  # in the encoder
            engine.translate(reference.text(4), **LANGUAGES)
    assert engine.translate(reference.text(4), max_tokens=3, **LANGUAGES).token_ids
    assert engine.metrics().kv_blocks_used == 0


def test_a_processor_that_raises(engine: Engine, reference: ReferenceTranslator) -> None:
    def fail(*args: Any) -> None:
        raise ZeroDivisionError("no")

    other = engine.submit_translation(reference.text(4), max_tokens=5, **LANGUAGES)
    params = SamplingParams(logits_processor=fail)
    with pytest.raises(CallbackError, match="ZeroDivisionError"):
        engine.translate(reference.text(5), params=params, **LANGUAGES)
    events = engine.poll()
    while not events[-1].is_last:
        events += engine.poll()
    assert events[-1].request_id == other
    assert events[-1].error is None


@pytest.mark.parametrize("victim", ["beams", "greedy", "samples", "caller"])
def test_a_callback_may_cancel_what_its_own_step_runs(
    engine: Engine, reference: ReferenceTranslator, victim: str
) -> None:
    """A call that it may not make takes nothing away from the step under way."""
    wishes: dict[str, BeamParams | SamplingParams] = {
        "beams": BeamParams(max_tokens=6, early_stopping="never"),
        "greedy": BeamParams(num_beams=1, max_tokens=6),
        "samples": SamplingParams(n=2, temperature=1.0, seed=1, max_tokens=6, ignore_eos=True),
    }
    text = reference.text(5)
    want = {
        name: engine.translate(text, params=params, **LANGUAGES).token_ids
        for name, params in wishes.items()
    }

    def cancel(prompt: Any, output: Any, logits: Any) -> None:
        if len(output) == 2:
            engine.cancel(victim)
            with pytest.raises(ModelBusyError):
                engine.translate([[20], [21]], **LANGUAGES)

    wishes["caller"] = SamplingParams(max_tokens=6, ignore_eos=True, logits_processor=cancel)
    for name, params in wishes.items():
        engine.submit_translation(text, params=params, request_id=name, **LANGUAGES)
    events = []
    while engine.has_unfinished():
        events += engine.step()
    ended = {event.request_id: event.completion for event in events if event.is_last}
    assert ended.keys() == wishes.keys()
    for name, completion in ended.items():
        assert completion is not None
        assert completion.error is None
        sample = completion.samples[0]
        if name == victim:
            assert sample.finish_reason == "cancelled"
        elif name in want:
            assert sample.token_ids == want[name]
    assert engine.metrics().kv_blocks_used == 0


def test_a_callback_does_not_drive_the_model(
    engine: Engine, reference: ReferenceTranslator
) -> None:
    """Its rows would stand in the place of those that others still choose from."""
    by_hand = BeamRequest([30, 31], SOURCE, TARGET, -1, 16, 5, 1.0, False)
    samples = SamplingParams(temperature=1.0, seed=3, max_tokens=8, ignore_eos=True)
    want = engine.translate(reference.text(9), params=samples, **LANGUAGES).token_ids

    def drive(prompt: Any, output: Any, logits: Any) -> None:
        with pytest.raises(ModelBusyError, match="a callback of a step"):
            engine.model.forward.generate_beam_batch([by_hand])
        with engine.paused() as model, pytest.raises(ModelBusyError, match="a callback of a step"):
            model.forward.generate_beam_batch([by_hand])

    params = SamplingParams(max_tokens=8, ignore_eos=True, logits_processor=drive)
    engine.submit_translation(reference.text(5), params=params, **LANGUAGES)
    other = engine.submit_translation(reference.text(9), params=samples, **LANGUAGES)
    events = []
    while engine.has_unfinished():
        events += engine.step()
    assert [event.error for event in events if event.is_last] == [None, None]
    assert [t for e in events if e.request_id == other for t in e.token_ids] == list(want)
    assert engine.model.forward.generate_beam_batch([by_hand])


def test_an_interrupt_leaves_the_step_untaken(
    engine: Engine, reference: ReferenceTranslator
) -> None:
    calls = []

    def interrupt_once(prompt: Any, output: Any, logits: Any) -> None:
        calls.append(list(output))
        if len(calls) == 3:
            raise KeyboardInterrupt

    beams = BeamParams(num_beams=4, max_tokens=12, early_stopping="never")
    want = engine.translate(reference.text(6), params=beams, **LANGUAGES)
    request_id = engine.submit_translation(reference.text(6), params=beams, **LANGUAGES)
    params = SamplingParams(max_tokens=6, ignore_eos=True, logits_processor=interrupt_once)
    engine.submit_translation(reference.text(5), params=params, **LANGUAGES)
    engine.step()
    engine.step()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    events = []
    while engine.has_unfinished():
        events += engine.step()
    completion = next(e.completion for e in events if e.request_id == request_id and e.is_last)
    assert completion is not None
    assert completion.samples[0].token_ids == want.token_ids
    assert completion.samples[0].score == want.score
    assert [len(output) for output in calls] == [0, 1, 2, 2, 3, 4, 5]


def interrupted(call: Callable[[], Any], place: int) -> int:
    """Call with a SIGINT at the ``place``-th line of the code that holds requests and blocks.

    Returns how many such lines were run.
    """
    owners = ("translation_loop", "_decode", "beam_search", "translator_core", "encoded_source")
    names = (*(f"{name}.py" for name in owners), "room.py")
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        name = frame.f_code.co_filename
        owned = name.endswith(names) or frame.f_code.co_name in ("take_inbox", "_take_one")
        if event == "line" and owned:
            count += 1
            if count == place:
                signal.raise_signal(signal.SIGINT)
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
    return count


@pytest.mark.parametrize("num_steps", [0, 1, 15])
def test_an_interrupt_anywhere_in_a_step_loses_nothing(
    reference: ReferenceTranslator, num_steps: int
) -> None:
    """At admission, where beams fork, and where they copy the blocks that they share."""
    wishes = [
        BeamParams(num_beams=4, num_return=4, max_tokens=18, early_stopping="never"),
        SamplingParams(n=3, temperature=1.0, seed=4, max_tokens=18, ignore_eos=True),
        BeamParams(num_beams=1, max_tokens=18),
    ]
    with Engine(reference.directory, threads=1, quiet=True) as engine:

        def run(place: int) -> tuple[list[Any], int]:
            for i, params in enumerate(wishes):
                text = reference.text(5, seed=i)
                engine.submit_translation(text, params=params, request_id=str(i), **LANGUAGES)
            events = [event for _ in range(num_steps) for event in engine.step()]
            count = 0
            try:
                count = interrupted(lambda: events.extend(engine.step()), place)
            except KeyboardInterrupt:
                events += engine.step()
            while engine.has_unfinished():
                events += engine.step()
            ended = {e.request_id: e.completion for e in events if e.completion is not None}
            results = []
            for i in range(len(wishes)):
                completion = ended[str(i)]
                assert completion is not None
                results.append([(s.token_ids, s.score) for s in completion.samples])
            assert engine.metrics().kv_blocks_used == 0
            return results, count

        want, count = run(0)
        for place in range(1, count, max(1, count // 60)):
            assert run(place)[0] == want


def test_an_interrupt_anywhere_in_a_search_by_hand_leaks_nothing(
    engine: Engine, reference: ReferenceTranslator
) -> None:
    request = BeamRequest(reference.text(5), SOURCE, TARGET, -1, 3, 3, 1.0, "never")

    def search() -> None:
        engine.model.forward.generate_beam_batch([request, request])

    count = interrupted(search, 0)
    for place in range(1, count, count // 60):
        with pytest.raises(KeyboardInterrupt):
            interrupted(search, place)
        assert engine.metrics().kv_blocks_used == 0


def test_sequences_by_hand_may_hold_the_pool(reference: ReferenceTranslator) -> None:
    with Engine(reference.directory, threads=1, kv_tokens=96, quiet=True) as engine:
        model = engine.model
        seq = model.lifecycle.alloc_sequence()
        seq.source_language, seq.target_language = SOURCE, TARGET
        model.forward.prefill(reference.text(50), seq)  # five of six blocks
        with pytest.raises(KvExhausted, match="driven by hand"):
            engine.translate(reference.text(5), num_beams=2, max_tokens=5, **LANGUAGES)
        model.lifecycle.free_sequence(seq)
        assert engine.translate(reference.text(5), num_beams=2, max_tokens=5, **LANGUAGES)
