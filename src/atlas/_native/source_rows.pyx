"""Sequences that translate one source, and sweeps over those of many sources, without Python.

A sequence of a sweep costs less here than one call of a Python function: a step of 32 requests
with four beams each has 128 of them.
"""

import numpy as np

from libc.stdint cimport uint8_t, uint32_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy

from atlas._native.sequence cimport Sequence
from atlas.errors import InvalidArgumentError, KvExhausted, OutOfMemoryError


cdef class SourceRows:
    """The sequences of one request and what each of them reads next.

    Parameters
    ----------
    pool : BlockPool
    block_size : int
    source_blocks : int32 [⌈source_len / block_size⌉]
        Where the source's keys and values lie; the caller holds them.
    source_len : int
    first_tokens : int32 [n]
        What the first sequence reads first.

    Attributes
    ----------
    seqs : list of Sequence
    num_tokens : int
        Tokens that each of them reads in the next sweep: ``first_tokens``, then one.
    """

    def __cinit__(
            self, BlockPool pool not None, int64_t block_size,
            const int32_t[::1] source_blocks not None, int64_t source_len,
            const int32_t[::1] first_tokens not None):
        self._pool = pool
        self._block_size = block_size
        self._source = source_blocks
        self.source_len = source_len
        self.seqs = [Sequence(pool, block_size)]
        self.num_tokens = first_tokens.shape[0]
        if not self.num_tokens:
            raise InvalidArgumentError("first_tokens is empty; allowed: one token or more")
        self.grow_tokens(self.num_tokens)
        memcpy(self._tokens, &first_tokens[0], self.num_tokens * sizeof(int32_t))

    def __dealloc__(self):
        free(self._tokens)
        free(self._taken)

    def __len__(self):
        return len(self.seqs)

    @property
    def tokens(self):
        """Copy of what the sequences read next, int32 [sequences, num_tokens]."""
        cdef int64_t i
        found = [self._tokens[i] for i in range(len(self.seqs) * self.num_tokens)]
        return np.array(found, np.int32).reshape(len(self.seqs), self.num_tokens)

    @property
    def num_blocks(self):
        """Blocks that the sequences hold, each counted once, the source's not."""
        cdef Sequence seq
        cdef int64_t i
        held = set()
        for seq in self.seqs:
            for i in range(seq._num_blocks):
                held.add(seq._blocks[i])
        return len(held)

    cdef int grow_tokens(self, int64_t count) except -1:
        cdef int32_t *grown
        cdef uint8_t *taken
        if count > self._capacity:
            grown = <int32_t *>realloc(self._tokens, count * sizeof(int32_t))
            if grown != NULL:
                self._tokens = grown
            taken = <uint8_t *>realloc(self._taken, count)
            if taken != NULL:
                self._taken = taken
            if grown == NULL or taken == NULL:
                raise OutOfMemoryError(f"no memory for {count} token ids")
            self._capacity = count
        return 0

    cdef int follow(
            self, int64_t count, const int32_t *parents, const int32_t *tokens) except -1:
        """What ``go_on`` does; ``parents`` are known to be sequences."""
        cdef list before = self.seqs, seqs = [None] * count
        cdef int64_t i, given = 0, num_before = len(before)
        cdef Sequence seq
        self.grow_tokens(max(count, num_before))
        for i in range(num_before):
            self._taken[i] = False
        for i in range(count):
            if not self._taken[parents[i]]:
                self._taken[parents[i]] = True
                seqs[i] = before[parents[i]]
        for i in range(count):
            if seqs[i] is None:  # its sequence is that of a childless one, if there still is any
                while given < num_before and self._taken[given]:
                    given += 1
                if given < num_before:
                    seq = before[given]
                    given += 1
                else:
                    seq = Sequence(self._pool, self._block_size)
                follow_parent(seq, <Sequence>before[parents[i]])
                seqs[i] = seq
        for i in range(given, num_before):
            if not self._taken[i]:
                (<Sequence>before[i]).release()
        self.seqs = seqs
        self.num_tokens = 1
        memcpy(self._tokens, tokens, count * sizeof(int32_t))
        return 0

    def go_on(self, const int32_t[::1] parents not None, const int32_t[::1] tokens not None):
        """Sequence i goes on from where ``parents[i]`` stands, and reads ``tokens[i]`` next.

        A parent's first child takes its sequence over, the others share its blocks; sequences
        without children end.
        """
        cdef int64_t i
        if parents.shape[0] != tokens.shape[0]:
            raise InvalidArgumentError(
                f"{parents.shape[0]} parents for {tokens.shape[0]} tokens")
        for i in range(parents.shape[0]):
            if not 0 <= parents[i] < len(self.seqs):
                raise InvalidArgumentError(
                    f"parents[{i}] is {parents[i]}; allowed: 0 … {len(self.seqs) - 1}")
        self.follow(parents.shape[0], &parents[0] if parents.shape[0] else NULL,
                    &tokens[0] if tokens.shape[0] else NULL)

    def release(self):
        """End every sequence; idempotent."""
        cdef Sequence seq
        for seq in self.seqs:
            seq.release()
        self.seqs = []


