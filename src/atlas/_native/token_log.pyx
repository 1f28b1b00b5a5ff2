"""Tokens of samples that nobody follows one by one, kept until somebody asks or something ends."""

import numpy as np

from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy

from atlas._native.plan cimport PROMPT, SAMPLES, Plan, entry_t
from atlas.errors import InvalidArgumentError, OutOfMemoryError

cdef int64_t NUMBER_MASK = (<int64_t>1 << 32) - 1


cdef class TokenLog:
    """Takes the step tokens of many sequences in one pass, those that end a sample left out.

    A sequence is known by its scheduler's handle.

    Attributes
    ----------
    num_open : int
        Sequences whose tokens it takes.
    """

    def __dealloc__(self):
        cdef int64_t i
        for i in range(self._capacity):
            free(self._logs[i].end_ids)
            free(self._logs[i].tokens)
        free(self._logs)

    cdef log_t *_find(self, int64_t handle) noexcept nogil:
        cdef int64_t number = handle & NUMBER_MASK
        if number >= self._capacity or self._logs[number].handle != handle:
            return NULL
        return &self._logs[number]

    cdef int _grow(self, int64_t number) except -1:
        cdef int64_t i, capacity = max(64, 2 * self._capacity, number + 1)
        cdef log_t *grown = <log_t *>realloc(self._logs, capacity * sizeof(log_t))
        if grown == NULL:
            raise OutOfMemoryError(f"no memory for the tokens of {capacity} sequences")
        self._logs = grown
        for i in range(self._capacity, capacity):
            grown[i].handle = -1
            grown[i].num_end_ids = grown[i].num_tokens = grown[i].capacity = 0
            grown[i].end_ids = grown[i].tokens = NULL
        self._capacity = capacity
        return 0

    def open(self, int64_t handle, int64_t last_position, const int32_t[::1] end_ids not None,
             double now_s):
        """Take a sequence's tokens from now on.

        Parameters
        ----------
        handle : int
        last_position : int
            Where its last token may stand, counted from the prompt's first.
        end_ids : int32 array
            Ids that end it.
        now_s : float
            When its latest token came.

        Raises
        ------
        InvalidArgumentError
            It is open already.
        """
        cdef int64_t number = handle & NUMBER_MASK
        cdef int64_t count = end_ids.shape[0]
        cdef int32_t *ends
        cdef log_t *log
        if handle < 0 or self._find(handle) != NULL:
            raise InvalidArgumentError(f"handle is {handle}; allowed: one that is not open")
        if number >= self._capacity:
            self._grow(number)
        log = &self._logs[number]
        ends = <int32_t *>realloc(log.end_ids, max(1, count) * sizeof(int32_t))
        if ends == NULL:
            raise OutOfMemoryError(f"no memory for {count} token ids")
        if count:
            memcpy(ends, &end_ids[0], count * sizeof(int32_t))
        log.end_ids, log.num_end_ids = ends, count
        log.handle, log.last_position = handle, last_position
        log.num_tokens, log.last_s = 0, now_s
        self.num_open += 1

    def close(self, int64_t handle):
        """A sequence's tokens since it was opened, int32, and when the latest came; None unless
        it is open. From now on its tokens are others'."""
        cdef log_t *log = self._find(handle)
        cdef int32_t[::1] view
        if log == NULL:
            return None
        tokens = np.empty(log.num_tokens, np.int32)
        if log.num_tokens:
            view = tokens
            memcpy(&view[0], log.tokens, log.num_tokens * sizeof(int32_t))
        free(log.tokens)
        log.tokens, log.capacity, log.handle = NULL, 0, -1
        self.num_open -= 1
        return tokens, log.last_s

    @property
    def handles(self):
        """Those that are open."""
        cdef int64_t i
        return [self._logs[i].handle for i in range(self._capacity) if self._logs[i].handle >= 0]

    cdef bint _keeps(self, const entry_t *entry, int32_t token) noexcept nogil:
        """Whether it takes an entry's token: an open sequence's that goes on after it."""
        cdef log_t *log = self._find(entry.handle)
        cdef int64_t i
        if log == NULL or entry.kind == PROMPT or token < 0:
            return False
        if entry.start + entry.rows >= log.last_position:
            return False
        for i in range(log.num_end_ids):
            if log.end_ids[i] == token:
                return False
        return True

    def others(self, Plan plan not None, const int32_t[::1] chosen not None):
        """Numbers of the plan's entries whose token is chosen and which ``keep`` would not take.

        Parameters
        ----------
        plan : Plan
        chosen : int32 [≥ plan.num_logits]
            The token of each logits row; negative where there is none. Empty: it takes nothing.
        """
        cdef int64_t i, row
        cdef entry_t *entry
        found = []
        for i in range(plan.num_seqs):
            entry = &plan.items[i]
            row = entry.first_logits + entry.num_logits - 1
            if entry.flags & SAMPLES and (
                    row >= chosen.shape[0] or not self._keeps(entry, chosen[row])):
                found.append(i)
        return found

    def keep(self, Plan plan not None, const int32_t[::1] chosen not None, double now_s, *,
             int32_t[::1] out not None):
        """Take the tokens of a step; the seconds that each sequence waited for it, float64.

        Parameters
        ----------
        plan, chosen
            As in ``others``.
        now_s : float
        out : int32 [≥ plan.num_seqs]
            Gets the tokens that were taken, by entry; the rest stays.
        """
        cdef int64_t i, row, count = 0
        cdef entry_t *entry
        cdef log_t *log
        cdef int32_t *grown
        cdef double[::1] waited
        if out.shape[0] < plan.num_seqs:
            raise InvalidArgumentError(
                f"out has {out.shape[0]} entries; the step has {plan.num_seqs}")
        times = np.empty(plan.num_seqs)
        waited = times
        for i in range(plan.num_seqs):
            entry = &plan.items[i]
            row = entry.first_logits + entry.num_logits - 1
            if (not entry.flags & SAMPLES or row >= chosen.shape[0]
                    or not self._keeps(entry, chosen[row])):
                continue
            log = self._find(entry.handle)
            if log.num_tokens == log.capacity:
                grown = <int32_t *>realloc(
                    log.tokens, max(64, 2 * log.capacity) * sizeof(int32_t))
                if grown == NULL:
                    raise OutOfMemoryError(f"no memory for {2 * log.capacity} token ids")
                log.tokens, log.capacity = grown, max(64, 2 * log.capacity)
            log.tokens[log.num_tokens] = out[i] = chosen[row]
            log.num_tokens += 1
            waited[count] = now_s - log.last_s
            log.last_s = now_s
            count += 1
        return times[:count]
