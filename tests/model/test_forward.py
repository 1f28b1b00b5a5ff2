"""Forward: which rows run, where their logits lie, and what is refused."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from atlas.errors import (
    CapabilityError,
    InvalidArgumentError,
    PromptTooLongError,
    SequenceStateError,
    StaleHandleError,
)
from atlas.model import Model
from atlas.model.load import LoadedModel
from atlas.model.records import PrefillSlice
from atlas.model.sequence import SequenceState
from tests.model.checks import OTHER, PROMPT, assert_logits, prefilled, unchanged
from tests.model.conftest import Expected

N = len(PROMPT)


@pytest.mark.contract("forward.prefill")
def test_prefill_runs_a_whole_prompt(model: Model, expected: Expected) -> None:
    seq = model.lifecycle.alloc_sequence()
    view = model.forward.prefill(PROMPT, seq)
    assert_logits(view, expected(PROMPT)[-1:])
    assert view is not None
    assert view.row_numbers == range(1)
    assert (seq.seq_len, seq.prompt_len, seq.tokens.tolist()) == (N, N, PROMPT)


@pytest.mark.contract("forward.prefill")
def test_prefill_gives_the_rows_asked_for(model: Model, expected: Expected) -> None:
    seq = model.lifecycle.alloc_sequence()
    view = model.forward.prefill(np.array(PROMPT, np.uint16), seq, logits="all")
    assert_logits(view, expected(PROMPT))
    model.lifecycle.rewind(seq, 0)
    assert model.forward.prefill(PROMPT, seq, logits="none") is None
    assert seq.seq_len == N


@pytest.mark.contract("forward.prefill_chunk")
def test_prefill_chunk_runs_windows(model: Model, expected: Expected) -> None:
    seq, forward = model.lifecycle.alloc_sequence(), model.forward
    for start, end in pairwise([0, 1, 15, 17]):
        assert forward.prefill_chunk(PROMPT, seq, start, end - start, False) is None
        assert (seq.seq_len, seq.prompt_len) == (end, end)
    view = forward.prefill_chunk(PROMPT, seq, 17, 3, True)
    assert_logits(view, expected(PROMPT)[-1:])
    assert seq.tokens.tolist() == PROMPT


@pytest.mark.contract("forward.prefill_chunk")
def test_prefill_chunk_gives_all_rows_of_any_window(model: Model, expected: Expected) -> None:
    seq, forward, rows = model.lifecycle.alloc_sequence(), model.forward, expected(PROMPT)
    assert_logits(forward.prefill_chunk(PROMPT, seq, 0, 6, False, logits="all"), rows[:6])
    assert forward.prefill_chunk(PROMPT, seq, 6, 4, False, logits="none") is None
    assert_logits(forward.prefill_chunk(PROMPT, seq, 10, 10, True, logits="all"), rows[10:])


@pytest.mark.contract("forward.decode")
def test_decode_appends_and_advances(model: Model, expected: Expected) -> None:
    seq = prefilled(model, PROMPT)
    rows = expected([*PROMPT, *OTHER])
    for i, token in enumerate(OTHER):
        assert_logits(model.forward.decode(token, seq), rows[N + i][None])
        assert (seq.seq_len, seq.prompt_len) == (N + i + 1, N)
    assert seq.tokens.tolist() == [*PROMPT, *OTHER]


@pytest.mark.contract("forward.decode_batch")
def test_decode_batch_rows_follow_the_sequences(model: Model, expected: Expected) -> None:
    prompts = [PROMPT[:1], PROMPT, PROMPT[3:9]]
    seqs = [prefilled(model, prompt) for prompt in prompts]
    view = model.forward.decode_batch([11, 12, 13], [seqs[2], seqs[0], seqs[1]])
    texts = [[*prompts[2], 11], [*prompts[0], 12], [*prompts[1], 13]]
    assert_logits(view, np.stack([expected(text)[-1] for text in texts]))
    assert view.row_numbers == range(3)
    assert [seq.seq_len for seq in seqs] == [2, N + 1, 7]


@pytest.mark.contract("forward.mixed_forward")
def test_mixed_forward_is_a_decode_step_and_a_window(model: Model, expected: Expected) -> None:
    seqs = [prefilled(model, OTHER), prefilled(model, OTHER[:3])]
    fresh = model.lifecycle.alloc_sequence()
    first = model.forward.mixed_forward([1, 2], seqs, PrefillSlice(PROMPT, fresh, 0, 9, False))
    assert first.prefill_logits is None
    rows = [expected([*OTHER, 1])[-1], expected([*OTHER[:3], 2])[-1]]
    assert_logits(first.decode_logits, np.stack(rows))
    last = model.forward.mixed_forward([3], seqs[:1], PrefillSlice(PROMPT, fresh, 9, 11, True))
    assert_logits(last.decode_logits, expected([*OTHER, 1, 3])[-1:])
    assert_logits(last.prefill_logits, expected(PROMPT)[-1:])
    assert last.prefill_logits is not None
    assert last.prefill_logits.first_row == 1  # above the decode row
    assert [seq.seq_len for seq in (*seqs, fresh)] == [9, 4, N]
    alone = model.lifecycle.alloc_sequence()
    only = model.forward.mixed_forward([], [], PrefillSlice(OTHER, alone, 0, 7, True))
    assert only.decode_logits is None
    assert_logits(only.prefill_logits, expected(OTHER)[-1:])


@pytest.mark.contract("forward.mixed_forward_batch")
def test_mixed_forward_batch_is_the_general_step(model: Model, expected: Expected) -> None:
    lanes = [prefilled(model, OTHER[:n]) for n in (2, 5, 7)]
    fresh = [model.lifecycle.alloc_sequence() for _ in range(3)]
    slices = [
        PrefillSlice(PROMPT, fresh[0], 0, N, True),
        PrefillSlice(PROMPT, fresh[1], 0, 7, False),
        PrefillSlice(OTHER, fresh[2], 0, 7, True),
    ]
    result = model.forward.mixed_forward_batch([1, 2, 3], lanes, slices)
    rows = [expected([*OTHER[:n], i])[-1] for i, n in ((1, 2), (2, 5), (3, 7))]
    assert_logits(result.decode_logits, np.stack(rows))
    assert_logits(result.prefill_logits[0], expected(PROMPT)[-1:])
    assert result.prefill_logits[1] is None
    assert_logits(result.prefill_logits[2], expected(OTHER)[-1:])
    assert [seq.seq_len for seq in (*lanes, *fresh)] == [3, 6, 8, N, 7, 7]
    empty = model.forward.mixed_forward_batch([4], lanes[:1], [])
    assert empty.prefill_logits == []
    assert_logits(empty.decode_logits, expected([*OTHER[:2], 1, 4])[-1:])


@pytest.mark.contract("forward.mixed_forward_batch")
def test_windows_of_a_step_may_have_all_rows(model: Model, expected: Expected) -> None:
    lane, fresh = prefilled(model, OTHER), model.lifecycle.alloc_sequence()
    result = model.forward.mixed_forward_batch(
        [1], [lane], [PrefillSlice(PROMPT, fresh, 0, 12, False)], logits="all"
    )
    assert_logits(result.decode_logits, expected([*OTHER, 1])[-1:])
    assert_logits(result.prefill_logits[0], expected(PROMPT)[:12])
    none = model.forward.mixed_forward_batch(
        [2], [lane], [PrefillSlice(PROMPT, fresh, 12, 8, True)], logits="none"
    )
    assert none.prefill_logits == [None]
    assert fresh.seq_len == N


def slices_of(model: Model, *prompts: list[int]) -> list[PrefillSlice]:
    """A finishing window of each prompt, in new sequences."""
    return [
        PrefillSlice(prompt, model.lifecycle.alloc_sequence(), 0, len(prompt), True)
        for prompt in prompts
    ]


@pytest.mark.contract("forward.prefill_batch_chunk")
def test_prefill_batch_chunk_places_row_i_at_row_base_plus_i(
    model: Model, expected: Expected
) -> None:
    slices = slices_of(model, PROMPT, OTHER, PROMPT[:4])
    views = model.forward.prefill_batch_chunk(slices, row_base=5)
    for i, (piece, view) in enumerate(zip(slices, views, strict=True)):
        assert view is not None
        assert view.row_numbers == range(5 + i, 6 + i)
        assert_logits(view, expected(list(piece.prompt_tokens))[-1:])
    assert [piece.seq.seq_len for piece in slices] == [N, 7, 4]


@pytest.mark.contract("forward.prefill_batch_chunk")
def test_a_window_that_ends_nothing_keeps_its_row_free(model: Model, expected: Expected) -> None:
    middle = PrefillSlice(PROMPT, model.lifecycle.alloc_sequence(), 0, 5, False)
    (last,) = slices_of(model, OTHER)
    views = model.forward.prefill_batch_chunk([middle, last], row_base=3)
    assert views[0] is None
    assert views[1] is not None
    assert views[1].row_numbers == range(4, 5)
    assert_logits(views[1], expected(OTHER)[-1:])


@pytest.mark.contract("forward.prefill_batch_chunk")
def test_rows_that_a_step_writes_without_asking_are_stale(model: Model) -> None:
    """The row of a window that ends nothing is written, too: no older view may survive there."""
    old = model.forward.prefill(OTHER, model.lifecycle.alloc_sequence())
    middle = PrefillSlice(PROMPT, model.lifecycle.alloc_sequence(), 0, 5, False)
    model.forward.prefill_batch_chunk([middle, *slices_of(model, OTHER)])
    with pytest.raises(StaleHandleError):
        np.asarray(old)


@pytest.mark.contract("forward.prefill_batch_chunk")
def test_prefill_above_decode_rows_leaves_them(model: Model, expected: Expected) -> None:
    seqs = [prefilled(model, OTHER), prefilled(model, PROMPT)]
    decoded = model.forward.decode_batch([1, 2], seqs)
    views = model.forward.prefill_batch_chunk(slices_of(model, PROMPT), row_base=2)
    assert_logits(decoded, np.stack([expected([*OTHER, 1])[-1], expected([*PROMPT, 2])[-1]]))
    assert_logits(views[0], expected(PROMPT)[-1:])


@pytest.mark.contract("forward.prefill_batch_chunk")
def test_rows_that_do_not_fit_fall_back_to_row_0(model: Model, expected: Expected) -> None:
    views = model.forward.prefill_batch_chunk(slices_of(model, PROMPT, OTHER), row_base=63)
    assert [view.first_row for view in views if view is not None] == [0, 1]
    assert_logits(views[1], expected(OTHER)[-1:])


@pytest.mark.contract("forward.prefill_batch_chunk")
def test_rows_do_not_fall_back_over_an_unread_decode(model: Model) -> None:
    seq = prefilled(model, OTHER)
    slices = slices_of(model, PROMPT, OTHER)
    decoded = model.forward.decode(1, seq)
    seqs = [seq, *(piece.seq for piece in slices)]
    with unchanged(model, *seqs), pytest.raises(InvalidArgumentError, match="unread decode"):
        model.forward.prefill_batch_chunk(slices, row_base=63)
    assert model.logits.argmax(decoded) >= 0  # read, so that its row is free now
    views = model.forward.prefill_batch_chunk(slices, row_base=63)
    assert [view.first_row for view in views if view is not None] == [0, 1]
    with pytest.raises(StaleHandleError):
        np.asarray(decoded)


@pytest.mark.contract("forward.kv_block_size")
def test_kv_block_size(model: Model) -> None:
    assert model.forward.kv_block_size == 16
    seq = prefilled(model, PROMPT[:16])
    assert len(seq.block_table) == 1
    model.forward.decode(1, seq)
    assert len(seq.block_table) == 2


def test_facts_and_capabilities_of_later_issues(model: Model) -> None:
    forward = model.forward
    assert (forward.requires_single_chunk, forward.hc_mult, forward.supports_beam) == (
        False,
        0,
        False,
    )
    assert forward.prefill_tail_split(PROMPT) is None
    with pytest.raises(CapabilityError, match=r"forward\.generate_beam_batch"):
        forward.generate_beam_batch([])


@pytest.mark.contract("forward.prefill_twophase")
def test_prefill_twophase_without_recurrence_is_a_prefill(model: Model, expected: Expected) -> None:
    seq = model.lifecycle.alloc_sequence()
    view = model.forward.prefill_twophase(PROMPT, seq, 8)
    assert_logits(view, expected(PROMPT)[-1:])
    assert seq.seq_len == seq.prompt_len == len(PROMPT)


# -- refusals ---------------------------------------------------------------------------------

BAD_TOKENS = [
    pytest.param([], id="empty"),
    pytest.param([5, 203], id="beyond"),
    pytest.param([-1], id="negative"),
    pytest.param([2**40], id="huge"),
    pytest.param([2**70], id="beyond-int64"),
    pytest.param([1.5], id="fraction"),
    pytest.param([True], id="bool"),
    pytest.param([[1, 2]], id="nested"),
    pytest.param(["5"], id="text"),
    pytest.param("5 6", id="string"),
    pytest.param([None], id="none"),
    pytest.param([[1], [2, 3]], id="ragged"),
]


@pytest.mark.parametrize("tokens", BAD_TOKENS)
def test_tokens_outside_the_vocabulary_are_refused(model: Model, tokens: list[int]) -> None:
    fresh, seq = model.lifecycle.alloc_sequence(), prefilled(model, PROMPT)
    forward, verify = model.forward, model.verify
    with unchanged(model, fresh, seq):
        with pytest.raises(InvalidArgumentError):
            forward.prefill(tokens, fresh)
        with pytest.raises(InvalidArgumentError):
            forward.prefill_chunk(tokens, fresh, 0, 1, True)
        with pytest.raises(InvalidArgumentError):
            forward.decode_batch(tokens, [seq])
        with pytest.raises(InvalidArgumentError):
            verify.decode_verify(tokens, seq)


@pytest.mark.parametrize(
    ("start", "length", "last"),
    [
        (0, 0, False),
        (0, -1, False),
        (-1, 3, False),
        (0, N + 1, True),
        (0, N, False),
        (0, N - 1, True),
        (1, 3, False),
        (N, 1, True),
    ],
)
def test_windows_outside_the_prompt_are_refused(
    model: Model, start: int, length: int, last: bool
) -> None:
    seq = model.lifecycle.alloc_sequence()
    with unchanged(model, seq), pytest.raises(InvalidArgumentError):
        model.forward.prefill_chunk(PROMPT, seq, start, length, last)


def test_a_window_continues_what_the_sequence_holds(model: Model) -> None:
    seq = model.lifecycle.alloc_sequence()
    model.forward.prefill_chunk(PROMPT, seq, 0, 4, False)
    with unchanged(model, seq):
        with pytest.raises(InvalidArgumentError, match="stands at 4"):
            model.forward.prefill_chunk(PROMPT, seq, 0, 4, False)
        with pytest.raises(InvalidArgumentError, match="stands at 4"):
            model.forward.prefill(PROMPT, seq)
        with pytest.raises(InvalidArgumentError, match="stands at 4"):
            model.forward.prefill_chunk(PROMPT, seq, 8, 4, False)
        with pytest.raises(InvalidArgumentError, match="differs"):
            model.forward.prefill_chunk([*OTHER, *PROMPT], seq, 4, 4, False)
        with pytest.raises(InvalidArgumentError, match="stands at 4"):
            model.forward.prefill_batch_chunk([PrefillSlice(PROMPT, seq, 5, 3, False)])


def test_a_sequence_given_twice_is_refused(model: Model) -> None:
    seq, other = prefilled(model, PROMPT), prefilled(model, OTHER)
    window = PrefillSlice([*PROMPT, 1], seq, N, 1, True)
    with unchanged(model, seq, other):
        for call in (
            lambda: model.forward.decode_batch([1, 2, 3], [seq, other, seq]),
            lambda: model.forward.mixed_forward([1], [seq], window),
            lambda: model.forward.prefill_batch_chunk([window, window]),
            lambda: model.forward.mixed_forward_batch([1, 2], [other, seq], [window]),
        ):
            with pytest.raises(InvalidArgumentError, match="twice"):
                call()


def test_lengths_that_disagree_and_empty_steps_are_refused(model: Model) -> None:
    seq = prefilled(model, PROMPT)
    with unchanged(model, seq):
        for call in (
            lambda: model.forward.decode_batch([1, 2], [seq]),
            lambda: model.forward.decode_batch([], [seq]),
            lambda: model.forward.decode_batch([1], []),
            lambda: model.forward.decode_batch([], []),
            lambda: model.forward.mixed_forward_batch([], [], []),
            lambda: model.forward.mixed_forward_batch([1], [], []),
            lambda: model.forward.prefill_batch_chunk([]),
            lambda: model.forward.prefill_batch_chunk(slices_of(model, OTHER), row_base=-1),
            lambda: model.forward.prefill(PROMPT, seq, logits="some"),  # type: ignore[arg-type]
        ):
            with pytest.raises(InvalidArgumentError):
                call()


def test_decode_needs_a_position(model: Model) -> None:
    seq, other = model.lifecycle.alloc_sequence(), prefilled(model, PROMPT)
    with unchanged(model, seq, other), pytest.raises(SequenceStateError, match="at least one"):
        model.forward.decode_batch([1, 2], [other, seq])


def test_no_sequence_outgrows_max_seq_len(model: Model) -> None:
    fresh, full = model.lifecycle.alloc_sequence(), prefilled(model, [1] * 200)
    other = prefilled(model, OTHER)
    with unchanged(model, fresh, full, other):
        with pytest.raises(PromptTooLongError, match="201 positions"):
            model.forward.prefill([1] * 201, fresh)
        with pytest.raises(PromptTooLongError, match="201 positions"):
            model.forward.decode_batch([1, 2], [other, full])
        with pytest.raises(PromptTooLongError, match="201 positions"):
            model.forward.mixed_forward([1], [other], PrefillSlice([1] * 201, full, 200, 1, True))


def test_rows_beyond_the_arena_or_the_step_are_refused(loaded: LoadedModel) -> None:
    model, limits = loaded.model, loaded.core.limits
    fresh = model.lifecycle.alloc_sequence()
    with unchanged(model, fresh):
        with pytest.raises(InvalidArgumentError, match="65 positions"):
            model.forward.prefill([1] * 65, fresh, logits="all")
        with pytest.raises(InvalidArgumentError, match="allowed"):
            model.forward.prefill_batch_chunk(
                [PrefillSlice([1] * 65, fresh, 0, 65, True)], logits="all"
            )
    assert limits.logits_rows == 64
    many: list[SequenceState] = [model.lifecycle.alloc_sequence() for _ in range(10)]
    prompts = [PrefillSlice([1] * 60, seq, 0, 60, True) for seq in many]
    with unchanged(model, *many), pytest.raises(InvalidArgumentError, match="600 rows"):
        model.forward.prefill_batch_chunk(prompts)
    assert limits.max_rows == 512
