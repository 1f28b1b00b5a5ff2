"""Recurrent state: checkpoints, rollbacks, rings, slots, and what a lowered length demands."""

from __future__ import annotations

import gc
import io
from collections.abc import Iterator

import numpy as np
import pytest

from atlas.cache.recurrent import CHECKPOINT_ROWS
from atlas.errors import (
    InvalidArgumentError,
    KvExhausted,
    OutOfMemoryError,
    SequenceStateError,
    StaleHandleError,
    WrongThreadError,
)
from atlas.layers.step import StepShape
from atlas.model import Model, ModelSsmState
from atlas.model.load import LoadedModel
from atlas.model.records import PrefillSlice
from atlas.model.sequence import SequenceState
from tests.helpers.random_model import random_model
from tests.model.checks import OTHER, PROMPT, bits, prefilled, row_after, unchanged

N = len(PROMPT)


@pytest.fixture(params=["delta", "mamba"])
def loaded(request: pytest.FixtureRequest) -> Iterator[LoadedModel]:
    """Two recurrent layers around attention; three sequences, four snapshots."""
    options = {"threads": 2, "kv_tokens": 640, "max_seq_len": 200}
    options |= {"state_snapshots": 4, "max_step_tokens": 90}
    with random_model(request.param, **options) as loaded:
        yield loaded


@pytest.fixture
def ssm(model: Model) -> ModelSsmState:
    assert model.ssm is not None
    return model.ssm


def live_state(loaded: LoadedModel, seq: SequenceState) -> list[bytes]:
    """The bytes of a sequence's state and tails."""
    assert loaded.core.states is not None
    assert seq.slot is not None
    return [part.tobytes() for part in loaded.core.states.pools.read(seq.slot)]


def free_slots(loaded: LoadedModel) -> tuple[int, int, int]:
    """Running slots, snapshots and checkpoints that nobody has."""
    states = loaded.core.states
    assert states is not None
    snapshots = states.snapshots
    return (
        states.running.num_free,
        snapshots.num_total - snapshots.num_used,
        len(states.checkpoints),
    )


def decoded(model: Model, tokens: list[int], seq: SequenceState) -> list[bytes]:
    return [bits(model.forward.decode(token, seq)) for token in tokens]


# -- slots ------------------------------------------------------------------------------------


@pytest.mark.contract("ssm", "lifecycle.alloc_sequence")
def test_a_sequence_has_a_slot_of_its_own(loaded: LoadedModel, ssm: ModelSsmState) -> None:
    model = loaded.model
    first, second = model.lifecycle.alloc_sequence(), model.lifecycle.alloc_sequence()
    assert first.slot is not None
    assert second.slot is not None
    assert first.slot != second.slot
    model.forward.prefill(PROMPT, first)
    slot = first.slot
    model.lifecycle.free_sequence(first)
    assert first.slot is None
    again = model.lifecycle.alloc_sequence()
    assert again.slot == slot, "the lowest free slot"
    assert not any(part.any() for part in loaded.core.states.pools.read(slot))  # type: ignore[union-attr]


def test_slots_run_out_and_come_back(loaded: LoadedModel) -> None:
    lifecycle = loaded.model.lifecycle
    total = free_slots(loaded)[0]
    seqs = [lifecycle.alloc_sequence() for _ in range(total)]
    with pytest.raises(OutOfMemoryError, match="recurrent slots are in use"):
        lifecycle.alloc_sequence()
    with unchanged(loaded.model, *seqs), pytest.raises(OutOfMemoryError):
        lifecycle.fork(seqs[0])
    for seq in seqs:
        lifecycle.free_sequence(seq)
        lifecycle.free_sequence(seq)
    assert free_slots(loaded)[0] == total


def test_a_dropped_sequence_gives_everything_back(loaded: LoadedModel, ssm: ModelSsmState) -> None:
    before = free_slots(loaded)
    seq = prefilled(loaded.model, PROMPT)
    ssm.save_snapshot(seq, 1)
    ssm.checkpoint(seq)
    assert free_slots(loaded) != before
    del seq
    gc.collect()
    assert free_slots(loaded) == before


