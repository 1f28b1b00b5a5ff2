"""Products of more rows than the step GEMM takes: cuBLASLt with algorithms pinned for their bits.

A matrix has one order of summation, that of the step GEMM. cuBLASLt promises none, so before an
algorithm serves a kind of product it must give the step GEMM's bits on random rows of the matrix
itself, at several numbers of rows (``Trial``). Those that do are timed on the first product of
about as many rows (``Launches``), and the fastest stays: the bits are the same whichever that is. A
kernel of ours adds a bias to float32 sums, or a product that was stored to the residual stream.
Kinds that no algorithm passes for go through the step GEMM, 128 rows at a time; ``disclosed`` says
which.

A matrix of several chains of summation (``gemm_step_plan``) takes a call for each, over that part
of K. All but the first add to the float32 sums in place, and the kernel of ours rounds the last.

A quantised matrix is first turned into bf16, which is what the step GEMM does with its weights.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from atlas_kernels.gemm_step_plan import RUNGS, chain_length
from numpy.typing import NDArray

from atlas.backends.cuda.activation import add
from atlas.backends.cuda.array import DeviceArray
from atlas.backends.cuda.check import Args
from atlas.backends.cuda.cublaslt import WORKSPACE_BYTES, Algorithm, CublasLt, Product
from atlas.backends.cuda.device import CudaDevice
from atlas.backends.cuda.launch import Queue, Recording
from atlas.backends.cuda.pack import DeviceMatrix
from atlas.errors import CapabilityError, OutOfMemoryError

_SUMS_BYTES = 48 << 20  # sums on their way: most of an H200's second-level cache
_WEIGHTS_BYTES = 40 << 20  # of a quantised matrix in bf16, at a time
_SIZES = (192, 512, 1024, 2048, 4096, 8192)
"""Numbers of rows that algorithms are asked for; others take those of the next smaller one."""
_FEW, _MANY, _WIDE = 192, 1088, 576
"""Rows of a trial: few, and several tiles; fewer of a matrix of more than ``_NARROW`` rows."""
_NARROW, _WIDEST = 8192, _SUMS_BYTES // (4 * 128)
_TIMES, _CALLS, _CLEARLY = 4, 2, 1.01  # of algorithms that are timed
_STEP_ROWS = RUNGS[-1]
_WORDS, _DEQUANTIZED = 1024, 2048  # columns, or words, of a thread block
_log = logging.getLogger("atlas")

StepProduct = Callable[[Queue, DeviceArray, DeviceArray], None]


@dataclass(frozen=True, slots=True)
class Kind:
    """What decides the bits of a product, and how it is computed.

    ``format``, ``rows`` and ``cols`` are the matrix's; ``out_type`` bfloat16 or float32. A residual
    is added to what was rounded, and decides nothing.
    """

    format: str
    rows: int
    cols: int
    out_type: str
    has_bias: bool
    is_whole: bool = False  # one chain, whatever the matrix' shape

    @property
    def num_chains(self) -> int:
        """Parts of K that are summed for themselves, then added in ascending order."""
        if self.is_whole or self.format != "bf16":
            return 1
        length: int = chain_length(self.rows, self.cols)
        return self.cols // length


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """How a kind is computed: at once, or (``is_finished``) as float32 sums that we finish.

    Several chains are always finished: they add up in float32.
    ``algorithms`` of equal bits by numbers of rows, ascending; ``fastest`` those that were timed.
    """

    is_finished: bool
    algorithms: dict[int, tuple[Algorithm, ...]]
    fastest: dict[int, Algorithm] = field(default_factory=dict)

    def size(self, rows: int) -> int:
        """The number of rows whose algorithms serve this one."""
        return max((size for size in self.algorithms if size <= rows), default=min(self.algorithms))


class Products:
    """The products of one device; ``plans`` by kind, None where the step GEMM has to do it.

    Raises
    ------
    CapabilityError
        cuBLASLt is not usable.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self.library = CublasLt()
        self.plans: dict[Kind, Plan | None] = {}

    def run(
        self,
        queue: Queue,
        x: DeviceArray,
        weight: DeviceMatrix,
        bias: DeviceArray | None,
        residual: DeviceArray | None,
        out: DeviceArray,
        *,
        step: StepProduct,
        is_whole: bool = False,
    ) -> bool:
        """Put the launches of out = x · weightᵀ + bias + residual on a queue; False: none can.

        ``residual`` is ``out`` or None; ``step(queue, x, out)`` computes up to 128 rows without it
        by the step GEMM: the trial of a new kind compares with it. ``is_whole``: the matrix is one
        chain, whatever its shape.
        """
        if weight.rows > _WIDEST or weight.rows % 8:
            return False
        shape = (weight.format, weight.rows, weight.cols)
        kind = Kind(*shape, out.dtype, bias is not None, is_whole)
        if kind not in self.plans:
            eager = Queue(self._device, queue.workspace)
            self.plans[kind] = Trial(self, eager, kind, weight, bias, step).plan()
        plan = self.plans[kind]
        if plan is None:
            return False
        Launches(self, queue, kind, plan, adds=residual is not None).put(x, weight, bias, out)
        return True

    def disclosed(self) -> list[str]:
        """Kinds that the step GEMM computes 128 rows at a time, in words."""
        return [
            f"prompts, {kind.format} [{kind.rows}, {kind.cols}]: step GEMM, 128 rows at a time"
            for kind, plan in self.plans.items()
            if plan is None
        ]

    def close(self) -> None:
        """Free the library's objects; idempotent."""
        self.plans.clear()
        self.library.close()


