from libc.stdint cimport int32_t, int64_t

cdef struct waiting_t:
    int64_t rank      # preempted first, then priority
    int64_t order     # arrival number: FIFO within a rank
    int64_t since_us  # when it began to wait
    int32_t heap      # position in the heap; -1 = not waiting
    int32_t earlier   # neighbours in the order of waiting; -1 = none
    int32_t later


cdef class WaitQueue:
    cdef waiting_t *_entry    # by record number
    cdef int64_t _capacity
    cdef int32_t *_heap       # record numbers; the root is next
    cdef readonly int64_t num_waiting
    cdef int32_t _earliest    # waits longest
    cdef int32_t _latest

    cdef int push(
        self, int32_t record, bint front, int64_t priority, int64_t order,
        int64_t since_us) except -1
    cdef void remove(self, int32_t record) noexcept nogil
    cdef int32_t head(self, int64_t now_us, int64_t aging_us) noexcept nogil
    cdef void sift(self, int64_t position) noexcept nogil
    cdef bint before(self, int32_t a, int32_t b) noexcept nogil