@pytest.mark.contract("lifecycle.compact_sequence", "lifecycle.detach_slot_for_reuse")
def test_compact_and_detach(loaded: LoadedModel) -> None:
    model = loaded.model
    retired, moved = prefilled(model, OTHER), prefilled(model, PROMPT)
    slots = retired.slot, moved.slot
    before = live_state(loaded, moved)
    model.lifecycle.compact_sequence(moved, slots[0])  # type: ignore[arg-type]
    model.lifecycle.detach_slot_for_reuse(retired)
    assert (retired.slot, moved.slot) == (None, slots[0])
    assert live_state(loaded, moved) == before
    with pytest.raises(SequenceStateError, match="gave up its recurrent slot"):
        model.forward.decode(1, retired)
    model.lifecycle.free_sequence(retired)
    assert decoded(model, [3], moved) == [row_after(model, [*PROMPT, 3])]
    other = model.lifecycle.alloc_sequence()
    assert other.slot == slots[1], "the old slot is free"


def test_compact_refuses_other_slots(loaded: LoadedModel) -> None:
    model = loaded.model
    seq = prefilled(model, PROMPT)
    for slot in (-1, 10_000, seq.slot, seq.slot + 1):  # type: ignore[operator]
        with unchanged(model, seq), pytest.raises(InvalidArgumentError, match="new_slot"):
            model.lifecycle.compact_sequence(seq, slot)  # type: ignore[arg-type]


@pytest.mark.contract("lifecycle.fork")
def test_a_fork_has_a_state_of_its_own(loaded: LoadedModel) -> None:
    model = loaded.model
    seq = prefilled(model, PROMPT)
    twin = model.lifecycle.fork(seq)
    assert twin.slot != seq.slot
    assert live_state(loaded, twin) == live_state(loaded, seq)
    assert decoded(model, [3, 4], seq)[-1] == row_after(model, [*PROMPT, 3, 4])
    assert decoded(model, [7], twin) == [row_after(model, [*PROMPT, 7])]


# -- checkpoint and rollback ------------------------------------------------------------------


@pytest.mark.contract("ssm.checkpoint", "ssm.rollback")
@pytest.mark.parametrize("rows", [0, 1, 3, len(OTHER)])
def test_a_rollback_leaves_what_its_rows_alone_leave(
    loaded: LoadedModel, ssm: ModelSsmState, rows: int
) -> None:
    model = loaded.model
    seq, alone = prefilled(model, PROMPT), prefilled(model, PROMPT)
    ssm.checkpoint(seq)
    decoded(model, OTHER, seq)
    decoded(model, OTHER[:rows], alone)
    ssm.rollback(seq, rows)
    assert seq.seq_len == N + len(OTHER)
    assert live_state(loaded, seq) == live_state(loaded, alone)
    if rows < len(OTHER):
        with pytest.raises(SequenceStateError, match="rewind it there"):
            model.forward.decode(1, seq)
    model.lifecycle.rewind(seq, N + rows)
    assert decoded(model, [5], seq) == decoded(model, [5], alone)


def test_a_checkpoint_serves_until_the_next(loaded: LoadedModel, ssm: ModelSsmState) -> None:
    model = loaded.model
    seq = prefilled(model, PROMPT)
    ssm.checkpoint(seq)
    first = live_state(loaded, seq)
    for rows in (2, 3):
        decoded(model, OTHER[:rows], seq)
        ssm.rollback(seq, 0)
        assert live_state(loaded, seq) == first
        model.lifecycle.rewind(seq, N)
    decoded(model, OTHER[:2], seq)
    ssm.checkpoint(seq)
    second = live_state(loaded, seq)
    decoded(model, OTHER[2:4], seq)
    ssm.rollback(seq, 0)
    assert live_state(loaded, seq) == second


