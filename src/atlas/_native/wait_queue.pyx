"""The waiting requests: a heap by rank and arrival, and a list by how long each has waited."""

from libc.stdlib cimport free, realloc

from atlas.errors import OutOfMemoryError

cdef int64_t FRONT = -(<int64_t>1 << 40)  # below every priority


cdef class WaitQueue:
    """Record numbers in the order of admission. Push, remove: logarithmic; head: constant."""

    def __cinit__(self):
        self._earliest = self._latest = -1

    def __dealloc__(self):
        free(self._entry)
        free(self._heap)

    cdef bint before(self, int32_t a, int32_t b) noexcept nogil:
        cdef waiting_t *x = &self._entry[a]
        cdef waiting_t *y = &self._entry[b]
        return x.rank < y.rank or (x.rank == y.rank and x.order < y.order)

    cdef void sift(self, int64_t position) noexcept nogil:
        """Move the record at ``position`` up or down to where it belongs."""
        cdef int32_t record = self._heap[position]
        cdef int64_t other
        while position > 0:
            other = (position - 1) // 2
            if not self.before(record, self._heap[other]):
                break
            self._heap[position] = self._heap[other]
            self._entry[self._heap[position]].heap = <int32_t>position
            position = other
        while True:
            other = 2 * position + 1
            if other >= self.num_waiting:
                break
            if (other + 1 < self.num_waiting
                    and self.before(self._heap[other + 1], self._heap[other])):
                other += 1
            if not self.before(self._heap[other], record):
                break
            self._heap[position] = self._heap[other]
            self._entry[self._heap[position]].heap = <int32_t>position
            position = other
        self._heap[position] = record
        self._entry[record].heap = <int32_t>position

    cdef int push(
            self, int32_t record, bint front, int64_t priority, int64_t order,
            int64_t since_us) except -1:
        cdef int64_t capacity
        cdef waiting_t *entry
        cdef void *grown
        if record >= self._capacity:
            capacity = max(64, record + 1, 2 * self._capacity)
            grown = realloc(self._entry, capacity * sizeof(waiting_t))
            if grown == NULL:
                raise OutOfMemoryError(f"no memory for {capacity} waiting requests")
            self._entry = <waiting_t *>grown
            grown = realloc(self._heap, capacity * sizeof(int32_t))
            if grown == NULL:
                raise OutOfMemoryError(f"no memory for {capacity} waiting requests")
            self._heap = <int32_t *>grown
            self._capacity = capacity
        entry = &self._entry[record]
        entry.rank = priority + (FRONT if front else 0)
        entry.order = order
        entry.since_us = since_us
        entry.earlier = self._latest
        entry.later = -1
        if self._latest >= 0:
            self._entry[self._latest].later = record
        else:
            self._earliest = record
        self._latest = record
        self._heap[self.num_waiting] = record
        self.num_waiting += 1
        self.sift(self.num_waiting - 1)
        return 0

    cdef void remove(self, int32_t record) noexcept nogil:
        cdef waiting_t *entry = &self._entry[record]
        cdef int64_t position = entry.heap
        self.num_waiting -= 1
        if position < self.num_waiting:
            self._heap[position] = self._heap[self.num_waiting]
            self.sift(position)
        entry.heap = -1
        if entry.earlier >= 0:
            self._entry[entry.earlier].later = entry.later
        else:
            self._earliest = entry.later
        if entry.later >= 0:
            self._entry[entry.later].earlier = entry.earlier
        else:
            self._latest = entry.earlier

    cdef int32_t head(self, int64_t now_us, int64_t aging_us) noexcept nogil:
        """Who is next; -1 when nobody waits.

        Preempted requests come first. Then whoever has waited longer than ``aging_us`` (0 = no
        aging), the longest wait first, whatever its priority; then priority and arrival.
        """
        cdef int32_t first
        if not self.num_waiting:
            return -1
        first = self._heap[0]
        if (aging_us and self._entry[first].rank >= FRONT // 2
                and now_us - self._entry[self._earliest].since_us > aging_us):
            return self._earliest
        return first
