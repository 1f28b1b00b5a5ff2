"""What may be done to a running request between steps, while no row of it is in flight."""

from libc.stdlib cimport realloc
from libc.string cimport memcpy

from atlas._native.request_table cimport RUNNING, WAITING, is_rebuildable
from atlas._native.sequence cimport Sequence
from atlas.errors import InvalidArgumentError, OutOfMemoryError, SequenceStateError

STATE_NAMES = ("unused", "waiting", "spilled", "running", "ended")


cdef request_t *at_rest(RunningSet running, int64_t handle) except NULL:
    """The record of a running request with no row in flight."""
    cdef request_t *request = running.table.find(handle)
    if request.state != RUNNING:
        raise SequenceStateError(f"the request is {STATE_NAMES[request.state]}, not running")
    if request.in_flight:
        raise SequenceStateError(f"{request.in_flight} steps in flight hold rows of it")
    return request


cdef bint awaits_token(request_t *request) noexcept nogil:
    """Whether it stands just before its last token, with prompt and replay behind it."""
    return (request.planned_len >= request.prompt_len
            and request.num_history - request.planned_len == 1)


cdef int set_drafts(
        RunningSet running, int64_t handle, const int32_t *tokens, int64_t count) except -1:
    cdef request_t *request = at_rest(running, handle)
    cdef int32_t *grown
    if not awaits_token(request):
        raise SequenceStateError("the request is still absorbing known tokens")
    if count > request.drafts_capacity:
        grown = <int32_t *>realloc(request.drafts, count * sizeof(int32_t))
        if grown == NULL:
            raise OutOfMemoryError(f"no memory for {count} drafts")
        request.drafts = grown
        request.drafts_capacity = count
    if count:
        memcpy(request.drafts, tokens, count * sizeof(int32_t))
    request.num_drafts = count
    return 0


cdef int64_t fork(RunningSet running, int64_t handle, int32_t token, int64_t now_us) except -1:
    """A copy that shares every block; where no place is free to run, one made of its tokens."""
    cdef request_t *parent = at_rest(running, handle)
    cdef request_t *child
    cdef Sequence source = <Sequence>parent.sequence
    cdef Sequence sequence
    cdef int64_t i
    cdef int32_t record
    cdef int64_t held = running.blocks_for(source.seq_len)
    cdef bint fits = (running.num_running < running.limits.max_running
                      and (not running.slots.num_total or running.slots.num_free > 0))
    if not awaits_token(parent) or parent.num_history == parent.prompt_len:
        raise SequenceStateError("only a request that has emitted a token can fork")
    if not fits and not is_rebuildable(parent):
        raise OutOfMemoryError(
            f"all {running.limits.max_running} places to run are taken, and this sequence "
            "cannot be rebuilt from its tokens")
    sequence = Sequence(running.pool, running.limits.block_size)
    sequence.grow_block_table(running.blocks_for(parent.limit_len))
    record = running.table.allocate(sequence, parent.history, parent.num_history)
    parent = running.table.find(handle)  # the table may have moved
    child = &running.table.records[record]
    child.prompt_len = parent.prompt_len
    child.limit_len = parent.limit_len
    child.reserved_len = parent.reserved_len
    child.matched_len = parent.matched_len
    child.exact_len = parent.exact_len
    child.match_reason = parent.match_reason
    child.draft_capacity = parent.draft_capacity
    child.last_token_us = parent.last_token_us
    child.arrival = parent.arrival
    child.priority = parent.priority
    child.seed = parent.seed
    child.run_ahead = parent.run_ahead
    child.can_requeue = parent.can_requeue
    child.all_logits = parent.all_logits
    child.history[child.num_history - 1] = token
    if not fits:
        child.state = WAITING
        running.queue.push(record, True, child.priority, child.arrival, now_us)
        return child.handle
    sequence.adopt_blocks(parent.history, source.seq_len, source._blocks, held)
    sequence.prompt_len = source.prompt_len
    for i in range(held):
        running.pool.hold(source._blocks[i])
    child.planned_len = sequence.seq_len
    if running.slots.num_total:
        child.slot = <int32_t>running.slots.claim_for(child.handle)
    running.insert(record)
    return child.handle


cdef int rewind(RunningSet running, int64_t handle, int64_t position, int64_t state_len) except -1:
    cdef request_t *request = at_rest(running, handle)
    cdef Sequence sequence = <Sequence>request.sequence
    cdef int64_t kept = min(sequence.seq_len, position - 1)
    if not 1 <= position <= request.num_history:
        raise InvalidArgumentError(
            f"position is {position}; allowed: 1 … {request.num_history}")
    if state_len >= position:
        raise InvalidArgumentError(f"state_len is {state_len}; allowed: 0 … {position - 1}")
    if state_len >= 0:
        kept = min(kept, state_len)
    elif running.slots.num_total and kept < sequence.seq_len:
        raise SequenceStateError(
            f"the recurrent state stands at {sequence.seq_len} and there is no snapshot "
            f"for {position - 1}")
    request.num_history = position
    request.prompt_len = min(request.prompt_len, position)
    request.logits_len = min(request.logits_len, position - 1)
    sequence.rewind_to(kept)
    request.planned_len = sequence.seq_len
    request.num_drafts = 0
    running.num_releases += 1
    return 0