def test_rollbacks_of_several_sequences_do_not_mix(loaded: LoadedModel, ssm: ModelSsmState) -> None:
    """Each keeps the inputs of its own rows, whoever shared the step or ran in between."""
    model = loaded.model
    prompts = [PROMPT, OTHER, PROMPT[3:]]
    seqs = [prefilled(model, prompt) for prompt in prompts]
    ssm.checkpoint(seqs[0])
    ssm.checkpoint(seqs[2])
    for i in range(4):
        model.forward.decode_batch([OTHER[i], 50 + i, 90 + i], seqs)
    for kept, seq, prompt, first in (
        (1, seqs[0], prompts[0], OTHER),
        (3, seqs[2], prompts[2], [90, 91, 92]),
    ):
        ssm.rollback(seq, kept)
        model.lifecycle.rewind(seq, len(prompt) + kept)
        assert decoded(model, [5], seq) == [row_after(model, [*prompt, *first[:kept], 5])]
    assert decoded(model, [5], seqs[1]) == [row_after(model, [*OTHER, 50, 51, 52, 53, 5])]


def test_what_a_rollback_refuses(model: Model, ssm: ModelSsmState) -> None:
    seq = prefilled(model, PROMPT)
    with pytest.raises(SequenceStateError, match="no checkpoint"):
        ssm.rollback(seq, 0)
    ssm.checkpoint(seq)
    decoded(model, OTHER[:2], seq)
    for rows in (-1, 3, 1.5):
        with unchanged(model, seq), pytest.raises(InvalidArgumentError, match="rows_kept"):
            ssm.rollback(seq, rows)  # type: ignore[arg-type]
    model.forward.prefill_chunk([*PROMPT, *OTHER[:2], 9, 9], seq, N + 2, 2, True)
    decoded(model, [1], seq)
    with pytest.raises(InvalidArgumentError, match="rows_kept"):
        ssm.rollback(seq, 3)  # prompt rows came in between
    ssm.rollback(seq, 2)
    model.lifecycle.rewind(seq, N + 2)
    model.verify.decode_verify(OTHER[2:4], seq)
    for call in (lambda: ssm.checkpoint(seq), lambda: ssm.rollback(seq, 0)):
        with pytest.raises(SequenceStateError, match="awaits accept"):
            call()
    model.verify.accept(seq, 1)


def test_rows_beyond_what_is_kept(model: Model, ssm: ModelSsmState) -> None:
    seq = prefilled(model, PROMPT)
    ssm.checkpoint(seq)
    decoded(model, [7] * (CHECKPOINT_ROWS + 2), seq)
    with pytest.raises(InvalidArgumentError, match=f"0 … {CHECKPOINT_ROWS}"):
        ssm.rollback(seq, CHECKPOINT_ROWS + 1)
    ssm.rollback(seq, CHECKPOINT_ROWS)
    model.lifecycle.rewind(seq, N + CHECKPOINT_ROWS)
    assert decoded(model, [5], seq) == [row_after(model, [*PROMPT, *[7] * CHECKPOINT_ROWS, 5])]


def test_a_rollback_longer_than_a_step() -> None:
    with random_model("delta", threads=2, max_step_tokens=3) as loaded:
        model = loaded.model
        assert model.ssm is not None
        seq = prefilled(model, PROMPT)
        model.ssm.checkpoint(seq)
        decoded(model, OTHER, seq)
        model.ssm.rollback(seq, 5)
        model.lifecycle.rewind(seq, N + 5)
        assert decoded(model, [5], seq) == [row_after(model, [*PROMPT, *OTHER[:5], 5])]


@pytest.mark.contract(
    "ssm.start_checkpoint_async", "ssm.start_rollback_and_checkpoint_async", "ssm.sync_secondary"
)
def test_the_asynchronous_members(loaded: LoadedModel, ssm: ModelSsmState) -> None:
    model = loaded.model
    seq = prefilled(model, PROMPT)
    ssm.start_checkpoint_async(seq)
    ssm.sync_secondary()
    decoded(model, OTHER[:3], seq)
    ssm.start_rollback_and_checkpoint_async(seq, 1)
    ssm.sync_secondary()
    model.lifecycle.rewind(seq, N + 1)
    kept = live_state(loaded, seq)
    decoded(model, OTHER[1:4], seq)
    ssm.rollback(seq, 0)
    assert live_state(loaded, seq) == kept
    with pytest.raises(WrongThreadError):
        _in_another_thread(ssm.sync_secondary)


def _in_another_thread(call: object) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        pool.submit(call).result()  # type: ignore[arg-type]


