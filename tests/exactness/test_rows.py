"""Rows are independent: whoever shares a step, each row has the bits of its solo run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from atlas.model.load import LoadOptions, load_model
from atlas.ops.blocks import HostMatrix
from tests.exactness.serial import (
    CASES,
    Case,
    assert_continues,
    assert_row,
    assert_rows,
    bits,
    sequence,
    sequences,
    text,
    window,
)
from tests.helpers.random_model import CONFIGS, RandomCheckpoint

# Lengths around the edges of blocks (16), of attention's segments (256), and windows (7, 40, 300).
LENGTHS = st.one_of(st.integers(1, 50), st.sampled_from([254, 255, 256, 257, 301, 310]))
STARTS = st.one_of(st.just(0), LENGTHS)


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, int, bool]]]:
    """Lengths of decode lanes, and (start, length, finishes) of prompt windows."""
    lanes = draw(st.lists(LENGTHS, max_size=5))
    windows = st.tuples(STARTS, st.integers(1, 30), st.booleans())
    return lanes, draw(st.lists(windows, min_size=0 if lanes else 1, max_size=3))


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("case", CASES, ids=str)
@settings(max_examples=3, deadline=None)
@given(step=steps())
@example(step=([5, 256, 17], [(0, 20, True), (250, 12, True)]))
@example(step=([255, 300], []))
@example(step=([], [(0, 30, True), (13, 1, False), (240, 30, True)]))
def test_every_row_of_a_step_is_its_solo_row(
    case: Case, threads: int, step: tuple[list[int], list[tuple[int, int, bool]]]
) -> None:
    """Three decode lanes and two finishing prefills among the examples."""
    lanes, windows = step
    model = case.load(threads).model
    texts = [(i % 4, length) for i, length in enumerate(lanes)]
    texts += [(3 - i, start) for i, (start, _, _) in enumerate(windows)]
    with sequences(model, texts) as seqs:
        slices = [
            window(3 - i, seq, length, finishes=finishes)
            for i, (seq, (_, length, finishes)) in enumerate(
                zip(seqs[len(lanes) :], windows, strict=True)
            )
        ]
        tokens = [text(seed)[length] for seed, length in texts[: len(lanes)]]
        result = model.forward.mixed_forward_batch(tokens, seqs[: len(lanes)], slices)
        assert (result.decode_logits is None) == (not lanes)
        for row, (seed, length) in enumerate(texts[: len(lanes)]):
            assert result.decode_logits is not None
            assert_row(case, seed, length, result.decode_logits.numpy()[row].tobytes())
        for i, ((start, length, finishes), view) in enumerate(
            zip(windows, result.prefill_logits, strict=True)
        ):
            assert (view is not None) == finishes
            if finishes:
                assert_rows(case, 3 - i, [start + length - 1], view)
        # What the step wrote to the cache is exact, too.
        for (seed, _), seq in zip(texts, seqs, strict=True):
            assert_continues(case, model, seed, seq, 1)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("threads", [2])
def test_every_position_of_a_step_is_its_solo_row(case: Case, threads: int) -> None:
    model = case.load(threads).model
    with sequences(model, [(0, 250), (1, 0), (2, 31)]) as seqs:
        slices = [window(i, seq, 14 + i, finishes=i != 1) for i, seq in enumerate(seqs[:2])]
        result = model.forward.mixed_forward_batch([text(2)[31]], [seqs[2]], slices, logits="all")
        assert_rows(case, 2, [31], result.decode_logits)
        assert_rows(case, 0, range(250, 264), result.prefill_logits[0])
        assert_rows(case, 1, range(15), result.prefill_logits[1])


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("count", [3, 9, 40])
def test_decode_rows_do_not_depend_on_their_number(case: Case, count: int) -> None:
    """Few rows share attention's segments out over the threads, many rows do not."""
    model = case.load(threads=2).model
    texts = [(i % 4, 1 + 7 * i % 300) for i in range(count)]
    with sequences(model, texts) as seqs:
        view = model.forward.decode_batch([text(seed)[n] for seed, n in texts], seqs)
        for row, (seed, length) in enumerate(texts):
            assert_row(case, seed, length, view.numpy()[row].tobytes())


class SpoiledCheckpoint(RandomCheckpoint):
    """The embedding of one token is infinite."""

    BAD = 7

    def matrix(self, name: str) -> HostMatrix:
        matrix = super().matrix(name)
        if name == "embedding" and matrix.format == "f32":
            matrix.data[self.BAD] = np.inf
        elif name == "embedding":
            assert matrix.format == "q8_0"  # blocks of a float16 scale and 32 bytes
            blocks = matrix.data.reshape(matrix.rows, -1, 34)
            blocks[self.BAD, :, :2] = np.array([np.inf], np.float16).view(np.uint8)
        return matrix


@pytest.mark.parametrize("at", [19, 20, 21, 22])
@pytest.mark.parametrize(
    ("name", "format"),
    [("dense", "f32"), ("moe", "f32"), ("dense_wide", "q8_0"), ("moe_wide", "q8_0")],
)
@pytest.mark.parametrize("verify", [False, True])
def test_a_row_that_is_not_finite_spoils_none_before_it(
    name: str, format: str, verify: bool, at: int
) -> None:
    """A drafted token that overflows must not change the rows of the tokens before it."""
    checkpoint: Any = SpoiledCheckpoint(CONFIGS[name], format, seed=99)
    loaded = load_model(checkpoint, LoadOptions(threads=2))
    model, bad = loaded.model, SpoiledCheckpoint.BAD
    clean = [token for token in text(0)[:40] if token != bad]
    tokens = [*clean[:at], bad, *clean[at:26]]
    with sequence(model) as seq, sequence(model) as other:
        serial = [bits(model.forward.prefill(tokens[:1], seq))]
        serial += [bits(model.forward.decode(token, seq)) for token in tokens[1:at]]
        model.forward.prefill(tokens[:16], other)
        if verify:
            view = model.verify.decode_verify(tokens[16:], other).logits
        else:
            view = model.forward.prefill_chunk(tokens, other, 16, 11, True, logits="all")
        assert view is not None
        assert not np.isfinite(view.numpy()[at - 16]).all()
        assert [bits(view, row) for row in range(at - 16)] == serial[16:]
    model.lifecycle.teardown()
