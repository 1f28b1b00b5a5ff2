from libc.stdint cimport int32_t, int64_t

from atlas._native.plan cimport entry_t

cdef struct log_t:
    int64_t handle          # -1 = no sample
    int64_t last_position   # the token there is the sample's last one
    int64_t num_end_ids
    int64_t num_tokens
    int64_t capacity
    int32_t *end_ids
    int32_t *tokens
    double last_s           # when its latest token came


cdef class TokenLog:
    cdef log_t *_logs       # by the number in a handle
    cdef int64_t _capacity
    cdef readonly int64_t num_open

    cdef log_t *_find(self, int64_t handle) noexcept nogil
    cdef bint _keeps(self, const entry_t *entry, int32_t token) noexcept nogil
    cdef int _grow(self, int64_t number) except -1
