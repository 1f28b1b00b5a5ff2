"""Lists of CUDA launches, replayed without Python for each.

Needs no CUDA headers or libraries to build: the driver's structures are laid out here as its ABI
has them (CUDA 12 and newer), and its functions are called by addresses found at run time.
"""

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, realloc

from atlas.errors import InvalidArgumentError, OutOfMemoryError, StaleHandleError

# CUlaunchAttributeID
cdef enum:
    CLUSTER_DIMENSION = 4
    PROGRAMMATIC_STREAM_SERIALIZATION = 6
    PREFERRED_SHARED_MEMORY_CARVEOUT = 14

cdef enum:
    KERNEL = 0
    MATMUL = 1
    CALL = 2
    MATMUL_WORDS = 15

ctypedef struct launch_attribute:  # CUlaunchAttribute: a value of 64 bytes after its id
    uint32_t id
    uint32_t padding
    uint32_t value[16]

ctypedef struct launch_config:  # CUlaunchConfig
    uint32_t grid[3]
    uint32_t block[3]
    uint32_t shared_bytes
    void *stream
    launch_attribute *attributes
    uint32_t num_attributes

ctypedef struct entry:
    int32_t kind
    void *function
    launch_config config
    launch_attribute attributes[3]
    int64_t num_words
    int64_t *words      # of the arguments
    void **pointers     # to each of them

ctypedef int (*launch_function)(const launch_config *, void *, void **, void **) noexcept nogil
ctypedef int (*matmul_function)(
    void *, void *, void *, void *, void *, void *, void *, void *, void *, void *, void *,
    void *, void *, void *, uint64_t, void *) noexcept nogil


cdef int run_matmul(entry *item, void *stream) noexcept nogil:
    cdef int64_t *w = item.words
    return (<matmul_function>item.function)(
        <void *>w[0], <void *>w[1], <void *>w[2], <void *>w[3], <void *>w[4], <void *>w[5],
        <void *>w[6], <void *>w[7], <void *>w[8], <void *>w[9], <void *>w[10], <void *>w[11],
        <void *>w[12], <void *>w[13], <uint64_t>w[14], stream)


