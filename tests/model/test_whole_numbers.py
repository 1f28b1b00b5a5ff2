"""Counts are integers: fractions and texts are refused by name, never cut."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from atlas.errors import InvalidArgumentError, SequenceStateError
from atlas.whole_number import whole_number


@pytest.mark.parametrize("value", [2.0, 1.9, "1", None, True, -1, 11, 2**70, float("nan")])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"count is .*; allowed: an integer, 0 … 10"):
        whole_number("count", value, 0, 10)


@pytest.mark.parametrize("value", [0, 10, np.int64(3), np.uint8(4)])
def test_any_integer_type_is_taken(value: Any) -> None:
    assert whole_number("count", value, 0, 10) == value


def test_members_of_the_model_refuse_fractions(model: Any) -> None:
    lifecycle = model.lifecycle
    with pytest.raises(InvalidArgumentError, match=r"budget_tokens is 5\.5"):
        lifecycle.alloc_sequence(5.5)
    seq = lifecycle.alloc_sequence()
    model.forward.prefill([3, 4, 5], seq)
    for call, name in (
        (lambda: lifecycle.rewind(seq, 2.9), "new_len is 2.9"),
        (lambda: lifecycle.rewind(seq, 2**70), "new_len is"),
        (lambda: lifecycle.reserve(seq, 1.5), "num_positions is 1.5"),
        (lambda: model.forward.prefill_chunk([3, 4, 5, 6], seq, 3, 1.0, True), "chunk_len is 1.0"),
        (lambda: model.forward.prefill_batch_chunk([None], row_base=0.5), "row_base is 0.5"),
    ):
        with pytest.raises(InvalidArgumentError, match=name):
            call()
    model.verify.decode_verify([3, 4], seq)
    with pytest.raises(InvalidArgumentError, match=r"rows_kept is 1\.9"):
        model.verify.accept(seq, 1.9)
    model.verify.accept(seq, 1)
    assert seq.seq_len == 4
    lifecycle.free_sequence(seq)


@pytest.mark.parametrize("other", [None, "x", 5])
def test_only_sequences_are_sequences(model: Any, other: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="seq is a"):
        model.forward.decode(3, other)


def test_a_sequence_is_forked_not_copied(model: Any) -> None:
    seq = model.lifecycle.alloc_sequence()
    for copier in (copy.copy, copy.deepcopy):
        with pytest.raises(SequenceStateError, match="fork"):
            copier(seq)
    model.lifecycle.free_sequence(seq)
