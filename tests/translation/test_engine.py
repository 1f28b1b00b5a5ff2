"""engine.translate and submit_translation: batches, streams, cancellation, priorities, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atlas import Engine, SamplingParams
from atlas.errors import (
    CapabilityError,
    InvalidArgumentError,
    KvExhausted,
    PromptTooLongError,
    TokenizerError,
)
from atlas.event import Event
from atlas.model.records import BeamRequest
from atlas.translation import BeamParams, Translation
from tests.helpers import translation_model
from tests.helpers.translation_model import SOURCE, TARGET, ReferenceTranslator

LANGUAGES: dict[str, Any] = {"source": SOURCE, "target": TARGET}


def drained(engine: Engine) -> dict[str, list[Event]]:
    """Every request's events, to the end."""
    events: dict[str, list[Event]] = {}
    while engine.has_unfinished():
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
    return events


def essence(translation: Translation) -> list[tuple[tuple[int, ...], float | None]]:
    """Ids and scores, to the bit."""
    return [(found.token_ids, found.score) for found in translation.hypotheses]


def test_mixed_widths_equal_single_runs(engine: Engine, reference: ReferenceTranslator) -> None:
    """Bitwise: scores are compared as they are."""
    wishes = [(1, 1, 9), (4, 3, 5), (16, 2, 30), (2, 2, 1), (7, 7, 17), (4, 1, 16)]
    alone, ids = [], []
    for i, (num_beams, num_return, length) in enumerate(wishes):
        params = BeamParams(num_beams=num_beams, num_return=num_return, max_tokens=10 + i)
        text = reference.text(length, seed=i)
        alone.append(engine.translate(text, params=params, **LANGUAGES))
        ids.append(engine.submit_translation(text, params=params, **LANGUAGES))
    events = drained(engine)
    for request_id, translation in zip(ids, alone, strict=True):
        completion = events[request_id][-1].completion
        assert completion is not None
        got = [(sample.token_ids, sample.score) for sample in completion.samples]
        assert got == essence(translation)
        assert completion.prompt_token_ids == translation.source_token_ids


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_do_not_matter(
    engine: Engine, reference: ReferenceTranslator, threads: int
) -> None:
    texts = [reference.text(length, seed=8) for length in (3, 20)]
    want = engine.translate(texts, num_return=4, max_tokens=20, **LANGUAGES)
    with Engine(reference.directory, threads=threads, quiet=True) as other:
        got = other.translate(texts, num_return=4, max_tokens=20, **LANGUAGES)
    assert [essence(t) for t in got] == [essence(t) for t in want]


def test_whole_at_prefill_equals_interleaved(
    engine: Engine, reference: ReferenceTranslator
) -> None:
    text = reference.text(11)
    want = engine.translate(text, num_beams=5, num_return=5, max_tokens=15, **LANGUAGES)
    request = BeamRequest(text, SOURCE, TARGET, -1, 5, 15, 1.0, False, 0, 5)
    (found,) = engine.model.forward.generate_beam_batch([request])
    end = engine.eos_token_ids[0]
    got = [(tuple(i for i in h.token_ids if i != end), h.score) for h in found]
    assert got == essence(want)


def test_a_full_cache_preempts_and_changes_nothing(reference: ReferenceTranslator) -> None:
    texts = [reference.text(length, seed=1) for length in (20, 30, 5, 40, 9)]
    params = [
        BeamParams(num_beams=4, num_return=4, max_tokens=40, early_stopping="never"),
        BeamParams(num_beams=1, max_tokens=60),
        SamplingParams(temperature=1.0, seed=5, n=5, max_tokens=60, ignore_eos=True),
        BeamParams(num_beams=8, num_return=2, max_tokens=40),
        SamplingParams(temperature=2.0, seed=6, n=4, max_tokens=70, ignore_eos=True),
    ]

    def run(kv_tokens: int | None) -> tuple[list[Any], int]:
        with Engine(
            reference.directory, threads=1, kv_tokens=kv_tokens, quiet=True, max_running=60
        ) as engine:
            ids = [
                engine.submit_translation(text, params=p, **LANGUAGES)
                for text, p in zip(texts, params, strict=True)
            ]
            events = drained(engine)
            results = []
            for request_id in ids:
                completion = events[request_id][-1].completion
                assert completion is not None
                assert completion.error is None
                for sample in completion.samples:
                    streamed = [
                        token
                        for event in events[request_id]
                        if event.index == sample.index
                        for token in event.token_ids
                    ]
                    assert tuple(streamed) == sample.token_ids
                results.append([(s.token_ids, s.score) for s in completion.samples])
            metrics = engine.metrics()
            assert metrics.kv_blocks_used == 0
            return results, metrics.preemptions

    want, none = run(None)
    got, some = run(16 * 30)
    assert none == 0
    assert some > 0
    assert got == want


