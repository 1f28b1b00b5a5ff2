"""The sampler gives the definition's tokens bitwise, and remembers what it should."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atlas.backends.cpu.compiler import BodyCompiler
from atlas.backends.cpu.sampling import CompiledWeights, filtered, most_probable
from atlas.errors import InvalidArgumentError, NonFiniteLogitsError, ShapeError
from atlas.ops import sampling as ops
from atlas.ops.elementary import exp32
from atlas.sampler import Sampled, Sampler, needs_logits, score_token
from atlas.sampling import SamplingParams

COMPILED = CompiledWeights(BodyCompiler())


def sampler(vocab_size: int, prompt_ids: list[int] | None = None, **fields: Any) -> Sampler:
    state = {name: fields.pop(name) for name in ("eos_token_ids", "sample_index") if name in fields}
    params = SamplingParams(**fields).with_seed(0)
    prompt_ids = [0] if prompt_ids is None else prompt_ids
    return Sampler(params, vocab_size=vocab_size, prompt_ids=prompt_ids, **state)


def rows(seed: int, vocab_size: int, kind: str) -> np.ndarray:
    """Rows of every temper: like a model's, full of ties, flat, peaked, and absurdly large."""
    rng = np.random.default_rng(seed)
    row = rng.standard_normal(vocab_size) * 3
    match kind:
        case "peaked":
            row[rng.integers(vocab_size, size=3)] += 25
        case "ties":
            row = np.round(row)
        case "equal":
            row[:] = 1.25
        case "flat":
            row *= 1e-3
        case "huge":
            row *= 1e37
        case "tiny":
            row *= 1e-40
    return row.astype(np.float32)


def optional(strategy: st.SearchStrategy[Any], off: Any) -> st.SearchStrategy[Any]:
    return st.one_of(st.just(off), strategy)


def unit(low: float) -> st.SearchStrategy[float]:
    return st.floats(low, 1.0, exclude_min=low == 0.0, allow_subnormal=False)


@st.composite
def parameters(draw: st.DrawFn, vocab_size: int) -> SamplingParams:
    ids = st.integers(0, min(vocab_size, 12) - 1)
    temperature = draw(st.sampled_from([0.0, 1e-6, 0.3, 0.8, 1.0, 1.7, 30.0, 1e6]))
    drawn = temperature > 0.0
    return SamplingParams(
        temperature=temperature,
        seed=draw(st.integers(0, 2**64 - 1)),
        top_n_sigma=draw(optional(st.floats(0.01, 5.0), 0.0)),
        top_k=draw(optional(st.integers(1, vocab_size + 5), 0)),
        typical_p=draw(optional(unit(0.0), 1.0)) if drawn else 1.0,
        top_p=draw(optional(unit(0.0), 1.0)),
        min_p=draw(optional(st.floats(0.0, 1.0), 0.0)),
        xtc_probability=draw(optional(unit(0.5), 0.0)) if drawn else 0.0,
        xtc_threshold=draw(st.floats(1e-6, 0.5)),
        repetition_penalty=draw(optional(st.floats(0.5, 2.0), 1.0)),
        presence_penalty=draw(optional(st.floats(-2.0, 2.0), 0.0)),
        frequency_penalty=draw(optional(st.floats(-2.0, 2.0), 0.0)),
        dry_multiplier=draw(optional(st.floats(0.1, 5.0), 0.0)),
        dry_base=draw(st.sampled_from([1.0, 1.0000001, 1.75, 1e6])),
        dry_allowed_length=draw(st.integers(1, 3)),
        dry_range=draw(st.none() | st.integers(1, 12)),
        dry_sequence_breakers=draw(st.lists(ids, max_size=2)),
        logit_bias=draw(st.dictionaries(ids, st.floats(-5.0, 5.0), max_size=2)),
        bad_words=draw(st.lists(st.lists(ids, min_size=1, max_size=2), max_size=2)),
        min_tokens=draw(st.integers(0, 3)),
        stop_token_ids=draw(st.lists(ids, max_size=1)),
        ignore_eos=draw(st.booleans()),
        logprobs=draw(st.none() | st.integers(0, min(vocab_size, 6))),
        logprobs_mode=draw(st.sampled_from(["raw", "processed"])),
    )


def outcome(call: Any) -> object:
    """The result, or the kind and text of the error."""
    try:
        return call()
    except (InvalidArgumentError, NonFiniteLogitsError) as error:
        return type(error), str(error)


