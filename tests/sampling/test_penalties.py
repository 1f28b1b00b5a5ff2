"""The stages that change logits, one by one, on rows small enough to compute by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atlas.errors import InvalidArgumentError, NonFiniteLogitsError, ShapeError
from atlas.ops.penalties import (
    MAX_DRY_PENALTY,
    adjust,
    check_finite,
    dry_penalties,
    forbid_bad_words,
    penalize_occurrence,
    penalize_repetition,
    unpack_mask,
)
from atlas.sampling import SamplingParams

INF = float("inf")


def row(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def pack(allowed: list[int], vocab_size: int) -> np.ndarray:
    words = np.zeros(-(-vocab_size // 32), np.uint32)
    for token_id in allowed:
        words[token_id // 32] |= np.uint32(1 << token_id % 32)
    return words.view(np.int32)


def adjusted(logits: np.ndarray, **fields: object) -> list[float]:
    state = {name: fields.pop(name) for name in ("mask", "eos_token_ids") if name in fields}
    prompt_ids, output_ids = fields.pop("prompt_ids", []), fields.pop("output_ids", [])
    params = SamplingParams(**fields)
    return adjust(logits, params, prompt_ids=prompt_ids, output_ids=output_ids, **state).tolist()


@pytest.mark.parametrize("value", [float("nan"), INF, -INF])
def test_a_row_that_is_not_finite_is_refused_by_id(value: float) -> None:
    with pytest.raises(NonFiniteLogitsError, match=f"token 2 is {value}"):
        check_finite(row(0, 1, value, value))


def test_logit_bias_is_added() -> None:
    assert adjusted(row(1, 2, 3), logit_bias={0: 2.5, 2: -1}) == [3.5, 2.0, 2.0]


def test_bad_words_forbid_only_the_id_that_completes_them() -> None:
    words = [[0], [7, 1], [8, 2], [6, 7, 3], [9, 9, 9, 9, 9, 4]]
    logits = np.zeros(5, np.float32)
    forbid_bad_words(logits, words, [6, 7])
    assert np.flatnonzero(logits == -np.inf).tolist() == [0, 1, 3]
    # The word may begin within the prompt.
    assert adjusted(row(0, 0, 5), bad_words=[[1, 2]], prompt_ids=[0, 1])[2] == -INF
    assert adjusted(row(0, 0, 5), bad_words=[[1, 2]], output_ids=[1])[2] == -INF


@pytest.mark.parametrize(("num_output", "forbidden"), [(0, True), (1, True), (2, False)])
def test_min_tokens_forbids_what_would_end_the_request(num_output: int, forbidden: bool) -> None:
    fields = {"min_tokens": 2, "stop_token_ids": [1], "eos_token_ids": [0]}
    got = adjusted(row(9, 8, 7), output_ids=[2] * num_output, **fields)
    assert got == ([-INF, -INF, 7.0] if forbidden else [9.0, 8.0, 7.0])
    if forbidden:  # the end token ends nothing here
        got = adjusted(row(9, 8, 7), output_ids=[2] * num_output, ignore_eos=True, **fields)
        assert got == [9.0, -INF, 7.0]


@given(vocab_size=st.integers(1, 130), data=st.data())
def test_the_row_mask_is_unpacked_for_any_vocabulary(vocab_size: int, data: st.DataObject) -> None:
    allowed = data.draw(st.lists(st.integers(0, vocab_size - 1), unique=True))
    mask = pack(allowed, vocab_size)
    if vocab_size % 32:  # bits beyond the vocabulary mean nothing
        mask.view(np.uint32)[-1] |= np.uint32(0xFFFFFFFF << vocab_size % 32 & 0xFFFFFFFF)
    assert np.flatnonzero(unpack_mask(mask, vocab_size)).tolist() == sorted(allowed)


def test_a_mask_of_another_shape_or_dtype_is_refused() -> None:
    for mask in (np.zeros(1, np.int32), np.zeros(3, np.int32), np.zeros(2, np.int64)):
        with pytest.raises(ShapeError, match=r"allowed: int32 \[2\] for 33 tokens"):
            unpack_mask(mask, 33)


def test_repetition_divides_positive_and_multiplies_negative_logits() -> None:
    logits = row(2, -2, 2, 0)
    penalize_repetition(logits, np.array([True, True, False, True]), 2.0)
    assert logits.tolist() == [1.0, -4.0, 2.0, 0.0]
    # prompt and output both count
    got = adjusted(row(2, 2, 2), repetition_penalty=2.0, prompt_ids=[0], output_ids=[2])
    assert got == [1.0, 2.0, 1.0]


def test_presence_and_frequency_count_the_output_alone() -> None:
    logits = row(1, 1, 1)
    penalize_occurrence(logits, row(0, 1, 3), presence=0.5, frequency=0.25)
    assert logits.tolist() == [1.0, 0.25, -0.25]
    fields = {"prompt_ids": [0, 0], "output_ids": [1, 2, 2, 2]}
    got = adjusted(row(1, 1, 1), presence_penalty=0.5, frequency_penalty=0.25, **fields)
    assert got == [1.0, 0.25, -0.25]
    assert adjusted(row(1, 1, 1), presence_penalty=-1.0, **fields) == [1.0, 2.0, 2.0]


def dry(history: list[int], **fields: object) -> dict[int, float]:
    params = SamplingParams(
        **{"dry_multiplier": 0.8, "dry_base": 1.75, "dry_sequence_breakers": (), **fields}
    )
    return {token_id: float(value) for token_id, value in dry_penalties(history, params).items()}


def test_dry_grows_with_the_length_of_the_repetition() -> None:
    assert dry([1, 2, 3, 9, 1, 2, 3]) == {9: pytest.approx(0.8 * 1.75)}
    assert dry([5, 2, 3, 9, 1, 2, 3]) == {9: pytest.approx(0.8)}
    assert dry([5, 6, 3, 9, 1, 2, 3]) == {}  # a repetition of one token is allowed
    assert dry([5, 6, 3, 9, 1, 2, 3], dry_allowed_length=1) == {9: pytest.approx(0.8)}
    assert dry([1, 2, 3, 9, 1, 2, 3], dry_base=1.0) == {9: pytest.approx(0.8)}


def test_dry_takes_the_longest_of_several_repetitions() -> None:
    history = [2, 3, 8, 1, 2, 3, 9, 7, 2, 3, 9, 1, 2, 3]
    assert dry(history) == {8: pytest.approx(0.8), 9: pytest.approx(0.8 * 1.75)}


def test_dry_repetitions_may_overlap() -> None:
    assert dry([4, 4, 4, 4]) == {4: pytest.approx(0.8 * 1.75)}


def test_dry_stops_at_breakers_and_does_not_penalise_them() -> None:
    history = [1, 2, 3, 9, 1, 2, 3]
    assert dry(history, dry_sequence_breakers=[1]) == {9: pytest.approx(0.8)}
    assert dry(history, dry_sequence_breakers=[2]) == {}
    assert dry(history, dry_sequence_breakers=[3]) == {}
    assert dry(history, dry_sequence_breakers=[9]) == {}


def test_dry_looks_back_over_its_range() -> None:
    history = [1, 2, 3, 9, 1, 2, 3]
    assert dry(history, dry_range=7) == {9: pytest.approx(0.8 * 1.75)}
    assert dry(history, dry_range=6) == {9: pytest.approx(0.8)}
    assert dry(history, dry_range=5) == {}
    assert dry([], dry_range=5) == dry([1]) == {}


def test_dry_is_bounded() -> None:
    assert dry([4] * 500) == {4: np.float32(MAX_DRY_PENALTY)}


def test_dry_is_subtracted() -> None:
    fields = {"dry_multiplier": 2.0, "dry_sequence_breakers": ()}
    got = adjusted(row(5, 5, 5), prompt_ids=[0, 1, 2, 0, 1], **fields)
    assert got == [5.0, 5.0, 3.0]


def test_the_logits_processor_sees_ids_and_the_models_logits() -> None:
    seen: list[object] = []

    def processor(prompt_ids, output_ids, logits):
        seen.append((list(prompt_ids), list(output_ids), logits.tolist()))
        return logits * 2

    logits = row(1, 2, 3)
    fields = {"prompt_ids": [0], "output_ids": [2, 1]}
    got = adjusted(logits, logits_processor=processor, logit_bias={0: 5.0}, **fields)
    assert seen == [([0], [2, 1], [1.0, 2.0, 3.0])]
    assert got == [7.0, 4.0, 6.0]

    def in_place(prompt_ids, output_ids, logits):
        logits[1] = -np.inf

    assert adjusted(logits, logits_processor=in_place) == [1.0, -INF, 3.0]
    assert logits.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("result", "error"),
    [
        (row(1, 2), ShapeError),
        (np.zeros(3), ShapeError),
        ([1.0, 2.0, 3.0], ShapeError),
        (row(1, float("nan"), 2), NonFiniteLogitsError),
        (row(1, INF, 2), NonFiniteLogitsError),
    ],
)
def test_a_logits_processor_is_held_to_its_contract(result: object, error: type) -> None:
    with pytest.raises(error, match="logits processor"):
        adjusted(row(1, 2, 3), logits_processor=lambda *_: result)


def test_the_stage_that_forbids_the_last_token_is_named() -> None:
    def nothing(*_: object) -> np.ndarray:
        return row(-INF, -INF)

    none = np.zeros(1, np.int32)
    cases: list[tuple[str, dict[str, object]]] = [
        ("logits_processor", {"logits_processor": nothing, "mask": none}),
        ("bad_words", {"bad_words": [[0], [1]], "mask": none}),
        ("min_tokens", {"bad_words": [[0]], "min_tokens": 1, "eos_token_ids": [1], "mask": none}),
        ("the row mask", {"bad_words": [[0]], "mask": pack([0], 2)}),
    ]
    for stage, fields in cases:
        with pytest.raises(InvalidArgumentError, match=f"{stage} leaves no token"):
            adjusted(row(1, 2), **fields)


def test_logits_that_overflow_under_the_penalties_are_refused() -> None:
    with pytest.raises(NonFiniteLogitsError, match="after bias and penalties"):
        adjusted(row(3e38, 0), repetition_penalty=0.5, prompt_ids=[0])


def test_bias_comes_before_mask_and_repetition() -> None:
    assert adjusted(row(1, 1), logit_bias={0: 100.0}, mask=pack([1], 2))[0] == -INF
    got = adjusted(row(1, 1), logit_bias={0: 1.0}, repetition_penalty=2.0, prompt_ids=[0])
    assert got[0] == 1.0  # (1 + 1) / 2, not 1 / 2 + 1


def test_repetition_comes_before_presence_and_frequency() -> None:
    fields = {"repetition_penalty": 2.0, "presence_penalty": 1.0, "frequency_penalty": 0.5}
    assert adjusted(row(4, 4), output_ids=[0, 0], **fields)[0] == 0.0  # 4 / 2 − 2 · 0.5 − 1
