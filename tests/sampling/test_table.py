"""Tables of draws: their definition gives the samplers' tokens, with a last token unseen or not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atlas.errors import InvalidArgumentError
from atlas.sampler import Sampler
from atlas.sampling import SamplingParams
from atlas.sampling_table import EDIT, MAX_EDITS, ROW, SamplingTable, choose_tokens, host_reason

VOCAB = 97
IDS = st.integers(0, VOCAB - 1)
PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 1.7]),
        "seed": st.integers(0, 2**64 - 1),
    },
    optional={
        "top_k": st.integers(0, VOCAB + 3),
        "top_p": st.floats(0.01, 1.0),
        "min_p": st.floats(0.0, 1.0),
        "min_tokens": st.integers(0, 12),
        "logit_bias": st.dictionaries(IDS, st.floats(-20, 20), max_size=6),
        "bad_words": st.lists(IDS.map(lambda token: (token,)), max_size=4),
        "repetition_penalty": st.floats(0.5, 2.0),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
    },
)
EOS = (4, 40)


def table_of(rows: int) -> tuple[SamplingTable, Any, Any]:
    arrays = np.zeros((rows, 20), np.int32), np.zeros((rows * MAX_EDITS, 4), np.int32)
    return SamplingTable(*arrays, np.zeros((rows, 20), np.int32)), *arrays


@settings(deadline=None, max_examples=150)
@given(
    given_params=st.lists(PARAMS, min_size=1, max_size=4),
    prompt=st.lists(IDS, min_size=1, max_size=9),
    output=st.lists(IDS, max_size=9),
    unseen=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_table_chooses_what_samplers_choose(
    given_params: list[dict[str, Any]],
    prompt: list[int],
    output: list[int],
    unseen: bool,
    seed: int,
) -> None:
    logits = np.random.default_rng(seed).standard_normal((len(given_params) + 1, VOCAB)) * 4
    logits = logits.astype(np.float32)
    table, rows, edits = table_of(len(given_params))
    known = output[:-1] if unseen and output else output
    draws, samplers = [], {}
    token_ids = np.full(5, output[-1] if output else -1, np.int32)
    for i, options in enumerate(given_params):
        params = SamplingParams(**options)
        if host_reason(params, 50, VOCAB) is not None:
            continue
        sampler = Sampler(
            params, vocab_size=VOCAB, prompt_ids=prompt, eos_token_ids=EOS, sample_index=i
        )
        for token in known:
            sampler.observe(token)
        fed_row = 3 if len(known) < len(output) else -1
        draws.append(sampler.draw(i, len(prompt) + len(output), fed_row))
        samplers[i] = sampler
    table.fill(draws)  # a step is launched before the token that it is fed is observed
    want = np.full(len(logits), 7, np.int32)  # the last row is nobody's
    for i, sampler in samplers.items():
        for token in output[len(known) :]:
            sampler.observe(token)
        want[i] = sampler.sample(logits[i], len(prompt) + len(output)).token_id
    before, chosen = logits.copy(), np.full(len(logits), 7, np.int32)
    choose_tokens(logits, token_ids, rows[: table.num_rows], edits, chosen=chosen)
    np.testing.assert_array_equal(chosen, want)
    np.testing.assert_array_equal(logits, before)


def test_counts_follow_a_rewind() -> None:
    params = SamplingParams(presence_penalty=2.0, logit_bias={3: 1.5})
    sampler = Sampler(params, vocab_size=VOCAB, prompt_ids=[1], eos_token_ids=EOS)
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, [3, 9]] = 1.0, 2.0
    table, rows, edits = table_of(1)
    found = []
    for change in (lambda: None, lambda: sampler.observe(3), lambda: sampler.rewind(0)):
        change()
        table.fill([sampler.draw(0, 1 + sampler.num_output_tokens)])
        chosen = np.zeros(1, np.int32)
        choose_tokens(logits, np.zeros(1, np.int32), rows[:1], edits, chosen=chosen)
        assert chosen[0] == sampler.sample(logits[0], 1).token_id
        found.append(int(chosen[0]))
    assert found == [3, 9, 3]


def test_layouts() -> None:
    assert (ROW.itemsize, EDIT.itemsize) == (80, 16)
    rows = pytest.importorskip("atlas_kernels.sampling_rows")
    words = {name: at // 4 for name, (_, at) in ROW.fields.items()}
    names = [name for name in ROW.names if name != "unused"]
    assert {name: getattr(rows, name.upper()) for name in names} == {n: words[n] for n in names}
    assert (rows.ROW_BYTES, rows.EDIT_BYTES) == (80, 16)


def test_more_rows_than_there_is_room_for() -> None:
    sampler = Sampler(SamplingParams(presence_penalty=1.0), vocab_size=VOCAB, prompt_ids=[1])
    table, _, _ = table_of(1)
    with pytest.raises(InvalidArgumentError, match="2 rows; allowed: 1"):
        table.fill([sampler.draw(0, 1), sampler.draw(1, 1)])