def test_greedy_streams_token_by_token(engine: Engine, reference: ReferenceTranslator) -> None:
    text = reference.text(8, seed=2)
    want = reference.translate([text], 12, 1)[0][0][0]
    request_id = engine.submit_translation(text, num_beams=1, max_tokens=12, **LANGUAGES)
    events = drained(engine)[request_id]
    assert len(events) > 3
    assert [token for event in events for token in event.token_ids] == [
        token for token in want if token not in engine.eos_token_ids
    ]
    sampled = engine.translate(text, params=SamplingParams(max_tokens=12), **LANGUAGES)
    assert list(sampled.token_ids) == [t for t in want if t not in engine.eos_token_ids]
    assert sampled.score is None


def test_samples_are_drawn_from_their_seed(engine: Engine, reference: ReferenceTranslator) -> None:
    params = SamplingParams(temperature=1.2, seed=3, n=4, max_tokens=15, repetition_penalty=1.3)
    text = reference.text(6)
    first = engine.translate(text, params=params, **LANGUAGES)
    again = engine.translate([text, text], params=params, **LANGUAGES)
    assert [essence(t) for t in again] == [essence(first)] * 2
    assert len({found.token_ids for found in first.hypotheses}) > 1


def test_a_processor_sees_the_decoders_tokens(
    engine: Engine, reference: ReferenceTranslator
) -> None:
    seen = []

    def only_forty(prompt: Any, output: Any, logits: np.ndarray) -> None:
        seen.append((list(prompt), list(output)))
        logits[:] = -np.inf
        logits[40] = 0.0

    params = SamplingParams(max_tokens=2, logits_processor=only_forty)
    translation = engine.translate(reference.text(3), params=params, **LANGUAGES)
    assert translation.token_ids == (40, 40)
    assert translation.finish_reason == "length"
    assert seen == [([2, TARGET], []), ([2, TARGET], [40])]


def test_cancelled(engine: Engine, reference: ReferenceTranslator) -> None:
    running = engine.submit_translation(reference.text(9), max_tokens=60, **LANGUAGES)
    kept = engine.submit_translation(reference.text(9), max_tokens=3, **LANGUAGES)
    engine.step()
    waiting = engine.submit_translation(reference.text(9), **LANGUAGES)
    assert engine.cancel(running)
    assert engine.cancel(waiting)
    events = drained(engine)
    assert [e.finish_reason for e in events[running]] == ["cancelled"]
    assert [e.finish_reason for e in events[waiting]] == ["cancelled"]
    assert events[kept][-1].finish_reason in ("stop", "length")
    assert engine.metrics().kv_blocks_used == 0


def test_priorities_come_first(reference: ReferenceTranslator) -> None:
    """16 beams fill the sweep twice over; the urgent request overtakes those that wait."""
    with Engine(reference.directory, threads=1, quiet=True) as engine:
        params = BeamParams(num_beams=16, max_tokens=8, early_stopping="never")
        ids = [
            engine.submit_translation(reference.text(5, seed=i), params=params, **LANGUAGES)
            for i in range(8)
        ]
        engine.step()
        assert engine.metrics().waiting == 4
        urgent = engine.submit_translation(
            reference.text(5), params=params, priority=-1, **LANGUAGES
        )
        order = list(drained(engine))
        assert set(order[:4]) == set(ids[:4])
        assert urgent in order[4:8]


def test_metrics(reference: ReferenceTranslator) -> None:
    with Engine(reference.directory, threads=1, quiet=True) as engine:
        engine.warmup()
        found = engine.translate(
            [reference.text(4), reference.text(5)], num_return=2, max_tokens=6, **LANGUAGES
        )
        metrics = engine.metrics()
        assert metrics.prompt_tokens == 4 + 5 + 2 * 2
        assert metrics.generated_tokens == sum(t.usage.completion_tokens for t in found)
        assert metrics.finished["stop"] + metrics.finished["length"] == 4
        assert metrics.time_to_first_token_s.num_observed == metrics.request_s.num_observed == 2
        assert metrics.kv_blocks_used == metrics.waiting == metrics.running == 0
        assert "atlas_steps_total" in engine.openmetrics()
        assert engine.health().state == "ok"


