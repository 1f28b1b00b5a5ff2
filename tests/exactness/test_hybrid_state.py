"""The recurrent state itself, bit for bit: after any split, any verify, and any way back."""

from __future__ import annotations

import pytest

from atlas.model.load import LoadedModel
from atlas.model.sequence import SequenceState
from tests.exactness.serial import HYBRID, Case, assert_row, bits, sequence, text

PROMPT = text(0)[:150]


def state(loaded: LoadedModel, seq: SequenceState) -> bytes:
    """State and convolution tails of every recurrent layer."""
    assert loaded.core.states is not None
    assert seq.slot is not None
    return b"".join(part.tobytes() for part in loaded.core.states.pools.read(seq.slot))


@pytest.mark.parametrize("case", HYBRID, ids=str)
def test_every_split_of_a_prompt_leaves_the_state_of_one_pass(case: Case) -> None:
    loaded = case.load(2)
    model = loaded.model
    with sequence(model) as seq:
        whole = bits(model.forward.prefill(PROMPT, seq))
        expected = state(loaded, seq)
        after = bits(model.forward.decode(text(0)[150], seq))
    assert_row(case, 0, 149, whole)
    assert_row(case, 0, 150, after)
    for cut in range(1, 150):
        with sequence(model) as seq:
            model.forward.prefill_chunk(PROMPT, seq, 0, cut, False)
            view = model.forward.prefill_chunk(PROMPT, seq, cut, 150 - cut, True)
            assert bits(view) == whole, cut
            assert state(loaded, seq) == expected, cut
            assert bits(model.forward.decode(text(0)[150], seq)) == after, cut


@pytest.mark.parametrize("case", HYBRID, ids=str)
def test_two_phases_leave_the_state_of_one_pass(case: Case) -> None:
    loaded = case.load(2)
    model = loaded.model
    with sequence(model) as one, sequence(model) as two:
        view = bits(model.forward.prefill(PROMPT, one))
        assert bits(model.forward.prefill_twophase(PROMPT, two, 40)) == view
        assert state(loaded, two) == state(loaded, one)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("case", HYBRID, ids=str)
def test_accepting_any_count_leaves_the_state_of_serial_decoding(case: Case, threads: int) -> None:
    """With wrong drafts behind the rows that are kept; twice, so that a trace would show."""
    loaded = case.load(threads)
    model, start = loaded.model, 45
    with sequence(model) as serial:
        model.forward.prefill(PROMPT[:start], serial)
        expected = [state(loaded, serial)]
        for token in PROMPT[start : start + 16]:
            model.forward.decode(token, serial)
            expected.append(state(loaded, serial))
    for k in (1, 2, 5, 16):
        for kept in range(k + 1):
            with sequence(model) as seq:
                model.forward.prefill(PROMPT[:start], seq)
                for first in (0, kept):
                    if first + kept > 16:
                        continue
                    at = start + first
                    tokens = [*PROMPT[at : at + kept], *text(1)[kept:k]]
                    model.verify.decode_verify(tokens, seq)
                    model.verify.accept(seq, kept)
                    assert state(loaded, seq) == expected[first + kept], (k, kept)


@pytest.mark.parametrize("case", HYBRID, ids=str)
def test_serial_steps_leave_the_state_of_a_prompt(case: Case) -> None:
    loaded = case.load(2)
    model = loaded.model
    with sequence(model) as one, sequence(model) as two:
        model.forward.prefill(PROMPT[:60], one)
        model.forward.prefill(PROMPT[:1], two)
        for token in PROMPT[1:60]:
            model.forward.decode(token, two)
        assert state(loaded, two) == state(loaded, one)
