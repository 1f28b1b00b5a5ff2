"""State machine over pool, prefix cache, slots and scheduler: whatever happens, solo outputs."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from atlas._native.plan import FinishReason
from atlas.errors import KvExhausted, SequenceStateError
from tests.native.driver import Driver
from tests.native.recording_model import VOCAB

BLOCK_SIZE = 4
BASE = [(7 * i * i + 3) % VOCAB for i in range(24)]  # prompts share prefixes of this


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, run, fork, rewind, end and are cancelled while the pool runs short."""

    driver: Driver

    @initialize(
        depth=st.sampled_from([1, 2]),
        recurrent=st.booleans(),
        cached=st.booleans(),
        spill=st.booleans(),
        draft_len=st.integers(0, 3),
        num_blocks=st.integers(11, 22),
        max_running=st.integers(1, 6),
        abandon_rate=st.sampled_from([0.0, 0.0, 0.1]),
        chunk_tokens=st.integers(4, 9),
        watermark=st.sampled_from([0, 0, 3]),
        immune_tokens=st.sampled_from([0, 3]),
        separate=st.sampled_from([False, False, True]),
        single_chunk=st.sampled_from([False] * 5 + [True]),
        aging_us=st.sampled_from([0, 50]),
        token_deadline_us=st.sampled_from([0, 0, 20]),
        tail=st.booleans(),
    )
    def start(
        self,
        num_blocks: int,
        draft_len: int,
        abandon_rate: float,
        max_running: int,
        tail: bool,
        **options: bool,
    ) -> None:
        self.driver = Driver(
            num_blocks,
            BLOCK_SIZE,
            max_running=max_running,
            max_step_tokens=max_running + 36,
            max_verify_rows=4,
            tail_unit=BLOCK_SIZE if tail else 0,
            reuse_generated=False,
            **options,
        )
        self.driver.draft_len = draft_len
        self.driver.abandon_rate = abandon_rate
        self.outside: list[int] = []
        self.was_held = False

    @rule(
        copies=st.integers(1, 4),
        prefix=st.integers(0, len(BASE)),
        suffix=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8),
        max_tokens=st.integers(1, 24),
        stop_after=st.integers(1, 40),
        priority=st.integers(-1, 1),
        run_ahead=st.booleans(),
        can_requeue=st.booleans(),
        all_logits=st.sampled_from([False, False, False, True]),
    )
    def add(
        self,
        copies: int,
        prefix: int,
        suffix: list[int],
        max_tokens: int,
        stop_after: int,
        **options: bool,
    ) -> None:
        for copy in range(copies):  # of which each leaves the prompt a little earlier
            prompt = BASE[: max(0, prefix - 3 * copy)] + suffix
            needed = -(-(len(prompt) + max_tokens - 1) // BLOCK_SIZE)
            try:
                self.driver.add(prompt, max_tokens, min(stop_after, max_tokens), **options)
            except KvExhausted:
                assert needed > self.driver.pool.num_total
            else:
                assert needed <= self.driver.pool.num_total

    @rule(count=st.integers(1, 20), passed_us=st.integers(0, 30))
    def step(self, count: int, passed_us: int) -> None:
        self.driver.now_us += passed_us
        for _ in range(count):
            self.driver.step()

    @precondition(lambda self: self.driver.clients)
    @rule(which=st.integers(0, 20))
    def cancel(self, which: int) -> None:
        handles = list(self.driver.clients)
        if which < len(handles):
            self.driver.cancel(handles[which])

    @precondition(lambda self: self.driver.clients)
    @rule(which=st.integers(0, 100), token=st.integers(0, VOCAB - 1))
    def fork(self, which: int, token: int) -> None:
        handles = list(self.driver.clients)
        handle = handles[which % len(handles)]
        self.settle()
        if handle not in self.driver.clients or not self.driver.clients[handle].got:
            return
        try:
            self.driver.fork(handle, token)
        except (SequenceStateError, MemoryError):
            return

    @precondition(lambda self: self.driver.clients)
    @rule(which=st.integers(0, 100), back=st.integers(0, 12))
    def rewind(self, which: int, back: int) -> None:
        handles = list(self.driver.clients)
        handle = handles[which % len(handles)]
        self.settle()
        if handle not in self.driver.clients:
            return
        client = self.driver.clients[handle]
        position = max(1, len(client.prompt) + len(client.got) - back)
        try:
            self.driver.rewind(handle, position)
        except SequenceStateError:
            return

    def settle(self) -> None:
        """Commit what is in flight, so that requests are at rest."""
        while self.driver.flights:
            self.driver.commit()

    @rule(count=st.integers(1, 4))
    def hold_outside(self, count: int) -> None:
        """Exhaustion from outside: blocks of sequences that a host drives by hand."""
        self.outside += self.driver.pool.allocate(min(count, self.driver.pool.num_free))
        self.was_held |= bool(self.outside)

    @rule()
    def release_outside(self) -> None:
        for block in self.outside:
            self.driver.pool.release(block)
        self.outside.clear()

    @rule(spill=st.booleans())
    def change_preemption(self, spill: bool) -> None:
        self.driver.scheduler.set_spill(spill)

    @precondition(lambda self: self.driver.clients)
    @rule(which=st.integers(0, 100), capacity=st.none() | st.integers(0, 3))
    def limit_drafts(self, which: int, capacity: int | None) -> None:
        handles = list(self.driver.clients)
        self.driver.scheduler.set_draft_capacity(handles[which % len(handles)], capacity)

    @invariant()
    def references_add_up(self) -> None:
        if hasattr(self, "driver"):
            self.driver.check(len(self.outside))

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        self.release_outside()
        self.driver.abandon_rate = 0.0
        self.driver.drain()
        ended = [client.reason for client in self.driver.finished.values()]
        assert all(ended)
        assert self.was_held or FinishReason.EXHAUSTED not in ended
        self.driver.scheduler.close()


SchedulerMachine.TestCase.settings = settings(
    max_examples=200,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestSchedulerMachine = SchedulerMachine.TestCase
