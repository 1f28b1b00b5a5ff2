from libc.stdint cimport int32_t, int64_t, uint32_t

from atlas._native.block_pool cimport BlockPool
from atlas._native.plan cimport ActionList
from atlas._native.request_table cimport RequestTable, request_t
from atlas._native.slot_pool cimport SlotPool
from atlas._native.wait_queue cimport WaitQueue

cdef struct limits_t:
    int64_t block_size
    int64_t max_running
    int64_t watermark         # new tokens that admission reserves room for, at most
    int64_t immune_tokens     # emitted tokens after admission before a sequence may be preempted
    int64_t aging_us          # a wait that overrides priorities; 0 = never
    int64_t chunk_unit        # of a hybrid: prompt blocks are exact up to its last multiple
    bint spill                # preempt to host memory; else requeue
    bint single_chunk         # a prompt runs whole, so no prefix of it is reused
    bint reuse_generated


cdef class RunningSet:
    cdef limits_t limits
    cdef BlockPool pool
    cdef object cache         # a PrefixCache, or None
    cdef SlotPool slots
    cdef RequestTable table
    cdef WaitQueue queue
    cdef ActionList pending   # actions for the next plan
    cdef list retired         # handles that gave everything back
    cdef int32_t *order       # record numbers by rank: priority, then admission
    cdef int64_t num_running
    cdef int64_t num_admissions
    cdef int64_t num_preemptions
    cdef int64_t num_releases  # grows whenever blocks may have come free
    cdef int32_t _blocked      # the head that did not fit, and when to look again
    cdef int64_t _blocked_free
    cdef int64_t _blocked_releases

    cdef int64_t blocks_for(self, int64_t num_positions) noexcept nogil
    cdef int insert(self, int32_t record) noexcept nogil
    cdef void remove(self, int32_t record) noexcept nogil
    cdef int64_t growth(self) noexcept nogil
    cdef bint admit(self, int64_t now_us, bint prefill, bint alone) except -1
    cdef bint may_reuse_generated(self, request_t *request) noexcept nogil
    cdef int start(self, int32_t record, bint lookup) except -1
    cdef int adopt_match(self, request_t *request) except -1
    cdef bint reserve(self, int64_t place, int64_t rows, int64_t step, bint force) except -1
    cdef bint make_room(
        self, int64_t num_blocks, int64_t place, int64_t step, bint force) except -1
    cdef bint forget_cache(self) except -1
    cdef int32_t victim(self, int64_t place, int64_t step, bint force) noexcept nogil
    cdef int preempt(self, int32_t record) except -1
    cdef int cache_blocks(self, request_t *request) except -1
    cdef int end(self, int32_t record, int32_t reason) except -1
    cdef int retire(self, int32_t record) except -1
    cdef int compact(self) except -1
