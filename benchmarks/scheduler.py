"""What a scheduler step costs: microseconds per plan + commit, and block operations a second.

Run it as ``python benchmarks/scheduler.py``. A step is plan, the batch writer's arrays and commit
of one decode row for each running sequence.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from atlas._native.batch_writer import write_batch
from atlas._native.block_pool import BlockPool
from atlas._native.scheduler import Scheduler
from atlas._native.sequence import Sequence

BLOCK_SIZE = 16
PROMPT_LEN = 200
STEPS = 200
ROUNDS = 15
BOUND_US = 50.0
WAITING_SLOWDOWN = 1.10


def filled(num_running: int, num_waiting: int, depth: int = 1) -> Scheduler:
    """A scheduler whose running sequences all decode, with a queue that does not fit."""
    max_tokens = 2 * STEPS * ROUNDS + 200
    blocks = num_running * ((PROMPT_LEN + max_tokens) // BLOCK_SIZE + 1)
    scheduler = Scheduler(
        BlockPool(blocks),
        BLOCK_SIZE,
        max_running=num_running,
        max_step_tokens=num_running * (PROMPT_LEN + 1) + 1,
        max_prefills=num_running,
        depth=depth,
    )
    prompt = np.arange(PROMPT_LEN, dtype=np.int32)
    for _ in range(num_running):
        scheduler.add(prompt, max_tokens)
    for _ in range(num_waiting):
        scheduler.add(prompt[:20], 100)
    plan = scheduler.plan()
    assert plan is not None
    assert plan.num_seqs == num_running
    scheduler.commit(plan.step_id, np.zeros(num_running, np.int32))
    return scheduler


class Stepper:
    """One scheduler under load, stepped in rounds; the best round counts."""

    def __init__(self, num_running: int, num_waiting: int) -> None:
        self.scheduler = filled(num_running, num_waiting)
        self.sampled = np.zeros(num_running, np.int32)
        self.kept = np.ones(num_running, np.int32)
        self.rows = [np.zeros(num_running, np.int32) for _ in range(4)]
        self.cu_rows = np.zeros(num_running + 1, np.int32)
        self.tables = np.zeros((num_running, 512), np.int32)
        self.best_us = {False: float("inf"), True: float("inf")}

    def round(self, write: bool) -> None:
        """Time ``STEPS`` steps, with or without the batch writer."""
        scheduler, rows = self.scheduler, self.rows
        start = time.perf_counter()
        for _ in range(STEPS):
            plan = scheduler.plan()
            assert plan is not None
            if write:
                write_batch(plan, rows[0], rows[1], rows[2], self.cu_rows, self.tables, rows[3])
            scheduler.commit(plan.step_id, self.sampled, self.kept)
        us = (time.perf_counter() - start) / STEPS * 1e6
        self.best_us[write] = min(self.best_us[write], us)


def compare(num_running: int, rounds: int = ROUNDS) -> tuple[Stepper, Stepper]:
    """An empty queue against 10,000 waiting requests, their rounds taken in turns."""
    steppers = Stepper(num_running, 0), Stepper(num_running, 10_000)
    for _ in range(rounds):
        for stepper in steppers:
            for write in (False, True):
                stepper.round(write)
    return steppers


class Request:
    """The fields of a request that the decode path reads and writes."""

    def __init__(self, handle: int) -> None:
        self.handle, self.epoch, self.planned_epoch = handle, 0, 0
        self.running, self.draining, self.run_ahead = True, False, False
        self.history = list(range(PROMPT_LEN + 1))
        self.tokens = list(range(PROMPT_LEN))
        self.blocks = list(range(PROMPT_LEN // BLOCK_SIZE + 1))
        self.prompt_len = self.planned_len = PROMPT_LEN
        self.limit_len = 10**9
        self.in_flight = self.num_drafts = self.fresh_tokens = 0
        self.draft_capacity = self.source_row = self.source_step = self.last_token_us = -1


@dataclass(slots=True)
class Entry:
    """What ``plan`` says of one sequence."""

    handle: int
    request: Request
    epoch: int
    start: int
    rows: int
    flags: int = 0
    num_drafts: int = 0
    num_logits: int = 0
    first_row: int = 0
    first_logits: int = 0
    source: int = -1
    emitted: int = 0
    reason: int = 0
    dropped: int = 0


class PythonLoop:
    """The decode path of ``planner.pyx`` and ``outcome.pyx``, line by line in Python.

    Prompts, drafts, preemption and validation's error paths are left out, which favours it.
    """

    def __init__(self, num_running: int) -> None:
        self.order = [Request(i) for i in range(num_running)]
        self.references = [1] * 10**5
        self.free = list(range(10**5 // 2, 10**5))
        self.step_id = 0

    def steps(self, request: Request) -> bool:
        """``phase_of``."""
        known = len(request.history) - request.planned_len
        if request.draining or request.planned_len >= request.limit_len:
            return False
        if request.in_flight and request.planned_epoch != request.epoch:
            return False
        return request.planned_len >= request.prompt_len and known > 0

    def reserve(self, request: Request, rows: int) -> bool:
        last = request.planned_len // BLOCK_SIZE
        missing = max(0, -(-(request.planned_len + rows) // BLOCK_SIZE) - len(request.blocks))
        partial = request.planned_len % BLOCK_SIZE != 0
        if partial and self.references[request.blocks[last]] > 1:
            missing += 1
        if missing > len(self.free):
            return False
        for _ in range(missing):
            request.blocks.append(self.free.pop())
            self.references[request.blocks[-1]] = 1
        return True

    def plan(self) -> list[Entry]:
        """``survey``, ``lay_steps``, ``add_entry`` and ``finish_rows``."""
        num_steps, capacity = 0, 7
        for request in self.order:
            request.draining = False
            num_steps += self.steps(request)
            if request.draft_capacity >= 0:
                capacity = min(capacity, request.draft_capacity)
        entries: list[Entry] = []
        spare = 10**6 - num_steps
        for request in self.order:
            if not self.steps(request):
                continue
            extra = max(0, min(spare, 7, request.limit_len - request.planned_len - 1))
            in_hand = (len(request.blocks) + len(self.free)) * BLOCK_SIZE - request.planned_len - 1
            drafts = max(0, min(extra, request.num_drafts, capacity, in_hand))
            rows = 1 + drafts
            if not self.reserve(request, rows):
                continue
            entry = Entry(request.handle, request, request.epoch, request.planned_len, rows)
            request.planned_len += rows
            request.planned_epoch = request.epoch
            request.in_flight += 1
            entry.flags, entry.num_drafts, entry.num_logits = 2, drafts, 1 + drafts
            entries.append(entry)
        row = logits = 0
        self.rows: list[int] = []
        for entry in entries:
            request = entry.request
            entry.first_row, entry.first_logits = row, logits
            for j in range(entry.rows):
                self.rows.append(request.history[entry.start + j])
                row += 1
            logits += entry.num_logits
            request.source_row = logits - 1
            request.source_step = self.step_id
        return entries

    def commit(self, entries: list[Entry], tokens: list[int], kept: list[int], now: int) -> None:
        """``first_invalid`` and ``settle``."""
        for i, entry in enumerate(entries):
            if kept[i] != 0 and not entry.rows - entry.num_drafts <= kept[i] <= entry.rows:
                raise ValueError(i)
            if kept[i] and tokens[i] < 0 and entry.flags & 2 and entry.request.running:
                raise ValueError(i)
        for i, entry in enumerate(entries):
            request = entry.request
            request.in_flight -= 1
            if not request.running or request.epoch != entry.epoch:
                entry.dropped = 1
                continue
            accepted = kept[i] - (entry.rows - entry.num_drafts)
            request.tokens += request.history[entry.start : entry.start + kept[i]]
            if entry.flags & 2:
                request.history.append(tokens[i])
                entry.emitted = accepted + 1
                request.fresh_tokens += entry.emitted
                request.last_token_us = now
                request.num_drafts = 0
                if len(request.history) > request.limit_len:
                    entry.reason = 1
        self.step_id += 1

    def step(self) -> None:
        """One plan and commit."""
        entries = self.plan()
        self.commit(entries, [0] * len(entries), [1] * len(entries), self.step_id)


def python_us(num_running: int) -> float:
    """Best round of the loop in Python, µs a step."""
    best = float("inf")
    for _ in range(ROUNDS):
        loop = PythonLoop(num_running)
        start = time.perf_counter()
        for _ in range(STEPS):
            loop.step()
        best = min(best, (time.perf_counter() - start) / STEPS * 1e6)
    return best


def block_operations_per_s(count: int = 200_000) -> float:
    """Blocks taken and returned a second, a sequence growing and shrinking from Python."""
    pool = BlockPool(1024)
    per_call = 64
    sequence = Sequence(pool, BLOCK_SIZE)
    start = time.perf_counter()
    for _ in range(count // per_call):
        sequence.reserve(per_call * BLOCK_SIZE)
        sequence.trim(0)
    return 2 * (count // per_call) * per_call / (time.perf_counter() - start)


def single_operations_per_s(count: int = 300_000) -> float:
    """Calls of ``retain`` and ``release`` a second, one block a call."""
    pool = BlockPool(64)
    (block,) = pool.allocate(1)
    retain, release = pool.retain, pool.release
    start = time.perf_counter()
    for _ in range(count):
        retain(block)
        release(block)
    return 2 * count / (time.perf_counter() - start)


def main() -> None:
    print("| running | waiting | plan + commit, µs | + batch writer, µs |")
    print("| --- | --- | --- | --- |")
    for num_running in (1, 16, 128):
        pair = compare(num_running)
        for num_waiting, stepper in zip((0, 10_000), pair, strict=True):
            bare, both = stepper.best_us[False], stepper.best_us[True]
            print(f"| {num_running} | {num_waiting} | {bare:.2f} | {both:.2f} |")
    empty, queued = (stepper.best_us[False] for stepper in pair)
    print(f"\n128 running: {empty:.1f} µs a step (bound {BOUND_US:.0f} µs);")
    print(f"10,000 waiting make it {queued / empty:.2f} × (bound {WAITING_SLOWDOWN:.2f} ×)")
    interpreted = python_us(128)
    print(
        f"the same decode path in Python: {interpreted:.0f} µs, {interpreted / empty:.1f} × as long"
    )
    print(f"block operations from Python: {single_operations_per_s() / 1e6:.1f} M/s one by one,")
    print(f"{block_operations_per_s() / 1e6:.1f} M/s through Sequence.reserve and trim of 64")


if __name__ == "__main__":
    main()
