"""What the scheduler owes the model: one test for each letter of the interface's list."""

from __future__ import annotations

from typing import Any

import pytest

from atlas._native.plan import ActionKind, EntryFlag, EntryKind, FinishReason
from atlas._native.scheduler import Scheduler
from atlas.errors import (
    CapabilityError,
    ClosedError,
    InvalidArgumentError,
    PromptTooLongError,
    SequenceStateError,
)
from tests.native.driver import Driver, ids
from tests.native.recording_model import continuation


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(i * i + 7 * salt + 3) % 50 for i in range(length)]


def chunks(driver: Driver, handle: int) -> list[tuple[int, int]]:
    """(start, rows) of each prompt chunk of a request, in order."""
    return [
        (int(entry["start"]), int(entry["rows"]))
        for plan in driver.plans
        for entry in plan["entries"]
        if entry["handle"] == handle and entry["kind"] == EntryKind.PROMPT
    ]


def actions(driver: Driver, kind: ActionKind) -> list[Any]:
    return [action for plan in driver.plans for action in plan["actions"] if action["kind"] == kind]


def test_a_single_chunk_prompt_is_never_split() -> None:
    driver = Driver(
        64, single_chunk=True, chunk_tokens=4, max_running=4, max_step_tokens=20, cached=True
    )
    handles = [driver.add(prompt(n, n), 12) for n in (18, 5, 19, 20)]
    driver.drain()
    for handle, length in zip(handles, (18, 5, 19, 20), strict=True):
        assert chunks(driver, handle) == [(0, length)]
    with pytest.raises(PromptTooLongError, match="21 tokens"):
        driver.add(prompt(21), 1)


def test_b_one_sequence_at_a_time() -> None:
    driver = Driver(64, one_at_a_time=True, max_running=8, max_step_tokens=32)
    for salt in range(3):
        driver.add(prompt(10, salt), 6)
    driver.drain()
    assert all(len(plan["entries"]) == 1 for plan in driver.plans)
    order = [int(plan["entries"][0]["handle"]) for plan in driver.plans]
    assert order == sorted(order)


