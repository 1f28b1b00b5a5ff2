"""Hybrids on pools so small that blocks, slots and snapshots are taken away all the time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import atlas.step_loop
from atlas import Engine, SamplingParams
from atlas._native.scheduler import Scheduler
from atlas.errors import InvalidArgumentError, OutOfMemoryError, SequenceStateError
from atlas.request import Completion
from tests.composition.harness import assert_balanced

BASE = [3 + (37 * i + i * i) % 190 for i in range(60)]
_REQUESTS = 24
_LIVE = 6
# (blocks of 16, slots, snapshots, preemption, compaction of slots)
POOLS = [
    (9, 3, 0, "spill", False),
    (9, 2, 1, "requeue", False),
    (11, 3, 2, "spill", True),
    (14, 4, 3, "requeue", True),
    (12, 4, 5, "spill", False),
]


@contextmanager
def tiny_engine(
    folder: Path, blocks: int, slots: int, snapshots: int, preemption: str, compact: bool
) -> Iterator[Engine]:
    """An engine that reserves late, spares nobody, and has only so many slots to run in."""
    eager = {"watermark": 0, "immune_tokens": 0, "compact_slots": compact}

    def make(*args: Any, **options: Any) -> Scheduler:
        return Scheduler(*args, **options | eager)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(atlas.step_loop, "Scheduler", make)
        engine = Engine(
            folder,
            threads=1,
            quiet=True,
            kv_tokens=16 * blocks,
            max_seq_len=128,
            chunk_tokens=9,
            max_running=4,
            state_snapshots=snapshots,
            preemption=preemption,
        )
    with engine:
        running = engine._loop.core.states.running  # type: ignore[union-attr]
        held = [running.claim() for _ in range(running.num_total - slots)]
        for slot in sorted(held)[:slots]:  # holes in front, so that compaction has work
            running.release(slot)
        held = sorted(held)[slots:] + [running.claim() for _ in range(running.num_free - slots)]
        assert running.num_free == slots
        yield engine
        for slot in held:
            running.release(slot)
        assert_balanced(engine)


class Crowd:
    """Requests that come, fork, go back, are saved, restored and cancelled, at random."""

    def __init__(self, engine: Engine, folder: Path, seed: int) -> None:
        self.engine = engine
        self.folder = folder
        self.random = np.random.default_rng(seed)
        self.wanted: dict[str, tuple[list[int], SamplingParams]] = {}
        self.ended: dict[str, Completion] = {}
        self.counts: Counter[str] = Counter()

    def live(self) -> list[str]:
        return [name for name in self.wanted if name not in self.ended]

    def submit(self, number: int) -> None:
        prompt = BASE[: int(self.random.integers(1, len(BASE)))]
        prompt = [*prompt, *(int(t) for t in self.random.integers(3, 190, 3))]
        sampled = {"temperature": 0.9, "seed": number} if number % 2 else {}
        params = SamplingParams(
            max_tokens=int(self.random.integers(1, 50)), ignore_eos=True, logprobs=1, **sampled
        )
        name = f"request {number}"
        self.wanted[name] = (prompt, params)
        self.engine.submit(prompt, params, request_id=name, priority=int(self.random.integers(2)))

    def step(self) -> None:
        for event in self.engine.step():
            assert event.error is None, event
            if event.completion is not None:
                self.ended[event.request_id] = event.completion

    def disturb(self, name: str) -> None:
        """Do something to a request, where it lets us."""
        prompt, params = self.wanted[name]
        what = self.random.choice(["fork", "rewind", "session", "cancel"], p=[0.3, 0.4, 0.2, 0.1])
        try:
            if what == "fork":
                self.engine.fork(name, new_id=f"{name}'")
                self.wanted[f"{name}'"] = (prompt, params)
                self.counts["forked"] += 1
            elif what == "rewind":
                position = len(prompt) + int(self.random.integers(0, 25))
                self.engine.rewind(name, position)
                self.counts["rewound"] += 1
            elif what == "session":
                self.engine.save(name, self.folder / "session")
                self.engine.cancel(name)
                while name not in self.ended:
                    self.step()
                if self.ended[name].finish_reason == "cancelled":
                    del self.ended[name]
                    self.engine.restore(self.folder / "session", request_id=name)
                    self.counts["restored"] += 1
            else:
                self.engine.cancel(name)
                del self.wanted[name]
                self.counts["cancelled"] += 1
        except (SequenceStateError, OutOfMemoryError, InvalidArgumentError):
            self.counts["refused"] += 1  # not at rest, no place, no snapshot; no such position

    def run(self) -> None:
        number = 0
        while number < _REQUESTS or self.engine.has_unfinished():
            if number < _REQUESTS and len(self.live()) < _LIVE and self.random.random() < 0.3:
                self.submit(number)
                number += 1
            self.step()
            live = self.live()
            if live and self.random.random() < 0.15:
                self.disturb(live[int(self.random.integers(len(live)))])


@pytest.mark.parametrize("pools", POOLS, ids=str)
def test_every_request_gives_what_it_gives_alone(
    hybrid_folder: Path, pools: tuple[int, int, int, str, bool], tmp_path: Path
) -> None:
    counts: Counter[str] = Counter()
    with (
        tiny_engine(hybrid_folder, *pools) as engine,
        Engine(hybrid_folder, threads=1, quiet=True, prefix_cache=False) as alone,
    ):
        for seed in range(3):
            crowd = Crowd(engine, tmp_path, seed)
            crowd.run()
            counts += crowd.counts
            for name, (prompt, params) in crowd.wanted.items():
                expected = alone.generate(prompt, params)
                assert crowd.ended[name].token_ids == expected.token_ids, (seed, name)
                assert crowd.ended[name].logprobs == expected.logprobs, (seed, name)
        metrics = engine.metrics()
        assert metrics.preemptions > 0
        assert metrics.state_slots_total - metrics.state_slots_used == pools[1]
        assert metrics.snapshots_total == pools[2]
    for name in ("forked", "restored", "cancelled"):
        assert counts[name] > 0, counts
    assert counts["rewound"] > 0 or pools[2] < 2, counts
