"""A minimal engine: plans, runs a RecordingModel, accepts drafts, stops and commits."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from atlas._native.block_pool import BlockPool
from atlas._native.plan import EntryFlag, FinishReason, Plan
from atlas._native.prefix_cache import PrefixCache
from atlas._native.scheduler import Scheduler
from atlas._native.slot_pool import SlotPool
from tests.native.recording_model import EMPTY, VOCAB, RecordingModel, continuation, samples


def ids(tokens: list[int]) -> Any:
    return np.array(tokens, np.int32)


@dataclass
class Client:
    """One request as its client sees it: what it must get, and what it got."""

    prompt: list[int]
    expected: list[int]
    stop_after: int
    prompt_len: int
    got: list[int] = field(default_factory=list)
    reason: int = 0


class Driver:
    """Runs requests to their end; every token is compared with the solo run as it arrives."""

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        *,
        recurrent: bool = False,
        cached: bool = False,
        kinds: bool = True,
        seed: int = 0,
        **options: Any,
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.slot_pool = SlotPool(options.get("max_running", 16)) if recurrent else None
        num_slots = self.slot_pool.num_total if self.slot_pool else 0
        self.model = RecordingModel(num_blocks, block_size, num_slots, kinds)
        self.cache = PrefixCache(self.pool, block_size, recurrent=recurrent) if cached else None
        self.kinds = kinds
        self.block_size = block_size
        self.scheduler = Scheduler(
            self.pool, block_size, cache=self.cache, slots=self.slot_pool, **options
        )
        self.random = np.random.default_rng(seed)
        self.clients: dict[int, Client] = {}
        self.finished: dict[int, Client] = {}
        self.flights: deque[tuple[Plan, Any, Any]] = deque()
        self.before: Any = None
        self.before_step = -1
        self.draft_len = 0
        self.abandon_rate = 0.0
        self.plans: list[dict[str, Any]] = []
        self.now_us = 0
        self.next_snapshot = 0
        self.marks: dict[int, dict[int, int]] = {}  # by handle: states by tokens absorbed
        self.stale: set[tuple[int, int]] = set()

    # -- requests -----------------------------------------------------------------------------

    def add(self, prompt: list[int], max_tokens: int, stop_after: int = 0, **options: Any) -> int:
        expected = continuation(prompt, len(prompt), max_tokens, self.kinds)
        handle = self.scheduler.add(ids(prompt), max_tokens, now_us=self.now_us, **options)
        self.clients[handle] = Client(prompt, expected, stop_after or max_tokens, len(prompt))
        return handle

    def fork(self, handle: int, token: int) -> int:
        parent = self.clients[handle]
        child = self.scheduler.fork(handle, token, now_us=self.now_us)
        if self.scheduler.slot(child) >= 0:  # else it waits for a place
            state = self.model.states[self.scheduler.slot(handle)]
            self.model.place(child, self.scheduler.slot(child), state)
        got = [*parent.got[:-1], token]
        left = len(parent.expected) - len(got)
        after = continuation([*parent.prompt, *got], parent.prompt_len, left, self.kinds)
        self.clients[child] = Client(
            parent.prompt, got + after, len(parent.expected), parent.prompt_len, got
        )
        return child

    def rewind(self, handle: int, position: int, state_len: int | None = None) -> None:
        """On a hybrid to the state after ``state_len`` tokens, by default any that was seen."""
        client = self.clients[handle]
        tokens = [*client.prompt, *client.got][:position]
        total = len(client.prompt) + len(client.expected)
        known = {0: EMPTY} | self.marks.get(handle, {})
        marks = {n: state for n, state in known.items() if n < position}
        if self.slot_pool and state_len is None:
            state_len = int(self.random.choice(list(marks)))
        self.scheduler.rewind(handle, position, state_len=state_len)
        if state_len is not None:
            standing = self.scheduler.sequence(handle).seq_len
            if standing == state_len:
                self.model.states[self.scheduler.slot(handle)] = marks[state_len]
            self.marks[handle] = marks
        client.prompt_len = min(client.prompt_len, position)
        client.prompt, client.got = tokens[: client.prompt_len], tokens[client.prompt_len :]
        after = continuation(tokens, client.prompt_len, total - position, self.kinds)
        client.expected = client.got + after
        client.stop_after = len(client.expected)

    def cancel(self, handle: int) -> None:
        self.scheduler.cancel(handle)
        self.finished[handle] = self.clients.pop(handle)
        self.finished[handle].reason = FinishReason.CANCELLED

    # -- the step -----------------------------------------------------------------------------

    def propose(self) -> None:
        """Drafts whose first few are right."""
        if not self.draft_len:
            return
        for group in self.scheduler.proposal_groups(4):
            for handle in group:
                client = self.clients[handle]
                right = client.expected[len(client.got) :][: self.draft_len]
                wrong = int(self.random.integers(0, self.draft_len + 2))
                drafts = [t if i < wrong else (t + 1) % VOCAB for i, t in enumerate(right)]
                self.scheduler.set_drafts(handle, ids(drafts))

    def plan(self) -> Plan | None:
        self.propose()
        plan = self.scheduler.plan(self.now_us)
        if plan is None:
            return None
        for handle, reason in plan.refused:
            self.finished[handle] = self.clients.pop(handle)
            self.finished[handle].reason = reason
        self.model.act(plan)
        if self.cache is not None:
            for orphan in self.cache.drain_snapshots():
                del self.model.snapshots[orphan]
        assert self.before is None or self.before_step == plan.step_id - 1
        tokens, states = self.model.run(plan, self.before)
        self.before, self.before_step = tokens, plan.step_id
        self.flights.append((plan, tokens, states))
        self.plans.append(
            {
                "command": plan.command,
                "entries": plan.entries.copy(),
                "actions": plan.actions,
                "padded_batch": plan.padded_batch,
                "one_by_one": plan.one_by_one,
                "num_decode": plan.num_decode,
                "num_rows": plan.num_rows,
                "step_id": plan.step_id,
            }
        )
        return plan

    def judge(self, plan: Plan, outputs: Any) -> tuple[Any, Any, Any]:
        """Each entry's sampled token, rows kept and finish reason: accept drafts, stop, abandon."""
        tokens, kept, ends = (np.zeros(plan.num_seqs, np.int32) for _ in range(3))
        for i, entry in enumerate(plan.entries):
            if self.abandon_rate and self.random.random() < self.abandon_rate:
                continue
            kept[i] = entry["rows"]
            if not samples(entry):
                continue
            client = self.clients.get(int(entry["handle"]))
            accepted, drafts = 0, int(entry["num_drafts"])
            first = int(entry["first_logits"]) + int(entry["num_logits"]) - 1 - drafts
            row = int(entry["first_row"]) + int(entry["rows"]) - drafts
            room = client.stop_after - len(client.got) if client else drafts + 1
            while (
                accepted < drafts
                and accepted + 1 < room
                and outputs[first + accepted] == plan.token_ids[row + accepted]
            ):
                accepted += 1
            kept[i] -= drafts - accepted
            tokens[i] = outputs[first + accepted]
            ends[i] = FinishReason.STOP if client and accepted + 1 >= room else 0
        return tokens, kept, ends

    def commit(self) -> None:
        plan, outputs, states = self.flights.popleft()
        tokens, kept, ends = self.judge(plan, outputs)
        handles = [int(entry["handle"]) for entry in plan.entries]
        clients = [self.clients.get(handle) for handle in handles]
        stale = [(plan.step_id, handle) in self.stale for handle in handles]
        self.scheduler.commit(plan.step_id, tokens, kept, ends, now_us=self.now_us)
        for i, entry in enumerate(plan.entries):
            client, handle = clients[i], handles[i]
            if kept[i] == 0 and self.flights:  # what is in flight behind it counts for nothing
                self.stale.add((plan.step_id + 1, handle))
            if client is None or stale[i]:
                assert entry["dropped"]
            elif entry["dropped"]:
                self.model.keep(entry, states[i], 0)
            else:
                if kept[i] < entry["rows"]:
                    self.model.keep(entry, states[i], int(kept[i]))
                marks = self.marks.setdefault(handle, {})
                marks[int(entry["start"] + kept[i])] = states[i][int(kept[i])]
                self.deliver(handle, plan, i, tokens)
                if int(entry["flags"]) & EntryFlag.SNAPSHOT:
                    self.snapshot(client.prompt, entry, states[i][int(entry["rows"])])
            if entry["dropped"]:
                assert entry["emitted"] == 0
        for handle in self.scheduler.take_retired():
            self.model.host.pop(handle, None)
            self.model.slots.pop(handle, None)

    def deliver(self, handle: int, plan: Plan, i: int, tokens: Any) -> None:
        entry, client = plan.entries[i], self.clients[handle]
        emitted = int(entry["emitted"])
        if emitted:
            end = int(entry["first_row"]) + int(entry["rows"])
            drafts = plan.token_ids[end - int(entry["num_drafts"]) : end][: emitted - 1]
            client.got += [*map(int, drafts), int(tokens[i])]
            assert client.got == client.expected[: len(client.got)], (handle, plan)
        if entry["reason"]:
            client.reason = int(entry["reason"])
            self.finished[handle] = self.clients.pop(handle)

    def snapshot(self, prompt: list[int], entry: Any, state: int) -> None:
        """Give the prefix cache the recurrent state at the tail split."""
        if self.cache is None or not self.slot_pool:
            return
        end = int(entry["start"]) + int(entry["rows"])
        self.model.snapshots[self.next_snapshot] = state
        given_back = self.cache.attach_snapshot(ids(prompt), end, 0, self.next_snapshot)
        self.next_snapshot += 1
        if given_back is not None:
            del self.model.snapshots[given_back]

    def step(self) -> bool:
        """Plan once and commit once the pipeline is full; False when nothing is left to do."""
        plan = self.plan() if self.scheduler.num_outstanding < self.scheduler.depth else None
        if self.flights and (plan is None or len(self.flights) == self.scheduler.depth):
            self.commit()
            return True
        return plan is not None

    def drain(self, limit: int = 5000) -> None:
        """Run until every request has ended."""
        for _ in range(limit):
            if not self.step():
                break
        else:
            raise AssertionError("no end in sight")
        assert not self.clients, f"stuck: {self.clients}"
        self.check(0)
        assert self.scheduler.num_requests == 0

    def check(self, held_outside: int) -> None:
        """Every reference is accounted for."""
        references = [self.pool.references(block) for block in range(self.pool.num_total)]
        assert self.pool.num_free == references.count(0)
        held = sum(
            self.scheduler.sequence(handle).num_blocks
            for handle in {*self.clients, *self.in_flight_handles()}
        )
        cached = self.cache.num_blocks if self.cache is not None else 0
        assert sum(references) == held + cached + held_outside
        if self.slot_pool:
            owners = [self.slot_pool.owner(i) for i in range(self.slot_pool.num_total)]
            used = [owner for owner in owners if owner >= 0]
            assert len(used) == len(set(used))
            assert self.slot_pool.num_free == owners.count(-1)

    def in_flight_handles(self) -> set[int]:
        return {int(entry["handle"]) for plan, _, _ in self.flights for entry in plan.entries}
