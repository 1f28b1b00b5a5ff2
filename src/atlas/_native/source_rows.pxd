from libc.stdint cimport int32_t, int64_t, uint8_t

from atlas._native.block_pool cimport BlockPool


cdef class SourceRows:
    cdef readonly list seqs           # of Sequence
    cdef readonly int64_t num_tokens  # that each of them reads in the next sweep
    cdef readonly int64_t source_len
    cdef BlockPool _pool
    cdef int64_t _block_size
    cdef const int32_t[::1] _source
    cdef int32_t *_tokens             # num_tokens of each sequence, one sequence after the other
    cdef uint8_t *_taken              # scratch of ``follow``: whose sequence has gone to a child
    cdef int64_t _capacity            # of both

    cdef int grow_tokens(self, int64_t count) except -1
    cdef int follow(
        self, int64_t count, const int32_t *parents, const int32_t *tokens) except -1
