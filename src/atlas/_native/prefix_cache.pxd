from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from atlas._native.radix_tree cimport RadixTree


cdef enum miss_reason:
    MISS_COMPLETE
    MISS_COLD
    MISS_DIVERGED
    MISS_GENERATED
    MISS_CAPPED
    MISS_SNAPSHOT
    NUM_MISS_REASONS


cdef struct prefix_match:
    int32_t node            # the deepest one matched, or NONE
    int64_t num_blocks
    int64_t num_cached      # blocks on the way, those behind the snapshot included
    int64_t exact_tokens    # fewer than matched: what is computed next is not exact
    int32_t snapshot_node   # of the deepest usable snapshot, or NONE
    int64_t snapshot_tokens
    miss_reason reason


cdef class PrefixCache(RadixTree):
    cdef readonly bint recurrent        # a match ends at a snapshot
    cdef readonly int64_t num_snapshots
    cdef readonly int64_t hits
    cdef readonly int64_t matched_tokens
    cdef readonly int64_t evicted_blocks
    cdef readonly int64_t upgraded_blocks
    cdef int64_t _misses[NUM_MISS_REASONS]
    cdef int64_t _snapshot_floor        # value of the snapshot evicted last
    cdef int32_t _newest_snapshot       # nodes
    cdef int32_t _oldest_snapshot
    cdef int32_t *_orphans              # ids of snapshots whose nodes were evicted
    cdef int64_t _num_orphans
    cdef int64_t _orphan_capacity

    # The scheduler's doors. `find` changes nothing: what it found holds until the next insert or
    # eviction (`reclaim` keeps what it is given). `claim` takes a reference on each block, writes
    # them into room for num_blocks and counts the match.
    cdef void find(self, const int32_t *tokens, int64_t num_tokens, uint64_t seed,
                   bint reuse_generated, int64_t max_tokens, prefix_match *found) noexcept nogil
    cdef void claim(self, const prefix_match *found, uint32_t *blocks) noexcept nogil
    cdef int64_t insert_blocks(self, const int32_t *tokens, const uint32_t *block_table,
                               int64_t num_blocks, int64_t prompt_len, uint64_t seed) except -1
    cdef int64_t evict_blocks(self, int64_t count) noexcept nogil
    cdef int64_t reclaim(self, const prefix_match *kept, int64_t blocks_needed) noexcept nogil
    cdef int32_t evict_snapshot(self) noexcept nogil

    cdef int _claim_block(self, uint32_t block, int64_t index) except -1
    cdef bint _evict_one(self) noexcept nogil
    cdef void _remove(self, int32_t node) noexcept nogil
    cdef void _link_snapshot(self, int32_t node) noexcept nogil
    cdef void _unlink_snapshot(self, int32_t node) noexcept nogil
    cdef int32_t _take_snapshot(self, int32_t node) noexcept nogil
    cdef int64_t _snapshot_value(self, int32_t node) noexcept nogil
    cdef int32_t _labelled_node(self, const int32_t[::1] tokens, int64_t num_tokens,
                                uint64_t seed) except -2
