from libc.stdint cimport int32_t, int64_t, uint32_t

cpdef enum EntryKind:
    STEP = 0
    PROMPT = 1

cpdef enum EntryFlag:
    LAST_CHUNK = 1        # the chunk ends its prompt
    SAMPLES = 2           # a token is sampled from the entry's last kept row
    REPLAY = 4            # generated tokens absorbed again: nothing of them is emitted
    POLL_CALIBRATION = 8  # the engine calls lifecycle.poll_kv_calibration() after it
    NORMALIZE = 16        # ... and ssm.normalize(seq): another chunk follows
    SNAPSHOT = 32         # the chunk ends where a snapshot of the recurrent state is wanted
    FIRST_CHUNK = 64

cpdef enum ActionKind:
    COPY_BLOCK = 0        # source -> target, all layers
    SPILL = 1             # blocks and slot (source) to host memory
    RESTORE = 2           # host memory to blocks and slot (target)
    REQUEUE = 3           # nothing to move: blocks and slot were given up
    MOVE_SLOT = 4         # source -> target, whose last owner (other) is detached
    ZERO_SLOT = 5         # target starts empty
    RESTORE_SNAPSHOT = 6  # snapshot other -> target

cpdef enum FinishReason:
    LENGTH = 1            # max_tokens were emitted: found by commit
    STOP = 2
    CANCELLED = 3
    ERROR = 4             # its blocks are not cached
    EXHAUSTED = 5         # the pool cannot hold it beside what others hold for good

cdef struct entry_t:
    int64_t handle
    int32_t request       # record number
    int32_t epoch
    int32_t kind
    int32_t start         # position of the first row
    int32_t rows
    int32_t num_drafts    # how many of the last rows hold drafts
    int32_t first_row
    int32_t first_logits
    int32_t num_logits    # the last rows of the entry get logits
    int32_t source        # logits row of step_id - 1 whose token the first row takes; -1 = known
    int32_t flags
    int32_t wave          # prompt chunks of one wave share start and LAST_CHUNK; -1 = a step
    int32_t slot
    int32_t emitted       # written by commit: tokens of this entry that the client gets
    int32_t reason        # written by commit: why the request ended; 0 = it goes on
    int32_t dropped       # written by commit: the rows counted for nothing

cdef struct action_t:
    int64_t handle
    int64_t other
    int32_t kind
    int32_t source
    int32_t target
    int32_t first_block   # into action_blocks
    int32_t num_blocks
    int32_t reserved


cdef class ActionList:
    cdef action_t *items
    cdef int64_t count
    cdef int64_t _capacity
    cdef uint32_t *blocks
    cdef int64_t num_blocks
    cdef int64_t _block_capacity

    cdef int push(
        self, int32_t kind, int64_t handle, int64_t other, int64_t source, int64_t target,
        const uint32_t *blocks, int64_t num_blocks) except -1
    cdef void clear(self) noexcept nogil


cdef class Plan:
    cdef readonly int64_t step_id
    cdef readonly int64_t num_seqs
    cdef readonly int64_t num_decode        # step entries; they come first
    cdef readonly int64_t num_rows
    cdef readonly int64_t num_logits
    cdef readonly int64_t padded_batch      # rung of num_decode; 1 is not padded
    cdef readonly bint one_by_one           # verify sequence by sequence
    cdef readonly bint outstanding
    cdef readonly list refused              # (handle, reason)
    cdef readonly int64_t block_size
    cdef readonly object owner              # the RequestTable
    cdef entry_t *items
    cdef int32_t *tokens
    cdef int32_t *sources
    cdef ActionList action_list
    cdef object _entries
    cdef object _token_ids
    cdef object _source_rows
