"""The engine against transformers in float32: exactness 5, at every position, every way to run.

Greedy texts are compared by one forward of transformers over prompt and answer: each token of the
answer must be the argmax of the position before it, so the texts are equal token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from atlas.model import Model
from atlas.model.load import LoadOptions, load_model
from atlas.model.logits_view import LogitsView
from atlas.weights.checkpoint import open_checkpoint
from tests.helpers.reference import ARCHITECTURES, NOT_IN_GGUF, ReferenceModel
from tests.helpers.reference_gguf import write_gguf

Floats = NDArray[np.float32]
GetReference = Callable[[str], ReferenceModel]

TOLERANCE = 1e-4
PROMPT_LEN = 60
NUM_GREEDY = 64
BATCH_LENGTHS = (1, 7, 17, 33, 60)
SPLITS = ([20, 40, 60], [1, 2, 18, 60], [16, 47, 48, 60])


@dataclass(frozen=True)
class Pair:
    """One reference model, and ours loaded from its file."""

    reference: ReferenceModel
    model: Model

    def prefilled(self, prompt: Sequence[int], ends: Sequence[int]) -> Floats:
        """Logits of every position of a prompt that runs in windows with these ends."""
        seq = self.model.lifecycle.alloc_sequence()
        rows = []
        for start, end in pairwise([0, *ends]):
            last = end == len(prompt)
            view = self.model.forward.prefill_chunk(
                prompt, seq, start, end - start, last, logits="all"
            )
            rows.append(host(view))
        self.model.lifecycle.free_sequence(seq)
        return np.concatenate(rows)


@pytest.fixture(
    scope="module",
    params=[
        (name, kind)
        for name in ARCHITECTURES
        for kind in ("folder", "gguf")
        if kind == "folder" or name not in NOT_IN_GGUF
    ],
    ids="-".join,
)
def pair(
    request: pytest.FixtureRequest,
    reference: GetReference,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pair]:
    """Folders run on two threads, GGUF files on one."""
    name, kind = request.param
    model = reference(name)
    path = model.directory
    if kind == "gguf":
        path = write_gguf(model, tmp_path_factory.mktemp("gguf") / f"{name}.gguf")
    with open_checkpoint(path) as checkpoint:
        loaded = load_model(checkpoint, LoadOptions(threads=2 if kind == "folder" else 1))
    assert loaded.kv_dtype == "float32"
    yield Pair(model, loaded.model)
    loaded.model.lifecycle.teardown()


def host(view: LogitsView | None) -> Floats:
    assert view is not None
    return np.asarray(view)


def assert_close(actual: Floats, expected: Floats) -> None:
    """Per row, max |a − b| / max |b| is within the tolerance."""
    assert actual.shape == expected.shape
    error = np.abs(actual - expected).max(-1) / np.abs(expected).max(-1)
    assert error.max() <= TOLERANCE, f"position {error.argmax()}: {error.max():.2e}"


def assert_greedy(tokens: Sequence[int], expected: Floats) -> None:
    """``tokens[i]`` is the greatest logit of row i; a near-tie is shown as such."""
    for i, (token, row) in enumerate(zip(tokens, expected, strict=True)):
        best = int(np.argmax(row))
        if token != best:
            gap = (row[best] - row[token]) / np.abs(row).max()
            what = "a near-tie" if gap <= TOLERANCE else "no near-tie"
            pytest.fail(
                f"token {i} is {token}, transformers' is {best}: {what}, "
                f"{gap:.2e} of the row's greatest apart"
            )


def test_whole_prefill_has_the_reference_logits(pair: Pair) -> None:
    prompt = pair.reference.prompt(PROMPT_LEN)
    assert_close(pair.prefilled(prompt, [PROMPT_LEN]), pair.reference.logits(prompt))


@pytest.mark.parametrize("ends", SPLITS, ids=str)
def test_chunked_prefill_has_the_reference_logits(pair: Pair, ends: list[int]) -> None:
    prompt = pair.reference.prompt(PROMPT_LEN)
    assert_close(pair.prefilled(prompt, ends), pair.reference.logits(prompt))


def test_a_batch_of_five_lengths_writes_the_reference_texts(pair: Pair) -> None:
    model = pair.model
    seqs = [model.lifecycle.alloc_sequence() for _ in BATCH_LENGTHS]
    prompts = [pair.reference.prompt(length, seed=length) for length in BATCH_LENGTHS]
    last = [
        host(model.forward.prefill(prompt, seq))[0]
        for prompt, seq in zip(prompts, seqs, strict=True)
    ]
    steps = [np.stack(last)]
    texts = [[int(np.argmax(row))] for row in last]
    while len(texts[0]) < NUM_GREEDY:
        view = model.forward.decode_batch([text[-1] for text in texts], seqs)
        for text, token in zip(texts, model.logits.argmax_batch(view, len(seqs)), strict=True):
            text.append(int(token))
        steps.append(host(view))
    for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        expected = pair.reference.logits([*prompt, *text[:-1]])[len(prompt) - 1 :]
        assert_close(np.stack([step[i] for step in steps]), expected)
        assert_greedy(text, expected)
        model.lifecycle.free_sequence(seqs[i])
    assert len({token for text in texts for token in text}) > 20  # not all in short loops


def test_one_sequence_writes_the_reference_text(pair: Pair) -> None:
    """As ``ReferenceModel.greedy`` writes it, every answer from the whole text."""
    model, prompt = pair.model, pair.reference.prompt(12)
    seq = model.lifecycle.alloc_sequence()
    text = [model.logits.argmax(_required(model.forward.prefill(prompt, seq)))]
    while len(text) < NUM_GREEDY:
        text.append(model.logits.argmax(model.forward.decode(text[-1], seq)))
    model.lifecycle.free_sequence(seq)
    assert_greedy(text, pair.reference.logits([*prompt, *text[:-1]])[len(prompt) - 1 :])


def _required(view: LogitsView | None) -> LogitsView:
    assert view is not None
    return view
