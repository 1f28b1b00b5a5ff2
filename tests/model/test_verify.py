"""Verify: K rows at once, then exactly one of accept and free."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from atlas.errors import (
    CapabilityError,
    InvalidArgumentError,
    PromptTooLongError,
    SequenceStateError,
)
from atlas.model import Model
from atlas.model.load import LoadedModel
from atlas.model.records import NON_FINITE, PrefillSlice
from tests.model.checks import OTHER, PROMPT, assert_logits, prefilled, state, unchanged
from tests.model.conftest import Expected

N, K = len(PROMPT), len(OTHER)


@pytest.mark.contract("verify.decode_verify")
def test_decode_verify_runs_k_rows(model: Model, expected: Expected) -> None:
    seq = prefilled(model, PROMPT)
    result = model.verify.decode_verify(OTHER, seq)
    rows = expected([*PROMPT, *OTHER])[N:]
    assert_logits(result.logits, rows)
    assert result.argmax.dtype == np.int32
    assert result.argmax.tolist() == rows.argmax(-1).tolist()
    assert (seq.seq_len, seq.verify_rows, seq.prompt_len) == (N + K, K, N)
    assert seq.tokens.tolist() == [*PROMPT, *OTHER]


@pytest.mark.contract("verify.decode_verify")
def test_decode_verify_gives_the_rows_asked_for(model: Model, expected: Expected) -> None:
    rows = expected([*PROMPT, *OTHER])[N:]
    for mode, wanted in (("last", rows[-1:]), ("none", None)):
        seq = prefilled(model, PROMPT)
        result = model.verify.decode_verify(OTHER, seq, logits=mode)
        assert result.argmax.tolist() == rows.argmax(-1).tolist()
        if wanted is None:
            assert result.logits is None
        else:
            assert_logits(result.logits, wanted)
    with unchanged(model, seq := prefilled(model, PROMPT)), pytest.raises(InvalidArgumentError):
        model.verify.decode_verify(OTHER, seq, logits="first")  # type: ignore[arg-type]


@pytest.mark.contract("verify.accept")
@pytest.mark.parametrize("kept", range(K + 1))
def test_accept_leaves_what_decoding_leaves(model: Model, kept: int) -> None:
    """Blocks included: the prompt ends just below the edge of one."""
    serial, seq = prefilled(model, PROMPT[:13]), prefilled(model, PROMPT[:13])
    for token in OTHER[:kept]:
        model.forward.decode(token, serial)
    model.verify.decode_verify(OTHER, seq)
    assert len(seq.block_table) == 2
    model.verify.accept(seq, kept)
    wanted, got = state(serial), state(seq)
    assert len(got.pop("blocks")) == len(wanted.pop("blocks"))  # type: ignore[arg-type]
    assert got == wanted
    rows = [np.asarray(model.forward.decode(9, s)).tobytes() for s in (serial, seq)]
    assert rows[0] == rows[1]


@pytest.mark.contract("verify.accept")
@pytest.mark.parametrize("rows_kept", [-1, K + 1])
def test_accept_refuses_other_counts(model: Model, rows_kept: int) -> None:
    seq = prefilled(model, PROMPT)
    model.verify.decode_verify(OTHER, seq)
    with (
        unchanged(model, seq),
        pytest.raises(InvalidArgumentError, match=f"rows_kept is {rows_kept}"),
    ):
        model.verify.accept(seq, rows_kept)
    model.verify.accept(seq, 2)
    assert seq.seq_len == N + 2


@pytest.mark.contract("verify.accept")
def test_accept_ends_one_verify(model: Model) -> None:
    seq = prefilled(model, PROMPT)
    with unchanged(model, seq), pytest.raises(SequenceStateError, match="no verify"):
        model.verify.accept(seq, 1)
    model.verify.decode_verify(OTHER, seq)
    model.verify.accept(seq, 1)
    with unchanged(model, seq), pytest.raises(SequenceStateError, match="no verify"):
        model.verify.accept(seq, 1)
    model.verify.decode_verify(OTHER, seq)
    model.verify.accept(seq, 0)
    assert (seq.seq_len, seq.tokens.tolist()) == (N + 1, [*PROMPT, OTHER[0]])


def test_nothing_else_may_follow_a_verify(model: Model) -> None:
    seq, other = prefilled(model, PROMPT), prefilled(model, OTHER)
    model.verify.decode_verify(OTHER, seq)
    longer = [*PROMPT, *OTHER, 1]
    window = PrefillSlice(longer, seq, N + K, 1, True)
    calls: list[Callable[[], object]] = [
        lambda: model.forward.decode(1, seq),
        lambda: model.forward.decode_batch([1, 2], [other, seq]),
        lambda: model.forward.prefill_chunk(longer, seq, N + K, 1, True),
        lambda: model.forward.prefill_batch_chunk([window]),
        lambda: model.forward.mixed_forward([1], [other], window),
        lambda: model.verify.decode_verify([1], seq),
        lambda: model.lifecycle.rewind(seq, 1),
    ]
    with unchanged(model, seq, other):
        for call in calls:
            with pytest.raises(SequenceStateError, match="awaits accept or free"):
                call()
    model.verify.accept(seq, 1)
    model.forward.decode(1, seq)


def test_limits_of_a_verify(model: Model) -> None:
    empty, seq, full = model.lifecycle.alloc_sequence(), prefilled(model, OTHER), None
    full = prefilled(model, [1] * 195)
    with unchanged(model, empty, seq, full):
        with pytest.raises(SequenceStateError, match="at least one position"):
            model.verify.decode_verify([1, 2], empty)
        with pytest.raises(InvalidArgumentError, match="logits rows 0 … 64"):
            model.verify.decode_verify([1] * 65, seq)
        with pytest.raises(PromptTooLongError, match="201 positions"):
            model.verify.decode_verify([1] * 6, full)
    model.verify.decode_verify([1] * 64, seq)
    model.verify.accept(seq, 64)


def test_a_row_that_is_not_finite_is_marked(loaded: LoadedModel) -> None:
    """The other rows are answered."""
    model = loaded.model
    seq = prefilled(model, PROMPT)
    best = model.verify.decode_verify([1, 2, 3], seq).argmax.tolist()
    model.verify.accept(seq, 0)
    run = loaded.core.runtime.run

    def spoil(*args: object) -> None:
        run(*args)
        loaded.core.arena.rows[1, 50] = np.nan

    loaded.core.runtime.run = spoil
    result = model.verify.decode_verify([1, 2, 3], seq)
    assert result.argmax.tolist() == [best[0], NON_FINITE, best[2]]


@pytest.mark.contract("verify.graphed")
def test_graphed_gives_the_bits_of_decode_verify(model: Model) -> None:
    """Also where the backend has no graphs, which the circuit discloses."""
    seq, twin = prefilled(model, PROMPT), prefilled(model, PROMPT)
    plain = model.verify.decode_verify([1, 2, 3], seq)
    assert plain.logits is not None
    rows = model.logits.to_host(plain.logits)
    graphed = model.verify.graphed([1, 2, 3], twin)
    assert graphed.logits is not None
    assert np.array_equal(model.logits.to_host(graphed.logits), rows)
    assert graphed.argmax.tolist() == plain.argmax.tolist()
    model.verify.accept(twin, 2)
    assert twin.seq_len == len(PROMPT) + 2


def test_capabilities_of_later_issues(model: Model) -> None:
    seq = prefilled(model, PROMPT)
    assert model.verify.can_batch([2, 2]) is False
    with pytest.raises(CapabilityError, match=r"verify\.batched"):
        model.verify.batched([1, 2], [2], [seq])
    assert model.verify.fold_accepted([0], [1], 2) is False
