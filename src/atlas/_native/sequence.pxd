from libc.stdint cimport int32_t, int64_t, uint32_t

from atlas._native.block_pool cimport BlockPool


cdef class Sequence:
    cdef readonly BlockPool pool
    cdef readonly int64_t block_size    # tokens a block holds
    cdef readonly int64_t seq_len       # positions whose K/V is committed
    cdef public int64_t prompt_len      # positions from here on are step tokens
    cdef public int64_t kv_valid_tokens  # cap on what may be cached
    cdef readonly int64_t verify_rows   # K of a verify that awaits accept or free; else 0
    cdef readonly bint failed
    cdef readonly bint freed
    cdef int32_t *_tokens
    cdef int64_t _num_tokens
    cdef int64_t _token_capacity
    cdef uint32_t *_blocks
    cdef int64_t _num_blocks
    cdef int64_t _block_capacity

    cdef int require_usable(self) except -1
    cdef int trim_blocks(self, int64_t num_blocks) except -1
    cdef int reserve_positions(self, int64_t num_positions) except -1
    cdef int grow_block_table(self, int64_t num_blocks) except -1
    cdef int grow_tokens(self, int64_t num_tokens) except -1
    cdef int append(self, const int32_t *tokens, int64_t count) except -1
    cdef int adopt_blocks(
        self, const int32_t *tokens, int64_t num_tokens,
        const uint32_t *blocks, int64_t num_blocks) except -1
    cdef int rewind_to(self, int64_t new_len) except -1