@pytest.mark.contract("ssm.commit_accepted_prefix")
@pytest.mark.parametrize("kept", [0, 1, 3, 4])
def test_commit_accepted_prefix_selects_a_row(
    loaded: LoadedModel, ssm: ModelSsmState, kept: int
) -> None:
    model = loaded.model
    seq, alone = prefilled(model, PROMPT), prefilled(model, PROMPT)
    model.verify.decode_verify(OTHER[:4], seq)
    decoded(model, OTHER[:kept], alone)
    ssm.commit_accepted_prefix(seq, kept, 4)
    assert live_state(loaded, seq) == live_state(loaded, alone)
    model.verify.accept(seq, kept)
    assert live_state(loaded, seq) == live_state(loaded, alone)
    assert decoded(model, [5], seq) == decoded(model, [5], alone)
    with pytest.raises(SequenceStateError, match="a verify of 0 rows"):
        ssm.commit_accepted_prefix(seq, 1, 4)


# -- verify -----------------------------------------------------------------------------------


def test_verify_keeps_no_checkpoint(loaded: LoadedModel) -> None:
    model = loaded.model
    seq = prefilled(model, PROMPT)
    before = free_slots(loaded)
    for kept in (2, 0, 1):
        model.verify.decode_verify(OTHER[:2], seq)
        assert free_slots(loaded)[2] == before[2] - 1
        model.verify.accept(seq, kept)
        assert free_slots(loaded) == before
    model.verify.decode_verify(OTHER[:2], seq)
    model.lifecycle.free_sequence(seq)
    assert free_slots(loaded)[1:] == before[1:]


def test_verify_refuses_more_rows_than_it_could_roll_back(model: Model) -> None:
    seq = prefilled(model, PROMPT)
    with unchanged(model, seq), pytest.raises(InvalidArgumentError, match="a verify of 17 rows"):
        model.verify.decode_verify([1] * (CHECKPOINT_ROWS + 1), seq)


def test_a_verify_without_blocks_leaves_no_trace(loaded: LoadedModel) -> None:
    model = loaded.model
    seq = prefilled(model, PROMPT)
    taken = loaded.core.blocks.allocate(loaded.core.blocks.num_free)
    before = free_slots(loaded), live_state(loaded, seq)
    with unchanged(model, seq), pytest.raises(KvExhausted):
        model.verify.decode_verify([1] * 16, seq)
    assert (free_slots(loaded), live_state(loaded, seq)) == before
    for block in taken:
        loaded.core.blocks.release(block)
    assert decoded(model, [5], seq) == [row_after(model, [*PROMPT, 5])]


# -- the ring and rewinds ---------------------------------------------------------------------


@pytest.mark.contract("ssm.save_snapshot", "ssm.restore_snapshot", "lifecycle.rewind")
def test_a_snapshot_in_the_ring(loaded: LoadedModel, ssm: ModelSsmState) -> None:
    model = loaded.model
    seq = prefilled(model, PROMPT)
    ssm.save_snapshot(seq, 2)
    assert seq.snapshot_ring_position == 3
    decoded(model, [7] * 30, seq)
    with unchanged(model, seq), pytest.raises(SequenceStateError, match="restore a snapshot"):
        model.lifecycle.rewind(seq, N)
    ssm.restore_snapshot(seq, 2)
    with pytest.raises(SequenceStateError, match="stands at 20, the sequence at 50"):
        model.verify.decode_verify([1], seq)
    with pytest.raises(SequenceStateError, match="stands at 20, not at 21"):
        model.lifecycle.rewind(seq, N + 1)
    model.lifecycle.rewind(seq, N)
    assert decoded(model, [5], seq) == [row_after(model, [*PROMPT, 5])]


def test_a_rewind_forgets_what_was_kept_of_dropped_tokens(model: Model, ssm: ModelSsmState) -> None:
    seq = prefilled(model, PROMPT)
    ssm.save_snapshot(seq, 0)
    decoded(model, OTHER, seq)
    ssm.save_snapshot(seq, 1)
    ssm.checkpoint(seq)
    ssm.restore_snapshot(seq, 0)
    model.lifecycle.rewind(seq, N)
    with pytest.raises(SequenceStateError, match="ring slot 1"):
        ssm.restore_snapshot(seq, 1)
    with pytest.raises(SequenceStateError, match="no checkpoint"):
        ssm.rollback(seq, 0)
    model.lifecycle.rewind(seq, 0)
    assert bits(model.forward.prefill(OTHER, seq)) == row_after(model, OTHER)


