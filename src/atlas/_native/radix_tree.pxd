from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from atlas._native.block_pool cimport BlockPool


cdef enum:
    NONE = -1


cdef struct radix_node:
    uint64_t hash           # of the seed and every token from position 0 on
    uint64_t seed
    uint64_t last_used
    int32_t parent          # NONE: its block starts at position 0
    int32_t num_children
    uint32_t block
    int64_t snapshot_base   # what its value is counted from
    int32_t snapshot        # id of a recurrent snapshot, or NONE
    int32_t newer           # neighbours by recency among the nodes that own a snapshot
    int32_t older
    uint8_t generated       # the block owes something to a step token
    uint8_t snapshot_generated
    uint8_t is_candidate    # has an entry in the heap


cdef struct eviction_candidate:
    uint64_t last_used      # when it was entered; the node may have been used since
    int32_t node


cdef class RadixTree:
    cdef readonly BlockPool pool
    cdef readonly int64_t block_size    # tokens a block holds
    cdef readonly int64_t num_blocks    # nodes, and so blocks that the tree holds
    cdef radix_node *_nodes
    cdef int32_t *_tokens               # [node, block_size]
    cdef int32_t *_unused               # a stack of node numbers
    cdef int32_t *_node_of              # [block], or NONE
    cdef int32_t *_table                # open addressing by hash; NONE: empty
    cdef uint64_t _mask
    cdef uint64_t _salt
    cdef uint64_t _hash_bits            # all ones; fewer in tests of collisions
    cdef uint64_t _clock                # counts uses
    cdef eviction_candidate *_heap      # least recently used first
    cdef int64_t _heap_len
    cdef bint _attached

    cdef uint64_t first_hash(self, uint64_t seed) noexcept nogil
    cdef uint64_t next_hash(self, uint64_t prefix, const int32_t *tokens) noexcept nogil
    cdef int32_t child(self, int32_t parent, uint64_t hash, uint64_t seed,
                       const int32_t *tokens) noexcept nogil
    cdef int32_t node_at(self, const int32_t *tokens, int64_t num_blocks,
                         uint64_t seed) noexcept nogil
    cdef int32_t add_node(self, int32_t parent, uint64_t hash, uint64_t seed,
                          const int32_t *tokens, uint32_t block, bint generated) noexcept nogil
    cdef void remove_node(self, int32_t node) noexcept nogil
    cdef void replace_block(self, int32_t node, uint32_t block) noexcept nogil
    cdef void start_use(self) noexcept nogil
    cdef int32_t least_recent(self) noexcept nogil

    cdef void _unlist(self, int32_t node) noexcept nogil
    cdef bint _is_evictable(self, int32_t node) noexcept nogil
    cdef void _add_candidate(self, int32_t node) noexcept nogil
    cdef void _sink(self, eviction_candidate moved) noexcept nogil
