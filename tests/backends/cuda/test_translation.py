"""An encoder-decoder on a GPU that is the host's memory and, under ``-m gpu``, on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atlas import Engine, SamplingParams
from atlas.backends.cuda.device import TensorMaps
from atlas.errors import CapabilityError
from atlas.event import Event
from atlas.layers.translation_step import DecodeShape
from atlas.model import Model
from atlas.ops.select import implementations
from atlas.translation import BeamParams, Translation
from tests.backends.cuda.folders import write_cuda_translator
from tests.backends.cuda.host_gpu import HostGpu

SOURCE, TARGET, START = 10, 11, 2
LANGUAGES: dict[str, Any] = {"source": SOURCE, "target": TARGET}
TOLERANCE = 0.08  # of the greatest logit: activations, weights and KV are rounded to bfloat16
NEAR = 0.2
"""Log-probability a token that rounding moves: a random model is unsure of everything."""


def text(length: int, seed: int = 0) -> list[int]:
    rng = np.random.default_rng([seed, length])
    return [int(token) for token in rng.integers(12, 5003, length)]


TEXTS = [text(length) for length in (3, 17, 9, 40, 1)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cuda_translator(tmp_path_factory.mktemp("translator"))


def open_engine(folder: Path, device: str = "cuda", **options: Any) -> Engine:
    return Engine(folder, device=device, **{"quiet": True, "max_seq_len": 128} | options)


def drained(engine: Engine) -> dict[str, list[Event]]:
    events: dict[str, list[Event]] = {}
    while engine.has_unfinished():
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
    return events


def essence(translation: Translation) -> list[tuple[tuple[int, ...], float | None]]:
    """Ids and scores, to the bit."""
    return [(found.token_ids, found.score) for found in translation.hypotheses]


def logits_of(model: Model, subwords: list[int], tokens: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Logits behind the tag and behind each token but the last: float32 [tokens, C]."""
    seq = model.lifecycle.alloc_sequence()
    seq.source_language, seq.target_language = SOURCE, TARGET
    rows = [model.logits.to_host(model.forward.prefill(subwords, seq))]
    for token in tokens[:-1]:
        rows.append(model.logits.to_host(model.forward.decode(token, seq)))
    model.lifecycle.free_sequence(seq)
    return np.concatenate(rows)


def score_of(model: Model, subwords: list[int], tokens: tuple[int, ...]) -> float:
    """Mean log-probability of a hypothesis, which a length penalty of 1 makes its score."""
    logits = logits_of(model, subwords, tokens).astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return float(np.mean([row[token] for row, token in zip(log_probs, tokens, strict=True)]))


def gap_where_they_part(model: Model, subwords: list[int], best: Any, other: Any) -> float:
    """By how much the logit of the first token that differs is greater in ``best``."""
    pairs = zip(best.token_ids, other.token_ids, strict=False)
    at = next(i for i, (a, b) in enumerate(pairs) if a != b)
    row = logits_of(model, subwords, best.token_ids[: at + 1])[-1]
    return float(row[best.token_ids[at]] - row[other.token_ids[at]])


@pytest.mark.parametrize("num_beams", [1, 4, 16])
@pytest.mark.parametrize("ngram", [0, 2])
def test_translations_are_the_cpu_s(cuda: str, folder: Path, num_beams: int, ngram: int) -> None:
    """The same ids, or others that the CPU finds as good but for what bfloat16 rounds away."""
    params = BeamParams(num_beams=num_beams, max_tokens=16, no_repeat_ngram=ngram)
    with open_engine(folder) as engine:
        got = engine.translate(TEXTS, params=params, **LANGUAGES)
        assert engine.metrics().kv_blocks_used == 0
    with open_engine(folder, "cpu") as engine:
        want = engine.translate(TEXTS, params=params, **LANGUAGES)
        same = [a.token_ids == b.token_ids for a, b in zip(got, want, strict=True)]
        with engine.paused() as model:
            for subwords, ours, theirs in zip(TEXTS, got, want, strict=True):
                assert len(set(ours.token_ids)) > 1 or len(ours.token_ids) < 2 or not ngram
                score = score_of(model, subwords, ours.token_ids)
                assert abs(score - ours.hypotheses[0].score) < NEAR  # type: ignore[operator]
                if num_beams > 1:
                    assert score > theirs.hypotheses[0].score - NEAR  # type: ignore[operator]
                elif ours.token_ids != theirs.token_ids:  # another way was taken at a near tie
                    assert gap_where_they_part(model, subwords, theirs, ours) < NEAR
    assert any(same), same


