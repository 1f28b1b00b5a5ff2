"""A radix tree over KV blocks: one node a block, found by the tokens from position 0 on.

The children of all nodes are in one hash table. A hash is never trusted: parent, seed and tokens
are compared. The tree holds one reference on each node's block. Only leaves whose block it alone
holds can be evicted, least recently used first; the block pool records which blocks fall to one
reference, so that no call ever walks over the blocks that running sequences hold.
"""

import os

cimport cython
from libc.stdlib cimport free, malloc
from libc.string cimport memcmp, memcpy, memset

from atlas.errors import InvalidArgumentError, OutOfMemoryError

cdef extern from *:
    """
    static inline uint64_t atlas_fold(uint64_t a, uint64_t b) {
        __extension__ const unsigned __int128 product = (unsigned __int128)a * b;
        return (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    """
    uint64_t atlas_fold(uint64_t a, uint64_t b) noexcept nogil

cdef uint64_t HASH_FACTOR = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: odd, its bits well mixed


@cython.no_gc  # refers to a BlockPool only, which refers to nothing: never part of a cycle
cdef class RadixTree:
    """The nodes, their table and their order of eviction; ``PrefixCache`` gives them meaning.

    All memory is taken at once: every node has a block of its own, so there are never more nodes
    than blocks in the pool. A node's last use is when its tokens were last inserted or the last
    holder of its block let go; until then it stays anyway.
    """

    def __cinit__(self, BlockPool pool not None, int64_t block_size=16, **for_subclass):
        cdef int64_t i, total = pool.num_total, num_slots = 4
        if not 1 <= block_size <= 4096:
            raise InvalidArgumentError(f"block_size is {block_size}; allowed: 1 … 4096")
        while num_slots < 2 * total:
            num_slots *= 2
        self.pool = pool
        self.block_size = block_size
        self._mask = num_slots - 1
        self._nodes = <radix_node *>malloc(total * sizeof(radix_node))
        self._tokens = <int32_t *>malloc(total * block_size * sizeof(int32_t))
        self._unused = <int32_t *>malloc(total * sizeof(int32_t))
        self._node_of = <int32_t *>malloc(total * sizeof(int32_t))
        self._table = <int32_t *>malloc(num_slots * sizeof(int32_t))
        self._heap = <eviction_candidate *>malloc(total * sizeof(eviction_candidate))
        if (self._nodes == NULL or self._tokens == NULL or self._unused == NULL
                or self._node_of == NULL or self._table == NULL or self._heap == NULL):
            raise OutOfMemoryError(f"no memory for a prefix cache of {total} blocks")
        for i in range(total):
            self._unused[i] = <int32_t>(total - 1 - i)
            self._node_of[i] = NONE
        memset(self._table, 0xFF, num_slots * sizeof(int32_t))  # all NONE
        # A secret salt, so that no prompt can be chosen to collide with others.
        self._hash_bits = <uint64_t>-1
        self._salt = int.from_bytes(os.urandom(8), "little")
        pool.record_fallen()
        self._attached = True

    def __dealloc__(self):
        cdef int64_t block
        if self._attached:
            self.pool.forget_fallen()
            for block in range(self.pool.num_total):
                if self._node_of[block] != NONE:
                    self.pool.let_go(<uint32_t>block)
        free(self._nodes)
        free(self._tokens)
        free(self._unused)
        free(self._node_of)
        free(self._table)
        free(self._heap)

    # -- nodes ------------------------------------------------------------------------------

    cdef uint64_t first_hash(self, uint64_t seed) noexcept nogil:
        return atlas_fold(seed ^ self._salt, HASH_FACTOR)

    cdef uint64_t next_hash(self, uint64_t prefix, const int32_t *tokens) noexcept nogil:
        """Hash of a prefix's hash and one block's tokens, two tokens a multiplication."""
        cdef int64_t i
        cdef uint64_t pair
        for i in range(0, self.block_size - 1, 2):
            pair = <uint64_t><uint32_t>tokens[i] | <uint64_t><uint32_t>tokens[i + 1] << 32
            prefix = atlas_fold(prefix ^ pair, HASH_FACTOR)
        if self.block_size & 1:
            pair = <uint64_t><uint32_t>tokens[self.block_size - 1]
            prefix = atlas_fold(prefix ^ pair, HASH_FACTOR)
        return prefix & self._hash_bits

    cdef int32_t child(self, int32_t parent, uint64_t hash, uint64_t seed,
                       const int32_t *tokens) noexcept nogil:
        """The child of ``parent`` with these tokens, or NONE."""
        cdef uint64_t slot = hash & self._mask
        cdef int32_t node = self._table[slot]
        cdef radix_node *found
        while node != NONE:
            found = &self._nodes[node]
            if (found.hash == hash and found.parent == parent and found.seed == seed
                    and memcmp(&self._tokens[node * self.block_size], tokens,
                               self.block_size * sizeof(int32_t)) == 0):
                return node
            slot = (slot + 1) & self._mask
            node = self._table[slot]
        return NONE

    cdef int32_t node_at(self, const int32_t *tokens, int64_t num_blocks,
                         uint64_t seed) noexcept nogil:
        """The node of the last of the first ``num_blocks`` blocks of ``tokens``, or NONE."""
        cdef uint64_t hash = self.first_hash(seed)
        cdef int32_t node = NONE
        cdef int64_t i
        for i in range(num_blocks):
            hash = self.next_hash(hash, &tokens[i * self.block_size])
            node = self.child(node, hash, seed, &tokens[i * self.block_size])
            if node == NONE:
                break
        return node

    cdef int32_t add_node(self, int32_t parent, uint64_t hash, uint64_t seed,
                          const int32_t *tokens, uint32_t block, bint generated) noexcept nogil:
        cdef int32_t node = self._unused[self.pool.num_total - 1 - self.num_blocks]
        cdef uint64_t slot = hash & self._mask
        cdef radix_node *added = &self._nodes[node]
        while self._table[slot] != NONE:
            slot = (slot + 1) & self._mask
        self._table[slot] = node
        memcpy(&self._tokens[node * self.block_size], tokens, self.block_size * sizeof(int32_t))
        added.hash = hash
        added.seed = seed
        added.last_used = self._clock
        added.parent = parent
        added.num_children = 0
        added.block = block
        added.snapshot = NONE
        added.generated = generated
        added.snapshot_generated = 0
        added.is_candidate = 0
        if parent != NONE:
            self._nodes[parent].num_children += 1
        self.num_blocks += 1
        self._node_of[block] = node
        self.pool.hold(block)
        return node

    cdef void remove_node(self, int32_t node) noexcept nogil:
        """Forget a leaf that is no candidate, and drop the reference on its block."""
        cdef radix_node *removed = &self._nodes[node]
        self._unlist(node)
        self._node_of[removed.block] = NONE
        self.pool.let_go(removed.block)
        self.num_blocks -= 1
        self._unused[self.pool.num_total - 1 - self.num_blocks] = node
        if removed.parent != NONE:
            self._nodes[removed.parent].num_children -= 1
            if self._is_evictable(removed.parent):
                self._add_candidate(removed.parent)

    cdef void replace_block(self, int32_t node, uint32_t block) noexcept nogil:
        """Let ``node`` hold ``block``; whoever else holds its old block keeps that."""
        self._node_of[self._nodes[node].block] = NONE
        self.pool.let_go(self._nodes[node].block)
        self._nodes[node].block = block
        self._node_of[block] = node
        self.pool.hold(block)

    cdef void _unlist(self, int32_t node) noexcept nogil:
        """Take ``node`` out of the table; later entries move up, so that no search stops short."""
        cdef uint64_t gap = self._nodes[node].hash & self._mask
        cdef uint64_t slot, home
        while self._table[gap] != node:
            gap = (gap + 1) & self._mask
        slot = (gap + 1) & self._mask
        while self._table[slot] != NONE:
            home = self._nodes[self._table[slot]].hash & self._mask
            if ((slot - home) & self._mask) >= ((slot - gap) & self._mask):
                self._table[gap] = self._table[slot]
                gap = slot
            slot = (slot + 1) & self._mask
        self._table[gap] = NONE

    # -- order of eviction ------------------------------------------------------------------

    cdef void start_use(self) noexcept nogil:
        """Advance the clock, past what sequences let go since the last call."""
        cdef int64_t i
        cdef uint32_t block
        cdef int32_t node
        for i in range(self.pool._num_fallen):
            block = self.pool._fallen[i]
            self.pool._is_fallen[block] = 0
            node = self._node_of[block]
            if node != NONE and self.pool._references[block] == 1:
                self._clock += 1
                self._nodes[node].last_used = self._clock
                if self._nodes[node].num_children == 0:
                    self._add_candidate(node)
        self.pool._num_fallen = 0
        self._clock += 1

    cdef bint _is_evictable(self, int32_t node) noexcept nogil:
        cdef radix_node *asked = &self._nodes[node]
        return asked.num_children == 0 and self.pool._references[asked.block] == 1

    cdef void _add_candidate(self, int32_t node) noexcept nogil:
        cdef uint64_t last_used = self._nodes[node].last_used
        cdef int64_t at = self._heap_len, above
        if self._nodes[node].is_candidate:
            return
        self._nodes[node].is_candidate = 1
        self._heap_len += 1
        while at > 0:
            above = (at - 1) // 2
            if self._heap[above].last_used <= last_used:
                break
            self._heap[at] = self._heap[above]
            at = above
        self._heap[at].last_used = last_used
        self._heap[at].node = node

    cdef void _sink(self, eviction_candidate moved) noexcept nogil:
        """Replace the heap's top by ``moved``."""
        cdef int64_t at = 0, below = 1
        while below < self._heap_len:
            if (below + 1 < self._heap_len
                    and self._heap[below + 1].last_used < self._heap[below].last_used):
                below += 1
            if moved.last_used <= self._heap[below].last_used:
                break
            self._heap[at] = self._heap[below]
            at = below
            below = 2 * at + 1
        self._heap[at] = moved

    cdef int32_t least_recent(self) noexcept nogil:
        """Take the least recently used evictable leaf out of the heap; NONE: there is none.

        Uses leave the heap alone, and its entries are put right here when they reach the top: a
        node that grew a child or is held again loses its entry (and gets one when that ends),
        one that was used since sinks to its place. So an entry costs O(log n) a use at most.
        """
        cdef eviction_candidate top
        cdef radix_node *node
        while self._heap_len:
            top = self._heap[0]
            node = &self._nodes[top.node]
            if self._is_evictable(top.node) and top.last_used != node.last_used:
                top.last_used = node.last_used
                self._sink(top)
                continue
            self._heap_len -= 1
            if self._heap_len:
                self._sink(self._heap[self._heap_len])
            node.is_candidate = 0
            if self._is_evictable(top.node):
                return top.node
        return NONE

    # -- for people and tests ---------------------------------------------------------------

    def weaken_hash(self, int num_bits):
        """Keep 0 … 64 bits of every hash, so that a test sees what collisions do."""
        if self.num_blocks or not 0 <= num_bits <= 64:
            raise InvalidArgumentError(
                f"num_bits is {num_bits}; allowed: 0 … 64 while the cache is empty")
        self._hash_bits = (<uint64_t>1 << num_bits) - 1 if num_bits < 64 else <uint64_t>-1

    def entries(self):
        """Every node as (seed, tokens from position 0 on, block, generated, snapshot id or None).

        In order of last use, least recent first. A copy, for inspection.
        """
        cdef int64_t block, i
        cdef int32_t node, ancestor
        cdef list rows = [], tokens
        for block in range(self.pool.num_total):
            node = ancestor = self._node_of[block]
            if node == NONE:
                continue
            tokens = []
            while ancestor != NONE:
                tokens[:0] = [self._tokens[ancestor * self.block_size + i]
                              for i in range(self.block_size)]
                ancestor = self._nodes[ancestor].parent
            rows.append((self._nodes[node].last_used, len(tokens), (
                self._nodes[node].seed, tuple(tokens), block, bool(self._nodes[node].generated),
                None if self._nodes[node].snapshot == NONE else self._nodes[node].snapshot)))
        rows.sort(key=lambda row: (row[0], -row[1]))
        return [row[2] for row in rows]

    def check(self):
        """Verify every invariant of the tree; for tests, O(number of blocks).

        Raises
        ------
        AssertionError
            Naming what is inconsistent.
        """
        cdef int64_t block, i, num_nodes = 0, num_listed = 0
        cdef int32_t node
        cdef radix_node *at
        cdef dict children = {}
        cdef list marked = []
        for block in range(self.pool.num_total):
            node = self._node_of[block]
            if node == NONE:
                continue
            num_nodes += 1
            at = &self._nodes[node]
            _require(at.block == block, f"block {block} belongs to a node of block {at.block}")
            _require(self.pool._references[block] >= 1, f"cached block {block} is free")
            _require(at.last_used <= self._clock, f"block {block} was used in the future")
            _require(self.child(at.parent, at.hash, at.seed,
                                &self._tokens[node * self.block_size]) == node,
                     f"the node of block {block} cannot be found")
            children.setdefault(node, 0)
            if at.is_candidate:
                marked.append(node)
            elif self._is_evictable(node):
                _require(self.pool._is_fallen[block], f"block {block} could never be evicted")
            if at.parent != NONE:
                children[at.parent] = children.get(at.parent, 0) + 1
                _require(self._node_of[self._nodes[at.parent].block] == at.parent,
                         f"the parent of block {block} was removed")
                _require(at.generated or not self._nodes[at.parent].generated,
                         f"block {block} is called exact and stands on a generated one")
        _require(num_nodes == self.num_blocks, f"{self.num_blocks} nodes, {num_nodes} found")
        for node, count in children.items():
            _require(self._nodes[node].num_children == count,
                     f"node {node} counts {self._nodes[node].num_children} of {count} children")
        for i in range(<int64_t>self._mask + 1):
            num_listed += self._table[i] != NONE
        _require(num_listed == num_nodes, f"{num_listed} nodes in the table of {num_nodes}")
        _require(sorted(marked) == sorted(self._heap[i].node for i in range(self._heap_len)),
                 "the heap disagrees with the nodes about who is in it")
        for i in range(1, self._heap_len):
            _require(self._heap[(i - 1) // 2].last_used <= self._heap[i].last_used,
                     f"heap entry {i} is older than the one above it")


cdef int _require(bint holds, str message) except -1:
    if not holds:
        raise AssertionError(message)
    return 0