cdef int follow_parent(Sequence seq, Sequence parent) except -1:
    """Make a sequence stand where ``parent`` does, on its blocks: ``share`` into a used one."""
    cdef int64_t held = (parent.seq_len + parent.block_size - 1) // parent.block_size
    cdef int64_t i
    seq.grow_block_table(held)
    seq.grow_tokens(parent._num_tokens)
    seq.trim_blocks(held)
    for i in range(held):
        parent.pool.hold(parent._blocks[i])
        if i < seq._num_blocks:
            seq.pool.let_go(seq._blocks[i])
        seq._blocks[i] = parent._blocks[i]
    seq._num_blocks = held
    memcpy(seq._tokens, parent._tokens, parent._num_tokens * sizeof(int32_t))
    seq._num_tokens, seq.seq_len = parent._num_tokens, parent.seq_len
    seq.prompt_len, seq.kv_valid_tokens = parent.prompt_len, parent.kv_valid_tokens
    return 0


cdef int64_t shared(Sequence seq) except -2:
    """The block of the next position, if others hold it too; else −1."""
    cdef int64_t index = seq.seq_len // seq.block_size
    if index < seq._num_blocks and seq.pool._references[seq._blocks[index]] > 1:
        return seq._blocks[index]
    return -1


cdef int64_t needed_of(SourceRows rows) except -1:
    cdef int64_t i, j, block, writers, needed = 0, count = len(rows.seqs)
    cdef Sequence seq
    for i in range(count):
        seq = rows.seqs[i]
        needed += max(0, (seq.seq_len + rows.num_tokens + seq.block_size - 1) // seq.block_size
                      - seq._num_blocks)
        block = shared(seq)
        if block < 0:
            continue
        writers = 0
        for j in range(count):
            if shared(<Sequence>rows.seqs[j]) == block:
                if j < i:
                    break  # counted with the first of them
                writers += 1
        needed += writers - (writers > 0 and rows._pool._references[block] == writers)
    return needed


def blocks_needed(list sources not None):
    """Blocks that the next sweep takes from the pool: for new positions, and for copies.

    Of n sequences that share the block they write, n − 1 copy it.
    """
    cdef SourceRows rows
    cdef int64_t needed = 0
    for rows in sources:
        needed += needed_of(rows)
    return needed


def longest(list sources not None):
    """Positions of the longest sequence after the next sweep."""
    cdef SourceRows rows
    cdef Sequence seq
    cdef int64_t most = 0
    for rows in sources:
        for seq in rows.seqs:
            most = max(most, seq.seq_len + rows.num_tokens)
    return most


def reserve(list sources not None):
    """Take the blocks of the next sweep: all of them, or KvExhausted and no change.

    Returns
    -------
    int32 [copies, 2]
        Blocks that others hold too, each with the one that stands in for it: the caller copies
        what is in them before the sweep.
    """
    cdef int64_t block, index, num_seqs = 0, count = 0, needed = blocks_needed(sources)
    cdef uint32_t copy
    cdef SourceRows rows
    cdef Sequence seq
    cdef int32_t[:, ::1] pairs
    for rows in sources:
        num_seqs += len(rows.seqs)
    found = np.empty((num_seqs, 2), np.int32)
    pairs = found
    for rows in sources:
        if needed > rows._pool._num_free:
            raise KvExhausted(
                f"{needed} KV blocks needed, {rows._pool._num_free} of {rows._pool.num_total} "
                "are free")
        break
    for rows in sources:
        for seq in rows.seqs:
            block = shared(seq)
            seq.reserve_positions(seq.seq_len + rows.num_tokens)
            if block >= 0:
                index = seq.seq_len // seq.block_size
                seq.pool.take(1, &copy)
                pairs[count, 0], pairs[count, 1] = <int32_t>block, <int32_t>copy
                count += 1
                seq._blocks[index] = copy
                seq.pool.let_go(<uint32_t>block)
    return found[:count]


