"""One step as the scheduler planned it: entries, their rows, and what must be done first."""

import numpy as np

from libc.stdlib cimport free, realloc
from libc.string cimport memcpy

from atlas.errors import OutOfMemoryError

ENTRY = np.dtype([
    ("handle", np.int64), ("request", np.int32), ("epoch", np.int32), ("kind", np.int32),
    ("start", np.int32), ("rows", np.int32), ("num_drafts", np.int32), ("first_row", np.int32),
    ("first_logits", np.int32), ("num_logits", np.int32), ("source", np.int32),
    ("flags", np.int32), ("wave", np.int32), ("slot", np.int32), ("emitted", np.int32),
    ("reason", np.int32), ("dropped", np.int32),
], align=True)
ACTION = np.dtype([
    ("handle", np.int64), ("other", np.int64), ("kind", np.int32), ("source", np.int32),
    ("target", np.int32), ("first_block", np.int32), ("num_blocks", np.int32),
    ("reserved", np.int32),
], align=True)
assert ENTRY.itemsize == sizeof(entry_t) and ACTION.itemsize == sizeof(action_t)


cdef class ActionList:
    """What must happen before the next step runs, in order."""

    def __dealloc__(self):
        free(self.items)
        free(self.blocks)

    cdef int push(
            self, int32_t kind, int64_t handle, int64_t other, int64_t source, int64_t target,
            const uint32_t *blocks, int64_t num_blocks) except -1:
        cdef int64_t capacity
        cdef void *grown
        cdef action_t *action
        if self.count == self._capacity:
            capacity = max(64, 2 * self._capacity)
            grown = realloc(self.items, capacity * sizeof(action_t))
            if grown == NULL:
                raise OutOfMemoryError(f"no memory for {capacity} actions")
            self.items = <action_t *>grown
            self._capacity = capacity
        if self.num_blocks + num_blocks > self._block_capacity:
            capacity = max(1024, self.num_blocks + num_blocks, 2 * self._block_capacity)
            grown = realloc(self.blocks, capacity * sizeof(uint32_t))
            if grown == NULL:
                raise OutOfMemoryError(f"no memory for {capacity} block numbers")
            self.blocks = <uint32_t *>grown
            self._block_capacity = capacity
        action = &self.items[self.count]
        action.handle = handle
        action.other = other
        action.kind = kind
        action.source = <int32_t>source
        action.target = <int32_t>target
        action.first_block = <int32_t>self.num_blocks
        action.num_blocks = <int32_t>num_blocks
        action.reserved = 0
        if num_blocks:
            memcpy(&self.blocks[self.num_blocks], blocks, num_blocks * sizeof(uint32_t))
        self.num_blocks += num_blocks
        self.count += 1
        return 0

    cdef void clear(self) noexcept nogil:
        self.count = 0
        self.num_blocks = 0


cdef class Plan:
    """The arrays of one step; ``Scheduler.plan`` fills and reuses it.

    ``max_seqs`` entries and ``max_rows`` rows. Views are valid until the plan after the next.
    """

    def __cinit__(self, int64_t max_seqs, int64_t max_rows, int64_t block_size, owner):
        cdef int32_t[::1] tokens
        self._entries = np.zeros(max_seqs, ENTRY)
        self._token_ids = np.zeros(max_rows, np.int32)
        self._source_rows = np.zeros(max_rows, np.int32)
        self.items = <entry_t *><size_t>self._entries.ctypes.data
        tokens = self._token_ids
        self.tokens = &tokens[0]
        tokens = self._source_rows
        self.sources = &tokens[0]
        self.action_list = ActionList()
        self.refused = []
        self.block_size = block_size
        self.owner = owner

    @property
    def entries(self):
        """Structured view [num_seqs]: step entries in order of rank, then prompt chunks."""
        return self._entries[:self.num_seqs]

    @property
    def token_ids(self):
        """int32 [num_rows]; 0 where the token comes from the step before (``source_rows``)."""
        return self._token_ids[:self.num_rows]

    @property
    def source_rows(self):
        """int32 [num_rows]: logits row of step ``step_id - 1`` that makes the token; -1 = known."""
        return self._source_rows[:self.num_rows]

    @property
    def actions(self):
        """Structured array: what the engine does before the step runs, in order (a copy)."""
        out = np.zeros(self.action_list.count, ACTION)
        if self.action_list.count:
            memcpy(<void *><size_t>out.ctypes.data, self.action_list.items,
                   self.action_list.count * sizeof(action_t))
        return out

    @property
    def action_blocks(self):
        """int32 array: the block numbers of SPILL and RESTORE actions (a copy)."""
        out = np.zeros(self.action_list.num_blocks, np.int32)
        if self.action_list.num_blocks:
            memcpy(<void *><size_t>out.ctypes.data, self.action_list.blocks,
                   self.action_list.num_blocks * sizeof(uint32_t))
        return out

    @property
    def command(self):
        """``"decode"``, ``"prefill"``, ``"mixed"``, or ``"none"`` when there are only actions."""
        if self.num_seqs == 0:
            return "none"
        if self.num_decode == self.num_seqs:
            return "decode"
        return "mixed" if self.num_decode else "prefill"

    def __repr__(self):
        return (f"Plan(step_id={self.step_id}, {self.command}, {self.num_seqs} sequences "
                f"({self.num_decode} decode), {self.num_rows} rows, {self.num_logits} logits, "
                f"{self.action_list.count} actions)")
