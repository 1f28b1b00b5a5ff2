"""Any split of a prompt leaves the logits and the cache of one pass."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.exactness.serial import (
    CASES,
    FLOAT,
    QUANTIZED,
    Case,
    assert_continues,
    assert_row,
    assert_rows,
    bits,
    mark,
    return_to,
    sequence,
    text,
)

LENGTHS = st.one_of(st.integers(1, 70), st.sampled_from([255, 256, 257, 270]))


@st.composite
def splits(draw: st.DrawFn) -> list[int]:
    """Where each window of a prompt ends; the last entry is the prompt's length."""
    length = draw(LENGTHS)
    cuts = draw(st.sets(st.integers(1, length), max_size=6))
    return sorted({*cuts, length})


@pytest.mark.parametrize(("threads", "max_step_tokens"), [(1, 512), (2, 9)])
@pytest.mark.parametrize("case", CASES, ids=str)
@settings(max_examples=3, deadline=None)
@given(ends=splits(), seed=st.integers(0, 3))
@example(ends=[1, 2, 3, 20], seed=0)
@example(ends=[16, 32, 256, 270], seed=1)
@example(ends=[270], seed=2)
def test_any_split_equals_one_pass(
    case: Case, threads: int, max_step_tokens: int, ends: list[int], seed: int
) -> None:
    """With 9 rows a step, longer windows run in pieces."""
    model = case.load(threads, max_step_tokens).model
    prompt = text(seed)[: ends[-1]]
    with sequence(model) as seq:
        for start, end in pairwise([0, *ends]):
            last = end == ends[-1]
            view = model.forward.prefill_chunk(prompt, seq, start, end - start, last)
            assert (view is not None) == last
            assert (seq.seq_len, seq.prompt_len) == (end, end)
        assert_rows(case, seed, [len(prompt) - 1], view)
        assert seq.tokens.tolist() == list(prompt)
        assert_continues(case, model, seed, seq)


@pytest.mark.parametrize(
    ("case", "max_step_tokens"),
    [*((case, 512) for case in CASES), (FLOAT[0], 9), (QUANTIZED[0], 9)],
    ids=str,
)
def test_every_position_of_every_window_is_its_serial_row(case: Case, max_step_tokens: int) -> None:
    model = case.load(2, max_step_tokens).model
    prompt = text(0)[:290]
    with sequence(model) as seq:
        for start, end in pairwise([0, 64, 65, 81, 145, 200, 250, 290]):
            view = model.forward.prefill_chunk(
                prompt, seq, start, end - start, end == 290, logits="all"
            )
            assert_rows(case, 0, range(start, end), view)


@pytest.mark.parametrize("case", CASES, ids=str)
@settings(max_examples=3, deadline=None)
@given(length=LENGTHS, to=st.integers(0, 270), again=st.integers(1, 20))
@example(length=257, to=255, again=5)
@example(length=40, to=0, again=3)
def test_rewound_positions_are_made_again(case: Case, length: int, to: int, again: int) -> None:
    """Other tokens that were dropped leave no trace."""
    to = min(to, length)
    model = case.load(2).model
    with sequence(model) as seq:
        for start, end in ((0, to), (to, length)):
            if start < end:
                model.forward.prefill_chunk(
                    text(0)[:length], seq, start, end - start, end == length, logits="none"
                )
            if end == to:
                mark(model, seq)
        for token in text(1)[:3]:
            model.forward.decode(token, seq)
        return_to(model, seq, to)
        assert seq.tokens.tolist() == list(text(0)[:to])
        model.forward.prefill_chunk(text(0)[: to + again], seq, to, again, True, logits="none")
        assert_continues(case, model, 0, seq)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_prompt_may_grow_after_decoding(case: Case) -> None:
    """A chat's next turn: what was generated becomes the front of the next prompt."""
    model = case.load(2).model
    with sequence(model) as seq:
        model.forward.prefill(text(0)[:20], seq)
        assert_row(case, 0, 20, bits(model.forward.decode(text(0)[20], seq)))
        assert (seq.prompt_len, seq.seq_len) == (20, 21)
        view = model.forward.prefill_chunk(text(0)[:40], seq, 21, 19, True)
        assert_rows(case, 0, [39], view)
        assert seq.prompt_len == 40
