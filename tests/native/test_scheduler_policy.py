"""Who is admitted, planned and preempted, and in what order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from atlas._native.batch_writer import write_batch
from atlas._native.plan import ActionKind, EntryFlag, EntryKind, FinishReason
from atlas.errors import (
    InvalidArgumentError,
    KvExhausted,
    OutOfMemoryError,
    SequenceStateError,
    StaleHandleError,
)
from tests.native.driver import Driver, ids
from tests.native.recording_model import continuation
from tests.native.test_scheduler_duties import actions, chunks, prompt


def first_planned(driver: Driver, handle: int) -> int:
    return next(
        plan["step_id"] for plan in driver.plans if handle in plan["entries"]["handle"].tolist()
    )


# -- admission ----------------------------------------------------------------------------------


def test_admission_reserves_prompt_and_watermark_beside_what_is_committed() -> None:
    # 5 blocks each (8 prompt + 12 watermark = 20 of 27 positions); 12 blocks hold two of them.
    driver = Driver(12, max_running=4, watermark=12, max_step_tokens=64, immune_tokens=0)
    handles = [driver.add(prompt(8, salt), 20) for salt in range(3)]
    driver.step()
    assert driver.scheduler.num_running == 2
    assert driver.scheduler.state(handles[2]) == "waiting"
    assert driver.pool.num_free == 12 - 4  # accounting, not allocation
    driver.drain()


def test_nobody_passes_the_head_of_the_queue() -> None:
    driver = Driver(10, max_running=4, watermark=8, max_step_tokens=64)
    driver.add(prompt(16), 8)
    big, small = driver.add(prompt(24, 1), 8), driver.add(prompt(2, 2), 2)
    driver.drain()
    assert 1 < first_planned(driver, big) <= first_planned(driver, small)


def test_priorities_then_arrival() -> None:
    driver = Driver(64, max_running=1, max_step_tokens=32)
    low, first, second, urgent = (
        driver.add(prompt(4, salt), 3, priority=priority)
        for salt, priority in enumerate((5, 0, 0, -3))
    )
    driver.drain()
    order = sorted((low, first, second, urgent), key=lambda handle: first_planned(driver, handle))
    assert order == [urgent, first, second, low]


def test_a_long_wait_comes_before_priorities() -> None:
    driver = Driver(64, max_running=1, max_step_tokens=32, aging_us=100)
    low = driver.add(prompt(4), 3, priority=9)
    urgent = [driver.add(prompt(4, salt), 3, priority=0) for salt in range(1, 4)]
    for _ in range(3):
        driver.step()
    driver.now_us = 101
    for salt in range(4, 7):
        urgent.append(driver.add(prompt(4, salt), 3, priority=0))
    driver.drain()
    assert first_planned(driver, urgent[0]) < first_planned(driver, low)
    assert all(first_planned(driver, low) < first_planned(driver, u) for u in urgent[2:])


def test_a_request_that_can_never_fit_is_refused_with_the_numbers() -> None:
    driver = Driver(8)
    with pytest.raises(KvExhausted, match=r"34 positions, which take 9 KV blocks of 4.* 8"):
        driver.add(prompt(30), 5)
    driver.add(prompt(30), 3)
    driver.drain()
    with pytest.raises(InvalidArgumentError, match="prompt tokens is 0"):
        driver.scheduler.add(ids([]), 3)
    with pytest.raises(InvalidArgumentError, match="max_tokens is 0"):
        driver.scheduler.add(ids([1]), 0)


def test_blocks_held_outside_end_a_request_instead_of_hanging_it() -> None:
    driver = Driver(10, max_step_tokens=64)
    outside = driver.pool.allocate(7)
    waiting = driver.add(prompt(20), 3)
    driver.step()
    assert driver.finished[waiting].reason == FinishReason.EXHAUSTED
    growing = driver.add(prompt(8), 20)
    small = driver.add(prompt(4, 1), 2)
    for _ in range(100):
        driver.step()
    assert driver.finished[growing].reason == FinishReason.EXHAUSTED
    assert len(driver.finished[growing].got) == 5
    assert driver.finished[small].reason == FinishReason.STOP
    driver.check(len(outside))


# -- rows of a step -----------------------------------------------------------------------------


def test_decode_rows_come_first_and_the_budget_holds() -> None:
    driver = Driver(200, max_running=8, max_step_tokens=12, chunk_tokens=6, max_verify_rows=4)
    driver.draft_len = 3
    for salt in range(8):
        driver.add(prompt(11, salt), 12, run_ahead=salt % 2 == 0)
    driver.drain()
    for plan in driver.plans:
        kinds = plan["entries"]["kind"].tolist()
        assert kinds == sorted(kinds)
        assert plan["num_rows"] <= 12
        assert all(
            entry["rows"] <= 6 for entry in plan["entries"] if entry["kind"] == EntryKind.PROMPT
        )
    assert any(plan["command"] == "mixed" for plan in driver.plans)


def test_drafts_never_starve_a_prompt() -> None:
    driver = Driver(400, max_running=6, max_step_tokens=10, chunk_tokens=8, max_verify_rows=8)
    driver.draft_len = 7
    for salt in range(5):
        driver.add(prompt(4, salt), 60, run_ahead=False)
    for _ in range(12):
        driver.step()
    late = driver.add(prompt(12, 9), 3)
    for _ in range(14):
        driver.step()
    assert chunks(driver, late)
    driver.drain()


def test_prefills_of_a_step_are_grouped_in_waves() -> None:
    driver = Driver(200, max_running=8, max_step_tokens=64, chunk_tokens=8, max_prefills=5)
    for salt, length in enumerate((12, 5, 12, 8, 20, 6)):
        driver.add(prompt(length, salt), 4)
    driver.drain()
    for plan in driver.plans:
        entries = [entry for entry in plan["entries"] if entry["kind"] == EntryKind.PROMPT]
        assert len(entries) <= 5
        keys = [
            (int(entry["start"]), bool(entry["flags"] & EntryFlag.LAST_CHUNK)) for entry in entries
        ]
        waves = [int(entry["wave"]) for entry in entries]
        assert keys == sorted(keys)
        assert waves == [sorted(set(keys)).index(key) for key in keys]
    assert driver.plans[0]["entries"]["wave"].tolist() == [0, 0, 0, 1, 1]


def test_no_prefill_while_a_token_is_late() -> None:
    driver = Driver(64, max_step_tokens=32, chunk_tokens=4, token_deadline_us=100)
    driver.add(prompt(4), 30)
    driver.step()
    late = driver.add(prompt(16, 1), 4)
    driver.now_us = 80  # exactly 80 %: not past it
    driver.step()
    assert driver.plans[-1]["command"] == "mixed"
    for _ in range(3):
        driver.now_us += 81
        driver.step()
        assert driver.plans[-1]["command"] == "decode"
    driver.now_us += 20
    driver.step()
    assert driver.plans[-1]["command"] == "mixed"
    assert chunks(driver, late) == [(0, 4), (4, 4)]
    driver.drain()


def test_all_logits_of_a_prompt() -> None:
    driver = Driver(64, max_step_tokens=32, max_logits_rows=20, max_running=4, cached=True)
    driver.add(prompt(18), 4)
    driver.drain()
    handle = driver.add(prompt(18), 4, all_logits=True)
    driver.drain()
    entries = [
        entry
        for plan in driver.plans
        for entry in plan["entries"]
        if entry["handle"] == handle and entry["kind"] == EntryKind.PROMPT
    ]
    assert sum(int(entry["num_logits"]) for entry in entries) == 18  # nothing from the cache
    assert all(entry["num_logits"] == entry["rows"] for entry in entries)


# -- prefix cache -------------------------------------------------------------------------------


@pytest.mark.parametrize("recurrent", [False, True])
def test_a_second_turn_computes_only_what_is_new(recurrent: bool) -> None:
    driver = Driver(
        64, cached=True, recurrent=recurrent, tail_unit=4, max_step_tokens=64, chunk_tokens=64
    )
    first = driver.add(prompt(22), 8)
    driver.drain()
    history = prompt(22) + driver.finished[first].got
    before = driver.model.rows_run
    second = driver.add(history + prompt(5, 3), 3)
    driver.step()
    # Without a snapshot of decoded state a hybrid restarts at the first prompt's tail split.
    matched = 20 if recurrent else 28
    assert driver.scheduler.matched(second)[0] == matched
    assert driver.model.rows_run - before <= len(history) + 5 - matched
    driver.kinds = True
    if recurrent:
        driver.drain()  # a dense match holds step tokens' K/V, which this model tells apart


def test_a_hybrid_snapshots_where_prompts_part() -> None:
    driver = Driver(
        64, cached=True, recurrent=True, tail_unit=4, max_step_tokens=64, chunk_tokens=64
    )
    common = prompt(17)  # four whole blocks
    ends = []
    for salt in (1, 2, 3):
        handle = driver.add(common + prompt(9, salt), 2)
        driver.drain()
        ends.append(chunks(driver, handle))
    # Only the tail of the first is known to the second, which stops where it leaves the first.
    assert ends == [
        [(0, 24), (24, 2)],
        [(0, 16), (16, 8), (24, 2)],
        [(16, 8), (24, 2)],
    ]
    assert driver.cache is not None
    assert driver.cache.num_snapshots == 4


def test_requests_with_one_prompt_share_its_blocks_once_it_is_prefilled() -> None:
    driver = Driver(64, cached=True, max_running=4, max_step_tokens=64, reuse_generated=False)
    driver.add(prompt(21), 6)
    driver.step()
    used = driver.pool.num_total - driver.pool.num_free
    warm = driver.add(prompt(21), 6)
    driver.step()
    assert driver.scheduler.matched(warm)[:2] == (20, 20)
    assert driver.pool.num_total - driver.pool.num_free == used + 1
    driver.drain()


def test_a_retried_chunk_replays_the_recorded_lookup() -> None:
    driver = Driver(64, cached=True, max_step_tokens=64)
    driver.add(prompt(13), 2)
    driver.drain()
    warm = driver.add(prompt(13), 2)
    driver.abandon_rate = 1.0
    for _ in range(3):
        driver.step()
    driver.abandon_rate = 0.0
    driver.drain()
    assert chunks(driver, warm) == [(12, 1)] * 4
    assert driver.cache.hits == 1


# -- preemption ---------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("spill", [False, True])
def test_the_latest_admitted_is_preempted_and_its_stream_goes_on(
    spill: bool, recurrent: bool, depth: int
) -> None:
    driver = Driver(
        10,
        depth=depth,
        recurrent=recurrent,
        spill=spill,
        max_running=3,
        max_step_tokens=32,
        watermark=0,
        immune_tokens=0,
        max_verify_rows=3,
    )
    handles = [driver.add(prompt(6, salt), 24) for salt in range(3)]
    driver.drain()
    assert driver.scheduler.num_preemptions > 0
    kind = ActionKind.SPILL if spill else ActionKind.REQUEUE
    victims = [int(action["handle"]) for action in actions(driver, kind)]
    assert victims[0] == handles[2]
    assert handles[0] not in victims
    replays = [
        entry
        for plan in driver.plans
        for entry in plan["entries"]
        if entry["flags"] & EntryFlag.REPLAY
    ]
    assert bool(replays) == (not spill)
    assert all(entry["kind"] == EntryKind.STEP and entry["rows"] <= 3 for entry in replays)
    for handle in handles:
        assert driver.finished[handle].got == continuation(driver.finished[handle].prompt, 6, 24)


def test_fresh_sequences_are_immune() -> None:
    # The old one needs a fifth block just after the fresh one took the last; the fresh one has
    # room to go on, and emits three tokens before it must give way.
    driver = Driver(7, max_running=2, max_step_tokens=32, watermark=0, immune_tokens=3, spill=True)
    driver.add(prompt(14), 10)
    driver.step()
    driver.step()
    fresh = driver.add(prompt(9, 1), 10)
    driver.drain()
    emitted = waited = 0
    for plan in driver.plans[2:]:
        if any(action["kind"] == ActionKind.SPILL for action in plan["actions"]):
            break
        handles = plan["entries"]["handle"].tolist()
        emitted += fresh in handles
        waited += handles == [fresh]
    assert (emitted, waited) == (3, 2)
    assert [int(a["handle"]) for a in actions(driver, ActionKind.SPILL)] == [fresh]


def test_immunity_yields_when_nothing_else_could_run() -> None:
    driver = Driver(6, max_running=2, max_step_tokens=32, watermark=0, immune_tokens=99)
    driver.add(prompt(8), 15)
    driver.add(prompt(8, 1), 15)
    driver.drain()
    assert driver.scheduler.num_preemptions >= 1


def test_a_preempted_request_comes_before_all_who_wait() -> None:
    driver = Driver(9, max_running=2, max_step_tokens=32, watermark=0, immune_tokens=0, spill=True)
    driver.add(prompt(8), 20)
    victim = driver.add(prompt(8, 1), 20, priority=3)
    driver.step()
    urgent = driver.add(prompt(8, 3), 4, priority=0)
    driver.drain()
    resumed = next(
        plan["step_id"]
        for plan in driver.plans
        if any(a["kind"] == ActionKind.RESTORE and a["handle"] == victim for a in plan["actions"])
    )
    assert resumed <= first_planned(driver, urgent)


def test_a_sequence_on_reused_step_tokens_is_spilled_not_rebuilt() -> None:
    driver = Driver(
        12, cached=True, kinds=False, max_running=2, max_step_tokens=64, watermark=0,
        immune_tokens=0,
    )  # fmt: skip
    first = driver.add(prompt(6), 8)
    driver.drain()
    driver.add(prompt(4, 5), 26)
    history = prompt(6) + driver.finished[first].got
    warm = driver.add(history + prompt(3, 1), 26)
    driver.drain()
    assert [int(a["handle"]) for a in actions(driver, ActionKind.SPILL)] == [warm]
    assert not actions(driver, ActionKind.REQUEUE)


@pytest.mark.parametrize("spill", [False, True])
def test_prompt_logits_are_made_once_even_when_the_prompt_runs_again(spill: bool) -> None:
    driver = Driver(9, max_running=2, max_step_tokens=32, watermark=0, immune_tokens=0, spill=spill)
    driver.add(prompt(8), 20)
    handle = driver.add(prompt(8, 1), 20, all_logits=True)
    driver.drain()
    assert driver.scheduler.num_preemptions
    made = [
        int(entry["num_logits"])
        for plan in driver.plans
        for entry in plan["entries"]
        if entry["handle"] == handle and entry["kind"] == EntryKind.PROMPT
    ]
    assert sum(made) == 8
    assert len(made) == (1 if spill else 2)


# -- two steps ahead ----------------------------------------------------------------------------


def test_depth_two_plans_rows_from_tokens_that_are_not_known_yet() -> None:
    driver = Driver(64, depth=2, max_step_tokens=32)
    driver.add(prompt(5), 6)
    first = driver.plan()
    second = driver.plan()
    assert first is not None
    assert second is not None
    with pytest.raises(SequenceStateError, match="2 plans"):
        driver.scheduler.plan()
    assert second.source_rows.tolist() == [0]
    assert second.entries["start"].tolist() == [5]
    with pytest.raises(InvalidArgumentError, match="allowed: 0, the oldest"):
        driver.scheduler.commit(1, ids([1]))
    driver.drain()


def test_a_row_behind_a_finished_sequence_is_dropped_and_its_blocks_return() -> None:
    driver = Driver(64, depth=2, max_step_tokens=32, recurrent=True)
    handle = driver.add(prompt(4), 9, stop_after=2)
    for _ in range(3):
        driver.step()
    assert driver.finished[handle].got == continuation(prompt(4), 4, 2)
    assert driver.scheduler.state(handle) == "ended"
    assert driver.pool.num_free < 64
    assert driver.slot_pool is not None
    assert driver.slot_pool.num_free == 15
    driver.drain()
    assert driver.pool.num_free == 64
    assert driver.slot_pool.num_free == 16
    with pytest.raises(StaleHandleError):
        driver.scheduler.state(handle)


def test_a_request_that_must_see_its_tokens_is_not_planned_ahead() -> None:
    driver = Driver(64, depth=2, max_step_tokens=32)
    ahead, behind = driver.add(prompt(4), 8), driver.add(prompt(4, 1), 8, run_ahead=False)
    driver.drain()
    for before, after in zip(driver.plans, driver.plans[1:], strict=False):
        if ahead in after["entries"]["handle"]:  # both plans were outstanding at a time
            assert not (
                behind in before["entries"]["handle"] and behind in after["entries"]["handle"]
            )
    assert len([plan for plan in driver.plans if ahead in plan["entries"]["handle"]]) == 8


def test_a_length_is_found_by_commit_and_never_overrun() -> None:
    for depth in (1, 2):
        driver = Driver(64, depth=depth, max_step_tokens=32)
        scheduler = driver.scheduler
        handle = scheduler.add(ids(prompt(4)), 3)
        rows = 0
        reasons = []
        while True:
            plans = []
            while len(plans) < depth and (plan := scheduler.plan()) is not None:
                plans.append(plan)
                rows += plan.num_rows
            if not plans:
                break
            for plan in plans:
                scheduler.commit(plan.step_id, np.full(plan.num_seqs, 7, np.int32))
                reasons += plan.entries["reason"].tolist()
        assert rows == 4 + 2
        assert reasons == [0, 0, FinishReason.LENGTH]
        assert scheduler.take_retired() == [handle]


def test_a_rejected_commit_changes_nothing() -> None:
    driver = Driver(64, max_step_tokens=32)
    driver.add(prompt(5), 6)
    driver.add(prompt(3, 1), 6)
    plan = driver.plan()
    assert plan is not None
    commit = driver.scheduler.commit
    for arguments in (
        (ids([1]),),
        (ids([1, 2]), ids([1])),
        (ids([1, -1]),),
        (ids([1, 2]), ids([4, 3])),
        (ids([1, 2]), ids([6, 3])),
        (ids([1, 2]), None, ids([0, -1])),
    ):
        with pytest.raises(InvalidArgumentError):
            commit(plan.step_id, *arguments)
    driver.drain()


def test_cancelling() -> None:
    driver = Driver(64, depth=2, max_running=1, max_step_tokens=32)
    running, waiting = driver.add(prompt(6), 9), driver.add(prompt(6, 1), 9)
    driver.step()
    driver.cancel(waiting)
    assert driver.scheduler.num_waiting == 0
    driver.cancel(running)
    with pytest.raises(SequenceStateError, match="ended"):
        driver.scheduler.cancel(running)
    driver.drain()
    for handle in (running, waiting):
        with pytest.raises(StaleHandleError):
            driver.scheduler.cancel(handle)


def test_a_stop_inside_accepted_drafts_ends_there() -> None:
    driver = Driver(64, max_verify_rows=6, max_step_tokens=32)
    driver.draft_len = 5
    for stop_after in range(1, 12):
        handle = driver.add(prompt(4, stop_after), 30, stop_after, run_ahead=False)
        driver.drain()
        assert len(driver.finished[handle].got) == stop_after


def test_a_rewind_inside_the_prompt_makes_its_last_row_again() -> None:
    driver = Driver(64, chunk_tokens=4, max_step_tokens=32)
    handle = driver.add(prompt(7), 3, all_logits=True)
    driver.step()
    driver.rewind(handle, 4)
    driver.drain()
    assert chunks(driver, handle) == [(0, 4), (3, 1)]
    assert int(driver.plans[1]["entries"][0]["num_logits"]) == 1


# -- fork and sessions --------------------------------------------------------------------------


@pytest.mark.parametrize("recurrent", [False, True])
def test_forks_share_the_prompt_and_copy_on_write(recurrent: bool) -> None:
    driver = Driver(64, recurrent=recurrent, max_running=5, max_step_tokens=64)
    parent = driver.add(prompt(10), 8, run_ahead=False)
    driver.step()
    used = driver.pool.num_total - driver.pool.num_free
    children = [driver.fork(parent, token) for token in (1, 2, 3)]
    assert driver.pool.num_total - driver.pool.num_free == used
    driver.step()
    # The partly filled block is copied for all but the last of the four to write it.
    assert len(actions(driver, ActionKind.COPY_BLOCK)) == 3
    assert driver.pool.num_total - driver.pool.num_free == used + 3
    driver.drain()
    outputs = {tuple(driver.finished[handle].got) for handle in (parent, *children)}
    assert len(outputs) == 4


def test_a_fork_without_a_place_is_rebuilt_from_its_tokens() -> None:
    driver = Driver(64, max_running=1, max_step_tokens=64)
    parent = driver.add(prompt(6), 8)
    for _ in range(3):
        driver.step()
    child = driver.fork(parent, 17)
    assert driver.scheduler.state(child) == "waiting"
    driver.drain()
    assert driver.finished[child].got[:3][-1] == 17

    padded = Driver(64, max_running=1, max_step_tokens=64)
    parent = padded.add(prompt(6), 8, can_requeue=False)
    padded.step()
    with pytest.raises(OutOfMemoryError):
        padded.scheduler.fork(parent, 1)


def test_fork_and_drafts_need_a_sequence_at_rest() -> None:
    driver = Driver(64, depth=2, max_step_tokens=64)
    handle = driver.add(prompt(6), 8)
    with pytest.raises(SequenceStateError, match="waiting"):
        driver.scheduler.fork(handle, 1)
    driver.plan()
    for call in (
        lambda: driver.scheduler.fork(handle, 1),
        lambda: driver.scheduler.set_drafts(handle, ids([1])),
        lambda: driver.scheduler.rewind(handle, 3),
    ):
        with pytest.raises(SequenceStateError, match="in flight"):
            call()
    driver.drain()


@pytest.mark.parametrize("recurrent", [False, True])
def test_a_saved_session_enters_spilled_and_continues(recurrent: bool) -> None:
    saved = Driver(64, recurrent=recurrent, max_step_tokens=64)
    handle = saved.add(prompt(9), 12)
    for _ in range(5):
        saved.step()
    tokens = saved.scheduler.tokens(handle).tolist()
    table = saved.scheduler.sequence(handle).block_table
    slot = saved.scheduler.slot(handle)
    state = saved.model.states[slot] if recurrent else 0
    session = saved.model.kv[table].copy(), state

    driver = Driver(64, recurrent=recurrent, max_step_tokens=64)
    driver.add(prompt(5, 3), 9)
    driver.step()
    handle = driver.scheduler.add_spilled(ids(tokens), 9, 7)
    driver.model.host[handle] = session
    client = saved.clients.popitem()[1]
    client.got, client.stop_after = list(client.got), 12
    driver.clients[handle] = client
    driver.drain()
    assert driver.finished[handle].got == continuation(prompt(9), 9, 12)
    with pytest.raises(InvalidArgumentError, match="prompt_len is 3"):
        driver.scheduler.add_spilled(ids([1, 2, 3]), 3, 1)


# -- batch writer -------------------------------------------------------------------------------


def test_the_batch_writer_checks_its_arrays() -> None:
    driver = Driver(64, max_step_tokens=32)
    driver.scheduler.add(ids(prompt(6)), 3)
    driver.scheduler.add(ids(prompt(3, 1)), 3)
    plan = driver.scheduler.plan()
    assert plan is not None
    sizes: dict[str, Any] = {
        "token_ids": 9,
        "positions": 9,
        "slots": 9,
        "cu_rows": 3,
        "block_tables": (2, 2),
        "logits_rows": 2,
    }
    arrays = {name: np.zeros(size, np.int32) for name, size in sizes.items()}
    write_batch(plan, **arrays)
    assert arrays["token_ids"].tolist() == prompt(6) + prompt(3, 1)
    assert arrays["positions"].tolist() == [*range(6), *range(3)]
    assert arrays["cu_rows"].tolist() == [0, 6, 9]
    assert arrays["logits_rows"].tolist() == [5, 8]
    tables = arrays["block_tables"]
    assert arrays["slots"].tolist() == [
        int(tables[i, position // 4]) * 4 + position % 4
        for i, length in enumerate((6, 3))
        for position in range(length)
    ]
    for name, size in sizes.items():
        smaller = (1, 2) if name == "block_tables" else size - 1
        with pytest.raises(InvalidArgumentError, match=name):
            write_batch(plan, **(arrays | {name: np.zeros(smaller, np.int32)}))
    driver.scheduler.commit(plan.step_id, ids([1, 2]))
    with pytest.raises(StaleHandleError):
        write_batch(plan, **arrays)
