"""One sequence's tokens, counters and block table: the single owner of all of them."""

import numpy as np

cimport cython
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy

from atlas.errors import (
    InvalidArgumentError,
    OutOfMemoryError,
    SequenceStateError,
    StaleHandleError,
)


@cython.no_gc  # the pool refers to nothing, and must outlive the collection of a cycle
cdef class Sequence:
    """Tokens, committed length and KV blocks of one stream of tokens.

    ``reserve`` is the only allocator; ``advance`` and ``rewind`` are the only movers of
    ``seq_len``. A verify leaves ``verify_rows`` set until ``accept`` or ``release``.
    """

    def __cinit__(self, BlockPool pool not None, int64_t block_size):
        self.pool = pool
        self.block_size = block_size

    def __dealloc__(self):
        if not self.freed:
            self.trim_blocks(0)
        free(self._tokens)
        free(self._blocks)

    cdef int require_usable(self) except -1:
        if self.freed:
            raise StaleHandleError("this sequence was freed")
        if self.failed:
            raise SequenceStateError("this sequence failed; free it")
        return 0

    cdef int trim_blocks(self, int64_t num_blocks) except -1:
        while self._num_blocks > num_blocks:
            self._num_blocks -= 1
            self.pool.drop(self._blocks[self._num_blocks])
        return 0

    @property
    def tokens(self):
        """Copy of the token ids, int32 [num_tokens]."""
        out = np.empty(self._num_tokens, np.int32)
        cdef int32_t[::1] view = out
        if self._num_tokens:
            memcpy(&view[0], self._tokens, self._num_tokens * sizeof(int32_t))
        return out

    @property
    def num_tokens(self):
        return self._num_tokens

    @property
    def block_table(self):
        """Copy of the block numbers, uint32 [num_blocks]."""
        out = np.empty(self._num_blocks, np.uint32)
        cdef uint32_t[::1] view = out
        if self._num_blocks:
            memcpy(&view[0], self._blocks, self._num_blocks * sizeof(uint32_t))
        return out

    @property
    def num_blocks(self):
        return self._num_blocks

    def write_block_table(self, int32_t[::1] row not None):
        """Copy the block numbers into the front of ``row`` (a row of the step's metadata)."""
        if row.shape[0] < self._num_blocks:
            raise InvalidArgumentError(
                f"row has {row.shape[0]} entries for {self._num_blocks} blocks")
        if self._num_blocks:
            memcpy(&row[0], self._blocks, self._num_blocks * sizeof(uint32_t))

    def check(self):
        """Raise unless the sequence can take a forward call (usable, no verify pending)."""
        self.require_usable()
        if self.verify_rows:
            raise SequenceStateError(
                f"a verify of {self.verify_rows} rows awaits accept or free")

    cdef int reserve_positions(self, int64_t num_positions) except -1:
        """What ``reserve`` does, for native callers."""
        cdef int64_t needed = (num_positions + self.block_size - 1) // self.block_size
        self.require_usable()
        if needed <= self._num_blocks:
            return 0
        self.grow_block_table(needed)
        self.pool.take(needed - self._num_blocks, &self._blocks[self._num_blocks])
        self._num_blocks = needed
        return 0

    cdef int grow_block_table(self, int64_t num_blocks) except -1:
        """Room for ``num_blocks`` entries in the table; takes no block."""
        cdef int64_t capacity
        cdef uint32_t *grown
        if num_blocks > self._block_capacity:
            capacity = max(num_blocks, 2 * self._block_capacity)
            grown = <uint32_t *>realloc(self._blocks, capacity * sizeof(uint32_t))
            if grown == NULL:
                raise OutOfMemoryError(f"no memory for a table of {capacity} blocks")
            self._blocks = grown
            self._block_capacity = capacity
        return 0

    cdef int grow_tokens(self, int64_t num_tokens) except -1:
        """Room for ``num_tokens`` token ids."""
        cdef int64_t capacity
        cdef int32_t *grown
        if num_tokens > self._token_capacity:
            capacity = max(64, num_tokens, 2 * self._token_capacity)
            grown = <int32_t *>realloc(self._tokens, capacity * sizeof(int32_t))
            if grown == NULL:
                raise OutOfMemoryError(f"no memory for {capacity} token ids")
            self._tokens = grown
            self._token_capacity = capacity
        return 0

    cdef int append(self, const int32_t *tokens, int64_t count) except -1:
        """Append ``tokens`` and commit as many positions, which are reserved already."""
        self.grow_tokens(self._num_tokens + count)
        if count:
            memcpy(&self._tokens[self._num_tokens], tokens, count * sizeof(int32_t))
        self._num_tokens += count
        self.seq_len += count
        self.kv_valid_tokens = self.seq_len
        return 0

    cdef int adopt_blocks(
            self, const int32_t *tokens, int64_t num_tokens,
            const uint32_t *blocks, int64_t num_blocks) except -1:
        """Make an empty sequence stand after ``tokens``; takes over one reference per block."""
        if self._num_blocks or self.seq_len:
            raise SequenceStateError("only an empty sequence can adopt blocks")
        self.grow_block_table(num_blocks)
        self.append(tokens, num_tokens)
        if num_blocks:
            memcpy(self._blocks, blocks, num_blocks * sizeof(uint32_t))
        self._num_blocks = num_blocks
        return 0

    cdef int rewind_to(self, int64_t new_len) except -1:
        """What ``rewind`` does, for native callers that know ``new_len`` to be allowed."""
        self.seq_len = new_len
        self._num_tokens = min(self._num_tokens, new_len)
        self.kv_valid_tokens = min(self.kv_valid_tokens, new_len)
        self.prompt_len = min(self.prompt_len, new_len)
        return self.trim_blocks((new_len + self.block_size - 1) // self.block_size)

    def reserve(self, int64_t num_positions):
        """Make room for positions 0 … num_positions - 1.

        Raises
        ------
        KvExhausted
            Too few free blocks; nothing was changed.
        """
        self.reserve_positions(num_positions)

    def require_reserved(self, int64_t num_positions):
        """Raise unless positions 0 … num_positions - 1 have blocks."""
        self.require_usable()
        if num_positions > self._num_blocks * self.block_size:
            raise SequenceStateError(
                f"{num_positions} positions need reserve() first; room for "
                f"{self._num_blocks * self.block_size}")

    def advance(self, int32_t[::1] tokens not None, int64_t verify_rows=0):
        """Append ``tokens`` and commit as many positions. ``verify_rows`` = K opens a verify."""
        cdef int64_t count = tokens.shape[0]
        self.require_reserved(self.seq_len + count)
        self.append(&tokens[0] if count else NULL, count)
        self.verify_rows = verify_rows

    def accept(self, int64_t rows_kept):
        """End a verify: keep ``rows_kept`` of its K rows (the anchor included; 0 = abandon)."""
        self.require_usable()
        if not self.verify_rows:
            raise SequenceStateError("no verify is pending")
        if not 0 <= rows_kept <= self.verify_rows:
            raise InvalidArgumentError(
                f"rows_kept is {rows_kept}; allowed: 0 … {self.verify_rows}")
        cdef int64_t dropped = self.verify_rows - rows_kept
        self.verify_rows = 0
        self.rewind(self.seq_len - dropped)

    def rewind(self, int64_t new_len):
        """Lower ``seq_len``, trim the tokens and return surplus tail blocks (drop a reference)."""
        self.check()
        if not 0 <= new_len <= self.seq_len:
            raise InvalidArgumentError(f"new_len is {new_len}; allowed: 0 … {self.seq_len}")
        self.rewind_to(new_len)

    def adopt(self, const int32_t[::1] tokens not None, const uint32_t[::1] blocks not None):
        """Make an empty sequence stand after prompt ``tokens``, whose K/V fills ``blocks``.

        Takes over one reference per block.
        """
        cdef int64_t i
        self.check()
        if tokens.shape[0] != blocks.shape[0] * self.block_size:
            raise InvalidArgumentError(
                f"{tokens.shape[0]} tokens do not fill {blocks.shape[0]} blocks of "
                f"{self.block_size}")
        for i in range(blocks.shape[0]):
            if blocks[i] >= self.pool.num_total or not self.pool._references[blocks[i]]:
                raise InvalidArgumentError(f"block {blocks[i]} is not in use")
        self.adopt_blocks(&tokens[0] if tokens.shape[0] else NULL, tokens.shape[0],
                          &blocks[0] if blocks.shape[0] else NULL, blocks.shape[0])
        self.prompt_len = self.seq_len

    def share(self, Sequence source not None):
        """Make a sequence without positions stand where ``source`` does, on the same blocks.

        Returns the blocks that were reserved in their place, a list, with their references.
        """
        cdef int64_t held = (source.seq_len + self.block_size - 1) // self.block_size
        cdef int64_t i
        cdef list displaced
        self.check()
        source.check()
        if self.seq_len:
            raise SequenceStateError("only a sequence without positions can share another's")
        if source.pool is not self.pool or source.block_size != self.block_size:
            raise InvalidArgumentError("the two sequences do not use one pool")
        displaced = [self._blocks[i] for i in range(min(held, self._num_blocks))]
        self.grow_block_table(held)
        self.append(source._tokens, source._num_tokens)
        for i in range(held):
            self.pool.hold(source._blocks[i])
            self._blocks[i] = source._blocks[i]
        self._num_blocks = max(self._num_blocks, held)
        self.prompt_len = source.prompt_len
        self.kv_valid_tokens = source.kv_valid_tokens
        return displaced

    def shared_block(self):
        """Index of the block that the next position is in, if others hold it too; else -1."""
        cdef int64_t index = self.seq_len // self.block_size
        self.require_usable()
        if index < self._num_blocks and self.pool._references[self._blocks[index]] > 1:
            return index
        return -1

    def replace_block(self, int64_t index, uint32_t block):
        """Put ``block`` into the table with its reference; return the old one with its own."""
        cdef uint32_t old
        self.require_usable()
        if not 0 <= index < self._num_blocks:
            raise InvalidArgumentError(f"index is {index}; allowed: 0 … {self._num_blocks - 1}")
        if block >= self.pool.num_total or not self.pool._references[block]:
            raise InvalidArgumentError(f"block {block} is not in use")
        old = self._blocks[index]
        self._blocks[index] = block
        return old

    def trim(self, int64_t num_blocks):
        """Return tail blocks beyond ``num_blocks`` that hold no committed position."""
        cdef int64_t held = (self.seq_len + self.block_size - 1) // self.block_size
        self.trim_blocks(max(num_blocks, held))

    def fail(self):
        """Mark the sequence failed: only ``release`` is allowed from now on."""
        self.failed = True

    def release(self):
        """Return every block; idempotent. The sequence is unusable afterwards."""
        if not self.freed:
            self.trim_blocks(0)
            self.freed = True
            self.verify_rows = 0
