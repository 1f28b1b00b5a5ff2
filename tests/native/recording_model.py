"""A fake model whose recurrent state is a rolling hash of the tokens that it absorbed.

Each position's K/V is the hash after it; a row's output depends on the state before it and on
every earlier position read through the block table. A wrong block, rewind, snapshot, slot or
token kind therefore changes all later tokens of that sequence, and nobody else's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atlas._native.batch_writer import write_batch
from atlas._native.plan import ActionKind, EntryFlag, EntryKind, Plan

VOCAB = 50
MASK = (1 << 64) - 1
EMPTY = 0x9E3779B97F4A7C15
WEIGHTS = np.random.default_rng(7).integers(1, 1 << 63, 4096, np.uint64) | np.uint64(1)


def absorb(state: int, token: int, is_prompt: bool) -> int:
    """The state after one more token; prompt and step tokens are told apart."""
    mixed = (state ^ (token * 2 + 1 + is_prompt * 1000)) * 0xD6E8FEB86659FD93 & MASK
    return mixed ^ mixed >> 29


def next_token(state: int, seen: int) -> int:
    """The greedy token after a row: its state, and the weighted sum over all its K/V."""
    mixed = (state ^ seen) * 0xA0761D6478BD642F & MASK
    return (mixed >> 33) % VOCAB


def continuation(tokens: list[int], prompt_len: int, count: int, kinds: bool = True) -> list[int]:
    """The ``count`` greedy tokens after ``tokens``, from nothing but the tokens: the solo run."""
    tokens, state, seen, at = list(tokens), EMPTY, 0, 0
    end = len(tokens) + count
    while True:
        while at < len(tokens):
            state = absorb(state, tokens[at], kinds and at < prompt_len)
            seen = (seen + state * int(WEIGHTS[at])) & MASK
            at += 1
        if len(tokens) == end:
            return tokens[end - count :]
        tokens.append(next_token(state, seen))


@dataclass
class RecordingModel:
    """KV blocks, recurrent slots and host memory, driven by plans alone."""

    num_blocks: int
    block_size: int
    num_slots: int = 0
    kinds: bool = True
    max_rows: int = 256
    kv: NDArray[np.uint64] = field(init=False)
    states: list[int] = field(init=False)
    host: dict[int, tuple[NDArray[np.uint64], int]] = field(default_factory=dict)
    snapshots: dict[int, int] = field(default_factory=dict)
    slots: dict[int, int] = field(default_factory=dict)
    rows_run: int = 0

    def __post_init__(self) -> None:
        self.kv = np.zeros((self.num_blocks, self.block_size), np.uint64)
        self.states = [0] * self.num_slots

    def act(self, plan: Plan) -> None:
        """What the engine does before the step, in order."""
        blocks = plan.action_blocks
        for action in plan.actions:
            handle, source, target = (int(action[k]) for k in ("handle", "source", "target"))
            first = int(action["first_block"])
            listed = blocks[first : first + int(action["num_blocks"])]
            match ActionKind(int(action["kind"])):
                case ActionKind.COPY_BLOCK:
                    self.kv[target] = self.kv[source]
                case ActionKind.SPILL:
                    self.host[handle] = (
                        self.kv[listed].copy(),
                        self.states[source] if (source >= 0) else 0,
                    )
                    self.slots.pop(handle, None)
                case ActionKind.RESTORE:
                    kept, state = self.host.pop(handle)
                    self.kv[listed] = kept
                    self.place(handle, target, state)
                case ActionKind.REQUEUE:
                    self.slots.pop(handle, None)
                case ActionKind.MOVE_SLOT:
                    assert self.slots[handle] == source
                    self.place(handle, target, self.states[source])
                    self.states[source] = 0
                case ActionKind.ZERO_SLOT:
                    self.place(handle, target, EMPTY)
                case ActionKind.RESTORE_SNAPSHOT:
                    self.place(handle, target, self.snapshots[int(action["other"])])

    def place(self, handle: int, slot: int, state: int) -> None:
        """Give a slot a new owner."""
        if slot >= 0:
            self.slots[handle] = slot
            self.states[slot] = state

    def run(self, plan: Plan, before: NDArray[np.int32] | None) -> tuple[Any, list[list[int]]]:
        """One step: the next token of each logits row, and each entry's states row by row.

        ``before`` holds the previous step's tokens, from which ``source_rows`` take.
        """
        count, wide = max(1, plan.num_rows), 1
        wide = self.num_blocks
        token_ids, positions, slots, logits_rows = (np.full(count, -1, np.int32) for _ in range(4))
        cu_rows = np.full(plan.num_seqs + 1, -1, np.int32)
        tables = np.full((max(1, plan.num_seqs), wide), -1, np.int32)
        state_slots = np.full(plan.num_seqs, -2, np.int32)
        write_batch(plan, token_ids, positions, slots, cu_rows, tables, logits_rows, state_slots)
        assert state_slots.tolist() == plan.entries["slot"].tolist()
        fed = plan.source_rows >= 0
        if fed.any():
            assert before is not None
            token_ids[: plan.num_rows][fed] = before[plan.source_rows[fed]]
        outputs = np.full(count, -1, np.int32)
        history: list[list[int]] = []
        kv = self.kv.reshape(-1)
        for i, entry in enumerate(plan.entries):
            slot = int(entry["slot"])
            assert (slot >= 0) == (self.num_slots > 0)
            is_prompt = self.kinds and int(entry["kind"]) == EntryKind.PROMPT
            start = int(entry["start"])
            where = (
                tables[i].astype(np.int64)[:, None] * self.block_size + np.arange(self.block_size)
            ).reshape(-1)
            if self.num_slots:
                assert self.slots[int(entry["handle"])] == slot
                state = self.states[slot]
            else:
                state = int(kv[where[start - 1]]) if start else EMPTY
            states = [state]
            for row in range(cu_rows[i], cu_rows[i + 1]):
                position = int(positions[row])
                assert position == start + row - cu_rows[i]
                assert slots[row] == where[position]
                state = absorb(state, int(token_ids[row]), is_prompt)
                kv[slots[row]] = state
                states.append(state)
                seen = int((kv[where[: position + 1]] * WEIGHTS[: position + 1]).sum())
                outputs[row] = next_token(state, seen)
            if self.num_slots:
                self.states[slot] = state
            history.append(states)
        self.rows_run += plan.num_rows
        return outputs[logits_rows[: plan.num_logits]], history

    def keep(self, entry: Any, states: list[int], kept: int) -> None:
        """Select the recurrent state after the ``kept``-th row of an entry."""
        handle = int(entry["handle"])
        if self.num_slots and handle in self.slots:
            self.states[self.slots[handle]] = states[kept]


def samples(entry: Any) -> bool:
    """Whether a token is sampled for the entry."""
    return bool(int(entry["flags"]) & EntryFlag.SAMPLES)