class Launches:
    """The launches of one product under a plan."""

    def __init__(
        self, products: Products, queue: Queue, kind: Kind, plan: Plan, *, adds: bool = False
    ) -> None:
        """``adds``: to what ``out`` holds."""
        self._library, self._queue, self._plan, self._adds = products.library, queue, plan, adds
        self._num_chains = kind.num_chains
        is_converted, self._passes_by = kind.format != "bf16", plan.is_finished or adds
        self._workspace = queue.scratch(
            WORKSPACE_BYTES + _SUMS_BYTES * self._passes_by + _WEIGHTS_BYTES * is_converted
        )
        self._weights = self._workspace + WORKSPACE_BYTES
        self._sums = self._weights + _WEIGHTS_BYTES * is_converted

    def put(
        self, x: DeviceArray, weight: DeviceMatrix, bias: DeviceArray | None, out: DeviceArray
    ) -> None:
        for first, part in self._parts(weight):
            columns = slice(first, first + part.shape[0])
            own_bias = None if bias is None else bias[columns]
            for rows in self._slabs(len(x), part.shape[0]):
                self._slab(x[rows], part, own_bias, out[rows, columns])

    def _parts(self, weight: DeviceMatrix) -> Iterator[tuple[int, DeviceArray]]:
        """The matrix in bf16: (first row, rows); a quantised one in parts, each turned first."""
        if not weight.is_quantized:
            yield 0, weight.values
            return
        each = weight.layout.piece_rows
        step = max(each, _WEIGHTS_BYTES // (2 * weight.cols) // each * each)
        for first in range(0, weight.rows, step):
            rows = min(step, weight.rows - first)
            part = DeviceArray(self._weights, (rows, weight.cols), "bfloat16")
            source = weight.data[first // each : -(-(first + rows) // each)]
            stride = weight.layout.shape[1]
            args: Args = (0, source, part, weight.cols, stride, 2 * weight.cols, 1.0)
            grid = (rows, -(-weight.cols // _DEQUANTIZED))
            self._queue.launch(f"embedding_{weight.format}_bf16", grid, args, weight)
            yield first, part

    def _slabs(self, rows: int, columns: int) -> Iterator[slice]:
        """All rows at once, or slabs of about as many that what passes by has room for."""
        step = rows
        if self._passes_by:
            item = 4 if self._plan.is_finished else 2
            room = _SUMS_BYTES // (item * columns) // 128 * 128
            count = -(-rows // room)
            step = min(room, -(-rows // (128 * count)) * 128)
        for first in range(0, rows, step):
            yield slice(first, first + step)

    def _slab(
        self, x: DeviceArray, part: DeviceArray, bias: DeviceArray | None, out: DeviceArray
    ) -> None:
        (m, k), n = x.shape, part.shape[0]
        k //= self._num_chains
        strides = (part.strides[0] // 2, x.strides[0] // 2)
        keep = (x, part, bias, out, self._library)
        if not self._passes_by:
            product = Product(m, n, k, *strides, out.strides[0] // out.itemsize, out.dtype)
            self._call(product, part.address, x.address, out.address, keep)
            return
        type = "float32" if self._plan.is_finished else "bfloat16"
        sums = DeviceArray(self._sums, (m, n), type)
        product = Product(m, n, k, *strides, n, type)
        self._call(product, part.address, x.address, self._sums, keep)
        if not self._plan.is_finished:
            add(self._queue, sums, out, out=out)
            return
        residual = out if self._adds else 0
        numbers: Args = (sums, 0 if bias is None else bias, residual, out, n, 4 * n)
        numbers += (out.strides[0], out.strides[0], int(out.dtype == "float32"))
        self._queue.launch("gemm_finish", (m, -(-n // _WORDS)), numbers, keep)

    def _call(self, product: Product, w: int, x: int, out: int, keep: object) -> None:
        """A chain at a time, by the fastest algorithm.

        They are timed here, where all of them write what follows.
        """
        size, library = self._plan.size(product.m), self._library

        def call(queue: Queue, algorithm: Algorithm) -> None:
            for i in range(self._num_chains):
                at = i * 2 * product.k
                addresses = (w + at, x + at, out, self._workspace)
                args = library.arguments(product, algorithm, *addresses, adds=i > 0)
                queue.matmul(library.function, args, (keep, algorithm))

        if size not in self._plan.fastest:
            algorithms = self._plan.algorithms[size]
            seconds = self._seconds(call, algorithms)
            best = min(seconds)
            # cuBLASLt's own favourite, unless another is faster by more than times vary.
            index = 0 if seconds[0] < _CLEARLY * best else seconds.index(best)
            self._plan.fastest[size] = algorithms[index]
        call(self._queue, self._plan.fastest[size])

    def _seconds(
        self, call: Callable[[Queue, Algorithm], None], algorithms: Sequence[Algorithm]
    ) -> list[float]:
        """What some products by each algorithm take, the best of several times.

        They take turns, as the device's clock changes with its power and heat. Calls are a list, so
        that between short ones the device does not wait for Python.
        """
        device, lists = self._queue.device, []
        for algorithm in algorithms:
            recording = Recording()
            for _ in range(_CALLS):
                call(Queue(device, self._queue.workspace, recording), algorithm)
            lists.append(recording.compile(device))
        times: list[list[float]] = [[] for _ in lists]
        for _ in range(_TIMES + 1):  # the first is not counted
            for launches, own in zip(lists, times, strict=True):
                device.synchronize()
                start = time.perf_counter()
                device.run(launches)
                device.synchronize()
                own.append(time.perf_counter() - start)
        return [min(own[1:]) for own in times]


class Trial:
    """Looks for algorithms that give the step GEMM's bits for a kind, on the matrix itself."""

    def __init__(
        self,
        products: Products,
        queue: Queue,
        kind: Kind,
        weight: DeviceMatrix,
        bias: DeviceArray | None,
        step: StepProduct,
    ) -> None:
        self._products, self._queue, self._kind, self._step = products, queue, kind, step
        self._weight, self._bias = weight, bias
        self._device = queue.device
        self._tried = (_FEW, _MANY if kind.rows <= _NARROW else _WIDE)

    def plan(self) -> Plan | None:
        """A plan whose results were equal, or None, as when memory does not suffice."""
        memory: list[int] = []
        try:
            return self._search(memory)
        except OutOfMemoryError as error:
            _log.warning("cuBLASLt is not tried for %s: %s", self._kind, error)
            return None
        finally:
            self._device.synchronize()
            for address in memory:
                self._device.free(address)

    def _search(self, memory: list[int]) -> Plan | None:
        kind, most = self._kind, self._tried[-1]
        rng = np.random.default_rng(kind.rows)

        def take(columns: int, dtype: str) -> DeviceArray:
            array = DeviceArray(0, (most, columns), dtype)
            array.address = self._device.allocate(array.nbytes, "products on trial")
            memory.append(array.address)
            return array

        def random(array: DeviceArray) -> DeviceArray:
            bits = _random_bfloat16(rng, array.size)
            self._device.copy_in(array.address, bits.ctypes.data, bits.nbytes)
            self._device.synchronize()
            return array

        x = random(take(kind.cols, "bfloat16"))
        self._want, self._got = (take(kind.rows, kind.out_type) for _ in range(2))
        for first in range(0, most, _STEP_ROWS):
            rows = slice(first, first + _STEP_ROWS)
            self._step(self._queue, x[rows], self._want[rows])
        must_finish = kind.has_bias or kind.num_chains > 1
        for is_finished in (True,) if must_finish else (False, True):
            if found := self._algorithms(x, is_finished=is_finished):
                return Plan(is_finished, found)
        return None

    def _algorithms(self, x: DeviceArray, *, is_finished: bool) -> dict[int, tuple[Algorithm, ...]]:
        """The equal algorithms for each of ``_SIZES``; those without take a neighbour's."""
        kind, library = self._kind, self._products.library
        type = "float32" if is_finished else kind.out_type
        k = kind.cols // kind.num_chains
        sizes = (kind.rows, k, kind.cols, kind.cols, kind.rows)
        known: dict[bytes, bool] = {}
        found: dict[int, tuple[Algorithm, ...]] = {}
        for m in _SIZES:
            product = Product(m, *sizes, type)
            for algorithm in library.algorithms(product):
                tried = [replace(product, m=rows) for rows in (*self._tried, *_SIZES)]
                if not all(library.takes(other, algorithm) for other in tried):
                    continue
                content = algorithm.tobytes()
                if content not in known:
                    known[content] = self._is_equal(x, algorithm, is_finished=is_finished)
                    equal = known[content]
                    _log.debug("%s at %d rows, finished %s: equal %s", kind, m, is_finished, equal)
                if known[content]:
                    found[m] = (*found.get(m, ()), algorithm)
        return found

    def _is_equal(self, x: DeviceArray, algorithm: Algorithm, *, is_finished: bool) -> bool:
        plan = Plan(is_finished, {0: (algorithm,)}, {0: algorithm})
        for rows in self._tried:
            part = slice(0, rows)
            launches = Launches(self._products, self._queue, self._kind, plan)
            launches.put(x[part], self._weight, self._bias, self._got[part])
            if self._differences(self._want[part], self._got[part]):
                return False
        return True

    def _differences(self, a: DeviceArray, b: DeviceArray) -> int:
        """Words that differ."""
        count, words = np.zeros(1, np.int32), a.nbytes // 4
        place = self._queue.scratch(4)
        self._device.fill(place, 4)
        grid = (-(-words // _WORDS), 1)
        self._queue.launch("count_differences", grid, (a, b, place, words))
        self._device.copy_out(count.ctypes.data, place, 4)
        self._device.synchronize()
        return int(count[0])


def _random_bfloat16(rng: np.random.Generator, count: int) -> NDArray[np.uint16]:
    """Bits of numbers of either sign, of magnitudes between 2**-9 and 2**2."""
    bits = rng.integers(0, 1 << 16, count, np.uint16)
    exponent = 118 + (bits >> 7) % 11
    return (bits & np.uint16(0x807F)) | (exponent.astype(np.uint16) << np.uint16(7))


def open_products(device: CudaDevice) -> Products | None:
    """cuBLASLt's products, or None with a word in the log where the library is missing."""
    try:
        return Products(device)
    except CapabilityError as error:
        _log.warning("prompts run through the step GEMM, 128 rows at a time: %s", error)
        return None
