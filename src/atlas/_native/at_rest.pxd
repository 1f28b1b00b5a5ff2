from libc.stdint cimport int32_t, int64_t

from atlas._native.request_table cimport request_t
from atlas._native.running_set cimport RunningSet

cdef request_t *at_rest(RunningSet running, int64_t handle) except NULL
cdef bint awaits_token(request_t *request) noexcept nogil
cdef int set_drafts(
    RunningSet running, int64_t handle, const int32_t *tokens, int64_t count) except -1
cdef int64_t fork(RunningSet running, int64_t handle, int32_t token, int64_t now_us) except -1
cdef int rewind(RunningSet running, int64_t handle, int64_t position, int64_t state_len) except -1
