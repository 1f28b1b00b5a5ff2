"""Fill the arrays of one step from its plan, without the GIL."""

from libc.stdint cimport int32_t, int64_t, uint32_t
from libc.string cimport memcpy

from atlas._native.plan cimport Plan, entry_t
from atlas._native.request_table cimport RequestTable, request_t
from atlas._native.sequence cimport Sequence
from atlas.errors import InvalidArgumentError, StaleHandleError


cdef int64_t most_blocks(Plan plan, request_t *records) noexcept nogil:
    cdef int64_t i, most = 0
    for i in range(plan.num_seqs):
        most = max(most, (<Sequence>records[plan.items[i].request].sequence)._num_blocks)
    return most


cdef void fill(
        Plan plan, request_t *records, int32_t *token_ids, int32_t *positions, int32_t *slots,
        int32_t *cu_rows, int32_t *block_tables, int64_t table_stride,
        int32_t *logits_rows, int32_t *state_slots) noexcept nogil:
    cdef int64_t i, j, row = 0, logits = 0
    cdef int32_t position
    cdef int32_t block_size = <int32_t>plan.block_size
    cdef entry_t *entry
    cdef request_t *request
    cdef uint32_t *blocks
    memcpy(token_ids, plan.tokens, plan.num_rows * sizeof(int32_t))
    cu_rows[0] = 0
    for i in range(plan.num_seqs):
        entry = &plan.items[i]
        request = &records[entry.request]
        blocks = (<Sequence>request.sequence)._blocks
        memcpy(&block_tables[i * table_stride], blocks,
               (<Sequence>request.sequence)._num_blocks * sizeof(uint32_t))
        for j in range(entry.rows):
            position = entry.start + <int32_t>j
            positions[row] = position
            slots[row] = (<int32_t>blocks[position // block_size] * block_size
                          + position % block_size)
            row += 1
        for j in range(entry.num_logits):
            logits_rows[logits] = <int32_t>(row - entry.num_logits + j)
            logits += 1
        cu_rows[i + 1] = <int32_t>row
        if state_slots != NULL:
            state_slots[i] = entry.slot


def write_batch(
        Plan plan not None, int32_t[::1] token_ids not None, int32_t[::1] positions not None,
        int32_t[::1] slots not None, int32_t[::1] cu_rows not None,
        int32_t[:, ::1] block_tables not None, int32_t[::1] logits_rows not None,
        int32_t[::1] state_slots=None):
    """Write what ``run`` reads for ``plan``, between its plan and its commit.

    Parameters
    ----------
    plan : Plan
        Neither committed nor replaced.
    token_ids, positions, slots : int32 [≥ R]
        Token of each row (0 where ``plan.source_rows`` names a row of the step before), its
        position, and block · block size + offset.
    cu_rows : int32 [≥ N + 1]
    block_tables : int32 [≥ N, ≥ blocks of the longest]
        Entries beyond a sequence's blocks are left as they were.
    logits_rows : int32 [≥ L]
        Rows that get logits, entry after entry.
    state_slots : int32 [≥ N], optional
        Recurrent slot of each sequence.

    Raises
    ------
    InvalidArgumentError
        If an array is too short.
    StaleHandleError
        If the plan was committed.
    """
    cdef request_t *records = (<RequestTable>plan.owner).records
    cdef int64_t widest = most_blocks(plan, records)
    if not plan.outstanding:
        raise StaleHandleError(f"step {plan.step_id} was committed")
    for name, have, need in (
            ("token_ids", token_ids.shape[0], plan.num_rows),
            ("positions", positions.shape[0], plan.num_rows),
            ("slots", slots.shape[0], plan.num_rows),
            ("cu_rows", cu_rows.shape[0], plan.num_seqs + 1),
            ("block_tables' rows", block_tables.shape[0], plan.num_seqs),
            ("block_tables' columns", block_tables.shape[1], widest),
            ("logits_rows", logits_rows.shape[0], plan.num_logits),
            ("state_slots", plan.num_seqs if state_slots is None else state_slots.shape[0],
             plan.num_seqs)):
        if have < need:
            raise InvalidArgumentError(f"{name} has {have} entries; the step needs {need}")
    if not plan.num_seqs:
        if cu_rows.shape[0]:
            cu_rows[0] = 0
        return
    with nogil:
        fill(plan, records, &token_ids[0], &positions[0], &slots[0], &cu_rows[0],
             &block_tables[0, 0], block_tables.shape[1],
             &logits_rows[0] if logits_rows.shape[0] else NULL,
             &state_slots[0] if state_slots is not None else NULL)