@settings(max_examples=250, deadline=None)
@given(data=st.data())
def test_the_sampler_equals_the_definition_bitwise(data: st.DataObject) -> None:
    vocab_size = data.draw(st.sampled_from([3, 33, 1000, 5003, 20_011]))
    params = data.draw(parameters(vocab_size))
    ids = st.integers(0, min(vocab_size, 5) - 1)
    prompt_ids = data.draw(st.lists(ids, min_size=1, max_size=20))
    output_ids = data.draw(st.lists(ids, max_size=20))
    kind = data.draw(st.sampled_from(["model", "peaked", "ties", "equal", "flat", "huge", "tiny"]))
    logits = rows(data.draw(st.integers(0, 2**32)), vocab_size, kind)
    mask = None
    if data.draw(st.booleans()):
        word = np.random.default_rng(data.draw(st.integers(0, 99)))
        mask = word.integers(-(2**31), 2**31, -(-vocab_size // 32)).astype(np.int32)
    state = {"prompt_ids": prompt_ids, "eos_token_ids": [1], "sample_index": 2}
    weights = data.draw(st.sampled_from([exp32, COMPILED]))
    fast = Sampler(params, vocab_size=vocab_size, weights=weights, **state)
    for token_id in output_ids:
        fast.observe(token_id)
    for token_id in (0, 1):  # forgotten again
        fast.observe(token_id)
    fast.rewind(len(output_ids))
    before = logits.copy()
    got = outcome(lambda: fast.sample(logits, 77, mask))
    expected = outcome(
        lambda: ops.sample(logits, params, output_ids=output_ids, position=77, mask=mask, **state)
    )
    assert got == expected
    np.testing.assert_array_equal(logits, before)


FILTERS: list[dict[str, float]] = [
    {},
    {"top_n_sigma": 1.0},
    {"top_k": 50},
    {"top_k": 3000},
    {"typical_p": 0.3},
    {"typical_p": 0.999},
    {"top_p": 0.5},
    {"top_p": 0.999},
    {"min_p": 0.1},
    {"min_p": 1e-50},
    {"top_k": 2000, "typical_p": 0.9, "top_p": 0.9, "min_p": 0.01},
    {"xtc_probability": 1.0, "xtc_threshold": 1e-4},
]


@pytest.mark.parametrize("fields", FILTERS, ids=str)
@pytest.mark.parametrize("kind", ["model", "peaked", "ties", "equal", "flat", "huge", "tiny"])
def test_the_filters_leave_the_definitions_candidates(kind: str, fields: dict[str, float]) -> None:
    row = rows(11, 20_011, kind)
    row[::7] = -np.inf
    for temperature in (0.1, 1.0, 20.0):
        params = SamplingParams(temperature=temperature, **fields)
        expected = ops.filtered(row, params, np.float32(0.0))
        for weights in (exp32, COMPILED):
            got = filtered(row, params, np.float32(0.0), weights)
            for mine, defined in zip(got, expected, strict=True):
                assert mine.dtype == defined.dtype
                assert mine.tobytes() == defined.tobytes()


def test_most_probable_does_not_tell_zero_from_minus_zero() -> None:
    x = np.where(np.arange(5003) % 3 == 0, np.float32(-0.0), np.float32(0.0))
    for count in (0, 1, 2000, 5003):
        assert most_probable(x, count).tolist() == [*range(count)]


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), temperature=st.floats(0.01, 50.0), k=st.integers(1, 5003))
def test_top_k_1_is_greedy_and_any_k_has_k_candidates(
    seed: int, temperature: float, k: int
) -> None:
    logits = rows(seed, 5003, "ties")
    one = sampler(5003, temperature=temperature, top_k=1).sample(logits, 5)
    assert one.token_id == int(np.argmax(logits))
    many = sampler(5003, temperature=temperature, top_k=k, logprobs=5003, logprobs_mode="processed")
    assert len(many.sample(logits, 5).top) == k


@pytest.mark.parametrize("fields", [{"top_p": 1e-30}, {"min_p": 1.0}, {"top_n_sigma": 1e-6}])
def test_the_tightest_filters_leave_the_most_probable(fields: dict[str, float]) -> None:
    logits = rows(3, 5003, "model")
    for position in range(20):
        got = sampler(5003, temperature=2.0, **fields).sample(logits, position)
        assert got.token_id == int(np.argmax(logits))


def test_extreme_temperatures() -> None:
    logits = rows(4, 1000, "model")
    cold = sampler(1000, temperature=1e-6)
    hot = sampler(1000, temperature=1e6, logprobs=0, logprobs_mode="processed")
    assert {cold.sample(logits, i).token_id for i in range(50)} == {int(np.argmax(logits))}
    drawn = [hot.sample(logits, i) for i in range(50)]
    assert len({token.token_id for token in drawn}) > 40
    assert all(token.logprob == pytest.approx(-np.log(1000), abs=1e-3) for token in drawn)