cdef int require_room(Sequence seq, SourceRows rows) except -1:
    if seq.freed or seq.seq_len + rows.num_tokens > seq._num_blocks * seq.block_size:
        seq.require_reserved(seq.seq_len + rows.num_tokens)  # which raises
    return 0


def advance(list sources not None):
    """Commit the positions of a sweep that has run."""
    cdef SourceRows rows
    cdef Sequence seq
    cdef int64_t i
    for rows in sources:
        for i in range(len(rows.seqs)):
            seq = rows.seqs[i]
            require_room(seq, rows)
            seq.append(&rows._tokens[i * rows.num_tokens], rows.num_tokens)


def write_rows(
        list sources not None, int32_t[::1] token_ids not None, int32_t[::1] positions not None,
        int32_t[::1] slots not None, int32_t[::1] cu_rows not None,
        int32_t[:, ::1] block_tables not None, int32_t[::1] logits_rows not None,
        int32_t[::1] source_cu_rows not None, int32_t[::1] source_lens not None,
        int32_t[:, ::1] source_tables not None):
    """Write what a sweep reads, all rows of one source side by side.

    Parameters
    ----------
    sources : list of SourceRows
        With their blocks reserved.
    token_ids, positions, slots : int32 [≥ T]
        Token of each row, its position, and block · block size + offset.
    cu_rows, block_tables, logits_rows : int32 [≥ N + 1], [≥ N, ≥ blocks], [≥ N]
        Each sequence's last row gets logits.
    source_cu_rows, source_lens, source_tables : int32 [≥ G + 1], [≥ G], [≥ G, ≥ blocks]

    Returns
    -------
    rows, seqs, max_rows, max_source_rows : int
        T, N, and the most rows of a sequence and of a source.

    Raises
    ------
    InvalidArgumentError
        An array is too short.
    """
    cdef int64_t i, j, source = 0, row = 0, seq_index = 0, num_rows = 0, num_seqs = 0, widest = 0
    cdef int64_t widest_source = 0, most = 0, most_of_source = 0, position
    cdef SourceRows rows
    cdef Sequence seq
    for rows in sources:
        num_rows += len(rows.seqs) * rows.num_tokens
        num_seqs += len(rows.seqs)
        most = max(most, rows.num_tokens)
        most_of_source = max(most_of_source, len(rows.seqs) * rows.num_tokens)
        widest_source = max(widest_source, rows._source.shape[0])
        for seq in rows.seqs:
            require_room(seq, rows)
            widest = max(widest, seq._num_blocks)
    if (min(token_ids.shape[0], positions.shape[0], slots.shape[0]) < num_rows
            or min(cu_rows.shape[0] - 1, block_tables.shape[0], logits_rows.shape[0]) < num_seqs
            or min(source_cu_rows.shape[0] - 1, source_lens.shape[0],
                   source_tables.shape[0]) < len(sources)
            or block_tables.shape[1] < widest or source_tables.shape[1] < widest_source):
        raise InvalidArgumentError(
            f"a sweep of {num_rows} rows, {num_seqs} sequences of up to {widest} blocks and "
            f"{len(sources)} sources of up to {widest_source} does not fit its arrays")
    cu_rows[0] = source_cu_rows[0] = 0
    for rows in sources:
        for i in range(len(rows.seqs)):
            seq = rows.seqs[i]
            memcpy(&block_tables[seq_index, 0], seq._blocks, seq._num_blocks * sizeof(uint32_t))
            for j in range(rows.num_tokens):
                position = seq.seq_len + j
                token_ids[row] = rows._tokens[i * rows.num_tokens + j]
                positions[row] = <int32_t>position
                slots[row] = <int32_t>(seq._blocks[position // seq.block_size] * seq.block_size
                                       + position % seq.block_size)
                row += 1
            logits_rows[seq_index] = <int32_t>(row - 1)
            seq_index += 1
            cu_rows[seq_index] = <int32_t>row
        memcpy(&source_tables[source, 0], &rows._source[0],
               rows._source.shape[0] * sizeof(int32_t))
        source_lens[source] = <int32_t>rows.source_len
        source += 1
        source_cu_rows[source] = <int32_t>row
    return num_rows, num_seqs, most, most_of_source
