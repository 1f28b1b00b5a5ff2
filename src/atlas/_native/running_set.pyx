"""Which requests hold blocks and slots: admission, preemption, retirement."""

import numpy as np

from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memmove

from atlas._native.plan cimport (
    COPY_BLOCK,
    ERROR,
    MOVE_SLOT,
    REQUEUE,
    RESTORE,
    RESTORE_SNAPSHOT,
    SPILL,
    ZERO_SLOT,
)
from atlas._native.request_table cimport ENDED, RUNNING, SPILLED, WAITING, is_rebuildable
from atlas._native.sequence cimport Sequence
from atlas.errors import OutOfMemoryError


cdef prompt_array(const int32_t *tokens, int64_t count):
    out = np.empty(count, np.int32)
    cdef int32_t[::1] view = out
    if count:
        memcpy(&view[0], tokens, count * sizeof(int32_t))
    return out


cdef class RunningSet:
    """The running requests by rank (priority, then admission), and the way in and out of it."""

    def __cinit__(self, int64_t max_running):
        self.order = <int32_t *>malloc(max_running * sizeof(int32_t))
        if self.order == NULL:
            raise OutOfMemoryError(f"no memory for {max_running} running requests")
        self.limits.max_running = max_running
        self.table = RequestTable()
        self.queue = WaitQueue()
        self.pending = ActionList()
        self.retired = []
        self._blocked = -1

    def __dealloc__(self):
        free(self.order)

    cdef int64_t blocks_for(self, int64_t num_positions) noexcept nogil:
        return (num_positions + self.limits.block_size - 1) // self.limits.block_size

    cdef int insert(self, int32_t record) noexcept nogil:
        """Put a request, newly admitted, at its rank."""
        cdef request_t *records = self.table.records
        cdef int64_t place = self.num_running
        records[record].state = RUNNING
        records[record].admission = self.num_admissions
        records[record].fresh_tokens = 0
        self.num_admissions += 1
        while place > 0 and records[self.order[place - 1]].priority > records[record].priority:
            self.order[place] = self.order[place - 1]
            place -= 1
        self.order[place] = record
        self.num_running += 1
        return 0

    cdef void remove(self, int32_t record) noexcept nogil:
        cdef int64_t place = 0
        while self.order[place] != record:
            place += 1
        self.num_running -= 1
        memmove(&self.order[place], &self.order[place + 1],
                (self.num_running - place) * sizeof(int32_t))

    # -- admission ----------------------------------------------------------------------------

    cdef int64_t growth(self) noexcept nogil:
        """Blocks that the running requests may still take of what was reserved for them."""
        cdef int64_t i, reserved, blocks = 0
        cdef request_t *request
        for i in range(self.num_running):
            request = &self.table.records[self.order[i]]
            reserved = min(request.limit_len, max(request.reserved_len, request.planned_len + 1))
            blocks += max(
                0, self.blocks_for(reserved) - (<Sequence>request.sequence)._num_blocks)
        return blocks

    cdef bint admit(self, int64_t now_us, bint prefill, bint alone) except -1:
        """Admit the head of the queue if it fits beside what is reserved; nobody passes it.

        ``prefill`` False admits only a spilled request, which has no prompt to run. ``alone``:
        nothing runs, so that the rows it already has are all that must fit.
        """
        cdef int32_t record = self.queue.head(now_us, self.limits.aging_us)
        cdef int64_t reserved, known, needed
        cdef request_t *request
        cdef bint fits, lookup
        if record < 0 or self.num_running >= self.limits.max_running:
            return False
        request = &self.table.records[record]
        if request.state != SPILLED and not prefill:
            return False
        if self.slots.num_total and not self.slots.num_free:
            return False
        if (record == self._blocked and not alone
                and self.num_releases == self._blocked_releases
                and self.pool._num_free <= self._blocked_free):
            return False
        known = max(request.prompt_len, request.num_history)
        reserved = known if alone else known + self.limits.watermark
        needed = self.blocks_for(min(request.limit_len, reserved)) + self.growth()
        lookup = (self.cache is not None and request.state == WAITING
                  and not request.all_logits and not self.limits.single_chunk)
        fits = needed <= self.pool._num_free
        if not fits and self.cache is not None:
            _, _, fits = self.cache.reclaim_for(
                prompt_array(request.history, request.prompt_len if lookup else 0),
                request.seed, self.may_reuse_generated(request), needed)
            if not fits and alone:
                fits = self.forget_cache() and needed <= self.pool._num_free
        if not fits:
            self._blocked = record
            self._blocked_free = self.pool._num_free
            self._blocked_releases = self.num_releases
            return False
        request.reserved_len = min(request.limit_len, reserved)
        self.start(record, lookup)
        return True

    cdef bint may_reuse_generated(self, request_t *request) noexcept nogil:
        """Not when it ran before: its prompt's KV must come from prompt tokens again."""
        return self.limits.reuse_generated and request.num_history == request.prompt_len

    cdef int start(self, int32_t record, bint lookup) except -1:
        """Move a request that fits from the queue into the running set."""
        cdef request_t *request = &self.table.records[record]
        cdef Sequence sequence = <Sequence>request.sequence
        sequence.grow_block_table(self.blocks_for(request.limit_len))
        if request.state == SPILLED:
            sequence.reserve_positions(sequence.seq_len)
        elif lookup:
            self.adopt_match(request)
        self.queue.remove(record)
        if self.slots.num_total:
            request.slot = <int32_t>self.slots.claim_for(request.handle)
        if request.state == SPILLED:
            self.pending.push(RESTORE, request.handle, -1, -1, request.slot,
                              sequence._blocks, sequence._num_blocks)
        elif request.snapshot >= 0:
            self.pending.push(
                RESTORE_SNAPSHOT, request.handle, request.snapshot, -1, request.slot, NULL, 0)
        elif request.slot >= 0:
            self.pending.push(ZERO_SLOT, request.handle, -1, -1, request.slot, NULL, 0)
        request.snapshot = -1
        request.planned_len = sequence.seq_len
        return self.insert(record)

    cdef int adopt_match(self, request_t *request) except -1:
        """Look the prompt up once; blocks found become the sequence's first ones.

        With recurrent state only what a snapshot reaches is used, so the state never has to
        replay tokens whose KV is there.
        """
        cdef Sequence sequence = <Sequence>request.sequence
        cdef int64_t i, usable
        cdef uint32_t[::1] blocks
        match = self.cache.match(
            prompt_array(request.history, request.prompt_len), request.seed,
            self.may_reuse_generated(request), request.prompt_len - 1)
        usable = match.num_tokens
        request.exact_len = match.exact_tokens
        request.match_reason = int(match.reason)
        request.branch_len = 0
        if self.slots.num_total:
            if match.cached_tokens > match.snapshot_tokens:
                request.branch_len = match.cached_tokens
            usable = min(usable, <int64_t>match.snapshot_tokens)
            request.snapshot = <int32_t>match.snapshot_id if usable else -1
        blocks = match.blocks
        for i in range(usable // self.limits.block_size, blocks.shape[0]):
            self.pool.drop(blocks[i])
        request.matched_len = usable
        request.exact_len = min(request.exact_len, usable)
        if usable:
            sequence.adopt_blocks(request.history, usable, &blocks[0],
                                  usable // self.limits.block_size)
            sequence.prompt_len = usable
        return 0

    # -- room for rows ------------------------------------------------------------------------

    cdef bint reserve(self, int64_t place, int64_t rows, int64_t step, bint force) except -1:
        """Blocks for the next ``rows`` rows of the request at ``place``; False = not now.

        A shared block that the first of them would write is replaced by a copy.
        """
        cdef request_t *request = &self.table.records[self.order[place]]
        cdef Sequence sequence = <Sequence>request.sequence
        cdef int64_t last = request.planned_len // self.limits.block_size
        cdef int64_t missing = max(
            0, self.blocks_for(request.planned_len + rows) - sequence._num_blocks)
        cdef bint is_partial = request.planned_len % self.limits.block_size != 0
        cdef uint32_t shared, copy
        if is_partial and self.pool._references[sequence._blocks[last]] > 1:
            missing += 1
        if missing > self.pool._num_free and not self.make_room(missing, place, step, force):
            return False
        if is_partial and self.pool._references[sequence._blocks[last]] > 1:
            shared = sequence._blocks[last]
            self.pool.take(1, &copy)
            self.pending.push(COPY_BLOCK, request.handle, -1, shared, copy, NULL, 0)
            sequence._blocks[last] = copy
            self.pool.drop(shared)
        sequence.reserve_positions(request.planned_len + rows)
        return True

    cdef bint make_room(
            self, int64_t num_blocks, int64_t place, int64_t step, bint force) except -1:
        """Evict cached blocks, then preempt requests of lower rank, until so many are free."""
        cdef int32_t record
        while self.pool._num_free < num_blocks:
            if (self.cache is not None
                    and self.cache.evict(num_blocks - self.pool._num_free) > 0):
                continue
            record = self.victim(place, step, force)
            if record < 0:
                return False
            self.preempt(record)
        return True

    cdef bint forget_cache(self) except -1:
        """Last resort: also drop cached blocks that leaves in use keep; True if some came free."""
        return self.cache is not None and self.cache.clear() > 0

    cdef int32_t victim(self, int64_t place, int64_t step, bint force) noexcept nogil:
        """The lowest-ranked request below ``place`` that can be preempted now; -1 = none.

        One with rows in flight is marked instead: it is planned no more until they are committed.
        """
        cdef int64_t i
        cdef request_t *request
        for i in range(self.num_running - 1, place, -1):
            request = &self.table.records[self.order[i]]
            if request.planned_step == step and request.in_flight:
                continue
            if not force and request.fresh_tokens < self.limits.immune_tokens:
                continue
            if request.in_flight:
                request.draining = True
                return -1
            return self.order[i]
        return -1

    cdef int preempt(self, int32_t record) except -1:
        """Take blocks and slot away; the request waits in front, its stream goes on later."""
        cdef request_t *request = &self.table.records[record]
        cdef Sequence sequence = <Sequence>request.sequence
        cdef int64_t held = self.blocks_for(sequence.seq_len)
        self.remove(record)
        if held and (self.limits.spill or not is_rebuildable(request)):
            request.state = SPILLED
            self.pending.push(SPILL, request.handle, -1, request.slot, -1,
                              sequence._blocks, held)
            sequence.trim_blocks(0)
        else:
            request.state = WAITING
            self.cache_blocks(request)
            self.pending.push(REQUEUE, request.handle, -1, request.slot, -1, NULL, 0)
            sequence.rewind_to(0)
        if request.slot >= 0:
            self.slots.drop(request.slot)
            request.slot = -1
        request.planned_len = sequence.seq_len
        request.num_drafts = 0
        request.draining = False
        self.num_preemptions += 1
        self.num_releases += 1
        return self.queue.push(record, True, request.priority, request.arrival, 0)

    # -- the way out --------------------------------------------------------------------------

    cdef int cache_blocks(self, request_t *request) except -1:
        """Insert the committed whole blocks into the prefix cache, which then shares them."""
        cdef Sequence sequence = <Sequence>request.sequence
        cdef int64_t exact = sequence.prompt_len
        if request.exact_len < request.matched_len:
            exact = min(exact, request.exact_len)
        if self.slots.num_total:
            exact = exact // self.limits.chunk_unit * self.limits.chunk_unit
        if self.cache is not None and sequence.kv_valid_tokens >= self.limits.block_size:
            self.cache.insert(sequence.tokens, sequence.block_table, sequence.kv_valid_tokens,
                              exact, request.seed)
        return 0

    cdef int end(self, int32_t record, int32_t reason) except -1:
        """End a request now; what it holds goes back once no row of it is in flight."""
        cdef request_t *request = &self.table.records[record]
        if request.state == RUNNING:
            self.remove(record)
            if reason != ERROR:
                self.cache_blocks(request)
        elif request.state != ENDED:
            self.queue.remove(record)
        request.state = ENDED
        request.epoch += 1
        if not request.in_flight:
            return self.retire(record)
        if request.slot >= 0:
            self.slots.drain(request.slot)
        return 0

    cdef int retire(self, int32_t record) except -1:
        """Give back the blocks and the slot of an ended request, and forget it."""
        cdef request_t *request = &self.table.records[record]
        (<Sequence>request.sequence).release()
        if request.slot >= 0:
            self.slots.drop(request.slot)
        if record == self._blocked:
            self._blocked = -1
        self.retired.append(request.handle)
        self.num_releases += 1
        return self.table.release(record)

    cdef int compact(self) except -1:
        """Keep slots 0 … N - 1 in use: move the highest into holes, each move a plan's action."""
        cdef int64_t source = 0, target = 0
        cdef int32_t record
        while self.slots.next_move(&source, &target):
            record = self.table.number_of(self.slots._owner[source])
            self.pending.push(MOVE_SLOT, self.slots._owner[source], self.slots._retired[target],
                              source, target, NULL, 0)
            self.slots.move(source, target)
            self.table.records[record].slot = <int32_t>target
        return 0