@pytest.mark.parametrize(
    ("shape", "gathers"),
    [
        (DecodeShape(5, 5, 2, 5, max_source_rows=4), 0),
        (DecodeShape(3, 3, 1, 3, 7, max_source_rows=3), 0),  # elsewhere in the arena
        (DecodeShape(2, 1, 1, 2, max_rows=2, max_source_rows=2), 1),
        (DecodeShape(3, 2, 2, 2, max_rows=2, max_source_rows=2), 1),
    ],
)
def test_rows_that_all_have_logits_are_not_gathered(
    gpu: HostGpu, folder: Path, monkeypatch: pytest.MonkeyPatch, shape: DecodeShape, gathers: int
) -> None:
    monkeypatch.setattr(TensorMaps, "address", lambda *ignored: 0)
    with open_engine(folder) as engine:
        core: Any = engine._loaded.core
        runtime = core.runtime
        runtime.functions.clear()
        runtime.functions |= implementations("cuda")
        padded = runtime.padded(shape)
        launches = runtime._record(core.network.decoder, core.buffers, padded).launches
    names = [launch.kernel for launch in launches]
    assert sum(name.startswith("gather_rows") for name in names) == gathers


def test_the_logits_are_the_cpu_s(cuda: str, folder: Path) -> None:
    """Teacher-forced, over a source and a translation that cross blocks."""
    tokens = tuple(text(20, seed=1))
    rows = []
    for device in ("cuda", "cpu"):
        with open_engine(folder, device) as engine, engine.paused() as model:
            rows.append(logits_of(model, TEXTS[3], tokens))
    got, want = rows
    assert np.abs(got - want).max() < TOLERANCE * np.abs(want).max()


def test_candidates_are_those_of_the_same_logits_on_the_cpu(cuda: str, folder: Path) -> None:
    """Bitwise, with bans, for a row, for several, and for the widest search."""
    with open_engine(folder) as on_gpu, open_engine(folder, "cpu") as on_cpu:
        ours, theirs = on_gpu._loaded.core, on_cpu._loaded.core  # type: ignore[attr-defined]
        with on_gpu.paused() as model:
            seqs = [model.lifecycle.alloc_sequence() for _ in TEXTS]
            for seq, subwords in zip(seqs, TEXTS, strict=True):
                seq.source_language, seq.target_language = SOURCE, TARGET
                model.forward.prefill(subwords, seq)
            rows = model.logits.to_host(model.forward.decode_batch([40, 50, 60, 70, 80], seqs))
            theirs.buffers.logits[: len(rows)] = rows
            best = [int(token) for token in np.argsort(-rows[1])[:9]]
            for count, k in ((1, 1), (5, 8), (5, 48)):
                banned = np.array(best if count > 1 else [], np.int32)
                ends = np.where(np.arange(count + 1) > 1, len(banned), 0).astype(np.int32)
                found, wanted = (
                    core.top_candidates(count, k, banned, ends) for core in (ours, theirs)
                )
                np.testing.assert_array_equal(found[0], wanted[0])
                np.testing.assert_array_equal(found[1], wanted[1])
            again = model.forward.decode_batch([1, 2, 3, 4, 5], seqs)
            np.testing.assert_array_equal(ours.argmax(again), model.logits.to_host(again).argmax(1))
            for seq in seqs:
                model.lifecycle.free_sequence(seq)


