"""A call that raises leaves every sequence and the pool as they were before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from atlas.errors import KernelError, KvExhausted, StaleHandleError
from atlas.model import Model
from atlas.model.load import LoadedModel
from atlas.model.records import PrefillSlice
from atlas.model.sequence import SequenceState
from tests.helpers.random_model import random_model
from tests.model.checks import OTHER, PROMPT, prefilled, unchanged

N = len(PROMPT)
Step = Callable[[Model, list[SequenceState]], Any]

STEPS: dict[str, Step] = {
    "prefill": lambda m, s: m.forward.prefill(PROMPT, s[3]),
    "prefill_chunk": lambda m, s: m.forward.prefill_chunk(
        [*PROMPT, *PROMPT, 1], s[4], N, N, False, logits="all"
    ),
    "decode": lambda m, s: m.forward.decode(1, s[0]),
    "decode_batch": lambda m, s: m.forward.decode_batch([1, 2, 3], s[:3]),
    "prefill_batch_chunk": lambda m, s: m.forward.prefill_batch_chunk(
        [PrefillSlice(PROMPT, s[3], 0, N, True), PrefillSlice([*PROMPT, 1], s[4], N, 1, True)]
    ),
    "mixed_forward": lambda m, s: m.forward.mixed_forward(
        [1], s[:1], PrefillSlice(PROMPT, s[3], 0, 17, False)
    ),
    "mixed_forward_batch": lambda m, s: m.forward.mixed_forward_batch(
        [1, 2, 3],
        s[:3],
        [PrefillSlice(PROMPT, s[3], 0, N, True), PrefillSlice([*PROMPT, 1], s[4], N, 1, True)],
    ),
    "decode_verify": lambda m, s: m.verify.decode_verify(OTHER, s[0]),
}


def five(model: Model) -> list[SequenceState]:
    """Three to decode (two of them at the edge of a block), a new one, and half a prompt."""
    seqs = [prefilled(model, PROMPT[:length]) for length in (16, 7, 16)]
    return [*seqs, model.lifecycle.alloc_sequence(), prefilled(model, PROMPT)]


def bits(result: Any) -> list[bytes]:
    """All rows that a call returned."""
    if result is None:
        return []
    if hasattr(result, "numpy"):
        return [result.numpy().tobytes()]
    if isinstance(result, np.ndarray):
        return [result.tobytes()]
    parts = result if isinstance(result, list | tuple) else vars_of(result)
    return [raw for part in parts for raw in bits(part)]


def vars_of(record: Any) -> list[Any]:
    return [getattr(record, name) for name in record.__slots__]


@pytest.mark.parametrize("step", STEPS)
def test_an_error_in_a_kernel(
    step: str, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, in the middle of, or after the sweep; the same call works afterwards."""
    model, runtime = loaded.model, loaded.core.runtime
    seqs, run = five(model), runtime.run

    def broken_before(*args: object) -> None:
        raise KernelError("kernel attention reported an error")

    def broken_after(*args: object) -> None:
        run(*args)
        raise KernelError("kernel attention reported an error")

    for broken in (broken_before, broken_after, raising(KeyboardInterrupt)):
        monkeypatch.setattr(runtime, "run", broken)
        with unchanged(model, *seqs), pytest.raises((KernelError, KeyboardInterrupt)):
            STEPS[step](model, seqs)
        monkeypatch.undo()
    with random_model("dense", threads=1, max_seq_len=200) as fresh:
        expected = bits(STEPS[step](fresh.model, five(fresh.model)))
    assert bits(STEPS[step](model, seqs)) == expected


def raising(error: type[BaseException]) -> Callable[..., None]:
    def call(*args: object) -> None:
        raise error

    return call


BLOCKS_NEEDED = {
    "prefill": 2,
    "prefill_chunk": 1,
    "decode": 1,
    "decode_batch": 2,
    "prefill_batch_chunk": 2,
    "mixed_forward": 3,
    "mixed_forward_batch": 4,
    "decode_verify": 1,
}


@pytest.mark.parametrize("step", STEPS)
def test_an_exhausted_pool(step: str) -> None:
    """One block too few, wherever in the batch it is missed: nobody moves or holds more."""
    with random_model("dense", threads=1, kv_tokens=144, max_seq_len=100) as loaded:
        model = loaded.model
        seqs, hog = five(model), model.lifecycle.alloc_sequence()
        free = model.lifecycle.num_free_blocks
        assert free == 4
        model.lifecycle.reserve(hog, 16 * (free - BLOCKS_NEEDED[step] + 1))
        with unchanged(model, *seqs, hog), pytest.raises(KvExhausted):
            STEPS[step](model, seqs)
        model.lifecycle.rewind(hog, 0)
        STEPS[step](model, seqs)
        assert model.lifecycle.num_free_blocks == free - BLOCKS_NEEDED[step]


