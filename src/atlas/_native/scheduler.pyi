from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atlas._native.block_pool import BlockPool
from atlas._native.plan import Plan
from atlas._native.sequence import Sequence
from atlas._native.slot_pool import SlotPool

class Scheduler:
    depth: int
    next_step: int
    num_outstanding: int
    closed: bool
    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        *,
        cache: Any = None,
        slots: SlotPool | None = None,
        depth: int = 1,
        max_running: int = 16,
        max_step_tokens: int = 512,
        max_logits_rows: int | None = None,
        chunk_tokens: int = 512,
        max_prefills: int = 8,
        watermark: int = 256,
        max_verify_rows: int = 8,
        immune_tokens: int = 64,
        aging_us: int = 0,
        token_deadline_us: int = 0,
        spill: bool = False,
        reuse_generated: bool = True,
        chunk_unit: int = 1,
        tail_unit: int = 0,
        tail_least: int = 0,
        single_chunk: bool = False,
        one_at_a_time: bool = False,
        separate: bool = False,
        rollback_unsupported: bool = False,
        compact_slots: bool = True,
        can_batch: Callable[[Items[int]], bool] | None = None,
        rungs: Items[int] = (),
    ) -> None: ...
    def add(
        self,
        tokens: NDArray[np.int32],
        max_tokens: int,
        *,
        priority: int = 0,
        seed: int = 0,
        run_ahead: bool = True,
        can_requeue: bool = True,
        all_logits: bool = False,
        now_us: int = 0,
    ) -> int: ...
    def add_spilled(
        self,
        tokens: NDArray[np.int32],
        prompt_len: int,
        max_tokens: int,
        *,
        priority: int = 0,
        seed: int = 0,
        run_ahead: bool = True,
        can_requeue: bool = True,
        now_us: int = 0,
    ) -> int: ...
    def finish(self, handle: int, reason: int) -> None: ...
    def cancel(self, handle: int) -> None: ...
    def take_retired(self) -> list[int]: ...
    def set_drafts(self, handle: int, tokens: NDArray[np.int32]) -> None: ...
    def set_draft_capacity(self, handle: int, capacity: int | None) -> None: ...
    def set_run_ahead(self, handle: int, run_ahead: bool) -> None: ...
    def set_spill(self, spill: bool) -> None: ...
    def proposal_groups(self, propose_batch_max: int) -> list[list[int]]: ...
    def fork(self, handle: int, token: int, *, now_us: int = 0) -> int: ...
    def rewind(self, handle: int, position: int, *, state_len: int | None = None) -> None: ...
    def plan(self, now_us: int = 0) -> Plan | None: ...
    def commit(
        self,
        step_id: int,
        tokens: NDArray[np.int32],
        rows_kept: NDArray[np.int32] | None = None,
        finished: NDArray[np.int32] | None = None,
        *,
        now_us: int = 0,
    ) -> Plan: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def num_running(self) -> int: ...
    @property
    def running_handles(self) -> list[int]: ...
    @property
    def num_requests(self) -> int: ...
    @property
    def num_preemptions(self) -> int: ...
    def state(self, handle: int) -> str: ...
    def sequence(self, handle: int) -> Sequence: ...
    def tokens(self, handle: int) -> NDArray[np.int32]: ...
    def slot(self, handle: int) -> int: ...
    def matched(self, handle: int) -> tuple[int, int, int]: ...
    def close(self) -> None: ...
