from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t


cdef class BlockPool:
    cdef readonly int64_t num_total
    cdef int64_t _num_free
    cdef uint32_t *_free       # a stack: the block freed last is handed out first
    cdef int32_t *_references  # 0 = free
    # For the prefix cache, which can evict only what it alone holds: the blocks that fell to one
    # reference since it last looked, in order and each once. NULL until a cache is attached.
    cdef uint32_t *_fallen
    cdef uint8_t *_is_fallen
    cdef int64_t _num_fallen

    cdef int take(self, int64_t count, uint32_t *out) except -1
    cdef int drop(self, uint32_t block) except -1
    # The same without the checks, for a block known to be in use.
    cdef void hold(self, uint32_t block) noexcept nogil
    cdef void let_go(self, uint32_t block) noexcept nogil
    cdef int record_fallen(self) except -1
    cdef void forget_fallen(self) noexcept nogil
