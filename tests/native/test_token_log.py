"""The log takes every token that cannot end a sample, and none that others must see."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atlas._native.block_pool import BlockPool
from atlas._native.plan import EntryFlag, EntryKind, Plan
from atlas._native.scheduler import Scheduler
from atlas._native.token_log import TokenLog
from atlas.errors import InvalidArgumentError

PROMPT = np.arange(5, dtype=np.int32)
NOTHING = np.empty(0, np.int32)


def ids(*tokens: int) -> Any:
    return np.array(tokens, np.int32)


def running(count: int, max_tokens: int = 50) -> tuple[Scheduler, list[int]]:
    """A scheduler whose sequences have each one token."""
    scheduler = Scheduler(
        BlockPool(64), 16, max_running=8, max_step_tokens=99, max_prefills=8, chunk_tokens=99
    )
    handles = [scheduler.add(PROMPT, max_tokens) for _ in range(count)]
    settle(scheduler, planned(scheduler), ids(*[9] * count))
    return scheduler, handles


def planned(scheduler: Scheduler) -> Plan:
    plan = scheduler.plan()
    assert plan is not None
    return plan


def settle(scheduler: Scheduler, plan: Plan, tokens: Any) -> None:
    scheduler.commit(plan.step_id, tokens)


def test_tokens_are_taken_in_order_until_it_is_closed() -> None:
    scheduler, handles = running(3)
    log = TokenLog()
    for handle in handles[:2]:
        log.open(handle, 40, ids(7), 10.0)
    assert (log.num_open, sorted(log.handles)) == (2, handles[:2])
    for step in range(70 - 40):
        plan, out = planned(scheduler), np.zeros(3, np.int32)
        chosen = ids(20 + step, 60 + step, 5)
        assert log.others(plan, chosen) == [2]
        waited = log.keep(plan, chosen, 11.0 + step, out=out)
        assert waited.tolist() == [1.0, 1.0]
        assert out.tolist() == [20 + step, 60 + step, 0]
        out[2] = 5
        settle(scheduler, plan, out)
    tokens, last_s = log.close(handles[1]) or (NOTHING, 0.0)
    assert tokens.tolist() == [60 + step for step in range(30)]
    assert last_s == 40.0
    assert log.close(handles[1]) is None
    plan = planned(scheduler)
    assert log.others(plan, ids(1, 1, 1)) == [1, 2]
    assert (log.num_open, log.handles) == (1, handles[:1])
    log.open(handles[1], 40, NOTHING, 0.0)
    assert len((log.close(handles[1]) or [NOTHING])[0]) == 0  # what was taken before is gone


@given(
    ends=st.lists(st.integers(0, 5), max_size=3),
    last_position=st.integers(5, 12),
    tokens=st.lists(st.integers(-1, 6), min_size=1, max_size=8),
)
def test_what_may_end_a_sample_is_left_to_others(
    ends: list[int], last_position: int, tokens: list[int]
) -> None:
    scheduler, (handle,) = running(1)
    log = TokenLog()
    log.open(handle, last_position, ids(*ends), 0.0)
    kept = []
    for number, token in enumerate(tokens):
        plan, out = planned(scheduler), np.full(1, -5, np.int32)
        position = 6 + number  # of the token that this step gives
        goes_on = token >= 0 and token not in ends and position < last_position
        assert log.others(plan, ids(token)) == ([] if goes_on else [0])
        assert len(log.keep(plan, ids(token), 1.0, out=out)) == goes_on
        assert out.tolist() == ([token] if goes_on else [-5])
        kept += [token] * goes_on
        settle(scheduler, plan, ids(max(token, 0)))
    assert (log.close(handle) or [NOTHING])[0].tolist() == kept


def test_prompts_and_unknown_choices_are_others() -> None:
    scheduler, (first,) = running(1)
    log = TokenLog()
    log.open(first, 40, NOTHING, 0.0)
    second = scheduler.add(PROMPT, 9)
    log.open(second, 40, NOTHING, 0.0)
    plan, out = planned(scheduler), np.zeros(2, np.int32)
    assert plan.entries["kind"].tolist() == [EntryKind.STEP, EntryKind.PROMPT]
    assert all(plan.entries["flags"] & int(EntryFlag.SAMPLES))
    assert log.others(plan, ids(3, 4)) == [1]
    assert log.others(plan, NOTHING) == [0, 1]
    assert len(log.keep(plan, NOTHING, 1.0, out=out)) == 0
    settle(scheduler, plan, out)


def test_refusals() -> None:
    scheduler, (handle,) = running(1)
    log = TokenLog()
    log.open(handle, 40, NOTHING, 0.0)
    for wrong in (handle, -1):
        with pytest.raises(InvalidArgumentError, match="allowed: one that is not open"):
            log.open(wrong, 40, NOTHING, 0.0)
    plan = planned(scheduler)
    with pytest.raises(InvalidArgumentError, match="out has 0 entries; the step has 1"):
        log.keep(plan, ids(3), 0.0, out=NOTHING)
    settle(scheduler, plan, ids(3))
