from libc.stdint cimport int32_t, int64_t

from atlas._native.plan cimport Plan, entry_t
from atlas._native.request_table cimport request_t
from atlas._native.running_set cimport RunningSet

cdef enum Phase:
    NOTHING = 0
    STEPS = 1
    PROMPTS = 2


cdef class Planner:
    cdef RunningSet running
    cdef int64_t step              # number of the next step
    cdef int64_t max_step_tokens
    cdef int64_t max_logits_rows
    cdef int64_t max_prefills
    cdef int64_t max_verify_rows
    cdef int64_t chunk_tokens
    cdef int64_t chunk_unit
    cdef int64_t tail_unit
    cdef int64_t tail_least
    cdef int64_t token_deadline_us
    cdef bint separate             # decode and prefill never share a step
    cdef bint last_was_prefill
    cdef bint prompts_alone        # the next step leaves its rows to a prompt that must run whole

    cdef Phase phase_of(self, request_t *request) noexcept nogil
    cdef bint is_late(self, int64_t now_us) noexcept nogil
    cdef void survey(
        self, int64_t *num_steps, int64_t *num_prompts, int64_t *draft_capacity) noexcept nogil
    cdef int fill(self, Plan plan, bint is_idle, int64_t now_us) except -1
    cdef int lay_steps(self, Plan plan, int64_t num_steps, int64_t num_prompts,
                       int64_t draft_capacity) except -1
    cdef int lay_prompts(self, Plan plan) except -1
    cdef int lay_by_force(self, Plan plan) except -1
    cdef bint force(self, Plan plan, int64_t place) except -1
    cdef bint lay_step(self, Plan plan, int64_t place, int64_t extra, int64_t draft_capacity,
                       bint force) except -1
    cdef bint lay_prompt(self, Plan plan, int64_t place, bint force) except -1
    cdef entry_t *add_entry(self, Plan plan, int32_t record, int32_t kind,
                            int64_t rows) noexcept nogil
    cdef int64_t chunk_end(self, request_t *request, int64_t room) noexcept nogil
    cdef int64_t tail_split(self, request_t *request) noexcept nogil
    cdef int64_t branch_split(self, request_t *request) noexcept nogil
    cdef void withdraw(self, Plan plan) noexcept nogil
    cdef void finish_rows(self, Plan plan) noexcept nogil
