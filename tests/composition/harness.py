"""One request on a small engine, stepped by hand, while things happen to it.

A feature is what happens: before the request is submitted, and once it has written a few tokens.
Each proves afterwards, from the plans that ran, that it really happened. Features compose: a run
takes any set of them, and whatever the set, the request must give what :func:`plain` gives.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from atlas import Engine, SamplingParams
from atlas._native.plan import ActionKind, EntryKind, Plan
from atlas.errors import AtlasError, SequenceStateError
from atlas.event import Event
from atlas.request import Completion, Sample

T = TypeVar("T")
BLOCK_SIZE = 16
PROMPT = [3 + (37 * i + i * i) % 190 for i in range(75)]
MAX_TOKENS = 36
PARAMS = {
    "greedy": SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=2),
    "sampled": SamplingParams(
        max_tokens=MAX_TOKENS,
        ignore_eos=True,
        logprobs=2,
        temperature=0.9,
        top_p=0.95,
        repetition_penalty=1.1,
        seed=11,
    ),
}
_STEPS = 2000  # of a run at most: a request that hangs fails its test


def plain(engine: Engine, params: SamplingParams, index: int) -> Sample:
    """Sample ``index`` of the prompt by the model alone: one prefill, then decode by decode."""
    with engine.paused() as model:
        generation = engine._intake.generation(PROMPT, params, index)
        seq = model.lifecycle.alloc_sequence()
        try:
            view = model.forward.prefill(PROMPT, seq)
            while True:
                assert view is not None
                generation.push(generation.choose_from(view.numpy()[0]))
                if generation.finished:
                    return generation.sample()
                view = model.forward.decode(generation.last_token, seq)
        finally:
            model.lifecycle.free_sequence(seq)


@dataclass(frozen=True, slots=True)
class Step:
    """What a plan asked for, with requests by their ids: entries (id, kind, rows), actions.

    ``num_fed`` counts rows whose token the host had not seen when the step was launched.
    """

    entries: list[tuple[str, EntryKind, int]]
    actions: list[tuple[str, ActionKind]]
    num_fed: int


class Recorder:
    """Notes every plan of an engine while the block lasts."""

    def __init__(self, engine: Engine) -> None:
        self.steps: list[Step] = []
        self._loop = engine._loop
        self._perform = self._loop.store.perform

    def __enter__(self) -> Recorder:
        self._loop.store.perform = self._note  # type: ignore[method-assign]
        return self

    def __exit__(self, *exception: object) -> None:
        self._loop.store.perform = self._perform  # type: ignore[method-assign]

    def num_rows(self, kind: EntryKind) -> int:
        """Tokens that ran as prompt tokens or as step tokens."""
        return sum(rows for step in self.steps for _, own, rows in step.entries if own == kind)

    def _note(self, plan: Plan) -> dict[int, AtlasError]:
        entries = [
            (self._name(entry["handle"]), EntryKind(int(entry["kind"])), int(entry["rows"]))
            for entry in plan.entries
        ]
        actions = [(self._name(a["handle"]), ActionKind(int(a["kind"]))) for a in plan.actions]
        self.steps.append(Step(entries, actions, int((plan.source_rows >= 0).sum())))
        return self._perform(plan)

    def _name(self, handle: Any) -> str:
        request, _ = self._loop._by_handle.get(int(handle), (None, 0))
        return "" if request is None else request.request_id


@dataclass(slots=True)
class Run:
    """The target request of a composition, and its neighbours."""

    engine: Engine
    recorder: Recorder
    params: SamplingParams
    folder: Path
    target: str = "target"
    events: list[Event] = field(default_factory=list)
    ended: dict[str, Completion] = field(default_factory=dict)

    def submit(self, name: str, prompt: Sequence[int], max_tokens: int, priority: int) -> None:
        """Add a neighbour."""
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self.engine.submit(prompt, params, request_id=name, priority=priority)

    def step(self) -> None:
        """One step of the engine."""
        for event in self.engine.step():
            assert event.error is None, event
            self.events.append(event)
            if event.completion is not None:
                self.ended[event.request_id] = event.completion

    def num_tokens(self, name: str) -> int:
        """Tokens of a request's slowest sample so far."""
        counts = Counter(dict.fromkeys(range(self.params.n if name == "target" else 1), 0))
        for event in self.events:
            if event.request_id == name:
                counts[event.index] += len(event.token_ids)
        return min(counts.values())

    def until(self, done: Callable[[], bool]) -> None:
        """Step until ``done()``, with an end to patience."""
        for _ in range(_STEPS):
            if done():
                return
            assert self.engine.has_unfinished(), "the engine is idle before its time"
            self.step()
        raise AssertionError(f"not done after {_STEPS} steps")

    def when_running(self, call: Callable[[], T]) -> T:
        """``call()`` as soon as the target is past its prompt, running and not behind."""
        for _ in range(_STEPS):
            try:
                return call()
            except SequenceStateError:
                self.step()
        raise AssertionError(f"not running after {_STEPS} steps")

    def preemptions(self, kind: ActionKind) -> int:
        """How often a sample of the target was preempted this way."""
        return sum(step.actions.count((self.target, kind)) for step in self.recorder.steps)

    def shared_steps(self, neighbour: str) -> int:
        """Steps with rows of the target and of a neighbour."""
        return sum(
            {self.target, neighbour} <= {name for name, _, _ in step.entries}
            for step in self.recorder.steps
        )

    @contextmanager
    def all_free_blocks(self) -> Iterator[list[int]]:
        """Hold every block that is free or can be evicted from the prefix cache."""
        loop = self.engine._loop
        if loop.cache is not None:
            loop.cache.clear()
        blocks = loop.core.blocks.allocate(loop.core.blocks.num_free)
        try:
            yield blocks
        finally:
            for block in blocks:
                loop.core.blocks.release(block)

    def spoil(self, blocks: list[int]) -> None:
        """Fill blocks, and slots that are free, with what must never be read."""
        core = self.engine._loop.core
        spoil = functools.partial(self._spoil, core.runtime)
        for pool in (*core.pools.keys, *core.pools.values):
            spoil(pool, blocks)
        if core.states is not None:
            running = core.states.running
            free = [slot for slot in range(running.num_total) if running.owner(slot) == -1]
            for pool in (*core.states.pools.states, *core.states.pools.tails):
                spoil(pool, free + core.states.snapshots._free)

    @staticmethod
    def _spoil(runtime: Any, pool: Any, places: list[int]) -> None:
        """NaN into elements of a pool, which may lie in device memory."""
        if isinstance(pool, np.ndarray):
            pool[places] = np.nan
            return
        runtime.device.enter()
        for place in places:  # all bits set are NaN in every type
            runtime.device.fill(pool[place].address, pool[place].nbytes, 0xFF)
        runtime.device.synchronize()


def assert_balanced(engine: Engine) -> None:
    """Every block is free or cached, and the tree agrees with the pool about the latter."""
    loop = engine._loop
    cached = 0
    if loop.cache is not None:
        loop.cache.check()
        cached = loop.cache.num_blocks
    assert loop.core.blocks.num_free + cached == loop.core.blocks.num_total
    assert loop.scheduler.num_requests == 0
    if loop.core.states is not None:
        states, cached = loop.core.states, 0 if loop.cache is None else loop.cache.num_snapshots
        assert states.running.num_free == states.running.num_total
        assert states.snapshots.num_used == cached
        assert len(states.checkpoints) == states.pools.counts.checkpoints
    assert loop.store.nbytes == 0
    assert not engine.has_unfinished()
