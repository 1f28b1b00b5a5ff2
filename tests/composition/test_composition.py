"""Whatever happens to a request, and whichever two things do, its tokens are the plain run's.

Compared are token ids and the log-probabilities of the best tokens, bit for bit.
"""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from atlas import Engine
from atlas.errors import InvalidArgumentError, SequenceStateError
from atlas.request import Sample
from tests.composition.conftest import MakeEngine
from tests.composition.features import (
    FEATURES,
    Feature,
    Rewound,
    Sampled,
    Saved,
    happens_during,
)
from tests.composition.harness import PARAMS, PROMPT, Recorder, Run, assert_balanced, plain
from tests.composition.models import MODELS

ALONE = [(feature,) for feature in FEATURES]
ALL_PAIRS = list(combinations(FEATURES, 2))
REFUSED = [
    (first, second)
    for first, second in ALL_PAIRS
    if isinstance(first, Sampled) and second.one_sample
]
PAIRS = [pair for pair in ALL_PAIRS if pair not in REFUSED]
# Of two that happen while it runs, the other one first as well.
REVERSED = [(b, a) for a, b in PAIRS if happens_during(a) and happens_during(b)]
# A session file holds one recurrent state, its latest, which does not reach back.
WITHOUT_SNAPSHOT = {f"{Saved.name} + {Rewound.name}"}
_WRITTEN = 3  # tokens of the target when things start to happen

_EXPECTED: dict[tuple[str, str, int], Sample] = {}


def name_of(features: tuple[Feature, ...]) -> str:
    """The part of a test's id that tools/composition.py reads."""
    return " + ".join(feature.name for feature in features)


def begin(
    engine: Engine, recorder: Recorder, features: tuple[Feature, ...], kind: str, folder: Path
) -> Run:
    """A run in an engine with a cold cache, up to where things start to happen."""
    assert engine._loop.cache is not None
    engine._loop.cache.clear()
    params = PARAMS[kind]
    for feature in features:
        params = feature.params(params)
    run = Run(engine, recorder, params, folder)
    for feature in features:
        feature.before(run)
    engine.submit(PROMPT, params, request_id=run.target, priority=1)
    run.until(lambda: run.num_tokens(run.target) >= _WRITTEN)
    return run


def cases() -> list[object]:
    """Every pair on every model, except what a model refuses."""
    return [
        pytest.param(model, features, id=f"{model}-{name_of(features)}")
        for model in MODELS
        for features in (*ALONE, *PAIRS, *REVERSED)
        if not (MODELS[model].is_hybrid and name_of(features) in WITHOUT_SNAPSHOT)
    ]


@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize(("model", "features"), cases())
def test_composition(
    make_engine: MakeEngine, model: str, features: tuple[Feature, ...], kind: str, tmp_path: Path
) -> None:
    chunk_tokens = min(feature.chunk_tokens for feature in features)
    engine = make_engine(model, chunk_tokens, any(feature.feed for feature in features))
    with Recorder(engine) as recorder:
        run = begin(engine, recorder, features, kind, tmp_path)
        for feature in features:
            feature.during(run)
        run.until(lambda: not engine.has_unfinished())
    for feature in features:
        feature.prove(run)
    assert_balanced(engine)
    for sample in run.ended[run.target].samples:
        key = (model, kind, sample.index)
        if key not in _EXPECTED:
            _EXPECTED[key] = plain(make_engine(model, 128, False), PARAMS[kind], sample.index)
        assert sample.token_ids == _EXPECTED[key].token_ids
        if run.params.logprobs is not None:
            assert sample.logprobs == _EXPECTED[key].logprobs


@pytest.mark.parametrize("features", REFUSED, ids=name_of)
def test_refused(make_engine: MakeEngine, features: tuple[Feature, ...], tmp_path: Path) -> None:
    """What a request of several samples cannot do is refused, and harms it not at all."""
    engine = make_engine("float32", 128, False)
    with Recorder(engine) as recorder:
        run = begin(engine, recorder, features, "greedy", tmp_path)
        with pytest.raises(InvalidArgumentError, match="n 3"):
            features[1].during(run)
        run.until(lambda: not engine.has_unfinished())
    expected = plain(engine, PARAMS["greedy"], 0).token_ids
    assert [sample.token_ids for sample in run.ended[run.target].samples] == [expected] * 3
    assert_balanced(engine)


@pytest.mark.parametrize("model", [name for name in MODELS if MODELS[name].is_hybrid])
def test_refused_without_a_snapshot(make_engine: MakeEngine, model: str, tmp_path: Path) -> None:
    """A restored hybrid cannot go back behind its file's state, and goes on undisturbed."""
    engine, saved = make_engine(model, 128, False), Saved()
    with Recorder(engine) as recorder:
        run = begin(engine, recorder, (saved,), "greedy", tmp_path)
        saved.during(run)
        run.when_running(lambda: engine.save(run.target, tmp_path / "again"))
        with pytest.raises(SequenceStateError, match="no snapshot of the recurrent state"):
            engine.rewind(run.target, len(PROMPT) + 1)
        run.until(lambda: not engine.has_unfinished())
    expected = plain(engine, PARAMS["greedy"], 0)
    assert run.ended[run.target].samples[0].token_ids == expected.token_ids
    assert_balanced(engine)