def test_a_seed_and_a_position_fix_the_draw() -> None:
    logits = rows(5, 5003, "model")

    def tokens(seed: int, sample_index: int = 0) -> list[int]:
        chosen = sampler(5003, temperature=1.5, seed=seed, sample_index=sample_index)
        return [chosen.sample(logits, position).token_id for position in range(40)]

    assert tokens(1) == tokens(1)
    assert len({tuple(tokens(*key)) for key in [(1, 0), (2, 0), (1, 1), (2**63 + 1, 0)]}) == 4
    # A position's draw does not depend on what was drawn before.
    chosen = sampler(5003, temperature=1.5, seed=1)
    backwards = [chosen.sample(logits, position).token_id for position in reversed(range(40))]
    assert backwards[::-1] == tokens(1)
    assert len(set(tokens(1))) > 20


def test_observe_and_rewind_move_the_output() -> None:
    chosen = sampler(100, [5, 6], frequency_penalty=1.0, logprobs=100)
    for token_id in range(100):  # more than one growth of the arrays
        chosen.observe(token_id)
    assert chosen.output_ids == [*range(100)]
    chosen.rewind(2)
    assert chosen.output_ids == [0, 1]
    assert chosen.num_output_tokens == 2
    logits = np.zeros(100, np.float32)
    assert chosen.sample(logits, 9).token_id == 2
    chosen.rewind(0)
    assert chosen.sample(logits, 9).token_id == 0
    for wrong in (-1, 1):
        with pytest.raises(InvalidArgumentError, match="num_output_tokens"):
            chosen.rewind(wrong)
    with pytest.raises(InvalidArgumentError, match="token id is 100; allowed: 0 … 99"):
        chosen.observe(100)


def test_sampling_does_not_observe() -> None:
    chosen = sampler(3, presence_penalty=2.0)
    logits = np.array([0, 1, 0], np.float32)
    assert [chosen.sample(logits, 1).token_id for _ in range(3)] == [1, 1, 1]
    chosen.observe(1)
    assert chosen.sample(logits, 2).token_id == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("size", [5, 5003])
def test_a_row_that_is_not_finite_is_an_error(temperature: float, value: float, size: int) -> None:
    logits = rows(0, size, "model")
    logits[size - 2] = value
    with pytest.raises(NonFiniteLogitsError, match=f"token {size - 2}"):
        sampler(size, temperature=temperature).sample(logits, 1)
    with pytest.raises(NonFiniteLogitsError, match=f"token {size - 2}"):
        score_token(logits, 0, 1)


def test_logits_of_another_shape_or_dtype_are_an_error() -> None:
    for logits in (np.zeros(4, np.float32), np.zeros((1, 5), np.float32), np.zeros(5)):
        with pytest.raises(ShapeError, match=r"allowed: float32 \[5\]"):
            sampler(5).sample(logits, 1)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("logit_bias key", {"logit_bias": {5: 1.0}}),
        ("bad_words id", {"bad_words": [[1, 5]]}),
        ("stop_token_ids", {"stop_token_ids": [5]}),
        ("eos_token_ids", {"eos_token_ids": [5]}),
        ("dry_sequence_breakers", {"dry_multiplier": 1.0, "dry_sequence_breakers": [5]}),
        ("prompt id", {"prompt_ids": [1, 5]}),
        ("prompt id", {"prompt_ids": [-1]}),
        ("logprobs", {"logprobs": 6}),
        ("texts", {"bad_words": ["x"]}),
        ("texts", {"dry_multiplier": 1.0}),
    ],
)
def test_what_does_not_fit_the_vocabulary_is_refused(name: str, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{name}.*allowed"):
        sampler(5, **fields)


def test_a_drawing_sampler_needs_a_seed() -> None:
    with pytest.raises(InvalidArgumentError, match="seed is None"):
        Sampler(SamplingParams(temperature=1.0), vocab_size=5, prompt_ids=[0])


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1.0},
        {"logprobs": 0},
        {"logits_processor": lambda *_: None},
        {"logit_bias": {1: 1.0}},
        {"bad_words": [[1]]},
        {"min_tokens": 1},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"dry_multiplier": 0.1},
    ],
)
def test_needs_logits(fields: dict[str, Any]) -> None:
    assert needs_logits(SamplingParams(**fields))


def test_plain_greedy_needs_no_logits() -> None:
    assert not needs_logits(SamplingParams())
    assert not needs_logits(SamplingParams(top_k=5, top_p=0.5, min_p=0.1, top_n_sigma=1.0, n=2))


def log_softmax(row: np.ndarray) -> np.ndarray:
    wide = row.astype(np.float64)
    return wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())