def test_an_owner_thread_translates(reference: ReferenceTranslator) -> None:
    with Engine(reference.directory, threads=1, quiet=True) as engine:
        want = engine.translate(reference.text(5), max_tokens=9, **LANGUAGES)
        engine.start()
        got = engine.translate(reference.text(5), max_tokens=9, **LANGUAGES)
        assert essence(got) == essence(want)
        assert engine.drain(10.0)


def test_close_ends_what_runs(reference: ReferenceTranslator) -> None:
    engine = Engine(reference.directory, threads=1, quiet=True)
    engine.submit_translation(reference.text(5), **LANGUAGES)
    engine.step()
    engine.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 0}, "num_beams is 0; allowed: an integer, 1 or more"),
        ({"num_beams": 17}, "num_beams is 17; allowed: 1 … 16"),
        ({"num_beams": 2, "num_return": 3}, "num_return is 3; allowed: 1 … num_beams"),
        ({"early_stopping": "soon"}, "early_stopping is 'soon'; allowed: True, False, 'never'"),
        ({"length_penalty": float("nan")}, "length_penalty is nan; allowed: a number, -5 … 5"),
        ({"length_penalty": 400.0}, "length_penalty is 400.0; allowed: a number, -5 … 5"),
        ({"early_stopping": 1}, "early_stopping is 1; allowed: True, False, 'never'"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"no_repeat_ngram": -1}, "no_repeat_ngram is -1"),
        ({"target": SOURCE}, f"source and target language are both {SOURCE}"),
        ({"target": 120}, "target language is 120; allowed: a tag's id, 1 … 119"),
        ({"source": 0}, "source language is 0, and this model has no default"),
        ({"source": 1}, "source language is 1, which is no language's tag"),  # padding
        ({"target": 2}, "target language is 2, which is no language's tag"),  # start and end
        ({"source": 1.5}, "a language is 1.5; allowed: a code"),
        ({"params": 3}, "params is a int; allowed: BeamParams, SamplingParams or None"),
        ({"params": BeamParams(), "num_beams": 2}, "params and num_beams are given"),
        ({"params": SamplingParams(prompt_logprobs=1)}, "prompt_logprobs is 1"),
        ({"params": SamplingParams(n=100)}, "n is 100; allowed for a translation: 1 … 64"),
    ],
)
def test_bad_options(engine: Engine, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message.replace("(", "\\(")):
        engine.translate([20, 21], **(LANGUAGES | options))
    assert not engine.has_unfinished()


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("temperature", "temperature has no meaning in a beam search; allowed: num_beams"),
        ("num_beam", "unknown option 'num_beam'; did you mean 'num_beams'"),
    ],
)
def test_unknown_fields_are_refused(engine: Engine, field: str, message: str) -> None:
    options: dict[str, Any] = {field: 1}
    with pytest.raises(InvalidArgumentError, match=message):
        engine.translate([20, 21], **options, **LANGUAGES)
    assert not engine.has_unfinished()


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ([], InvalidArgumentError, "texts is empty"),
        ([[20], []], InvalidArgumentError, "the source is empty"),
        ([[20], 21], InvalidArgumentError, "texts mix token ids with sources"),
        ([120], InvalidArgumentError, "hold id 120; allowed: 0 … 119"),
        ([20, 1], InvalidArgumentError, "holds the padding token 1"),
        ([20] * 127, PromptTooLongError, "has 127 subwords; allowed: up to 126"),
        ("hello", TokenizerError, "has no tokenizer files"),
        (b"hello", InvalidArgumentError, "texts is a bytes"),
        ([20.5, 21.0], InvalidArgumentError, "have dtype float64; allowed: integers"),
        ([True, False], InvalidArgumentError, "have dtype bool; allowed: integers"),
        ([["20"]], InvalidArgumentError, "texts\\[0\\]: the source's tokens have dtype <U2"),
        ([None], InvalidArgumentError, "have dtype object; allowed: integers"),
        ([[[20]]], InvalidArgumentError, "has shape \\(1, 1\\); allowed: one or more ids"),
        ([[20, [21]]], InvalidArgumentError, "tokens are not token ids"),
    ],
)
def test_bad_sources(engine: Engine, text: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        engine.translate(text, **LANGUAGES)
    assert not engine.has_unfinished()


@pytest.mark.parametrize("text", [None, 5, {5: 6}, {5, 6}, iter([5]), ["20"], [[5, 6], [7, 8]]])
def test_what_is_no_source_is_not_submitted(engine: Engine, text: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="source"):
        engine.submit_translation(text, **LANGUAGES)
    assert not engine.has_unfinished()


@pytest.mark.parametrize("penalty", [-5.0, 0.0, 5.0])
@pytest.mark.parametrize("num_beams", [1, 4])
def test_the_widest_penalties_give_finite_scores(
    engine: Engine, reference: ReferenceTranslator, penalty: float, num_beams: int
) -> None:
    params = BeamParams(num_beams=num_beams, length_penalty=penalty, early_stopping="never")
    with np.errstate(all="raise"):
        translation = engine.translate(reference.text(3), params=params, **LANGUAGES)
    assert translation.score is not None
    assert np.isfinite(translation.score)


def test_sweeps_keep_to_the_sequences_there_are_rows_for(reference: ReferenceTranslator) -> None:
    """An engine has more rows of logits than sequences; both bound what is admitted."""
    with Engine(reference.directory, threads=1, max_running=64, quiet=True) as engine:
        limits = engine._loaded.core.limits
        assert limits.logits_rows > limits.max_seqs
        wide = BeamParams(num_beams=16, max_tokens=3, early_stopping="never")
        samples = SamplingParams(n=20, temperature=1.0, seed=1, max_tokens=3, ignore_eos=True)
        texts = [reference.text(4, seed=i) for i in range(8)]
        params = [samples, wide, wide, wide, samples, wide, wide, samples]
        want = [
            essence(engine.translate(text, params=p, **LANGUAGES))
            for text, p in zip(texts, params, strict=True)
        ]
        ids = [
            engine.submit_translation(text, params=p, **LANGUAGES)
            for text, p in zip(texts, params, strict=True)
        ]
        events = drained(engine)
        for request_id, one in zip(ids, want, strict=True):
            completion = events[request_id][-1].completion
            assert completion is not None
            assert [(s.token_ids, s.score) for s in completion.samples] == one
        many = SamplingParams(n=limits.max_seqs + 1)
        with pytest.raises(InvalidArgumentError, match=f"1 … {limits.max_seqs}"):
            engine.translate(texts[0], params=many, **LANGUAGES)
        request = BeamRequest(texts[0], SOURCE, TARGET, -1, 16, 3, 1.0, False)
        assert len(engine.model.forward.generate_beam_batch([request] * 5)) == 5


def test_the_longest_source_and_the_longest_translation(
    engine: Engine, reference: ReferenceTranslator
) -> None:
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    translation = engine.translate(reference.text(126), params=params, **LANGUAGES)
    assert len(translation.token_ids) == 126
    assert translation.finish_reason == "length"


@pytest.mark.parametrize("max_seq_len", [3, 50, 127])
def test_a_cache_of_the_usual_size_holds_the_widest_search(
    reference: ReferenceTranslator, max_seq_len: int
) -> None:
    """Beams share no block, so each takes whole ones."""
    with Engine(reference.directory, threads=1, max_seq_len=max_seq_len, quiet=True) as engine:
        assert engine.translate([20] * (max_seq_len - 2), num_beams=16, **LANGUAGES)


def test_integers_of_numpy(engine: Engine, reference: ReferenceTranslator) -> None:
    """Narrow ones too, whose products would overflow."""
    text = reference.text(4)
    small = {"num_beams": 16, "max_tokens": 100, "num_return": 3, "no_repeat_ngram": 2}
    narrow = {name: np.int8(value) for name, value in small.items()}
    want = engine.translate(text, **small, **LANGUAGES)
    languages = {name: np.int64(value) for name, value in LANGUAGES.items()}
    assert essence(engine.translate(text, **narrow, **languages)) == essence(want)  # type: ignore[call-overload]
    request = BeamRequest(
        text, *(np.int8(value) for value in (SOURCE, TARGET, -1, 16, 100)), 1.0, False
    )  # type: ignore[arg-type, misc]
    assert engine.model.forward.generate_beam_batch([request])


HUGE = 10**5000  # which Python refuses to spell out


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": HUGE},
        {"max_tokens": -HUGE},
        {"length_penalty": HUGE},
        {"early_stopping": HUGE},
        {"no_repeat_ngram": HUGE},
        {"num_return": HUGE},
        {"source": HUGE},
        {"priority": HUGE},
    ],
)
def test_integers_beyond_all_bounds(engine: Engine, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match="is an integer of 16610 bits; allowed: "):
        engine.submit_translation([20], **LANGUAGES | options)
    assert not engine.has_unfinished()


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_beams", 4.0), ("num_beams", "4"), ("max_new", True), ("no_repeat_ngram", 2**63)],
)
def test_searches_by_hand_take_integers(engine: Engine, field: str, value: Any) -> None:
    fields = {"num_beams": 4, "max_new": 5, "no_repeat_ngram": 0} | {field: value}
    with pytest.raises(InvalidArgumentError, match=f"{field} is {value!r}; allowed: an integer"):
        BeamRequest([5], SOURCE, TARGET, -1, length_penalty=1.0, early_stopping=False, **fields)


