"""Faults end the requests they belong to and leave the engine usable."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from atlas import BeamParams, Engine, SamplingParams
from atlas.errors import CallbackError, KernelError, KvExhausted, NonFiniteLogitsError
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
