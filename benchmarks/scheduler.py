"""What a scheduler step costs: microseconds per plan + commit, and block operations a second.

Run it as ``python benchmarks/scheduler.py``. A step is plan, the batch writer's arrays and commit
of one decode row for each running sequence.
"""

from __future__ import annotations

import time

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
    print(f"block operations from Python: {single_operations_per_s() / 1e6:.1f} M/s one by one,")
    print(f"{block_operations_per_s() / 1e6:.1f} M/s through Sequence.reserve and trim of 64")


if __name__ == "__main__":
    main()
