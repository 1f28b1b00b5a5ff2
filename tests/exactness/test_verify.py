"""A verify's rows are those of serial decoding, and accept leaves what decoding leaves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.exactness.serial import (
    CASES,
    Case,
    assert_continues,
    assert_row,
    assert_rows,
    bits,
    mark,
    return_to,
    rows,
    sequence,
    text,
)

LENGTHS = st.one_of(st.integers(1, 50), st.sampled_from([250, 255, 256, 257]))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("case", CASES, ids=str)
@settings(max_examples=2, deadline=None)
@given(length=LENGTHS, k=st.integers(1, 9))
@example(length=255, k=5)
@example(length=30, k=4)
@example(length=15, k=2)
def test_verify_then_accept_of_every_count_is_serial_decoding(
    case: Case, threads: int, length: int, k: int
) -> None:
    """Wrong drafts sit behind the rows that are kept; the tokens that follow are decoded."""
    model = case.load(threads).model
    verify = model.verify
    with sequence(model) as seq:
        model.forward.prefill(text(0)[:length], seq, logits="none")
        result = verify.decode_verify(text(0)[length : length + k], seq)
        assert_rows(case, 0, range(length, length + k), result.logits)
        serial = rows(case, 0, length + k)[length : length + k]
        greedy = [int(np.argmax(np.frombuffer(row, np.float32))) for row in serial]
        assert result.argmax.tolist() == greedy
        verify.accept(seq, 0)
        mark(model, seq)
        for kept in range(k + 1):
            tokens = [*text(0)[length : length + kept], *text(1)[kept:k]]
            result = verify.decode_verify(tokens, seq)
            assert (seq.seq_len, seq.verify_rows) == (length + k, k)
            for row in range(kept):
                assert_row(case, 0, length + row, bits(result.logits, row))
            verify.accept(seq, kept)
            assert (seq.seq_len, seq.verify_rows) == (length + kept, 0)
            assert seq.tokens.tolist() == list(text(0)[: length + kept])
            assert_continues(case, model, 0, seq)
            return_to(model, seq, length)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_speculation_equals_serial_greedy(case: Case) -> None:
    """Draft, verify, accept in a loop writes the text of one-token greedy decoding."""
    model = case.load(2).model
    prompt = text(2)[:20]
    with sequence(model) as seq:
        view = model.forward.prefill(prompt, seq)
        assert view is not None
        serial = [model.logits.argmax(view)]
        while len(serial) < 40:
            serial.append(model.logits.argmax(model.forward.decode(serial[-1], seq)))
    rng = np.random.default_rng(0)
    with sequence(model) as seq:
        view = model.forward.prefill(prompt, seq)
        assert view is not None
        made = [model.logits.argmax(view)]
        while len(made) < 40:
            # Some drafts right, some wrong.
            drafts = [int(t) for t in serial[len(made) : len(made) + int(rng.integers(0, 6))]]
            if drafts and rng.random() < 0.5:
                wrong = int(rng.integers(len(drafts)))
                drafts[wrong] = (drafts[wrong] + 1) % model.logits.vocab_size
            best = model.verify.decode_verify([made[-1], *drafts], seq, logits="none").argmax
            kept = 1
            while kept <= len(drafts) and drafts[kept - 1] == best[kept - 1]:
                kept += 1
            model.verify.accept(seq, kept)
            made += [int(token) for token in best[:kept]]
        assert made[:40] == serial