def test_raw_logprobs_are_the_models() -> None:
    logits = rows(6, 5003, "model")
    best = np.argsort(-logits, kind="stable")[:4]
    fields = {"logit_bias": {int(best[0]): -100.0}, "logprobs": 4}
    for temperature in (0.0, 0.5):
        got = sampler(5003, temperature=temperature, top_k=1, **fields).sample(logits, 3)
        expected = log_softmax(logits)
        assert got.token_id == best[1]
        assert got.logprob == pytest.approx(expected[best[1]], abs=1e-5)
        assert [token_id for token_id, _ in got.top] == best.tolist()
        assert [value for _, value in got.top] == pytest.approx(expected[best].tolist(), abs=1e-5)


def test_processed_logprobs_are_of_the_drawn_distribution() -> None:
    logits = rows(7, 1000, "model")
    fields = {"logprobs": 1000, "logprobs_mode": "processed"}
    got = sampler(1000, temperature=0.7, top_k=20, **fields).sample(logits, 3)
    best = np.argsort(-logits, kind="stable")[:20]
    expected = log_softmax(logits[best] / np.float32(0.7))
    assert [token_id for token_id, _ in got.top] == best.tolist()
    assert [value for _, value in got.top] == pytest.approx(expected.tolist(), abs=1e-5)
    assert dict(got.top)[got.token_id] == got.logprob
    greedy = sampler(1000, bad_words=[[int(best[0])]], **fields).sample(logits, 3)
    rest = np.delete(logits, best[0])
    assert greedy.token_id == best[1]
    assert greedy.logprob == pytest.approx(log_softmax(rest).max(), abs=1e-5)
    assert len(greedy.top) == 999


@pytest.mark.parametrize("mode", ["raw", "processed"])
@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_logprobs_sum_to_one(mode: str, temperature: float) -> None:
    fields = {"logprobs": 5003, "logprobs_mode": mode, "repetition_penalty": 1.2}
    got = sampler(5003, temperature=temperature, **fields).sample(rows(8, 5003, "ties"), 3)
    values = [value for _, value in got.top]
    assert sum(np.exp(values)) == pytest.approx(1.0, abs=1e-4)
    assert values == sorted(values, reverse=True)
    assert dict(got.top)[got.token_id] == got.logprob


def test_logprobs_zero_gives_the_sampled_token_alone() -> None:
    logits = rows(9, 1000, "model")
    got = sampler(1000, temperature=5.0, logprobs=0).sample(logits, 3)
    assert got.top == []
    assert got == score_token(logits, got.token_id, 0)
    assert sampler(1000, temperature=5.0).sample(logits, 3) == Sampled(got.token_id)


def test_score_token_scores_a_given_token() -> None:
    logits = rows(10, 5003, "model")
    got = score_token(logits, 17, 3, COMPILED)
    assert got == score_token(logits, 17, 3)
    assert got.token_id == 17
    assert got.logprob == pytest.approx(log_softmax(logits)[17], abs=1e-5)
    assert [token_id for token_id, _ in got.top] == np.argsort(-logits, kind="stable")[:3].tolist()


@pytest.mark.parametrize(
    ("fields", "support"),
    [
        ({}, range(12)),
        ({"temperature": 0.5}, range(12)),
        ({"top_k": 4}, range(4)),
        ({"top_p": 0.5}, range(3)),
        ({"min_p": 0.5}, range(4)),
    ],
)
def test_draws_follow_the_distribution(fields: dict[str, float], support: range) -> None:
    # Probabilities fall by 0.8 a rank; ids are shuffled.
    ids = np.random.default_rng(0).permutation(12)
    logits = np.empty(12, np.float32)
    logits[ids] = np.log(0.8) * np.arange(12)
    chosen = sampler(12, seed=123, **{"temperature": 1.0, **fields})
    num_draws = 3000
    drawn = [chosen.sample(logits, position).token_id for position in range(num_draws)]
    counts = np.bincount(np.argsort(ids)[drawn], minlength=12)
    power = 1.0 / fields.get("temperature", 1.0)
    expected = 0.8 ** (power * np.array(support))
    expected *= num_draws / expected.sum()
    assert counts[len(support) :].sum() == 0
    statistic = ((counts[: len(support)] - expected) ** 2 / expected).sum()
    assert statistic < 36.1  # χ² at p ≤ 0.00016 for at most 11 degrees; the seed is fixed


def test_xtc_acts_at_its_rate() -> None:
    logits = np.log(np.array([0.7, 0.2, 0.1])).astype(np.float32)
    chosen = sampler(3, temperature=1.0, seed=5, xtc_probability=0.3, xtc_threshold=0.15)
    first = sum(chosen.sample(logits, position).token_id == 0 for position in range(3000))
    assert first / 3000 == pytest.approx(0.7 * 0.7, abs=0.03)
