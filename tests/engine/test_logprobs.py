"""Log-probabilities of output and prompt, against the model's logits read by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from atlas import Engine, SamplingParams
from atlas.errors import InvalidArgumentError
from atlas.request import TokenLogprob
from tests.engine.folders import VOCAB_SIZE

PROMPT = [5, 6, 7]


def rows_by_hand(engine: Engine, ids: Sequence[int]) -> NDArray[np.float64]:
    """The model's logits after each of the ids [len(ids), C]."""
    model = engine.model
    seq = model.lifecycle.alloc_sequence()
    rows = []
    for start in range(0, len(ids), 7):
        length = min(7, len(ids) - start)
        view = model.forward.prefill_chunk(
            ids, seq, start, length, start + length == len(ids), logits="all"
        )
        assert view is not None
        rows.append(np.asarray(view, np.float64))
    model.lifecycle.free_sequence(seq)
    return np.concatenate(rows)


def log_softmax(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = rows - rows.max(axis=-1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def assert_scores(
    scored: Sequence[TokenLogprob], ids: Sequence[int], expected: NDArray[np.float64], num_top: int
) -> None:
    """``scored`` are the log-probabilities of ``ids`` under the rows of ``expected``."""
    assert [entry.token_id for entry in scored] == list(ids)
    for entry, row in zip(scored, expected, strict=True):
        assert entry.logprob == pytest.approx(row[entry.token_id], abs=2e-5)
        assert [i for i, _ in entry.top] == list(np.argsort(-row, kind="stable")[:num_top])
        for i, logprob in entry.top:
            assert logprob == pytest.approx(row[i], abs=2e-5)


@pytest.mark.parametrize("num_top", [0, 1, 5])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_raw_logprobs_are_the_models(engine: Engine, num_top: int, temperature: float) -> None:
    params = SamplingParams(
        max_tokens=9, logprobs=num_top, temperature=temperature, seed=1, top_k=20, ignore_eos=True
    )
    completion = engine.generate(PROMPT, params)
    rows = rows_by_hand(engine, [*PROMPT, *completion.token_ids])
    assert completion.logprobs is not None
    assert_scores(
        completion.logprobs, completion.token_ids, log_softmax(rows[len(PROMPT) - 1 : -1]), num_top
    )


def test_processed_logprobs_are_those_of_the_draw(engine: Engine) -> None:
    params = SamplingParams(
        max_tokens=9,
        logprobs=3,
        logprobs_mode="processed",
        temperature=0.5,
        top_k=4,
        logit_bias={9: 3.0},
        seed=1,
        ignore_eos=True,
    )
    completion = engine.generate(PROMPT, params)
    rows = rows_by_hand(engine, [*PROMPT, *completion.token_ids])[len(PROMPT) - 1 : -1]
    rows[:, 9] += 3.0
    rows /= 0.5
    fourth = np.sort(rows, axis=-1)[:, -4:][:, :1]
    expected = log_softmax(np.where(rows >= fourth, rows, -np.inf))
    assert completion.logprobs is not None
    assert_scores(completion.logprobs, completion.token_ids, expected, 3)


def test_processed_greedy_logprobs_hold_bias_but_no_temperature(engine: Engine) -> None:
    params = SamplingParams(
        max_tokens=5, logprobs=2, logprobs_mode="processed", logit_bias={9: 4.0}, ignore_eos=True
    )
    completion = engine.generate(PROMPT, params)
    rows = rows_by_hand(engine, [*PROMPT, *completion.token_ids])[len(PROMPT) - 1 : -1]
    rows[:, 9] += 4.0
    assert completion.logprobs is not None
    assert_scores(completion.logprobs, completion.token_ids, log_softmax(rows), 2)


@pytest.mark.parametrize("length", [1, 2, 64, 65, 129])
def test_prompt_logprobs(engine: Engine, length: int) -> None:
    prompt = [int(i) for i in np.random.default_rng(length).integers(3, VOCAB_SIZE, length)]
    params = SamplingParams(max_tokens=2, prompt_logprobs=2, temperature=0.9, seed=0)
    completion = engine.generate(prompt, params)
    scored = completion.prompt_logprobs
    assert scored is not None
    assert (scored[0].token_id, scored[0].logprob, scored[0].top) == (prompt[0], None, ())
    rows = log_softmax(rows_by_hand(engine, prompt))
    assert_scores(scored[1:], prompt[1:], rows[:-1], 2)
    # The prompt's scores change nothing about the output.
    assert (
        completion.token_ids
        == engine.generate(prompt, params.replace(prompt_logprobs=None)).token_ids
    )


def test_logprobs_stay_beside_their_tokens(engine: Engine) -> None:
    free = engine.generate(PROMPT, SamplingParams(max_tokens=8, ignore_eos=True)).token_ids
    params = SamplingParams(max_tokens=8, logprobs=0, stop_token_ids=[free[5]], ignore_eos=True)
    completion = engine.generate(PROMPT, params)
    assert completion.logprobs is not None
    assert [entry.token_id for entry in completion.logprobs] == list(completion.token_ids)
    deltas = list(engine.stream(PROMPT, params))
    assert [entry for delta in deltas for entry in delta.logprobs] == list(completion.logprobs)


def test_every_sample_has_its_own_logprobs(engine: Engine) -> None:
    params = SamplingParams(max_tokens=4, n=2, temperature=1.0, seed=5, logprobs=0, ignore_eos=True)
    for sample in engine.generate(PROMPT, params).samples:
        assert sample.logprobs is not None
        assert tuple(entry.token_id for entry in sample.logprobs) == sample.token_ids


def test_more_alternatives_than_tokens_are_refused(engine: Engine) -> None:
    for params in (
        SamplingParams(logprobs=VOCAB_SIZE + 1),
        SamplingParams(prompt_logprobs=VOCAB_SIZE + 1),
    ):
        with pytest.raises(InvalidArgumentError, match=str(VOCAB_SIZE)):
            engine.generate(PROMPT, params)
    whole = engine.generate(PROMPT, SamplingParams(max_tokens=1, logprobs=VOCAB_SIZE))
    assert whole.logprobs is not None
    assert np.exp([p for _, p in whole.logprobs[0].top]).sum() == pytest.approx(1.0, abs=1e-4)
