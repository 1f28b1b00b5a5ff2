"""Reference-counted KV blocks: which are free and how many hold each of the others."""

from libc.stdlib cimport calloc, free, malloc

from atlas.errors import InvalidArgumentError, KvExhausted, OutOfMemoryError


cdef class BlockPool:
    """``num_blocks`` block numbers, each free or held by one or more references.

    Invariant: free + used = total, and a block is on the free stack exactly when it has no
    references.
    """

    def __cinit__(self, int64_t num_blocks):
        cdef int64_t i
        if not 1 <= num_blocks < 2**31:
            raise InvalidArgumentError(f"num_blocks is {num_blocks}; allowed: 1 … 2**31 - 1")
        self._free = <uint32_t *>malloc(num_blocks * sizeof(uint32_t))
        self._references = <int32_t *>malloc(num_blocks * sizeof(int32_t))
        if self._free == NULL or self._references == NULL:
            raise OutOfMemoryError(f"no memory for the tables of {num_blocks} KV blocks")
        self.num_total = num_blocks
        self._num_free = num_blocks
        for i in range(num_blocks):
            self._free[i] = <uint32_t>(num_blocks - 1 - i)
            self._references[i] = 0

    def __dealloc__(self):
        free(self._free)
        free(self._references)
        free(self._fallen)
        free(self._is_fallen)

    @property
    def num_free(self):
        return self._num_free

    cdef int take(self, int64_t count, uint32_t *out) except -1:
        """All of ``count`` blocks with one reference each, or KvExhausted and no change."""
        cdef int64_t i
        if count > self._num_free:
            raise KvExhausted(
                f"{count} KV blocks needed, {self._num_free} of {self.num_total} are free")
        for i in range(count):
            self._num_free -= 1
            out[i] = self._free[self._num_free]
            self._references[out[i]] = 1
        return 0

    cdef int drop(self, uint32_t block) except -1:
        if block >= self.num_total or self._references[block] == 0:
            raise InvalidArgumentError(f"block {block} is not in use")
        self.let_go(block)
        return 0

    cdef void hold(self, uint32_t block) noexcept nogil:
        self._references[block] += 1

    cdef void let_go(self, uint32_t block) noexcept nogil:
        self._references[block] -= 1
        if self._references[block] == 0:
            self._free[self._num_free] = block
            self._num_free += 1
        elif self._references[block] == 1 and self._fallen != NULL and not self._is_fallen[block]:
            self._is_fallen[block] = 1
            self._fallen[self._num_fallen] = block
            self._num_fallen += 1

    cdef int record_fallen(self) except -1:
        """Start to record the blocks that fall to one reference; one recorder at a time."""
        if self._fallen != NULL:
            raise InvalidArgumentError("this pool has a prefix cache already; allowed: one")
        self._fallen = <uint32_t *>malloc(self.num_total * sizeof(uint32_t))
        self._is_fallen = <uint8_t *>calloc(self.num_total, sizeof(uint8_t))
        if self._fallen == NULL or self._is_fallen == NULL:
            self.forget_fallen()
            raise OutOfMemoryError(f"no memory for the tables of {self.num_total} KV blocks")
        return 0

    cdef void forget_fallen(self) noexcept nogil:
        free(self._fallen)
        free(self._is_fallen)
        self._fallen = NULL
        self._is_fallen = NULL
        self._num_fallen = 0

    def allocate(self, int64_t count):
        """``count`` blocks with one reference each.

        Raises
        ------
        KvExhausted
            Fewer are free; nothing was changed.
        """
        cdef uint32_t *taken
        if count < 0:
            raise InvalidArgumentError(f"count is {count}; allowed: 0 or more")
        if count == 0:
            return []
        taken = <uint32_t *>malloc(count * sizeof(uint32_t))
        if taken == NULL:
            raise OutOfMemoryError(f"no memory for a list of {count} blocks")
        try:
            self.take(count, taken)
            return [taken[i] for i in range(count)]
        finally:
            free(taken)

    def retain(self, uint32_t block):
        """Add a reference to a block in use."""
        if block >= self.num_total or self._references[block] == 0:
            raise InvalidArgumentError(f"block {block} is not in use")
        self.hold(block)

    def release(self, uint32_t block):
        """Drop a reference; the last one frees the block."""
        self.drop(block)

    def references(self, uint32_t block):
        """References held on ``block``; 0 means free."""
        if block >= self.num_total:
            raise InvalidArgumentError(
                f"block is {block}; allowed: 0 … {self.num_total - 1}")
        return self._references[block]
