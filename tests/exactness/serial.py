"""The bits that every way of running a model must give: one token after the other, alone.

Text number ``seed`` is a fixed stream of ids. ``rows(case, seed, n)[p]`` are the logits after its
positions 0 … p, made by a model with one thread that never runs more than one row. On the CPU
prompt and step tokens use one order, so they do not depend on where the prompt ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import numpy as np

from atlas.model import Model
from atlas.model.load import LoadedModel
from atlas.model.logits_view import LogitsView
from atlas.model.records import PrefillSlice
from atlas.model.sequence import SequenceState
from tests.helpers.random_model import CONFIGS, shared_random

TEXT_LEN = 560


class Case(NamedTuple):
    """A model to run: a shape of ``CONFIGS``, the format of its weights, and its cache's type."""

    config: str
    format: str = "f32"
    kv_dtype: str = "auto"

    def __str__(self) -> str:
        return "-".join(part for part in self if part != "auto")

    def load(self, threads: int, max_step_tokens: int = 512) -> LoadedModel:
        """The session's model of this case."""
        return shared_random(
            self.config,
            self.format,
            kv_dtype=self.kv_dtype,
            threads=threads,
            max_step_tokens=max_step_tokens,
        )


FLOAT = [Case("dense"), Case("gemma"), Case("moe")]
QUANTIZED = [
    Case("dense_wide", "q8_0"),
    Case("gemma_wide", "q6_k"),
    Case("moe_wide", "q4_k"),
    Case("moe_wide", "q4_0", "float32"),
    Case("dense_wide", "q4_1"),
]
HYBRID = [
    Case("delta"),
    Case("delta_last"),
    Case("mamba"),
    Case("mixers"),
    Case("mamba_alone"),
    Case("delta_wide", "q8_0"),
]
CASES = FLOAT + QUANTIZED + HYBRID


@cache
def text(seed: int) -> tuple[int, ...]:
    """Ids of text number ``seed``."""
    vocabulary = CONFIGS["dense"].vocab_size
    ids = np.random.default_rng(seed).integers(0, vocabulary, TEXT_LEN)
    return tuple(int(i) for i in ids)


_ROWS: dict[tuple[Case, int], list[bytes]] = {}


def rows(case: Case, seed: int, count: int) -> list[bytes]:
    """Logits of the first ``count`` positions, at least; from a model of its own."""
    known = _ROWS.get((case, seed), [])
    if len(known) < count:
        model = case.load(threads=1, max_step_tokens=1).model
        known = []
        with sequence(model) as seq:
            known.append(bits(model.forward.prefill(text(seed)[:1], seq)))
            known += [bits(model.forward.decode(token, seq)) for token in text(seed)[1:count]]
        _ROWS[case, seed] = known
    return known


def bits(view: LogitsView | None, row: int = 0) -> bytes:
    """The bytes of one row."""
    assert view is not None
    return view.numpy()[row].tobytes()


@contextmanager
def sequence(model: Model) -> Iterator[SequenceState]:
    """A sequence for the length of the block."""
    seq = model.lifecycle.alloc_sequence()
    try:
        yield seq
    finally:
        model.lifecycle.free_sequence(seq)


@contextmanager
def sequences(model: Model, texts: Iterable[tuple[int, int]]) -> Iterator[list[SequenceState]]:
    """One sequence for each (seed, length), holding that much of its text."""
    seqs: list[SequenceState] = []
    try:
        for seed, length in texts:
            seqs.append(model.lifecycle.alloc_sequence())
            if length:
                model.forward.prefill(text(seed)[:length], seqs[-1], logits="none")
        yield seqs
    finally:
        for seq in seqs:
            model.lifecycle.free_sequence(seq)


def window(seed: int, seq: SequenceState, length: int, *, finishes: bool) -> PrefillSlice:
    """The next ``length`` tokens of a text as a prompt window that ends the prompt or does not."""
    end = seq.seq_len + length
    return PrefillSlice(text(seed)[: end + (not finishes)], seq, seq.seq_len, length, finishes)


def mark(model: Model, seq: SequenceState) -> None:
    """Let :func:`return_to` come back to where a sequence stands."""
    if model.ssm is not None:
        model.ssm.save_snapshot(seq, 0)


def return_to(model: Model, seq: SequenceState, length: int) -> None:
    """Drop a sequence's positions from the marked ``length`` on."""
    if model.ssm is not None and seq.seq_len != length:
        model.ssm.restore_snapshot(seq, 0)
    model.lifecycle.rewind(seq, length)


def assert_continues(
    case: Case, model: Model, seed: int, seq: SequenceState, num_tokens: int = 2
) -> None:
    """What ``seq`` holds is bitwise what serial decoding leaves: its next rows are."""
    for position in range(seq.seq_len, seq.seq_len + num_tokens):
        view = model.forward.decode(text(seed)[position], seq)
        assert_row(case, seed, position, bits(view))


def assert_row(case: Case, seed: int, position: int, actual: bytes) -> None:
    """A row has the bits of serial decoding; if not, say by how much it differs."""
    expected = rows(case, seed, position + 1)[position]
    if actual != expected:
        got, want = (np.frombuffer(raw, np.float32) for raw in (actual, expected))
        worst = float(np.abs(got - want).max())
        raise AssertionError(
            f"{case}: text {seed}, position {position}: {int((got != want).sum())} logits differ "
            f"from serial decoding, by up to {worst:.3g}"
        )


def assert_rows(case: Case, seed: int, positions: Sequence[int], view: LogitsView | None) -> None:
    """A view's rows are those of these positions."""
    assert view is not None
    assert view.num_rows == len(positions)
    for row, position in enumerate(positions):
        assert_row(case, seed, position, bits(view, row))
