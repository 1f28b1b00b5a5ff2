from libc.stdint cimport int32_t, int64_t, uint32_t


cdef class BlockPool:
    cdef readonly int64_t num_total
    cdef int64_t _num_free
    cdef uint32_t *_free       # a stack: the block freed last is handed out first
    cdef int32_t *_references  # 0 = free

    cdef int take(self, int64_t count, uint32_t *out) except -1
    cdef int drop(self, uint32_t block) except -1
