"""Slots of recurrent state: who owns each, and which moves make them compact again."""

from libc.stdlib cimport free, malloc

from atlas.errors import InvalidArgumentError, OutOfMemoryError

cdef enum:
    FREE = -1
    FOREIGN = -2   # claimed by hand: never moved
    DRAINING = -3  # its request has ended, with rows in flight: moved no more


cdef class SlotPool:
    """``num_slots`` slots, each free, owned by a request, or claimed by hand.

    Invariant: a slot is owned once, and released once. ``num_slots`` 0 is the pool of a model
    without recurrent state: it has nothing to claim.
    """

    def __cinit__(self, int64_t num_slots):
        cdef int64_t i
        if not 0 <= num_slots < 2**31:
            raise InvalidArgumentError(f"num_slots is {num_slots}; allowed: 0 … 2**31 - 1")
        self._owner = <int64_t *>malloc((num_slots + 1) * sizeof(int64_t))
        self._retired = <int64_t *>malloc((num_slots + 1) * sizeof(int64_t))
        if self._owner == NULL or self._retired == NULL:
            raise OutOfMemoryError(f"no memory for a table of {num_slots} slots")
        self.num_total = num_slots
        self.num_free = num_slots
        for i in range(num_slots):
            self._owner[i] = FREE
            self._retired[i] = FREE

    def __dealloc__(self):
        free(self._owner)
        free(self._retired)

    cdef int64_t claim_for(self, int64_t owner) noexcept nogil:
        """The lowest free slot, now ``owner``'s; -1 when none is free."""
        cdef int64_t slot
        for slot in range(self.num_total):
            if self._owner[slot] == FREE:
                self._owner[slot] = owner
                self.num_free -= 1
                return slot
        return -1

    cdef int drop(self, int64_t slot) except -1:
        if not 0 <= slot < self.num_total or self._owner[slot] == FREE:
            raise InvalidArgumentError(f"slot {slot} is not in use")
        if self._owner[slot] != DRAINING:
            self._retired[slot] = self._owner[slot]
        self._owner[slot] = FREE
        self.num_free += 1
        return 0

    cdef void drain(self, int64_t slot) noexcept nogil:
        """Keep the slot of an ended request where it is until ``drop``."""
        self._retired[slot] = self._owner[slot]
        self._owner[slot] = DRAINING

    cdef bint next_move(self, int64_t *source, int64_t *target) noexcept nogil:
        """The next move that lowers the highest movable slot in use into a hole, if any."""
        cdef int64_t low = 0
        cdef int64_t high = self.num_total - 1
        while low < self.num_total and self._owner[low] != FREE:
            low += 1
        while high > low and self._owner[high] < 0:
            high -= 1
        source[0] = high
        target[0] = low
        return low < high

    cdef void move(self, int64_t source, int64_t target) noexcept nogil:
        """Compact and detach in one: ``target`` changes owner, ``source`` becomes free."""
        self._owner[target] = self._owner[source]
        self._owner[source] = FREE

    def claim(self):
        """Claim a slot by hand; such a slot is never moved.

        Raises
        ------
        OutOfMemoryError
            If no slot is free.
        """
        cdef int64_t slot = self.claim_for(FOREIGN)
        if slot < 0:
            raise OutOfMemoryError(f"all {self.num_total} recurrent slots are in use")
        return slot

    def release(self, int64_t slot):
        """Release a slot that was claimed by hand."""
        if not 0 <= slot < self.num_total or self._owner[slot] != FOREIGN:
            raise InvalidArgumentError(f"slot {slot} was not claimed by hand")
        self.drop(slot)

    def owner(self, int64_t slot):
        """Handle of the owner of ``slot``; -1 = free, -2 = claimed by hand, -3 = draining."""
        if not 0 <= slot < self.num_total:
            raise InvalidArgumentError(f"slot is {slot}; allowed: 0 … {self.num_total - 1}")
        return self._owner[slot]
