"""Which rows of which sequences run next, up to two steps ahead of what is known.

Long because all doors are here with their contracts; the work is in ``planner``, ``outcome``,
``running_set`` and ``at_rest``.
"""

import numpy as np

from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from atlas._native cimport at_rest, outcome
from atlas._native.block_pool cimport BlockPool
from atlas._native.plan cimport CANCELLED, ActionList
from atlas._native.request_table cimport ENDED, SPILLED, WAITING, request_t
from atlas._native.sequence cimport Sequence
from atlas._native.slot_pool cimport SlotPool

from atlas._native.at_rest import STATE_NAMES
from atlas.errors import (
    CapabilityError,
    ClosedError,
    InvalidArgumentError,
    KvExhausted,
    OutOfMemoryError,
    PromptTooLongError,
    SequenceStateError,
)


cdef int at_least(str name, value, minimum) except -1:
    if value < minimum:
        raise InvalidArgumentError(f"{name} is {value}; allowed: {minimum} or more")
    return 0


cdef class Scheduler:
    """Continuous batching over one block pool: integers in, integers out.

    ``plan`` and ``commit`` are the only doors of the step. A request is known by its handle; its
    tokens, blocks and slot live here and in its native ``Sequence``. Time is what the caller
    passes as ``now_us``. Not thread-safe.

    Parameters
    ----------
    pool : BlockPool
    block_size : int
        Tokens of a block.
    cache : PrefixCache, optional
    slots : SlotPool, optional
        Of a model with recurrent state; each running request then owns one of them.
    depth : int
        Plans that may await their commit: 1 or 2.
    max_running : int
        Requests that hold blocks at a time, and sequences of a step.
    max_step_tokens : int
        Rows of a step; at least ``max_running + chunk_unit``.
    max_logits_rows : int, optional
        Rows of a step that get logits; default ``max_step_tokens``.
    chunk_tokens, max_prefills : int
        Most tokens of a prompt chunk, and most chunks of a step.
    watermark : int
        Admission reserves, as accounting, blocks of the prompt and of this many new tokens.
    max_verify_rows : int
        Most rows of a sequence in a step: anchor and drafts, or replayed tokens.
    immune_tokens : int
        A sequence is not preempted before it emitted so many tokens since its admission, unless
        nothing else could run.
    aging_us : int
        A request that waits longer comes before others' priority; 0 = never.
    token_deadline_us : int
        Above 0, no prompt runs while a sequence's last token is older than 80 % of it.
    spill : bool
        Preempt to host memory; else requeue (prompt and generated tokens run again).
    reuse_generated : bool
        Whether prompts may match cached blocks that step tokens made.
    chunk_unit, tail_unit : int
        Non-last chunks end at multiples of ``chunk_unit`` or after the last one (1 = anywhere).
        Above 0, a chunk ends at ⌊(n − 1) / tail_unit⌋ · tail_unit of n prompt tokens, and where
        more of the prompt is cached than a snapshot reaches.
    tail_least : int
        Uncached tokens before the former of those ends from which it is worth a chunk of its own.
    single_chunk, one_at_a_time, separate : bool
        The model's ``requires_single_chunk``, ``hc_mult > 0`` and ``experts.is_parallel``.
    rollback_unsupported : bool
        Recurrent state that no snapshot restores: ``rewind`` is refused.
    compact_slots : bool
        Keep slots 0 … N - 1 in use, by MOVE_SLOT actions: for kernels that cannot look slots up.
    can_batch : callable, optional
        ``verify.can_batch``: asked with the rows of each sequence when a step has drafts.
    rungs : tuple of int
        The batch ladder, ascending, for ``Plan.padded_batch``.
    """

    def __cinit__(
            self, BlockPool pool not None, int64_t block_size, *, cache=None,
            SlotPool slots=None, int64_t depth=1, int64_t max_running=16,
            int64_t max_step_tokens=512, max_logits_rows=None, int64_t chunk_tokens=512,
            int64_t max_prefills=8, int64_t watermark=256, int64_t max_verify_rows=8,
            int64_t immune_tokens=64, int64_t aging_us=0, int64_t token_deadline_us=0,
            bint spill=False, bint reuse_generated=True, int64_t chunk_unit=1,
            int64_t tail_unit=0, int64_t tail_least=0, bint single_chunk=False,
            bint one_at_a_time=False, bint separate=False, bint rollback_unsupported=False,
            bint compact_slots=True, can_batch=None, rungs=()):
        cdef int64_t most = 1 if one_at_a_time else max_running
        cdef RunningSet running
        cdef Planner planner
        for name, value in (
                ("block_size", block_size), ("depth", depth), ("max_running", max_running),
                ("chunk_unit", chunk_unit), ("max_prefills", max_prefills),
                ("max_verify_rows", max_verify_rows), ("chunk_tokens", chunk_tokens)):
            at_least(name, value, 1)
        for name, value in (
                ("watermark", watermark), ("immune_tokens", immune_tokens),
                ("aging_us", aging_us), ("token_deadline_us", token_deadline_us),
                ("tail_unit", tail_unit), ("tail_least", tail_least)):
            at_least(name, value, 0)
        if depth > MAX_DEPTH:
            raise InvalidArgumentError(f"depth is {depth}; allowed: 1 … {MAX_DEPTH}")
        at_least("chunk_tokens", chunk_tokens, chunk_unit)
        at_least("max_step_tokens", max_step_tokens, most + chunk_unit)
        self.depth = depth
        self.rollback_unsupported = rollback_unsupported
        self.compact_slots = compact_slots
        self._can_batch = can_batch
        self._rungs = tuple(rungs)
        self._todo = <int32_t *>malloc(most * sizeof(int32_t))
        if self._todo == NULL:
            raise OutOfMemoryError(f"no memory for a step of {most} sequences")
        running = self.running = RunningSet(most)
        running.pool = pool
        running.cache = cache
        running.slots = SlotPool(0) if slots is None else slots
        running.limits.block_size = block_size
        running.limits.watermark = watermark
        running.limits.immune_tokens = immune_tokens
        running.limits.aging_us = aging_us
        running.limits.chunk_unit = chunk_unit
        running.limits.spill = spill
        running.limits.single_chunk = single_chunk
        running.limits.reuse_generated = reuse_generated
        planner = self.planner = Planner()
        planner.running = running
        planner.max_step_tokens = max_step_tokens
        planner.max_logits_rows = max_step_tokens if max_logits_rows is None else max_logits_rows
        at_least("max_logits_rows", planner.max_logits_rows, most + 1)
        planner.max_prefills = max_prefills
        planner.max_verify_rows = max_verify_rows
        planner.chunk_tokens = chunk_tokens
        planner.chunk_unit = chunk_unit
        planner.tail_unit = tail_unit
        planner.tail_least = tail_least
        planner.token_deadline_us = token_deadline_us
        planner.separate = separate
        self._plans = [
            Plan(most, max_step_tokens, block_size, running.table) for _ in range(NUM_PLANS)]

    def __dealloc__(self):
        free(self._todo)

    # -- requests -----------------------------------------------------------------------------

    cdef int64_t enter(
            self, const int32_t[::1] tokens, int64_t prompt_len, int64_t limit_len,
            int64_t priority, uint64_t seed, bint run_ahead, bint can_requeue, bint all_logits,
            bint spilled, int64_t now_us) except -1:
        cdef RunningSet running = self.running
        cdef Sequence sequence
        cdef int64_t needed = running.blocks_for(limit_len)
        cdef int32_t record
        cdef request_t *request
        if self.closed:
            raise ClosedError("the scheduler was closed")
        if not -2**31 <= priority < 2**31:
            raise InvalidArgumentError(
                f"priority is {priority}; allowed: -2**31 … 2**31 - 1, lower first")
        if limit_len >= 2**31:
            raise InvalidArgumentError(f"{limit_len} positions; allowed: up to 2**31 - 1")
        if needed > running.pool.num_total:
            raise KvExhausted(
                f"the request may reach {limit_len} positions, which take {needed} KV blocks of "
                f"{running.limits.block_size}; the pool has {running.pool.num_total}")
        if running.limits.single_chunk and prompt_len > self.planner.max_step_tokens:
            raise PromptTooLongError(
                f"the prompt has {prompt_len} tokens and this model runs it in one chunk; "
                f"allowed: up to max_step_tokens {self.planner.max_step_tokens}")
        if all_logits and self.planner.max_logits_rows - running.limits.max_running < max(
                self.planner.chunk_unit, prompt_len if running.limits.single_chunk else 1):
            raise InvalidArgumentError(
                f"logits of all prompt rows do not fit {self.planner.max_logits_rows} logits rows "
                f"beside {running.limits.max_running} running sequences")
        sequence = Sequence(running.pool, running.limits.block_size)
        record = running.table.allocate(sequence, &tokens[0], tokens.shape[0])
        request = &running.table.records[record]
        request.prompt_len = prompt_len
        request.limit_len = limit_len
        request.priority = <int32_t>priority
        request.seed = seed
        request.run_ahead = run_ahead
        request.can_requeue = can_requeue
        request.all_logits = all_logits
        request.arrival = self.num_added
        request.last_token_us = -1
        request.state = SPILLED if spilled else WAITING
        self.num_added += 1
        try:
            if spilled:
                sequence.append(&tokens[0], tokens.shape[0] - 1)
                sequence.prompt_len = prompt_len
                request.planned_len = sequence.seq_len
            running.queue.push(record, False, priority, request.arrival, now_us)
        except BaseException:
            running.table.release(record)
            raise
        return request.handle

    def add(
            self, const int32_t[::1] tokens not None, int64_t max_tokens, *, int64_t priority=0,
            uint64_t seed=0, bint run_ahead=True, bint can_requeue=True, bint all_logits=False,
            int64_t now_us=0):
        """Queue a prompt; returns its handle.

        Parameters
        ----------
        tokens : int32 [n], n ≥ 1
        max_tokens : int
            Tokens to emit at most, 1 or more.
        priority : int
            Lower is admitted first and preempted last.
        seed : int
            Adapter and media part of the prefix key.
        run_ahead : bool
            Whether a row may be planned whose token is not known yet. False where the host must
            see each token first (masks, penalties, drafting).
        can_requeue : bool
            False for a sequence that cannot be rebuilt from tokens (``contains_pad``). One whose
            prompt reused K/V of step tokens is not rebuilt either.
        all_logits : bool
            Every prompt row gets logits, once; the prefix cache is not read.

        Raises
        ------
        InvalidArgumentError
        KvExhausted
            The pool is too small for this request alone.
        PromptTooLongError
            The prompt must run whole and does not fit a step.
        """
        at_least("the number of prompt tokens", tokens.shape[0], 1)
        at_least("max_tokens", max_tokens, 1)
        return self.enter(
            tokens, tokens.shape[0], tokens.shape[0] + max_tokens - 1, priority, seed, run_ahead,
            can_requeue, all_logits, False, now_us)

    def add_spilled(
            self, const int32_t[::1] tokens not None, int64_t prompt_len, int64_t max_tokens, *,
            int64_t priority=0, uint64_t seed=0, bint run_ahead=True, bint can_requeue=True,
            int64_t now_us=0):
        """Queue a sequence whose state lies in host memory or a file (a saved session).

        All of ``tokens`` but the last have K/V (and recurrent state) there; the last one runs
        next. The first action of its admission is RESTORE. ``max_tokens`` more are emitted.
        """
        at_least("the number of tokens", tokens.shape[0], 2)
        at_least("max_tokens", max_tokens, 1)
        if not 1 <= prompt_len < tokens.shape[0]:
            raise InvalidArgumentError(
                f"prompt_len is {prompt_len}; allowed: 1 … {tokens.shape[0] - 1}")
        return self.enter(
            tokens, prompt_len, tokens.shape[0] + max_tokens - 1, priority, seed, run_ahead,
            can_requeue, False, True, now_us)

    def finish(self, int64_t handle, int32_t reason):
        """End a request now, for ``reason`` (a FinishReason).

        Rows of it in flight are dropped at their commit; then its blocks and slot go back, and
        ``take_retired`` names it. What it committed is cached first, unless ``reason`` is ERROR.
        """
        cdef int32_t record = self.running.table.number_of(handle)
        at_least("reason", reason, 1)
        if self.running.table.records[record].state == ENDED:
            raise SequenceStateError("the request has ended already")
        self.running.end(record, reason)

    def cancel(self, int64_t handle):
        """``finish`` with CANCELLED."""
        self.finish(handle, CANCELLED)

    def take_retired(self):
        """Handles that gave back everything since the last call; they are stale now."""
        retired = self.running.retired
        self.running.retired = []
        return retired

    def set_drafts(self, int64_t handle, const int32_t[::1] tokens not None):
        """Propose tokens to follow the last one: the next step verifies them with it.

        They serve one step, and are cut to what fits (``max_verify_rows``, the least draft
        capacity of the running requests, the budget, the request's own end).

        Raises
        ------
        SequenceStateError
            Unless it is running, with no row in flight, past its prompt and any replay.
        """
        at_rest.set_drafts(
            self.running, handle, &tokens[0],
            min(tokens.shape[0], self.planner.max_verify_rows - 1))

    def set_draft_capacity(self, int64_t handle, capacity):
        """What ``draft.slot_draft_capacity`` says of its slot; None = unbounded."""
        if capacity is not None:
            at_least("capacity", capacity, 0)
        self.running.table.find(handle).draft_capacity = -1 if capacity is None else capacity

    def set_run_ahead(self, int64_t handle, bint run_ahead):
        """Whether the request may be planned before its last token is known."""
        self.running.table.find(handle).run_ahead = run_ahead

    def set_spill(self, bint spill):
        """How to preempt from now on: to host memory, or by requeueing."""
        self.running.limits.spill = spill

    def proposal_groups(self, int64_t propose_batch_max):
        """Handles that drafts can be proposed for now, at most ``propose_batch_max`` a group.

        Those that do not run ahead, with no row in flight, past prompt and replay, by rank.
        """
        cdef int64_t i
        cdef request_t *request
        at_least("propose_batch_max", propose_batch_max, 1)
        handles = []
        for i in range(self.running.num_running):
            request = &self.running.table.records[self.running.order[i]]
            if (not request.run_ahead and not request.in_flight
                    and at_rest.awaits_token(request)):
                handles.append(request.handle)
        return [handles[at:at + propose_batch_max]
                for at in range(0, len(handles), propose_batch_max)]

    def fork(self, int64_t handle, int32_t token, *, int64_t now_us=0):
        """A second request that stands where ``handle`` stands, but with ``token`` last.

        Blocks are shared and copied when one of the two first writes. Recurrent state the caller
        copies at once, from ``slot(handle)`` to the new one's. When no place is free to run, the
        new one waits in front and is rebuilt from its tokens. Returns its handle.

        Raises
        ------
        SequenceStateError
            Unless it is running, has no row in flight and has emitted a token.
        OutOfMemoryError
            No place or slot is free, and it cannot be rebuilt from tokens.
        """
        return at_rest.fork(self.running, handle, token, now_us)

    def rewind(self, int64_t handle, int64_t position, *, state_len=None):
        """Drop a running request's tokens from ``position`` on; the next one is made anew.

        Position ``position - 1`` runs again for its logits. ``state_len`` says that the caller
        puts recurrent state back, before the next plan, which absorbed so many tokens: those
        from there to ``position - 1`` run again too, into blocks of their own.

        Raises
        ------
        CapabilityError
            The model has state that no snapshot restores.
        SequenceStateError
            Recurrent state without a snapshot for it; rows in flight; not running.
        InvalidArgumentError
            ``position`` outside 1 … the number of tokens, ``state_len`` outside 0 …
            ``position - 1``.
        """
        if self.rollback_unsupported:
            raise CapabilityError("this model keeps state that no snapshot restores: no rewind")
        if state_len is not None:
            at_least("state_len", state_len, 0)
        at_rest.rewind(self.running, handle, position, -1 if state_len is None else state_len)

    # -- plan ---------------------------------------------------------------------------------

    def plan(self, int64_t now_us=0):
        """The next step, or None when nothing can run, move or be reported.

        A plan without entries may hold actions or refusals. Every plan must be committed, in
        order. Blocks of its rows are reserved.

        Raises
        ------
        SequenceStateError
            If ``depth`` plans await their commit.
        """
        cdef Plan plan = self._plans[self.planner.step % NUM_PLANS]
        cdef RunningSet running = self.running
        cdef ActionList actions
        if self.num_outstanding >= self.depth:
            raise SequenceStateError(
                f"{self.num_outstanding} plans await their commit; allowed: {self.depth}")
        plan.step_id = self.planner.step
        plan.refused = []
        plan.num_seqs = plan.num_decode = plan.num_rows = plan.num_logits = 0
        plan.one_by_one = False
        try:
            self.planner.fill(plan, self.num_outstanding == 0, now_us)
            if self.compact_slots:
                running.compact()
            if self._can_batch is not None and plan.num_rows > plan.num_seqs:
                self.ask_can_batch(plan)
        except BaseException:
            self.planner.withdraw(plan)
            raise
        if not plan.num_seqs and not running.pending.count and not plan.refused:
            return None
        actions = plan.action_list
        plan.action_list = running.pending
        running.pending = actions
        actions.clear()
        self.planner.finish_rows(plan)
        plan.padded_batch = next(
            (rung for rung in self._rungs if rung >= plan.num_decode), plan.num_decode
        ) if plan.num_decode > 1 else plan.num_decode
        if plan.num_seqs:
            self.planner.last_was_prefill = plan.num_decode == 0
        plan.outstanding = True
        self.planner.step += 1
        self.num_outstanding += 1
        return plan

    def ask_can_batch(self, Plan plan):
        """Verify sequence by sequence when the model cannot take this step's drafts at once."""
        cdef int64_t i
        ks = [plan.items[i].rows for i in range(plan.num_decode)]
        if len(ks) > 1 and max(ks) > 1:
            plan.one_by_one = not self._can_batch(ks)

    # -- commit -------------------------------------------------------------------------------

    def commit(
            self, int64_t step_id, const int32_t[::1] tokens not None,
            const int32_t[::1] rows_kept=None, const int32_t[::1] finished=None, *,
            int64_t now_us=0):
        """Settle the oldest outstanding step; returns its plan with the outcome in ``entries``.

        Parameters
        ----------
        step_id : int
        tokens : int32 [num_seqs]
            The token sampled after the last kept row of each entry with SAMPLES; else ignored.
        rows_kept : int32 [num_seqs], optional
            Rows of each entry that stand. Drafts may be rejected from the end: ``rows -
            num_drafts`` … ``rows``. 0 abandons the entry: it is planned again from where it
            began, and a recurrent state must be put back by the caller. Default: all.
        finished : int32 [num_seqs], optional
            A FinishReason where the engine ends the request with this entry, else 0. With
            ``rows_kept`` 0 nothing of the entry counts; otherwise its tokens do.

        Returns
        -------
        Plan
            ``emitted`` tokens go to the client: the accepted drafts, then the sampled one.
            ``reason`` is why the request ended (``finished``, or LENGTH). ``dropped``: its
            request had ended, or was abandoned, in an earlier step.

        Raises
        ------
        InvalidArgumentError
            A step that is not the oldest, an array too short, rows or a token that cannot be;
            nothing was changed.
        """
        cdef Plan plan
        cdef RunningSet running = self.running
        cdef int64_t wrong, count, i
        cdef const int32_t *kept = NULL
        cdef const int32_t *ends = NULL
        cdef int64_t oldest = self.planner.step - self.num_outstanding
        if not self.num_outstanding or step_id != oldest:
            raise InvalidArgumentError(
                f"step_id is {step_id}; allowed: "
                + (f"{oldest}, the oldest outstanding" if self.num_outstanding
                   else "none, no plan is outstanding"))
        plan = self._plans[step_id % NUM_PLANS]
        for name, array in (("tokens", tokens), ("rows_kept", rows_kept), ("finished", finished)):
            if array is not None and array.shape[0] < plan.num_seqs:
                raise InvalidArgumentError(
                    f"{name} has {array.shape[0]} entries; the step has {plan.num_seqs}")
        if plan.num_seqs:
            kept = &rows_kept[0] if rows_kept is not None else NULL
            ends = &finished[0] if finished is not None else NULL
            wrong = outcome.first_invalid(running, plan, &tokens[0], kept, ends)
            if wrong >= 0:
                raise InvalidArgumentError(
                    f"entry {wrong}: rows_kept is "
                    f"{plan.items[wrong].rows if kept == NULL else kept[wrong]} of "
                    f"{plan.items[wrong].rows} rows with {plan.items[wrong].num_drafts} drafts, "
                    f"token {tokens[wrong]}, finished "
                    f"{0 if ends == NULL else ends[wrong]}; allowed: rows - drafts … rows or 0, "
                    "a token of 0 or more where one is sampled, finished of 0 or more")
            outcome.make_space(running, plan)
        plan.outstanding = False
        self.num_outstanding -= 1
        if plan.num_seqs:
            count = outcome.settle_entries(
                running, plan, &tokens[0], kept, ends, now_us, self._todo)
            for i in range(count):
                outcome.conclude(running, &plan.items[self._todo[i]])
        return plan

    # -- queries ------------------------------------------------------------------------------

    @property
    def next_step(self):
        """Number of the next step."""
        return self.planner.step

    @property
    def num_waiting(self):
        """Requests in the queue, preempted ones included."""
        return self.running.queue.num_waiting

    @property
    def num_running(self):
        """Requests that hold blocks."""
        return self.running.num_running

    @property
    def running_handles(self):
        """Handles of the running requests by rank."""
        cdef int64_t i
        return [self.running.table.records[self.running.order[i]].handle
                for i in range(self.running.num_running)]

    @property
    def num_requests(self):
        """Requests that have not retired."""
        return self.running.table.num_used

    @property
    def num_preemptions(self):
        """How many times a request was preempted."""
        return self.running.num_preemptions

    def state(self, int64_t handle):
        """``"waiting"``, ``"spilled"``, ``"running"``, or ``"ended"`` with rows in flight."""
        return STATE_NAMES[self.running.table.find(handle).state]

    def sequence(self, int64_t handle):
        """The native Sequence of a request."""
        return <Sequence>self.running.table.find(handle).sequence

    def tokens(self, int64_t handle):
        """Prompt and emitted tokens, int32 (a copy); the last one has no K/V yet."""
        cdef request_t *request = self.running.table.find(handle)
        out = np.empty(request.num_history, np.int32)
        cdef int32_t[::1] view = out
        memcpy(&view[0], request.history, request.num_history * sizeof(int32_t))
        return out

    def slot(self, int64_t handle):
        """Its recurrent slot as the latest plan leaves it; -1 = none."""
        return self.running.table.find(handle).slot

    def matched(self, int64_t handle):
        """What its latest prefix lookup reused: (tokens, exact tokens, MissReason of the rest).

        Exact tokens owe nothing to a step token; a snapshot of its state is exact only when all
        are.
        """
        cdef request_t *request = self.running.table.find(handle)
        return request.matched_len, request.exact_len, request.match_reason

    def close(self):
        """Refuse requests from now on.

        Raises
        ------
        SequenceStateError
            While a plan is outstanding or a request has not retired: drain first.
        """
        if self.num_outstanding or self.running.table.num_used:
            raise SequenceStateError(
                f"{self.num_outstanding} plans are outstanding and {self.running.table.num_used} "
                "requests have not retired")
        self.closed = True