@pytest.mark.parametrize(
    ("length", "ends"), [(16, [7, 12, 16]), (17, [7, 14, 16, 17]), (4, [4]), (5, [4, 5])]
)
def test_c_a_chunk_ends_at_the_tail_split(length: int, ends: list[int]) -> None:
    driver = Driver(64, tail_unit=4, chunk_tokens=7, max_step_tokens=64, recurrent=True)
    handle = driver.add(prompt(length), 2)
    driver.drain()
    assert [start + rows for start, rows in chunks(driver, handle)] == ends
    marked = [
        int(entry["start"] + entry["rows"])
        for plan in driver.plans
        for entry in plan["entries"]
        if entry["flags"] & EntryFlag.SNAPSHOT
    ]
    assert marked == [end for end in ends[:-1] if end == (length - 1) // 4 * 4]


@pytest.mark.parametrize(("least", "ends"), [(12, [12, 16]), (13, [16])])
def test_c_a_short_prompt_is_not_split(least: int, ends: list[int]) -> None:
    limits = {"chunk_tokens": 32, "max_step_tokens": 64}
    driver = Driver(64, tail_unit=4, tail_least=least, recurrent=True, **limits)
    handle = driver.add(prompt(16), 2)
    driver.drain()
    assert [start + rows for start, rows in chunks(driver, handle)] == ends


def test_c_chunks_end_at_multiples_of_the_recurrence_chunk_or_in_the_tail() -> None:
    driver = Driver(64, chunk_unit=8, chunk_tokens=13, max_step_tokens=30, recurrent=True)
    handle = driver.add(prompt(45), 2)
    driver.drain()
    ends = [start + rows for start, rows in chunks(driver, handle)]
    assert ends == [8, 16, 24, 32, 45]


def test_d_each_chunk_polls_calibration_and_all_but_the_last_normalize() -> None:
    driver = Driver(64, chunk_tokens=4, max_step_tokens=32, recurrent=True)
    driver.add(prompt(10), 3)
    driver.drain()
    entries = [entry for plan in driver.plans for entry in plan["entries"]]
    prompts = [entry for entry in entries if entry["kind"] == EntryKind.PROMPT]
    assert [bool(entry["flags"] & EntryFlag.NORMALIZE) for entry in prompts] == [True, True, False]
    assert all(entry["flags"] & EntryFlag.POLL_CALIBRATION for entry in prompts)
    assert not any(
        entry["flags"] & (EntryFlag.POLL_CALIBRATION | EntryFlag.NORMALIZE)
        for entry in entries
        if entry["kind"] == EntryKind.STEP
    )


@pytest.mark.parametrize("depth", [1, 2])
def test_e_parallel_experts_never_see_a_mixed_step(depth: int) -> None:
    driver = Driver(64, separate=True, chunk_tokens=4, max_step_tokens=32, depth=depth)
    driver.add(prompt(3), 20)
    driver.step()
    driver.add(prompt(24, 1), 5)
    driver.drain()
    commands = [plan["command"] for plan in driver.plans]
    assert set(commands) == {"decode", "prefill"}
    # Neither waits for the other to end.
    assert "decode" in commands[commands.index("prefill") + 1 : len(commands) - 5]
    mixed = Driver(64, chunk_tokens=4, max_step_tokens=32, depth=depth)
    mixed.add(prompt(3), 20)
    mixed.step()
    mixed.add(prompt(24, 1), 5)
    mixed.drain()
    assert "mixed" in [plan["command"] for plan in mixed.plans]


def test_f_verifies_one_by_one_when_the_model_cannot_batch() -> None:
    asked: list[list[int]] = []

    def can_batch(ks: list[int]) -> bool:
        asked.append(ks)
        return sum(ks) <= 6

    driver = Driver(64, can_batch=can_batch, max_verify_rows=4, max_step_tokens=64)
    driver.draft_len = 3
    for salt in range(3):
        driver.add(prompt(4, salt), 12, run_ahead=False)
    driver.drain()
    assert asked
    answers = {tuple(ks): sum(ks) > 6 for ks in asked}
    for plan in driver.plans:
        ks = tuple(int(entry["rows"]) for entry in plan["entries"][: plan["num_decode"]])
        assert plan["one_by_one"] == answers.get(ks, False)
    assert {plan["one_by_one"] for plan in driver.plans} == {True, False}


def test_f_a_failing_can_batch_leaves_the_scheduler_as_it_was() -> None:
    calls = 0

    def can_batch(ks: list[int]) -> bool:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RuntimeError("the model is gone")
        return True

    driver = Driver(64, can_batch=can_batch, max_verify_rows=4, max_step_tokens=64)
    driver.draft_len = 3
    for salt in range(3):
        driver.add(prompt(4, salt), 12, run_ahead=False)
    driver.step()
    with pytest.raises(RuntimeError, match="gone"):
        driver.plan()
    driver.drain()
    assert calls > 1


def test_g_drafts_are_capped_at_the_least_capacity_of_the_running() -> None:
    driver = Driver(64, max_verify_rows=8, max_step_tokens=64)
    driver.draft_len = 5
    first, second = (driver.add(prompt(4, salt), 20, run_ahead=False) for salt in range(2))
    driver.step()
    driver.scheduler.set_draft_capacity(second, 2)
    for _ in range(2):
        driver.step()
    assert [int(entry["num_drafts"]) for entry in driver.plans[-1]["entries"]] == [2, 2]
    driver.cancel(second)
    for _ in range(2):
        driver.step()
    assert [int(entry["handle"]) for entry in driver.plans[-1]["entries"]] == [first]
    assert int(driver.plans[-1]["entries"][0]["num_drafts"]) > 2


def test_h_proposals_come_in_groups_of_propose_batch_max() -> None:
    driver = Driver(64, max_step_tokens=64)
    handles = [driver.add(prompt(3, salt), 9, run_ahead=salt == 4) for salt in range(6)]
    driver.step()
    drafting = handles[:4] + handles[5:]
    for most in (1, 2, 3, 8):
        groups = driver.scheduler.proposal_groups(most)
        assert [handle for group in groups for handle in group] == drafting
        assert max(map(len, groups)) <= most
        assert len(groups) == -(-5 // most)


@pytest.mark.parametrize("spill", [False, True])
def test_i_a_sequence_with_pads_is_spilled_and_never_requeued(spill: bool) -> None:
    driver = Driver(9, max_running=2, max_step_tokens=32, watermark=0, immune_tokens=0, spill=spill)
    driver.add(prompt(8), 20)
    padded = driver.add(prompt(8, 1), 20, can_requeue=False)
    driver.drain()
    spilled = {int(action["handle"]) for action in actions(driver, ActionKind.SPILL)}
    assert spilled == {padded}
    assert not actions(driver, ActionKind.REQUEUE)
    assert chunks(driver, padded) == [(0, 8)]


def test_j_refuses_a_rewind_that_the_state_cannot_follow() -> None:
    refusing = Driver(64, rollback_unsupported=True, recurrent=True)
    handle = refusing.add(prompt(6), 9)
    for _ in range(3):
        refusing.step()
    with pytest.raises(CapabilityError):
        refusing.rewind(handle, 7)

    hybrid = Driver(64, recurrent=True)
    handle = hybrid.add(prompt(6), 9)
    for _ in range(3):
        hybrid.step()
    with pytest.raises(SequenceStateError, match="no snapshot"):
        hybrid.scheduler.rewind(handle, 7)
    for wrong in (-1, 7):
        with pytest.raises(InvalidArgumentError, match="state_len"):
            hybrid.scheduler.rewind(handle, 7, state_len=wrong)


@pytest.mark.parametrize(("position", "state_len"), [(7, 6), (10, 6), (9, 8), (5, 4), (6, 0)])
def test_j_a_hybrid_runs_again_what_its_snapshot_lacks(position: int, state_len: int) -> None:
    driver = Driver(64, recurrent=True, chunk_tokens=4)
    handle = driver.add(prompt(6), 9)
    for _ in range(7):
        driver.step()
    driver.rewind(handle, position, state_len)
    before = driver.model.rows_run
    driver.step()
    assert driver.model.rows_run - before == min(position - state_len, 4 if state_len < 4 else 8)
    driver.drain()
    whole = (prompt(6) + continuation(prompt(6), 6, 5))[:position]
    expected = continuation(whole, min(6, position), 15 - position)
    assert driver.finished[handle].got[-len(expected) :] == expected


@pytest.mark.parametrize("position", [1, 4, 6, 7, 8, 9, 10, 11])
def test_j_a_dense_rewind_equals_a_fresh_run_to_that_position(position: int) -> None:
    driver = Driver(64, cached=True)
    handle = driver.add(prompt(6), 12)
    for _ in range(5):
        driver.step()
    driver.rewind(handle, position)
    driver.drain()
    whole = (prompt(6) + continuation(prompt(6), 6, 5))[:position]
    expected = continuation(whole, min(6, position), 18 - position)
    assert driver.finished[handle].got[-len(expected) :] == expected


def test_k_caches_before_it_frees() -> None:
    driver = Driver(64, cached=True)
    handle = driver.add(prompt(10), 8)
    driver.drain()
    tokens = prompt(10) + driver.finished[handle].got
    match = driver.cache.match(ids(tokens), 0, True, 100)
    assert match.num_tokens == 16  # of 17 positions: whole blocks only
    assert match.exact_tokens == 8
    for block in match.blocks:
        driver.pool.release(int(block))
    failed = Driver(64, cached=True)
    handle = failed.add(prompt(3), 20)
    for _ in range(8):
        failed.step()
    failed.scheduler.finish(handle, FinishReason.ERROR)
    assert failed.cache.num_blocks == 0
    assert failed.pool.num_free == 64


def test_l_slots_are_compacted_and_detached_in_one_action() -> None:
    driver = Driver(64, recurrent=True, max_running=4)
    handles = [driver.add(prompt(4, salt), 6 + 4 * salt) for salt in range(4)]
    driver.drain()
    moves = actions(driver, ActionKind.MOVE_SLOT)
    assert [(int(move["handle"]), int(move["other"])) for move in moves] == [
        (handles[3], handles[0]),
        (handles[2], handles[1]),
    ]
    for plan in driver.plans:
        slots = sorted(int(entry["slot"]) for entry in plan["entries"])
        assert slots == list(range(len(slots)))
    for move in moves:
        assert int(move["other"]) in handles
        assert int(move["target"]) < int(move["source"])
    assert driver.slot_pool is not None
    assert driver.slot_pool.num_free == 4


def test_l_a_slot_claimed_by_hand_is_never_moved() -> None:
    driver = Driver(64, recurrent=True, max_running=3)
    assert driver.slot_pool is not None
    driver.add(prompt(4), 3)
    driver.step()
    by_hand = driver.slot_pool.claim()
    assert by_hand == 1
    driver.add(prompt(4, 1), 9)
    driver.step()
    driver.drain()
    assert driver.slot_pool.owner(1) == -2
    driver.slot_pool.release(1)
    assert driver.slot_pool.num_free == 3


def test_m_reclaims_prefix_blocks_before_admission_and_resume() -> None:
    driver = Driver(12, cached=True, max_running=2, max_step_tokens=64, watermark=0)
    driver.add(prompt(20), 2)
    driver.drain()
    driver.add(prompt(18, 5), 2)
    driver.drain()
    assert driver.cache.num_blocks == 5 + 4
    # 11 blocks are needed; 5 of its prompt are cached and must survive.
    warm = driver.add(prompt(20) + prompt(20, 9), 2)
    driver.drain()
    assert chunks(driver, warm)[0][0] == 20
    assert driver.cache.evicted_blocks >= 2

    driver = Driver(
        9, cached=True, max_running=2, watermark=0, immune_tokens=0, spill=True, max_step_tokens=64
    )
    driver.add(prompt(8), 20)
    driver.add(prompt(8, 1), 20)
    driver.drain()
    assert actions(driver, ActionKind.RESTORE)
    assert driver.cache.evicted_blocks


def test_n_closes_only_after_the_last_request_and_step() -> None:
    driver = Driver(64, depth=2)
    handle = driver.add(prompt(4), 9)
    driver.plan()
    with pytest.raises(SequenceStateError, match="1 plans"):
        driver.scheduler.close()
    driver.cancel(handle)
    assert driver.pool.num_free < 64  # rows of it are in flight: nothing was given back yet
    with pytest.raises(SequenceStateError):
        driver.scheduler.close()
    driver.drain()
    assert driver.pool.num_free == 64
    driver.scheduler.close()
    with pytest.raises(ClosedError):
        driver.scheduler.add(ids([1]), 1)


def test_padded_batch_is_the_ladder_of_the_contract() -> None:
    from atlas.model.records import PADDED_BATCH_SIZES, padded_batch

    driver = Driver(
        200, max_running=20, max_step_tokens=200, rungs=PADDED_BATCH_SIZES, max_prefills=32
    )
    for salt in range(20):
        driver.add(prompt(2, salt), 2 + salt)
    driver.drain()
    seen = set()
    for plan in driver.plans:
        count = plan["num_decode"]
        seen.add(count)
        assert plan["padded_batch"] == (padded_batch(count) if count > 1 else count)
    assert seen == set(range(21))


def test_all_options_are_checked() -> None:
    from atlas._native.block_pool import BlockPool

    pool = BlockPool(4)
    for options in (
        {"depth": 3},
        {"depth": 0},
        {"max_running": 0},
        {"max_running": 8, "max_step_tokens": 8},
        {"chunk_unit": 64, "chunk_tokens": 32},
        {"max_logits_rows": 4},
        {"watermark": -1},
        {"max_prefills": 0},
    ):
        with pytest.raises(InvalidArgumentError, match="allowed"):
            Scheduler(pool, 4, **options)