cdef class CudaLaunchList:
    """A sequence of launches that runs as one unit on a stream.

    Parameters
    ----------
    launch_address : int
        Address of ``cuLaunchKernelEx``.
    """

    cdef launch_function _launch
    cdef entry *_entries
    cdef int64_t _num_entries
    cdef int64_t _capacity
    cdef bint _running
    cdef dict _calls
    cdef readonly list names
    cdef readonly list keep

    def __cinit__(self, int64_t launch_address):
        if not launch_address:
            raise InvalidArgumentError("launch_address is 0; allowed: a function's address")
        self._launch = <launch_function><size_t>launch_address
        self._calls = {}
        self.names = []
        self.keep = []

    def __dealloc__(self):
        cdef int64_t i
        for i in range(self._num_entries):
            free(self._entries[i].words)
            free(self._entries[i].pointers)
        free(self._entries)

    def __len__(self):
        return self._num_entries

    cdef entry *_append(self, str name, int32_t kind, size_t function, tuple args) except NULL:
        cdef entry *grown
        cdef entry *item
        cdef int64_t i, count = len(args)
        cdef list values = [int(value) for value in args]
        if self._running:
            raise StaleHandleError("this launch list is running")
        if self._num_entries == self._capacity:
            self._capacity = max(16, 2 * self._capacity)
            grown = <entry *>realloc(self._entries, self._capacity * sizeof(entry))
            if grown == NULL:
                raise OutOfMemoryError("no memory for a launch list")
            self._entries = grown
        item = &self._entries[self._num_entries]
        item.kind, item.function = kind, <void *>function
        item.num_words = count
        item.words = <int64_t *>calloc(max(1, count), sizeof(int64_t))
        item.pointers = <void **>calloc(max(1, count), sizeof(void *))
        if item.words == NULL or item.pointers == NULL:
            free(item.words)
            free(item.pointers)
            raise OutOfMemoryError("no memory for a launch's arguments")
        for i in range(count):
            item.words[i] = values[i]
            item.pointers[i] = &item.words[i]
        self._num_entries += 1
        self.names.append(name)
        return item

    def append_kernel(
            self, str name, size_t function, tuple grid, int threads, int shared_bytes,
            int cluster, bint dependent, int carveout, tuple args):
        """Add a kernel launch.

        Parameters
        ----------
        name : str
            Appears in errors.
        function : int
            The ``CUfunction``.
        grid : tuple of 3 int
        threads, shared_bytes, cluster : int
        dependent : bool
            It may start before the launch in front of it has ended (programmatic dependent launch).
        carveout : int
            Per cent of an SM's L1 and shared memory that are to be shared memory; negative: what
            the function prefers.
        args : tuple of int
            The 64-bit words that begin with each argument's bytes.
        """
        cdef entry *item
        x, y, z = grid
        item = self._append(name, KERNEL, function, args)
        item.config.grid[0], item.config.grid[1], item.config.grid[2] = x, y, z
        item.config.block[0], item.config.block[1], item.config.block[2] = threads, 1, 1
        item.config.shared_bytes = shared_bytes
        item.config.num_attributes = 0
        if dependent:
            self._attribute(item, PROGRAMMATIC_STREAM_SERIALIZATION, 1, 0, 0)
        if cluster > 1:
            self._attribute(item, CLUSTER_DIMENSION, cluster, 1, 1)
        if carveout >= 0:
            self._attribute(item, PREFERRED_SHARED_MEMORY_CARVEOUT, carveout, 0, 0)

    cdef void _attribute(self, entry *item, uint32_t id, uint32_t x, uint32_t y, uint32_t z):
        cdef launch_attribute *attribute = &item.attributes[item.config.num_attributes]
        cdef int i
        attribute.id, attribute.padding = id, 0
        for i in range(16):
            attribute.value[i] = 0
        attribute.value[0], attribute.value[1], attribute.value[2] = x, y, z
        item.config.num_attributes += 1

    def patch(self, int64_t launch, uint32_t num_blocks, tuple args):
        """Change a kernel launch's grid to (num_blocks, 1, 1), and all of its arguments."""
        cdef int64_t i, count = len(args)
        cdef entry *item
        if self._running:
            raise StaleHandleError("this launch list is running")
        if not 0 <= launch < self._num_entries or self._entries[launch].kind != KERNEL:
            raise InvalidArgumentError(f"launch {launch} is no kernel of this list")
        item = &self._entries[launch]
        if count != item.num_words:
            raise InvalidArgumentError(
                f"{self.names[launch]} got {count} arguments; allowed: {item.num_words}")
        for i in range(count):
            item.words[i] = args[i]
        item.config.grid[0], item.config.grid[1], item.config.grid[2] = num_blocks, 1, 1

    def append_matmul(self, size_t function, tuple args):
        """Add a call of ``cublasLtMatmul`` at ``function``: its 15 arguments before the stream."""
        if len(args) != MATMUL_WORDS:
            raise InvalidArgumentError(
                f"cublasLtMatmul got {len(args)} arguments; allowed: {MATMUL_WORDS}")
        self._append("cublasLtMatmul", MATMUL, function, args)

    def append_call(self, function):
        """Add a Python function, called with the stream's handle."""
        self._append(getattr(function, "__name__", "call"), CALL, 0, ())
        self._calls[self._num_entries - 1] = function

    def run(self, size_t stream):
        """Launch everything in order on a stream; does not wait.

        Returns
        -------
        (status, name)
            (0, None); or the first status that was not 0 (negative: cuBLASLt's) and which launch
            gave it. Nothing after that one was launched.
        """
        cdef int64_t i = 0
        cdef int status = 0
        if self._running:
            raise StaleHandleError("this launch list is already running")
        self._running = True
        try:
            while i < self._num_entries:
                if self._entries[i].kind == CALL:
                    self._calls[i](stream)
                    i += 1
                    continue
                with nogil:
                    i = self._play(i, <void *>stream, &status)
                if status:
                    return status, self.names[i]
        finally:
            self._running = False
        return 0, None

    cdef int64_t _play(self, int64_t i, void *stream, int *status) noexcept nogil:
        """Launch entries from ``i`` up to a call or a failure; where it stopped."""
        cdef entry *item
        while i < self._num_entries:
            item = &self._entries[i]
            if item.kind == CALL:
                break
            if item.kind == KERNEL:
                # Entries move when the list grows, so the pointer is set when it is used.
                item.config.attributes = item.attributes
                item.config.stream = stream
                status[0] = self._launch(&item.config, item.function, item.pointers, NULL)
            else:
                status[0] = -run_matmul(item, stream)
            if status[0]:
                break
            i += 1
        return i
