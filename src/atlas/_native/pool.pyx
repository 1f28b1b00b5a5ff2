"""Worker threads and the lists of compiled bodies they run, without the GIL."""

from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport free, malloc, realloc

from atlas.errors import InvalidArgumentError, KernelError, OutOfMemoryError, StaleHandleError


cdef extern from "worker_pool.h" nogil:
    ctypedef int (*atlas_body)(void **, void **, int64_t, int64_t, int64_t *)
    ctypedef struct atlas_launch:
        atlas_body body
        int64_t *args
    ctypedef struct atlas_pool:
        int32_t num_threads
        int pid
    atlas_pool *atlas_pool_create(int32_t num_threads)
    void atlas_pool_destroy(atlas_pool *pool)
    int64_t atlas_pool_run(atlas_pool *pool, const atlas_launch *launches, int64_t num_launches)

cdef extern from "unistd.h" nogil:
    int getpid()


cdef class LaunchList:
    """A sequence of (body, arguments) that runs as one unit: the CPU's captured graph.

    Arguments are 64-bit integers (addresses, sizes, float bits). ``keep`` holds whatever owns the
    memory behind the addresses.
    """

    cdef atlas_launch *_launches
    cdef int64_t _num_launches
    cdef int64_t _capacity
    cdef readonly list names
    cdef readonly list keep

    def __cinit__(self):
        self.names = []
        self.keep = []

    def __dealloc__(self):
        cdef int64_t i
        for i in range(self._num_launches):
            free(self._launches[i].args)
        free(self._launches)

    def __len__(self):
        return self._num_launches

    def append(self, str name, int64_t address, tuple args, object keep=None):
        """Add one launch of the body at ``address``; ``name`` appears in errors."""
        cdef int64_t i, count = len(args)
        cdef atlas_launch *grown
        cdef int64_t *packed
        if self._num_launches == self._capacity:
            self._capacity = max(16, 2 * self._capacity)
            grown = <atlas_launch *>realloc(
                self._launches, self._capacity * sizeof(atlas_launch))
            if grown == NULL:
                raise OutOfMemoryError("no memory for a launch list")
            self._launches = grown
        packed = <int64_t *>malloc(max(1, count) * sizeof(int64_t))
        if packed == NULL:
            raise OutOfMemoryError("no memory for a launch's arguments")
        try:
            for i in range(count):
                packed[i] = args[i]
        except BaseException:
            free(packed)
            raise
        self._launches[self._num_launches].body = <atlas_body><size_t>address
        self._launches[self._num_launches].args = packed
        self._num_launches += 1
        self.names.append(name)
        if keep is not None:
            self.keep.append(keep)


cdef class WorkerPool:
    """``num_threads`` threads, the caller among them, that run launch lists.

    One list at a time: the engine's owner drives it. After a fork the child's copy is dead and
    says so.
    """

    cdef atlas_pool *_pool
    cdef bint _running
    cdef readonly int num_threads

    def __cinit__(self, int num_threads):
        if not 1 <= num_threads <= 1024:
            raise InvalidArgumentError(f"threads is {num_threads}; allowed: 1 … 1024")
        self.num_threads = num_threads
        self._pool = atlas_pool_create(num_threads)
        if self._pool == NULL:
            raise OutOfMemoryError(f"could not start {num_threads - 1} worker threads")

    def __dealloc__(self):
        atlas_pool_destroy(self._pool)

    def close(self):
        """End the threads; idempotent. Refused while another thread runs a list."""
        cdef atlas_pool *pool = self._pool
        if self._running:
            raise StaleHandleError("this worker pool is running a list")
        self._pool = NULL
        with nogil:
            atlas_pool_destroy(pool)

    def run(self, LaunchList launches not None):
        """Run every launch in order, all threads on each; returns when the last one is done."""
        cdef int64_t failed
        if self._pool == NULL:
            raise StaleHandleError("this worker pool was closed")
        if self._pool.pid != getpid():
            raise StaleHandleError(
                "this engine belongs to the parent process; make a new one after a fork")
        if self._running:
            raise StaleHandleError("this worker pool is already running a list")
        self._running = True
        try:
            with nogil:
                failed = atlas_pool_run(self._pool, launches._launches, launches._num_launches)
        finally:
            self._running = False
        if failed:
            raise KernelError(f"kernel {launches.names[failed - 1]} reported an error")
