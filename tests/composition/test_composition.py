"""Whatever happens to a request, and whichever two things do, its tokens are the plain run's.

Compared are token ids and the log-probabilities of the best tokens, bit for bit.
"""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from atlas.request import Sample
from tests.composition.conftest import MODELS, MakeEngine
from tests.composition.features import FEATURES, Feature
from tests.composition.harness import PARAMS, PROMPT, Recorder, Run, assert_balanced, plain

ALONE = [(feature,) for feature in FEATURES]
PAIRS = list(combinations(FEATURES, 2))
_WRITTEN = 3  # tokens of the target when things start to happen

_EXPECTED: dict[tuple[str, str, int], Sample] = {}


def name_of(features: tuple[Feature, ...]) -> str:
    """The part of a test's id that tools/composition.py reads."""
    return " + ".join(feature.name for feature in features)


@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("features", [*ALONE, *PAIRS], ids=name_of)
@pytest.mark.parametrize("model", MODELS)
def test_composition(
    make_engine: MakeEngine, model: str, features: tuple[Feature, ...], kind: str, tmp_path: Path
) -> None:
    engine = make_engine(model, min(feature.chunk_tokens for feature in features))
    if engine._loop.cache is not None:
        engine._loop.cache.clear()
    params = PARAMS[kind]
    for feature in features:
        params = feature.params(params)
    with Recorder(engine) as recorder:
        run = Run(engine, recorder, params, tmp_path)
        for feature in features:
            feature.before(run)
        engine.submit(PROMPT, params, request_id=run.target, priority=1)
        run.until(lambda: run.num_tokens(run.target) >= _WRITTEN)
        for feature in features:
            feature.during(run)
        run.until(lambda: not engine.has_unfinished())
    for feature in features:
        feature.prove(run)
    assert_balanced(engine)
    for sample in run.ended[run.target].samples:
        key = (model, kind, sample.index)
        if key not in _EXPECTED:
            _EXPECTED[key] = plain(make_engine(model, 128), PARAMS[kind], sample.index)
        assert sample.token_ids == _EXPECTED[key].token_ids
        assert sample.logprobs == _EXPECTED[key].logprobs