@pytest.mark.contract("ssm.rollback_ring_slots", "ssm.rollback_unsupported")
def test_the_ring_is_bounded(model: Model, ssm: ModelSsmState) -> None:
    assert ssm.rollback_unsupported is False
    assert ssm.rollback_ring_slots > 1
    seq = prefilled(model, PROMPT)
    for place in (-1, ssm.rollback_ring_slots):
        for call in (ssm.save_snapshot, ssm.restore_snapshot):
            with pytest.raises(InvalidArgumentError, match="ring_slot"):
                call(seq, place)
    for _ in range(3):
        for place in range(ssm.rollback_ring_slots):
            ssm.save_snapshot(seq, place)
    other = prefilled(model, OTHER)
    with pytest.raises(OutOfMemoryError, match="all 4 snapshot slots"):
        ssm.save_snapshot(other, 0)


@pytest.mark.contract("ssm.snapshot_occupancy")
def test_occupancy(model: Model, ssm: ModelSsmState) -> None:
    assert ssm.snapshot_occupancy == (0, 4)
    seq = prefilled(model, PROMPT)
    ssm.save_snapshot(seq, 0)
    ssm.save_snapshot(seq, 3)
    assert ssm.snapshot_occupancy == (2, 4)
    model.lifecycle.free_sequence(seq)
    assert ssm.snapshot_occupancy == (0, 4)
    with random_model("delta", threads=1, state_snapshots=0) as none:
        assert none.model.ssm is not None
        assert none.model.ssm.snapshot_occupancy is None


@pytest.mark.contract("ssm.normalize")
def test_normalize_is_off_and_checks_its_sequence(loaded: LoadedModel, ssm: ModelSsmState) -> None:
    seq = prefilled(loaded.model, PROMPT)
    before = live_state(loaded, seq)
    ssm.normalize(seq)
    assert live_state(loaded, seq) == before
    with random_model("dense", threads=1) as other:
        foreign = other.model.lifecycle.alloc_sequence()
        with pytest.raises(StaleHandleError):
            ssm.normalize(foreign)


# -- forwards ---------------------------------------------------------------------------------


@pytest.mark.contract("forward.prefill_twophase")
@pytest.mark.parametrize("chunk_size", [1, 7, 64, 90])
def test_prefill_twophase_is_a_prefill(loaded: LoadedModel, chunk_size: int) -> None:
    """Longer than a step: the recurrence runs over all of it, the rest in pieces."""
    model = loaded.model
    prompt = [(31 * i) % 203 for i in range(120)]
    seq, plain = model.lifecycle.alloc_sequence(), prefilled(model, prompt)
    view = model.forward.prefill_twophase(prompt, seq, chunk_size)
    assert bits(view) == row_after(model, prompt)
    assert (seq.seq_len, seq.prompt_len) == (120, 120)
    assert live_state(loaded, seq) == live_state(loaded, plain)
    assert decoded(model, [3], seq) == decoded(model, [3], plain)
    with pytest.raises(InvalidArgumentError, match="chunk_size"):
        model.forward.prefill_twophase(prompt, model.lifecycle.alloc_sequence(), 91)


@pytest.mark.contract("forward.prefill_tail_split")
def test_prefill_tail_split(model: Model) -> None:
    splits = {n: model.forward.prefill_tail_split([5] * n) for n in (1, 16, 17, 32, 33, 150)}
    assert splits == {1: None, 16: None, 17: 16, 32: 16, 33: 32, 150: 144}


