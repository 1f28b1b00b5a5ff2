"""The prefix cache: KV blocks and recurrent snapshots of past sequences, found by their tokens.

What may be used is decided by where it came from. A block is *exact* when prompt tokens made it
and everything it was computed on: a cold prefill would have written the same bits. Any other is
called generated. Exact blocks never stand on generated ones in the tree, so a match that wants
exact blocks only stops at the first generated one.
"""

import enum

import numpy as np

cimport cython
from libc.stdlib cimport free, realloc

from atlas._native.block_pool cimport BlockPool
from atlas._native.radix_tree cimport NONE, radix_node

from atlas.errors import InvalidArgumentError, OutOfMemoryError

cdef enum:
    CLAIMED = -2  # node number of a block that the running insert will put into the tree


class MissReason(enum.IntEnum):
    """Why a match ended where it did."""

    COMPLETE = MISS_COMPLETE    # every whole block within max_tokens matched
    COLD = MISS_COLD            # the first block is absent: never cached, or evicted
    DIVERGED = MISS_DIVERGED    # a later one is: other text, not cached so far, or evicted
    GENERATED = MISS_GENERATED  # the next block is generated, and those were excluded
    CAPPED = MISS_CAPPED        # the next block is cached too, but max_tokens excludes it
    SNAPSHOT = MISS_SNAPSHOT    # more blocks are cached, but no usable snapshot goes so far


cdef class PrefixMatch:
    """What a prompt found in the cache: see ``PrefixCache.match``."""

    cdef readonly int64_t num_tokens
    cdef readonly object blocks
    cdef readonly int64_t exact_tokens
    cdef readonly object snapshot_id
    cdef readonly int64_t snapshot_tokens
    cdef readonly int64_t cached_tokens
    cdef readonly object reason

    def __repr__(self):
        return (f"PrefixMatch(num_tokens={self.num_tokens}, blocks={self.blocks.tolist()}, "
                f"exact_tokens={self.exact_tokens}, snapshot_id={self.snapshot_id}, "
                f"snapshot_tokens={self.snapshot_tokens}, cached_tokens={self.cached_tokens}, "
                f"reason={self.reason.name})")


