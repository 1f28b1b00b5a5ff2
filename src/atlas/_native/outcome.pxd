from libc.stdint cimport int32_t, int64_t

from atlas._native.plan cimport Plan, entry_t
from atlas._native.running_set cimport RunningSet

cdef int64_t first_invalid(
    RunningSet running, Plan plan, const int32_t *tokens, const int32_t *rows_kept,
    const int32_t *finished) noexcept nogil
cdef bint is_live(RunningSet running, entry_t *entry) noexcept nogil
cdef int make_space(RunningSet running, Plan plan) except -1
cdef int64_t settle_entries(
    RunningSet running, Plan plan, const int32_t *tokens, const int32_t *rows_kept,
    const int32_t *finished, int64_t now_us, int32_t *todo) except -1
cdef int settle(
    RunningSet running, Plan plan, entry_t *entry, int32_t token, int64_t kept, int32_t reason,
    int64_t now_us) except -1
cdef int conclude(RunningSet running, entry_t *entry) except -1