def test_a_batch_that_lacks_one_block() -> None:
    with random_model("dense", threads=1, kv_tokens=64, max_seq_len=60) as loaded:
        model = loaded.model
        seqs = [prefilled(model, PROMPT[:16]) for _ in range(3)]
        with unchanged(model, *seqs), pytest.raises(KvExhausted, match="1 KV blocks needed, 0"):
            model.forward.decode_batch([1, 2, 3], seqs)
        model.lifecycle.rewind(seqs[2], 15)
        view = model.forward.decode_batch([1, 2], seqs[1:])
        assert view.num_rows == 2
        assert [seq.seq_len for seq in seqs] == [16, 17, 16]


def test_an_error_between_the_pieces_of_a_long_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces that ran are taken back; blocks reserved by hand are kept."""
    with random_model("dense", threads=1, max_step_tokens=8, max_seq_len=200) as loaded:
        model, runtime = loaded.model, loaded.core.runtime
        seq = prefilled(model, PROMPT[:5])
        model.lifecycle.reserve(seq, 150)
        run, calls = runtime.run, []

        def third_fails(*args: object) -> None:
            calls.append(args)
            if len(calls) == 3:
                raise KernelError("kernel rope reported an error")
            run(*args)

        monkeypatch.setattr(runtime, "run", third_fails)
        free, blocks = model.lifecycle.num_free_blocks, len(seq.block_table)
        with pytest.raises(KernelError):
            model.forward.prefill_chunk([*PROMPT, *PROMPT], seq, 5, 35, True)
        assert (seq.seq_len, seq.prompt_len, seq.tokens.tolist()) == (5, 5, PROMPT[:5])
        assert (model.lifecycle.num_free_blocks, len(seq.block_table)) == (free, blocks)
        view = model.forward.prefill_chunk([*PROMPT, *PROMPT], seq, 5, 35, True)
        whole = model.lifecycle.alloc_sequence()
        first = view.numpy().tobytes() if view is not None else b""
        again = model.forward.prefill([*PROMPT, *PROMPT], whole)
        assert again is not None
        assert again.numpy().tobytes() == first


def test_rows_that_a_broken_step_may_have_written_are_stale(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded.model
    seq = prefilled(model, PROMPT)
    view = model.forward.decode(1, seq)
    monkeypatch.setattr(loaded.core.runtime, "run", raising(KernelError))
    with unchanged(model, seq), pytest.raises(KernelError):
        model.forward.decode(2, seq)
    with pytest.raises(StaleHandleError):
        view.numpy()
    with pytest.raises(StaleHandleError):
        model.logits.hidden_after_norm()


def test_an_error_in_the_argmax_of_a_verify(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded.model
    seq = prefilled(model, PROMPT)
    monkeypatch.setattr(loaded.core.runtime.ops, "argmax", lambda *a, **k: raising(KernelError)())
    with unchanged(model, seq), pytest.raises(KernelError):
        model.verify.decode_verify(OTHER, seq)


def test_a_refused_row_of_a_batch_stops_all_of_it(model: Model) -> None:
    """The last sequence, window or id of a call is at fault; the first ones have not moved."""
    good, fresh = prefilled(model, PROMPT), model.lifecycle.alloc_sequence()
    freed, pending = prefilled(model, OTHER), prefilled(model, OTHER)
    model.lifecycle.free_sequence(freed)
    model.verify.decode_verify([1, 2], pending)
    empty = model.lifecycle.alloc_sequence()
    window = PrefillSlice(PROMPT, fresh, 0, 3, False)
    with random_model("dense", threads=1) as other:
        foreign = prefilled(other.model, PROMPT)
        with unchanged(model, good, fresh, pending, empty), unchanged(other.model, foreign):
            for bad in (freed, pending, empty, foreign):
                with pytest.raises(Exception, match=r"freed|awaits|at least one|another model"):
                    model.forward.decode_batch([1, 2], [good, bad])
                with pytest.raises(Exception, match=r"freed|awaits|at least one|another model"):
                    model.forward.mixed_forward_batch([1, 2], [good, bad], [window])
            with pytest.raises(Exception, match="203"):
                model.forward.mixed_forward_batch(
                    [1], [good], [PrefillSlice([5, 203], fresh, 0, 2, True)]
                )
            for seq in (freed, pending, foreign):
                tokens = [*seq.tokens.tolist(), 1]
                bad_window = PrefillSlice(tokens, seq, len(tokens) - 1, 1, True)
                with pytest.raises(Exception, match=r"freed|awaits|another model"):
                    model.forward.mixed_forward_batch([1], [good], [window, bad_window])
