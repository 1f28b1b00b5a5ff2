"""The records of all unfinished requests, found by handle."""

from cpython.ref cimport PyObject
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, memset

from atlas.errors import OutOfMemoryError, StaleHandleError

cdef int64_t NUMBER_MASK = (<int64_t>1 << 32) - 1


cdef class RequestTable:
    """Records of requests in one array. A handle is (generation << 32 | number), never reused."""

    def __cinit__(self):
        self._sequences = []

    def __dealloc__(self):
        cdef int64_t i
        for i in range(self.capacity):
            free(self.records[i].history)
            free(self.records[i].drafts)
        free(self.records)
        free(self._free)

    cdef int grow(self) except -1:
        cdef int64_t capacity = max(64, 2 * self.capacity)
        cdef int64_t i
        cdef void *grown = realloc(self.records, capacity * sizeof(request_t))
        if grown == NULL:
            raise OutOfMemoryError(f"no memory for {capacity} requests")
        self.records = <request_t *>grown
        grown = realloc(self._free, capacity * sizeof(int32_t))
        if grown == NULL:
            raise OutOfMemoryError(f"no memory for {capacity} requests")
        self._free = <int32_t *>grown
        memset(&self.records[self.capacity], 0, (capacity - self.capacity) * sizeof(request_t))
        for i in range(capacity - 1, self.capacity - 1, -1):
            self.records[i].handle = i
            self._free[self._num_free] = <int32_t>i
            self._num_free += 1
            self._sequences.append(None)
        self.capacity = capacity
        return 0

    cdef int32_t allocate(
            self, Sequence sequence, const int32_t *history, int64_t count) except -1:
        """A new record that keeps ``sequence`` and a copy of ``history``. Pointers may move."""
        cdef int32_t number
        cdef request_t *request
        cdef int32_t *tokens = <int32_t *>malloc(max(1, count) * sizeof(int32_t))
        if tokens == NULL:
            raise OutOfMemoryError(f"no memory for {count} token ids")
        if not self._num_free:
            try:
                self.grow()
            except OutOfMemoryError:
                free(tokens)
                raise
        self._num_free -= 1
        number = self._free[self._num_free]
        request = &self.records[number]
        self._sequences[number] = sequence
        request.sequence = <PyObject *>sequence
        memcpy(tokens, history, count * sizeof(int32_t))
        request.history = tokens
        request.num_history = request.history_capacity = count
        request.slot = request.source_row = request.snapshot = -1
        request.draft_capacity = request.planned_step = request.source_step = -1
        self.num_used += 1
        return number

    cdef int release(self, int32_t record) except -1:
        """Forget a record; its handle is stale from now on."""
        cdef request_t *request = &self.records[record]
        cdef int64_t handle = request.handle + (<int64_t>1 << 32)
        free(request.history)
        free(request.drafts)
        memset(request, 0, sizeof(request_t))
        request.handle = handle
        self._sequences[record] = None
        self._free[self._num_free] = record
        self._num_free += 1
        self.num_used -= 1
        return 0

    cdef int32_t number_of(self, int64_t handle) except -1:
        cdef int64_t number = handle & NUMBER_MASK
        if (handle < 0 or number >= self.capacity or self.records[number].handle != handle
                or self.records[number].state == UNUSED):
            raise StaleHandleError(f"request handle {handle} is unknown, or has retired")
        return <int32_t>number

    cdef request_t *find(self, int64_t handle) except NULL:
        return &self.records[self.number_of(handle)]

    cdef int grow_history(self, request_t *request, int64_t num_tokens) except -1:
        """Room for ``num_tokens`` tokens of history."""
        cdef int64_t capacity
        cdef int32_t *grown
        if num_tokens > request.history_capacity:
            capacity = max(num_tokens, min(2 * num_tokens, request.limit_len + 1))
            grown = <int32_t *>realloc(request.history, capacity * sizeof(int32_t))
            if grown == NULL:
                raise OutOfMemoryError(f"no memory for {capacity} token ids")
            request.history = grown
            request.history_capacity = capacity
        return 0
