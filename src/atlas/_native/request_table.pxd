from cpython.ref cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint64_t

from atlas._native.sequence cimport Sequence

cdef enum State:
    UNUSED = 0
    WAITING = 1   # in the queue, holding nothing
    SPILLED = 2   # in the queue, its blocks and slot kept in host memory
    RUNNING = 3
    ENDED = 4     # finished; rows of it may still be in flight

cdef struct request_t:
    int64_t handle
    PyObject *sequence      # borrowed from the table
    int32_t *history        # prompt and emitted tokens; the last one is not in KV yet
    int64_t num_history
    int64_t history_capacity
    int32_t *drafts         # proposed after the last token of history
    int64_t num_drafts
    int64_t drafts_capacity
    int64_t prompt_len      # tokens of history that run as prompt tokens
    int64_t limit_len       # positions it may reach: prompt + max_tokens - 1
    int64_t planned_len     # positions committed or in flight
    int64_t reserved_len    # positions that admission reserved, as accounting
    int64_t matched_len     # tokens found in the prefix cache
    int64_t exact_len       # those of them that owe nothing to a step token
    int64_t branch_len      # where its cached blocks end, if no snapshot reached so far; else 0
    int64_t logits_len      # with all_logits: prompt rows whose logits were delivered
    int64_t arrival         # number of its submission
    int64_t admission       # number of its latest admission
    int64_t last_token_us
    int64_t planned_step    # step it was planned in last
    int64_t source_step     # step in flight that makes the token after history
    int64_t draft_capacity  # the proposer's cap; -1 = unbounded
    uint64_t seed           # adapter and media part of the prefix key
    int32_t source_row      # its logits row there; -1 = none
    int32_t state
    int32_t priority
    int32_t epoch           # rows planned in an earlier epoch are dropped at their commit
    int32_t planned_epoch
    int32_t in_flight       # steps in flight with rows of it
    int32_t slot
    int32_t fresh_tokens    # emitted since admission
    int32_t match_reason    # why the prefix cache held no more
    int32_t snapshot        # recurrent snapshot to start from; -1 = none
    bint run_ahead          # may be planned before its last token is known
    bint can_requeue        # its state can be rebuilt from tokens
    bint all_logits         # every prompt row gets logits; the prefix cache is not read
    bint draining           # chosen for preemption: not planned until its rows are committed


cdef inline bint is_rebuildable(const request_t *request) noexcept nogil:
    """Whether running its tokens again gives its state: not on reused K/V of step tokens."""
    return request.can_requeue and request.exact_len == request.matched_len


cdef class RequestTable:
    cdef request_t *records
    cdef int64_t capacity
    cdef readonly int64_t num_used
    cdef int32_t *_free
    cdef int64_t _num_free
    cdef list _sequences

    cdef int grow(self) except -1

    cdef int32_t allocate(self, Sequence sequence, const int32_t *history, int64_t count) except -1
    cdef int release(self, int32_t record) except -1
    cdef request_t *find(self, int64_t handle) except NULL
    cdef int32_t number_of(self, int64_t handle) except -1
    cdef int grow_history(self, request_t *request, int64_t num_tokens) except -1