def test_requests_end_as_alone(cuda: str, folder: Path) -> None:
    """Searches of all widths and samples, together and alone, whatever the bucket: bitwise."""
    sampled = SamplingParams(temperature=0.9, seed=3, n=3, max_tokens=9, repetition_penalty=1.2)
    wishes: list[BeamParams | SamplingParams] = [
        BeamParams(num_beams=4, max_tokens=11, num_return=3),
        BeamParams(num_beams=16, max_tokens=8, no_repeat_ngram=2),
        sampled,
        BeamParams(num_beams=1, max_tokens=13),
        SamplingParams(max_tokens=10, ignore_eos=True),
        BeamParams(num_beams=7, max_tokens=5, early_stopping="never"),
    ]
    with open_engine(folder) as engine:
        alone = []
        for i, params in enumerate(wishes):
            alone.append(engine.translate(TEXTS[i % 5], params=params, **LANGUAGES))
        names = []
        for i, params in enumerate(wishes):
            names.append(engine.submit_translation(TEXTS[i % 5], params=params, **LANGUAGES))
            if i % 2:
                engine.step()
        events = {name: [] for name in names} | drained(engine)
        for name, translation in zip(names, alone, strict=True):
            completion = events[name][-1].completion
            assert completion is not None
            got = [(sample.token_ids, sample.score) for sample in completion.samples]
            assert got == essence(translation)
        assert engine.metrics().kv_blocks_used == 0


def test_what_the_device_draws_the_host_would_draw(cuda: str, folder: Path) -> None:
    """A processor that changes nothing takes the choice to the host, with the same logits."""
    for params in (
        SamplingParams(temperature=0.8, seed=11, top_k=40, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=1.1, seed=5, top_p=0.9, n=2, max_tokens=8, logit_bias={40: 3.0}),
        SamplingParams(max_tokens=9, repetition_penalty=1.4),
    ):
        with open_engine(folder) as engine:
            on_device = engine.translate(TEXTS[1], params=params, **LANGUAGES)
            by_hand = params.replace(logits_processor=lambda prompt, output, row: row)
            on_host = engine.translate(TEXTS[1], params=by_hand, **LANGUAGES)
        assert essence(on_device) == essence(on_host)


def test_preempted_requests_end_as_alone(cuda: str, folder: Path) -> None:
    params = BeamParams(num_beams=4, max_tokens=40)
    with open_engine(folder) as engine:
        alone = [essence(engine.translate(source, params=params, **LANGUAGES)) for source in TEXTS]
    with open_engine(folder, kv_tokens=400) as engine:
        together = engine.translate(TEXTS, params=params, **LANGUAGES)
        assert engine.metrics().preemptions > 0
    assert [essence(translation) for translation in together] == alone


def test_sweeps_are_graphs_and_copies_are_few(gpu: HostGpu, folder: Path) -> None:
    """A sweep of a search: copies of blocks in one launch, then a graph, and one wait behind it."""
    with open_engine(folder) as engine:
        engine.warmup()
        engine.submit_translation(TEXTS[1], params=BeamParams(num_beams=4), **LANGUAGES)
        for _ in range(6):
            engine.step()
        gpu.log.clear()
        engine.step()
        kinds = [entry.split()[0] for entry in gpu.log]
        assert "synchronize" not in kinds
        sweep = kinds.index("graph")
        before, after = kinds[:sweep], kinds[sweep:]
        assert before.count("copy_blocks") == 1
        assert before.count("copy") == 2  # pairs of blocks, integers
        # The region of integers is free; bans, candidates.
        assert after == ["graph", "record", "copy", "copy", "record", "wait"]
        drained(engine)


def test_memory_keeps_to_the_plan(gpu: HostGpu, folder: Path) -> None:
    with open_engine(folder) as engine:
        engine.translate(TEXTS, num_beams=16, max_tokens=4, **LANGUAGES)
        assert gpu.used <= engine._loaded.plan.total  # type: ignore[attr-defined]
        about = engine.describe()
        assert about["device"] == "Host GPU, cuda-host (asked for)"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"decoder_attention_heads": 4}, "head_dim is 32"),
        ({"encoder_attention_heads": 4}, "the encoder's head_dim is 32"),
        ({"eos_token_id": list(range(2, 20))}, "the number of end tokens is 18"),
    ],
)
def test_what_no_kernel_takes_is_refused_by_name(
    gpu: HostGpu, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    unlike = write_cuda_translator(tmp_path / "unlike", **changes)
    with pytest.raises(CapabilityError, match=f"{words}; the CUDA kernels allow"):
        open_engine(unlike)
    assert gpu.live["memory"] == 0