def test_a_chunked_recurrence_splits_at_its_chunks(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a backend whose prefill runs in chunks of 64 positions."""
    model, core = loaded.model, loaded.core
    monkeypatch.setattr(core, "chunk_unit", 64)
    prompt = [(31 * i) % 203 for i in range(150)]
    assert model.forward.prefill_tail_split(prompt) == 128
    assert model.forward.prefill_tail_split(prompt[:64]) is None
    steps, run = [], core.runtime.run

    def record(network: object, buffers: object, shape: StepShape) -> None:
        steps.append(shape.rows)
        run(network, buffers, shape)

    monkeypatch.setattr(core.runtime, "run", record)
    seq = prefilled(model, prompt)
    assert steps == [64, 64, 22]
    for end in (1, 63, 65, 127):
        empty = model.lifecycle.alloc_sequence()
        with (
            unchanged(model, empty),
            pytest.raises(
                InvalidArgumentError,
                match=r"multiples of 64, the recurrence's chunk, .* from 128 on",
            ),
        ):
            model.forward.prefill_chunk(prompt, empty, 0, end, False)
        piece = PrefillSlice(prompt, empty, 0, end, False)
        with unchanged(model, empty), pytest.raises(InvalidArgumentError, match="multiples of 64"):
            model.forward.prefill_batch_chunk([piece])
    split = model.lifecycle.alloc_sequence()
    for start, end in ((0, 64), (64, 128), (128, 131), (131, 150)):
        model.forward.prefill_chunk(prompt, split, start, end - start, end == 150)
    assert live_state(loaded, split) == live_state(loaded, seq)


def test_a_step_that_fails_fails_its_sequences(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state that rows have overwritten is not given out; an empty one starts again."""
    model = loaded.model
    before = free_slots(loaded)
    seq, empty, apart = (
        prefilled(model, PROMPT),
        model.lifecycle.alloc_sequence(),
        prefilled(model, OTHER),
    )

    def fail(*args: object) -> None:
        raise RuntimeError("a kernel broke")

    with monkeypatch.context() as patch:
        patch.setattr(loaded.core.runtime, "run", fail)
        with pytest.raises(RuntimeError):
            model.forward.decode(1, seq)
        with pytest.raises(RuntimeError):
            model.forward.prefill(PROMPT, empty)
    assert (seq.status, empty.status, apart.status) == ("failed", "active", "active")
    assert bits(model.forward.prefill(OTHER, empty)) == row_after(model, OTHER)
    assert decoded(model, [5], apart) == [row_after(model, [*OTHER, 5])]
    for each in (seq, empty, apart):
        model.lifecycle.free_sequence(each)
    assert free_slots(loaded) == before


# -- saved sequences --------------------------------------------------------------------------


@pytest.mark.contract("lifecycle.save_sequence_state", "lifecycle.restore_sequence_state")
@pytest.mark.parametrize("name", ["delta", "mamba", "mamba_alone"])
def test_a_saved_state_goes_on_bitwise(name: str) -> None:
    with random_model(name, threads=2) as loaded:
        model, file = loaded.model, io.BytesIO()
        seq = prefilled(model, PROMPT)
        decoded(model, OTHER, seq)
        model.lifecycle.save_sequence_state(seq, file)
        file.seek(0)
        back = model.lifecycle.alloc_sequence()
        model.lifecycle.restore_sequence_state(back, 2, file)
        assert live_state(loaded, back) == live_state(loaded, seq)
        assert decoded(model, [1, 2], back) == decoded(model, [1, 2], seq)


def test_a_file_cut_within_its_state(loaded: LoadedModel) -> None:
    model, file = loaded.model, io.BytesIO()
    model.lifecycle.save_sequence_state(prefilled(model, PROMPT), file)
    assert loaded.core.states is not None
    whole, size = file.getvalue(), loaded.core.states.pools.slot_bytes
    seq = model.lifecycle.alloc_sequence()
    for missing in (9, size // 2, size):
        with unchanged(model, seq), pytest.raises(InvalidArgumentError, match="recurrent layer"):
            model.lifecycle.restore_sequence_state(seq, 2, io.BytesIO(whole[: -8 - missing]))
    broken = bytearray(whole)
    broken[-size // 2] ^= 1
    with unchanged(model, seq), pytest.raises(InvalidArgumentError, match="checksum"):
        model.lifecycle.restore_sequence_state(seq, 2, io.BytesIO(bytes(broken)))
    assert not np.any([part.any() for part in loaded.core.states.pools.read(seq.slot)])  # type: ignore[arg-type]
    assert bits(model.forward.prefill(OTHER, seq)) == row_after(model, OTHER)
