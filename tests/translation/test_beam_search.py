"""The search alone, over tables of log-probabilities."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atlas.errors import NonFiniteLogitsError
from atlas.model.beam_search import BeamSearch

START, TAG, END = 90, 91, 0
Table = Callable[[tuple[int, ...]], np.ndarray]


def table(seed: int, size: int) -> Table:
    """log p of the next of ``size`` tokens, by the tokens so far."""

    def row(tokens: tuple[int, ...]) -> np.ndarray:
        logits = np.random.default_rng([seed, *tokens]).normal(0, 2, size)
        return (logits - np.log(np.exp(logits).sum())).astype(np.float32)

    return row


def run(log_probs: Table, **options: Any) -> BeamSearch:
    settings = {
        "num_beams": 4,
        "max_new": 6,
        "length_penalty": 1.0,
        "early_stopping": False,
        "no_repeat_ngram": 0,
    } | options
    search = BeamSearch((START, TAG), (END,), **settings)
    while not search.done:
        k = search.num_candidates
        rows, bans = [], search.bans()
        for beam, banned in zip(search.running, bans, strict=True):
            row = log_probs(beam.token_ids[2:]).copy()
            row[[i for i in banned if i < len(row)]] = -np.inf
            rows.append(row)
        ids = np.full((len(rows), k), -1, np.int32)
        values = np.full((len(rows), k), -np.inf, np.float32)
        for i, row in enumerate(rows):
            best = [j for j in np.argsort(-row, kind="stable")[:k] if row[j] > -np.inf]
            ids[i, : len(best)], values[i, : len(best)] = best, row[best]
        search.step(ids, values)
    return search


def every(log_probs: Table, size: int, max_new: int) -> dict[tuple[int, ...], float]:
    """All sequences that end, or are cut, with their Σ log p."""
    found: dict[tuple[int, ...], float] = {}
    for length in range(1, max_new + 1):
        for tokens in itertools.product(range(size), repeat=length):
            ends = tokens[-1] == END
            if END in tokens[:-1] or not (ends or length == max_new):
                continue
            steps = [log_probs(tokens[:i])[token] for i, token in enumerate(tokens)]
            found[tokens] = float(np.sum(steps, dtype=np.float64))
    return found


@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.6, 1.0, 1.7]))
@settings(max_examples=60, deadline=None)
def test_a_search_wide_enough_finds_the_best_of_all(seed: int, penalty: float) -> None:
    """Four tokens and two steps give 13 sequences, which 16 beams hold."""
    log_probs = table(seed, 4)
    search = run(log_probs, num_beams=16, max_new=2, length_penalty=penalty, early_stopping="never")
    scores = {
        tokens: total / (len(tokens) + 1) ** penalty  # the tag counts
        for tokens, total in every(log_probs, 4, 2).items()
    }
    want = sorted(scores.values(), reverse=True)
    got = search.best(16)
    assert [h.score for h in got] == pytest.approx(want, abs=1e-5)
    for hypothesis in got:
        assert hypothesis.score == pytest.approx(scores[hypothesis.token_ids], abs=1e-5)


@given(
    st.integers(0, 10**6),
    st.integers(1, 16),
    st.sampled_from([0.6, 1.0, 1.4]),
    st.sampled_from([True, False, "never"]),
    st.integers(0, 3),
)
@settings(max_examples=60, deadline=None)
def test_hypotheses_are_sound(
    seed: int, num_beams: int, penalty: float, early: Any, ngram: int
) -> None:
    """Best first, distinct, scored as they should be, ended or full, without forbidden repeats."""
    log_probs = table(seed, 40)
    search = run(
        log_probs,
        num_beams=num_beams,
        length_penalty=penalty,
        early_stopping=early,
        no_repeat_ngram=ngram,
    )
    found = search.best(num_beams)
    assert len(found) == num_beams
    assert len({h.token_ids for h in found}) == num_beams
    assert [h.score for h in found] == sorted((h.score for h in found), reverse=True)
    for tokens, score in ((h.token_ids, h.score) for h in found):
        total = sum(float(log_probs(tokens[:i])[token]) for i, token in enumerate(tokens))
        assert score == pytest.approx(total / (len(tokens) + 1) ** penalty, abs=1e-4)
        assert tokens[-1] == END or len(tokens) == 6
        assert END not in tokens[:-1]
        if ngram:
            grams = [tokens[i : i + ngram] for i in range(len(tokens) - ngram + 1)]
            assert len(set(grams)) == len(grams)


def test_one_beam_is_greedy() -> None:
    for seed in range(20):
        log_probs = table(seed, 12)
        tokens: tuple[int, ...] = ()
        while len(tokens) < 6 and END not in tokens:
            tokens += (int(np.argmax(log_probs(tokens))),)
        (found,) = run(log_probs, num_beams=1).best(1)
        assert found.token_ids == tokens


def test_fewer_candidates_than_beams() -> None:
    """With every id banned but two, two beams go on."""
    search = run(table(3, 2), num_beams=8, max_new=3, early_stopping="never")
    assert len({h.token_ids for h in search.best(8)}) == len(search.ended) == 4


def test_nothing_left_to_say_ends_the_search() -> None:
    """Unigrams may not repeat and there are two of them."""
    search = run(table(1, 3), num_beams=2, max_new=9, no_repeat_ngram=1)
    assert search.done
    assert 1 <= len(search.best(2)) <= 2
    assert all(len(h.token_ids) <= 3 for h in search.best(2))


def test_a_search_that_may_not_go_on_keeps_what_it_has() -> None:
    def never_ends(tokens: tuple[int, ...]) -> np.ndarray:
        return np.array([-np.inf, -0.5, -1.0], np.float32)

    for num_beams in (1, 2):
        search = run(never_ends, num_beams=num_beams, max_new=9, no_repeat_ngram=1)
        assert search.best(1)[0].token_ids == (1, 2)
        assert search.best(1)[0].score == pytest.approx(-1.5 / 3)


def test_rows_that_are_not_finite() -> None:
    search = BeamSearch(
        (START, TAG), (END,), num_beams=2, max_new=3, length_penalty=1.0, early_stopping=False,
        no_repeat_ngram=0,
    )  # fmt: skip
    with pytest.raises(NonFiniteLogitsError):
        search.step(np.full((1, 4), -1, np.int32), np.full((1, 4), np.nan, np.float32))
    assert [beam.token_ids for beam in search.running] == [(START, TAG)]