def test_fewer_hypotheses_than_were_asked_for(tmp_path: Path) -> None:
    """Thirteen words make thirteen translations of one word."""
    reference = translation_model.build(tmp_path, vocab_size=13)
    with Engine(reference.directory, threads=1, quiet=True) as engine:
        found = engine.translate([12], num_beams=16, num_return=16, max_tokens=1, **LANGUAGES)
    reasons = [hypothesis.finish_reason for hypothesis in found.hypotheses]
    assert "error" not in reasons[:13]
    assert reasons[13:] == ["error"] * 3
    assert isinstance(found.error, InvalidArgumentError)
    assert "num_return is 16; allowed for this search: 1 … 13" in str(found.error)


def test_more_than_the_cache_holds(reference: ReferenceTranslator) -> None:
    with Engine(reference.directory, threads=1, kv_tokens=64, quiet=True) as engine:
        with pytest.raises(KvExhausted, match="raise kv_tokens"):
            engine.translate(reference.text(5), num_beams=4, max_tokens=40, **LANGUAGES)
        assert engine.translate(reference.text(5), num_beams=2, max_tokens=9, **LANGUAGES)


@pytest.fixture(scope="module")
def decoder_only(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    from tests.helpers import reference

    folder = tmp_path_factory.mktemp("llama2")
    reference.build("llama2", folder)
    with Engine(folder, threads=1, quiet=True) as engine:
        yield engine


def test_a_decoder_only_model_does_not_translate(decoder_only: Engine) -> None:
    assert not decoder_only.translates
    for call in (decoder_only.translate, decoder_only.submit_translation):
        with pytest.raises(CapabilityError, match="needs a translation model"):
            call([5, 6], **LANGUAGES)
    with pytest.raises(CapabilityError, match="needs a translation model"):
        _ = decoder_only.languages
    request = BeamRequest([5], SOURCE, TARGET, -1, 4, 5, 1.0, False)
    with pytest.raises(CapabilityError, match="generate_beam_batch"):
        decoder_only.model.forward.generate_beam_batch([request])


def test_a_translator_does_not_generate(engine: Engine, tmp_path: Path) -> None:
    assert engine.translates
    refused: list[Any] = [
        lambda: engine.generate([5, 6]),
        lambda: engine.stream([5, 6]),
        lambda: engine.submit([5, 6]),
        lambda: engine.chat([{"role": "user", "content": "hello"}]),
        lambda: engine.fork("a"),
        lambda: engine.rewind("a", 3),
        lambda: engine.save("a", tmp_path / "file"),
        lambda: engine.restore(tmp_path / "file"),
    ]
    for call in refused:
        with pytest.raises(CapabilityError, match="translation model"):
            call()


@pytest.mark.parametrize("num_beams", [1, 3])
def test_a_vocabulary_used_up(engine: Engine, num_beams: int) -> None:
    """No word may occur twice, and there are not as many as positions."""
    found = engine.translate(
        [20, 21], num_beams=num_beams, max_tokens=125, no_repeat_ngram=1, **LANGUAGES
    )
    assert len(set(found.token_ids)) == len(found.token_ids) <= 118
    assert found.finish_reason == "length"
    assert not engine.has_unfinished()


@pytest.mark.parametrize("quantize", ["q8_0", "q4_0"])
def test_quantized_rows_are_independent_too(tmp_path: Path, quantize: Any) -> None:
    """Bitwise, with float16 keys and values."""
    reference = translation_model.build(tmp_path, decoder_ffn_dim=96)
    texts = [reference.text(length, seed=length) for length in (2, 17, 40)]
    with Engine(tmp_path, threads=2, quantize=quantize, quiet=True) as engine:
        alone = [
            engine.translate(text, num_beams=width, num_return=width, max_tokens=9, **LANGUAGES)
            for text, width in zip(texts, (3, 9, 16), strict=True)
        ]
        ids = [
            engine.submit_translation(
                text, num_beams=width, num_return=width, max_tokens=9, **LANGUAGES
            )
            for text, width in zip(texts, (3, 9, 16), strict=True)
        ]
        events = drained(engine)
    for request_id, translation in zip(ids, alone, strict=True):
        completion = events[request_id][-1].completion
        assert completion is not None
        got = [(sample.token_ids, sample.score) for sample in completion.samples]
        assert got == essence(translation)
