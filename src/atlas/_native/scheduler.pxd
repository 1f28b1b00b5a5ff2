from libc.stdint cimport int32_t, int64_t, uint64_t

from atlas._native.plan cimport Plan
from atlas._native.planner cimport Planner
from atlas._native.running_set cimport RunningSet

cdef enum:
    MAX_DEPTH = 2
    NUM_PLANS = MAX_DEPTH + 1  # the one committed last stays readable


cdef class Scheduler:
    cdef RunningSet running
    cdef Planner planner
    cdef list _plans
    cdef int32_t *_todo            # entries whose commit touches the running set
    cdef object _can_batch
    cdef tuple _rungs
    cdef readonly int64_t depth
    cdef readonly int64_t num_outstanding
    cdef readonly bint closed
    cdef bint rollback_unsupported
    cdef bint compact_slots        # keep slots 0 … N - 1 in use
    cdef int64_t num_added

    cdef int64_t enter(
        self, const int32_t[::1] tokens, int64_t prompt_len, int64_t limit_len, int64_t priority,
        uint64_t seed, bint run_ahead, bint can_requeue, bint all_logits,
        bint spilled, int64_t now_us) except -1
