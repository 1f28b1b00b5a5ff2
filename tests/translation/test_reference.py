"""Encoder, decoder and beam search against transformers in float32."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from atlas import Engine
from atlas.model import Model
from atlas.model.records import BeamRequest
from tests.helpers import translation_model
from tests.helpers.translation_model import SOURCE, START, TARGET, ReferenceTranslator

STOPPING = (True, False, "never")
PENALTIES = (0.6, 1.0, 1.4)


def relative(got: np.ndarray, want: np.ndarray) -> float:
    """The worst row's max|a − b| / max|b|."""
    return float((np.abs(got - want).max(axis=-1) / np.abs(want).max(axis=-1)).max())


@pytest.fixture
def model(engine: Engine) -> Iterator[Model]:
    with engine.paused() as model:
        yield model


def begin(model: Model, source: list[int]) -> Any:
    seq = model.lifecycle.alloc_sequence()
    seq.source_language, seq.target_language = SOURCE, TARGET
    return seq, model.forward.prefill(source, seq, logits="all")


@pytest.mark.parametrize("length", [1, 13, 14, 30, 100])
def test_encoder_output(engine: Engine, reference: ReferenceTranslator, length: int) -> None:
    source = reference.text(length)
    core = engine._loaded.core
    with engine.paused():
        (held,) = core.encode([core.source_ids(source, SOURCE)])
        got = core.buffers.hidden[: length + 2].copy()
        held.release()
    assert relative(got, reference.encoded(source)) <= 1e-4


def test_decoder_logits(model: Model, reference: ReferenceTranslator) -> None:
    """Also those of padding tokens, which have no position, across a block's edge."""
    source = reference.text(20)
    seq, view = begin(model, source)
    tokens = [START, TARGET]
    rows = [view.numpy().copy()]
    for token in [30, 1, 1, 77, START, *range(40, 70)]:
        rows.append(model.forward.decode(token, seq).numpy().copy())
        tokens.append(token)
    model.lifecycle.free_sequence(seq)
    assert relative(np.concatenate(rows), reference.logits(source, tokens)) <= 1e-4


def search(
    model: Model, source: list[int], max_new: int, num_beams: int, **options: Any
) -> list[tuple[list[int], float]]:
    request = BeamRequest(
        source,
        SOURCE,
        TARGET,
        -1,
        num_beams,
        max_new,
        options.get("length_penalty", 1.0),
        options.get("early_stopping", False),
        options.get("no_repeat_ngram_size", 0),
        options.get("num_return_sequences", 1),
    )
    (found,) = model.forward.generate_beam_batch([request])
    return [(list(hypothesis.token_ids), hypothesis.score) for hypothesis in found]


def require_equal(got: list[tuple[list[int], float]], want: list[tuple[list[int], Any]]) -> None:
    assert [ids for ids, _ in got] == [ids for ids, _ in want]
    for (_, ours), (_, theirs) in zip(got, want, strict=True):
        assert theirs is None or ours == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize("early_stopping", STOPPING)
@pytest.mark.parametrize("num_beams", [1, 2, 4, 16])
def test_beam_search(
    model: Model, reference: ReferenceTranslator, num_beams: int, early_stopping: Any
) -> None:
    for penalty, length in itertools.product(PENALTIES, (1, 9)):
        options = {
            "length_penalty": penalty,
            "early_stopping": early_stopping,
            "num_return_sequences": min(num_beams, 3),
        }
        source = reference.text(length, seed=num_beams)
        got = search(model, source, 14, num_beams, **options)
        require_equal(got, reference.translate([source], 14, num_beams, **options)[0])


@pytest.mark.parametrize("ngram", [1, 2, 3])
@pytest.mark.parametrize("num_beams", [1, 4])
def test_no_repeat_ngram(
    model: Model, reference: ReferenceTranslator, num_beams: int, ngram: int
) -> None:
    source = reference.text(6, seed=ngram)
    got = search(model, source, 20, num_beams, no_repeat_ngram_size=ngram)
    want = reference.translate([source], 20, num_beams, no_repeat_ngram_size=ngram)
    require_equal(got, want[0])


@pytest.mark.parametrize("early_stopping", STOPPING)
@pytest.mark.parametrize("num_beams", [1, 2, 4, 16])
def test_a_padded_batch(
    engine: Engine, reference: ReferenceTranslator, num_beams: int, early_stopping: Any
) -> None:
    """The reference pads sources to one length; ours run ragged, all in one sweep."""
    sources = [reference.text(length, seed=3) for length in (1, 5, 17, 40)]
    for penalty in PENALTIES:
        options = {"length_penalty": penalty, "early_stopping": early_stopping}
        got = engine.translate(
            sources, source=SOURCE, target=TARGET, num_beams=num_beams, max_tokens=12, **options
        )
        want = reference.translate(sources, 12, num_beams, **options)
        for ours, (theirs,) in zip(got, want, strict=True):
            assert list(ours.token_ids) == [token for token in theirs[0] if token != START]
            assert theirs[1] is None or ours.score == pytest.approx(theirs[1], abs=1e-4)


def test_the_cases_tell_the_options_apart(engine: Engine, reference: ReferenceTranslator) -> None:
    """Some hypotheses end early, and each option changes some result."""
    sources = [reference.text(length, seed=3) for length in range(1, 30)]

    def results(**options: Any) -> list[Any]:
        found = engine.translate(
            sources, source=SOURCE, target=TARGET, num_beams=4, num_return=2, max_tokens=12,
            **options,
        )  # fmt: skip
        return [[h.token_ids for h in t.hypotheses] + [t.finish_reason] for t in found]

    plain = results()
    assert {row[-1] for row in plain} == {"stop", "length"}
    assert len({str(row) for row in plain}) > 10
    for options in (
        {"length_penalty": 0.6},
        {"length_penalty": 1.4},
        {"early_stopping": True},
        {"early_stopping": "never"},
        {"no_repeat_ngram": 2},
    ):
        assert results(**options) != plain, options


@pytest.mark.parametrize("shapes", [{}, {"scale_embedding": False, "d_model": 40}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_folders(tmp_path: Path, dtype: torch.dtype, shapes: dict[str, Any]) -> None:
    reference = translation_model.build(tmp_path, dtype=dtype, **shapes)
    with Engine(tmp_path, threads=1, quiet=True) as engine, engine.paused() as model:
        source = reference.text(9)
        seq, view = begin(model, source)
        want = reference.logits(source, [START, TARGET])
        assert relative(view.numpy(), want) <= 1e-4
        model.lifecycle.free_sequence(seq)


def test_an_untied_head(tmp_path: Path) -> None:
    reference = translation_model.build(tmp_path, tie_word_embeddings=False)
    with Engine(tmp_path, threads=1, quiet=True) as engine, engine.paused() as model:
        source = reference.text(5)
        _, view = begin(model, source)
        assert relative(view.numpy(), reference.logits(source, [START, TARGET])) <= 1e-4


@pytest.mark.parametrize("quantize", ["q8_0", "q4_0"])
def test_quantized_weights(tmp_path: Path, quantize: Any) -> None:
    """Close to float32 in the measure of its bits; not the same."""
    reference = translation_model.build(tmp_path, decoder_ffn_dim=96)
    with Engine(reference.directory, quantize=quantize, quiet=True) as engine:
        with engine.paused() as model:
            source = reference.text(12)
            _, view = begin(model, source)
            error = relative(view.numpy(), reference.logits(source, [START, TARGET]))
        assert 1e-4 < error < {"q8_0": 0.1, "q4_0": 0.8}[quantize]
        assert set(engine.describe()["weights"].split()) >= {quantize}