@cython.no_gc
cdef class PrefixCache(RadixTree):
    """Cached prefixes over the blocks of ``pool``; a pool has one cache at most.

    ``recurrent`` says that the model cannot continue from KV alone: a match then ends at the
    deepest usable snapshot, and without one nothing is matched. Snapshots are numbers that the
    caller gave; who reads one while it could be evicted holds a reference of its own.
    """

    def __cinit__(self, BlockPool pool not None, int64_t block_size=16, *, bint recurrent=False):
        self.recurrent = recurrent
        self._newest_snapshot = NONE
        self._oldest_snapshot = NONE

    def __dealloc__(self):
        free(self._orphans)

    # -- matching ---------------------------------------------------------------------------

    cdef void find(self, const int32_t *tokens, int64_t num_tokens, uint64_t seed,
                   bint reuse_generated, int64_t max_tokens, prefix_match *found) noexcept nogil:
        cdef int64_t num_whole = num_tokens // self.block_size
        cdef int64_t limit = max_tokens // self.block_size
        cdef uint64_t hash = self.first_hash(seed)
        cdef int32_t child
        cdef bint usable
        cdef radix_node *node
        found.node = NONE
        found.num_blocks = 0
        found.exact_tokens = 0
        found.snapshot_node = NONE
        found.snapshot_tokens = 0
        found.reason = MISS_COMPLETE
        while found.num_blocks < num_whole:
            hash = self.next_hash(hash, tokens)
            child = self.child(found.node, hash, seed, tokens)
            usable = child != NONE and (reuse_generated or not self._nodes[child].generated)
            if found.num_blocks >= limit:
                if usable:
                    found.reason = MISS_CAPPED
                break
            if not usable:
                found.reason = (MISS_GENERATED if child != NONE
                                else MISS_DIVERGED if found.num_blocks else MISS_COLD)
                break
            node = &self._nodes[child]
            tokens += self.block_size
            found.node = child
            found.num_blocks += 1
            if not node.generated:
                found.exact_tokens = found.num_blocks * self.block_size
            if node.snapshot != NONE and (reuse_generated or not node.snapshot_generated):
                found.snapshot_node = child
                found.snapshot_tokens = found.num_blocks * self.block_size
        if (found.snapshot_node != NONE
                and self._nodes[found.snapshot_node].snapshot_generated):
            # Its blocks may be exact, but what is computed next is not: it counts as fewer.
            found.exact_tokens = min(found.exact_tokens, found.snapshot_tokens - self.block_size)
        found.num_cached = found.num_blocks
        if self.recurrent and found.snapshot_tokens < found.num_blocks * self.block_size:
            found.node = found.snapshot_node
            found.num_blocks = found.snapshot_tokens // self.block_size
            found.exact_tokens = min(found.exact_tokens, found.snapshot_tokens)
            found.reason = MISS_SNAPSHOT

    cdef void claim(self, const prefix_match *found, uint32_t *blocks) noexcept nogil:
        cdef int32_t node = found.node
        cdef int64_t i
        for i in range(found.num_blocks - 1, -1, -1):
            blocks[i] = self._nodes[node].block
            self.pool.hold(blocks[i])
            node = self._nodes[node].parent
        if found.snapshot_node != NONE:
            self._unlink_snapshot(found.snapshot_node)
            self._link_snapshot(found.snapshot_node)
        self.hits += found.num_blocks > 0
        self.matched_tokens += found.num_blocks * self.block_size
        self._misses[<int>found.reason] += 1

    def match(self, const int32_t[::1] tokens not None, uint64_t seed, bint reuse_generated,
              int64_t max_tokens):
        """Find the longest cached prefix of a prompt and take a reference on each of its blocks.

        Parameters
        ----------
        tokens
            int32 [num_tokens], the whole prompt.
        seed
            The request's adapter and media, mixed into 64 bits by the caller; 0 = neither. Equal
            seeds share KV: the caller answers for their uniqueness.
        reuse_generated
            Use generated blocks and snapshots too.
        max_tokens
            Cap on the match; a prompt's length less one leaves a token to compute.

        Returns
        -------
        PrefixMatch
            ``num_tokens``, a multiple of the block size; ``blocks``, uint32
            [num_tokens / block_size], released by the caller; ``exact_tokens``, fewer than
            matched if anything generated is among what was found: then what is computed next is
            not exact either, and the caller inserts with no greater ``prompt_len``;
            ``snapshot_id`` (or None) and ``snapshot_tokens`` of the deepest usable recurrent
            snapshot; ``cached_tokens``, more than matched where no snapshot reaches so far;
            ``reason``, a ``MissReason``.
        """
        cdef prefix_match found
        cdef uint32_t[::1] blocks
        cdef PrefixMatch result = PrefixMatch.__new__(PrefixMatch)
        if max_tokens < 0:
            raise InvalidArgumentError(f"max_tokens is {max_tokens}; allowed: 0 or more")
        self.find(&tokens[0], tokens.shape[0], seed, reuse_generated, max_tokens, &found)
        result.blocks = np.empty(found.num_blocks, np.uint32)
        blocks = result.blocks
        result.num_tokens = found.num_blocks * self.block_size
        result.exact_tokens = found.exact_tokens
        if found.snapshot_node != NONE:
            result.snapshot_id = self._nodes[found.snapshot_node].snapshot
        result.snapshot_tokens = found.snapshot_tokens
        result.cached_tokens = found.num_cached * self.block_size
        result.reason = MissReason(found.reason)
        self.claim(&found, &blocks[0])
        return result

    @property
    def misses(self):
        """How many matches ended for each reason but COMPLETE, a partial hit's reason included."""
        return {reason: self._misses[<int>reason] for reason in MissReason if reason}

    # -- inserting --------------------------------------------------------------------------

    cdef int64_t insert_blocks(self, const int32_t *tokens, const uint32_t *block_table,
                               int64_t num_blocks, int64_t prompt_len, uint64_t seed) except -1:
        cdef int64_t num_exact = prompt_len // self.block_size
        cdef int64_t num_known = 0, first_generated = -1, i
        cdef uint64_t hash = self.first_hash(seed), next_hash
        cdef int32_t node = NONE, child
        self.start_use()
        while num_known < num_blocks:
            next_hash = self.next_hash(hash, tokens)
            child = self.child(node, next_hash, seed, tokens)
            if child == NONE:
                break
            self._nodes[child].last_used = self._clock
            if self._nodes[child].generated:
                if first_generated < 0:
                    first_generated = num_known
                if self._nodes[child].block == block_table[num_known]:
                    # The sequence matched it, so whatever it computed next stands on it.
                    num_exact = min(num_exact, num_known)
            node = child
            hash = next_hash
            tokens += self.block_size
            num_known += 1
        if first_generated < 0:
            first_generated = num_known
        # From the first generated node on all are; exact blocks replace those. Every block that
        # will go into the tree is looked at before the tree changes.
        try:
            for i in range(first_generated, min(num_known, num_exact)):
                self._claim_block(block_table[i], i)
            for i in range(num_known, num_blocks):
                self._claim_block(block_table[i], i)
        except InvalidArgumentError:
            for i in range(num_blocks):
                if (block_table[i] < self.pool.num_total
                        and self._node_of[block_table[i]] == CLAIMED):
                    self._node_of[block_table[i]] = NONE
            raise
        child = node
        for i in range(num_known - 1, first_generated - 1, -1):
            if i < num_exact:
                self.replace_block(child, block_table[i])
                self._nodes[child].generated = 0
                self.upgraded_blocks += 1
            child = self._nodes[child].parent
        for i in range(num_known, num_blocks):
            hash = self.next_hash(hash, tokens)
            node = self.add_node(node, hash, seed, tokens, block_table[i], i >= num_exact)
            tokens += self.block_size
        return num_blocks - num_known

    cdef int _claim_block(self, uint32_t block, int64_t index) except -1:
        """Reserve a block for the tree, unless it is free or another node's."""
        if block >= self.pool.num_total or self.pool._references[block] == 0:
            raise InvalidArgumentError(f"block_table[{index}] is {block}, which is not in use")
        if self._node_of[block] != NONE:
            raise InvalidArgumentError(
                f"block_table[{index}] is {block}, which is cached for other tokens")
        self._node_of[block] = CLAIMED
        return 0

    def insert(self, const int32_t[::1] tokens not None, const uint32_t[::1] block_table not None,
               int64_t num_valid_tokens, int64_t prompt_len, uint64_t seed):
        """Cache the whole blocks of a sequence's first ``num_valid_tokens`` tokens.

        The cache takes its own reference on each block that it adds. Where the tokens are cached
        already, the cached block stays, unless it is generated and the given one is exact: then
        the node changes to the given one, and whoever holds the old block keeps it.

        Parameters
        ----------
        tokens, block_table
            int32 and uint32; block i holds tokens i · block_size and following.
        num_valid_tokens
            Tokens whose KV is complete.
        prompt_len
            Blocks that end at or before this position count as exact: the prompt's length (on a
            hybrid on CUDA its last multiple of the recurrence chunk), and no more than the
            match's ``exact_tokens`` if the sequence began on generated blocks.
        seed
            As in ``match``.

        Returns
        -------
        int
            Blocks added. Replaced ones are counted in ``upgraded_blocks``.

        Raises
        ------
        InvalidArgumentError
            If a block to be added is not in use, is listed twice or is cached for other tokens;
            nothing was changed, save the recency of the nodes on the way.
        """
        cdef int64_t num_blocks = num_valid_tokens // self.block_size
        if not 0 <= num_valid_tokens <= tokens.shape[0]:
            raise InvalidArgumentError(
                f"num_valid_tokens is {num_valid_tokens}; allowed: 0 … {tokens.shape[0]}")
        if block_table.shape[0] < num_blocks:
            raise InvalidArgumentError(
                f"block_table has {block_table.shape[0]} entries; needed: {num_blocks}")
        if prompt_len < 0:
            raise InvalidArgumentError(f"prompt_len is {prompt_len}; allowed: 0 or more")
        return self.insert_blocks(&tokens[0], &block_table[0], num_blocks, prompt_len, seed)

    # -- evicting ---------------------------------------------------------------------------

    cdef int64_t evict_blocks(self, int64_t count) noexcept nogil:
        cdef int64_t freed = 0
        self.start_use()
        while freed < count and self._evict_one():
            freed += 1
        return freed

    cdef bint _evict_one(self) noexcept nogil:
        cdef int32_t node = self.least_recent()
        if node == NONE:
            return False
        self._remove(node)
        self.evicted_blocks += 1
        return True

    cdef void _remove(self, int32_t node) noexcept nogil:
        if self._nodes[node].snapshot != NONE:
            self._orphans[self._num_orphans] = self._take_snapshot(node)
            self._num_orphans += 1
        self.remove_node(node)

    cdef int64_t reclaim(self, const prefix_match *kept, int64_t blocks_needed) noexcept nogil:
        cdef int64_t freed = 0
        cdef int32_t node = kept.node
        self.start_use()
        while node != NONE:  # a held block is never evicted
            self.pool.hold(self._nodes[node].block)
            node = self._nodes[node].parent
        while self.pool._num_free < blocks_needed - kept.num_blocks and self._evict_one():
            freed += 1
        node = kept.node
        while node != NONE:
            self.pool.let_go(self._nodes[node].block)
            node = self._nodes[node].parent
        return freed

    def evict(self, int64_t num_blocks):
        """Evict until ``num_blocks`` blocks became free; return how many did.

        Least recently used leaves go first; blocks that sequences hold stay. Fewer than asked
        means that nothing more can be evicted now: 0 = stop asking. O(log n) a block.
        """
        if num_blocks < 0:
            raise InvalidArgumentError(f"num_blocks is {num_blocks}; allowed: 0 or more")
        return self.evict_blocks(num_blocks)

    def reclaim_for(self, const int32_t[::1] tokens not None, uint64_t seed, bint reuse_generated,
                    int64_t blocks_needed):
        """Evict until a prefill of ``tokens`` fits, never what that very prompt will reuse.

        Evicts until the pool has ``blocks_needed`` − r free blocks or nothing more can be
        evicted; r counts the blocks that ``match`` would find with ``max_tokens`` one less than
        the prompt (an empty prompt: r = 0).

        Returns
        -------
        tuple of int, int, bool
            Blocks that became free; r; whether free blocks + r cover ``blocks_needed`` now.
        """
        cdef prefix_match found
        cdef int64_t freed
        if blocks_needed < 0:
            raise InvalidArgumentError(f"blocks_needed is {blocks_needed}; allowed: 0 or more")
        self.find(&tokens[0], tokens.shape[0], seed, reuse_generated,
                  max(0, tokens.shape[0] - 1), &found)
        freed = self.reclaim(&found, blocks_needed)
        return freed, found.num_blocks, self.pool._num_free + found.num_blocks >= blocks_needed

    def clear(self):
        """Forget everything; return how many blocks became free. Sequences keep their blocks."""
        cdef int64_t num_free = self.pool._num_free, block
        cdef int32_t node, parent
        for block in range(self.pool.num_total):
            node = self._node_of[block]
            while node != NONE and self._nodes[node].num_children == 0:
                parent = self._nodes[node].parent
                self._remove(node)
                node = parent
        self._heap_len = 0
        return self.pool._num_free - num_free

    # -- snapshots of recurrent state -------------------------------------------------------

    cdef void _link_snapshot(self, int32_t node) noexcept nogil:
        self._nodes[node].snapshot_base = self._snapshot_floor
        self._nodes[node].newer = NONE
        self._nodes[node].older = self._newest_snapshot
        if self._newest_snapshot == NONE:
            self._oldest_snapshot = node
        else:
            self._nodes[self._newest_snapshot].newer = node
        self._newest_snapshot = node

    cdef void _unlink_snapshot(self, int32_t node) noexcept nogil:
        cdef int32_t newer = self._nodes[node].newer, older = self._nodes[node].older
        if newer == NONE:
            self._newest_snapshot = older
        else:
            self._nodes[newer].older = older
        if older == NONE:
            self._oldest_snapshot = newer
        else:
            self._nodes[older].newer = newer

    cdef int32_t _take_snapshot(self, int32_t node) noexcept nogil:
        """Part ``node`` from its snapshot and return the snapshot's id."""
        cdef int32_t snapshot = self._nodes[node].snapshot
        self._unlink_snapshot(node)
        self._nodes[node].snapshot = NONE
        self.num_snapshots -= 1
        return snapshot

    cdef int32_t _labelled_node(self, const int32_t[::1] tokens, int64_t num_tokens,
                                uint64_t seed) except -2:
        if (not self.block_size <= num_tokens <= tokens.shape[0]
                or num_tokens % self.block_size):
            raise InvalidArgumentError(
                f"num_tokens is {num_tokens}; allowed: multiples of {self.block_size} up to the "
                f"{tokens.shape[0]} tokens")
        return self.node_at(&tokens[0], num_tokens // self.block_size, seed)

    def attach_snapshot(self, const int32_t[::1] tokens not None, int64_t num_tokens,
                        uint64_t seed, int32_t snapshot_id, bint generated=False):
        """Give the cache a snapshot of the state that absorbed the first ``num_tokens`` tokens.

        Parameters
        ----------
        tokens, seed
            As in ``insert``, which comes first.
        num_tokens
            The snapshot's label, a multiple of the block size.
        snapshot_id
            0 or more. From now on the cache decides when it ends: see ``evict_snapshots`` and
            ``drain_snapshots``.
        generated
            Whether the state absorbed step tokens, or stands on a state or block that did.

        Returns
        -------
        int or None
            A snapshot that the caller has to free: the given one if those tokens are not cached
            or have a snapshot that is as good, the old one if the given one is exact and the old
            one is not; None otherwise.
        """
        cdef int32_t node = self._labelled_node(tokens, num_tokens, seed)
        cdef int32_t displaced = NONE
        cdef int32_t *grown
        cdef int64_t capacity
        if snapshot_id < 0:
            raise InvalidArgumentError(f"snapshot_id is {snapshot_id}; allowed: 0 or more")
        if node == NONE:
            return snapshot_id
        if self._nodes[node].snapshot != NONE:
            if generated or not self._nodes[node].snapshot_generated:
                return snapshot_id
            displaced = self._take_snapshot(node)
        elif self._num_orphans + self.num_snapshots >= self._orphan_capacity:
            # Every snapshot has room among the orphans before it comes: evicting cannot fail.
            capacity = max(16, 2 * self._orphan_capacity)
            grown = <int32_t *>realloc(self._orphans, capacity * sizeof(int32_t))
            if grown == NULL:
                raise OutOfMemoryError(f"no memory for a list of {capacity} snapshots")
            self._orphans = grown
            self._orphan_capacity = capacity
        self._nodes[node].snapshot = snapshot_id
        self._nodes[node].snapshot_generated = generated
        self._link_snapshot(node)
        self.num_snapshots += 1
        return None if displaced == NONE else displaced

    def detach_snapshot(self, const int32_t[::1] tokens not None, int64_t num_tokens,
                        uint64_t seed):
        """Take back the snapshot labelled so; its id, or None if there is none."""
        cdef int32_t node = self._labelled_node(tokens, num_tokens, seed)
        if node == NONE or self._nodes[node].snapshot == NONE:
            return None
        return self._take_snapshot(node)

    cdef int64_t _snapshot_value(self, int32_t node) noexcept nogil:
        """Tokens that only this snapshot saves from running again, counted from its base."""
        cdef int64_t num_blocks = 1
        cdef int32_t above = self._nodes[node].parent
        while above != NONE and self._nodes[above].snapshot == NONE:
            num_blocks += 1
            above = self._nodes[above].parent
        return self._nodes[node].snapshot_base + num_blocks * self.block_size

    cdef int32_t evict_snapshot(self) noexcept nogil:
        """Part with the snapshot of least value: its id, or NONE."""
        cdef int32_t node = self._oldest_snapshot, least = NONE
        cdef int64_t value, least_value = 0
        while node != NONE:
            value = self._snapshot_value(node)
            if least == NONE or value < least_value:
                least = node
                least_value = value
            node = self._nodes[node].newer
        if least == NONE:
            return NONE
        self._snapshot_floor = least_value
        return self._take_snapshot(least)

    def evict_snapshots(self, int64_t count):
        """Up to ``count`` snapshot ids for the caller to free, those of least value first.

        All snapshots take equal room, so value per byte is value: the tokens between a snapshot
        and the one above it, which only it saves from running again. It is counted from the value
        of what was evicted last when it was attached or matched, so that what is not used ages.
        Equal values go by recency.

        Source
        ------
        Cao & Irani, "Cost-Aware WWW Proxy Caching Algorithms" (1997): GreedyDual-Size.
        """
        if count < 0:
            raise InvalidArgumentError(f"count is {count}; allowed: 0 or more")
        return [self.evict_snapshot() for _ in range(min(count, self.num_snapshots))]

    def drain_snapshots(self):
        """Ids of snapshots whose nodes were evicted since the last call, for the caller to free."""
        cdef list ids = [self._orphans[i] for i in range(self._num_orphans)]
        self._num_orphans = 0
        return ids
