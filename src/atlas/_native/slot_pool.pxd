from libc.stdint cimport int64_t


cdef class SlotPool:
    cdef readonly int64_t num_total
    cdef readonly int64_t num_free
    cdef int64_t *_owner     # handle of each slot's owner; FREE or FOREIGN
    cdef int64_t *_retired   # handle of the owner before

    cdef int64_t claim_for(self, int64_t owner) noexcept nogil
    cdef int drop(self, int64_t slot) except -1
    cdef void drain(self, int64_t slot) noexcept nogil
    cdef bint next_move(self, int64_t *source, int64_t *target) noexcept nogil
    cdef void move(self, int64_t source, int64_t target) noexcept nogil
