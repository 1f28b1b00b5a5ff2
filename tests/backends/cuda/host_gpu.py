"""A GPU whose memory is the host's and whose kernels are the ops' NumPy definitions.

It stands in for the driver API, so that everything of ``backends/cuda`` but the kernels runs on any
machine: arenas, pinned inputs, buckets and their padding, launch lists, graphs, read-backs, the
feed, pools, loading, teardown. bfloat16 is rounded where the device rounds it.
"""

from __future__ import annotations

import ctypes
import inspect
import threading
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from atlas.backends.cuda.array import DeviceArray
from atlas.backends.cuda.launch import Queue
from atlas.backends.cuda.pack import DeviceMatrix
from atlas.errors import AtlasError
from atlas.ops import OPS
from atlas.ops.blocks import HostMatrix, dequantize
from atlas.ops.norm_linear import PRODUCTS
from atlas.sampling_table import choose_tokens, score_tokens
from tests.kernels.cells import unit_weights
from tests.kernels.launches import decode, encode
from tests.native.test_cuda_launch import LAUNCH

Array = np.ndarray[Any, Any]
KERNELS = (
    "",
    "feed_tokens",
    "cast_f32_bf16",
    "cast_f16_bf16",
    "copy_slot",
    "copy_blocks",
    "fetch_inputs",
    "copy_words",
)
_COUNTS = {"copy_blocks": 4, "fetch_inputs": 7}
"""Arguments, where they are not three."""
_ARGUMENTS = tuple((name, "i64") for name in "abcdefg")


class _Names:
    """An enumeration of which only the names matter."""

    def __getattr__(self, name: str) -> str:
        return name


class HostGpu:
    """The driver API and its bookkeeping; ``api`` is the object itself.

    Attributes
    ----------
    log : list of str
        Calls that put work on a stream or wait, in order.
    total, used : int
        Bytes of "device" memory.
    fails : dict
        Name of a call → the status that it answers from now on.
    """

    version = 13000

    def __init__(self, total: int = 1 << 30) -> None:
        self.log: list[str] = []
        self.total, self.used = total, 0
        self.fails: dict[str, int] = {}
        self.failure: AtlasError | None = None
        self.live: Counter[str] = Counter()
        self._memory: dict[int, Any] = {}
        self._graphs: dict[int, list[Callable[[], None]]] = {}
        self._capture: list[Callable[[], None]] | None = None
        self._current = threading.local()  # a thread's context
        self._next = 1000
        self._feed = LAUNCH(self._launch)
        self.launch_address = ctypes.cast(self._feed, ctypes.c_void_p).value or 0
        for name in ("CUdevice_attribute", "CUstream_flags", "CUevent_flags"):
            setattr(self, name, _Names())
        self.CUstreamCaptureMode = self.CUfunction_attribute = _Names()

    @property
    def api(self) -> HostGpu:
        return self

    # -- as atlas.backends.cuda.driver.Driver -------------------------------------------------

    def __call__(self, result: tuple[Any, ...], doing: str = "") -> Any:
        from atlas.backends.cuda.driver import Driver

        return Driver.__call__(self, result, doing)  # type: ignore[arg-type]

    def error(self, status: int, doing: str = "") -> AtlasError:
        from atlas.backends.cuda.driver import Driver

        return Driver.error(self, status, doing)  # type: ignore[arg-type]

    def words(self, status: int) -> str:
        return f"status {status}"

    # -- as cuda.bindings.driver --------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)
        call = getattr(type(self), f"_{name}")

        def checked(*args: Any) -> tuple[Any, ...]:
            if name in self.fails:
                return (self.fails[name], None)
            value = call(self, *args)
            return (0,) if value is None else (0, *value)

        return checked

    def _handle(self, kind: str) -> int:
        self.live[kind] += 1
        self._next += 8
        return self._next

    def _cuDeviceGetCount(self) -> Any:
        return (1,)

    def _cuDeviceGet(self, ordinal: int) -> Any:
        return (ordinal,)

    def _cuDeviceGetName(self, size: int, device: int) -> Any:
        return (b"Host GPU\0\0",)

    def _cuDeviceTotalMem(self, device: int) -> Any:
        return (self.total,)

    def _cuDeviceGetAttribute(self, name: str, device: int) -> Any:
        return ({"MAJOR": 9, "MINOR": 0}.get(name.rpartition("_")[2], 4),)

    def _cuDevicePrimaryCtxRetain(self, device: int) -> Any:
        return (self._handle("context"),)

    def _cuDevicePrimaryCtxRelease(self, device: int) -> None:
        self.live["context"] -= 1

    def _cuCtxSetCurrent(self, context: int) -> None:
        self._current.context = context

    def _cuMemGetInfo(self) -> Any:
        return self.total - self.used, self.total

    def _cuMemAlloc(self, nbytes: int) -> Any:
        if self.used + nbytes > self.total:
            raise MemoryError(nbytes)
        self.used += nbytes
        return (self._keep(nbytes, "memory"),)

    def _keep(self, nbytes: int, kind: str) -> int:
        raw = np.full(nbytes + 256, 0xFF, np.uint8)  # NaN in every float type
        address = raw.ctypes.data + -raw.ctypes.data % 256
        self._memory[address] = raw, nbytes
        self.live[kind] += 1
        return address

    def _cuMemFree(self, address: int) -> None:
        self.used -= self._memory.pop(address)[1]
        self.live["memory"] -= 1

    def _cuMemHostAlloc(self, nbytes: int, flags: int) -> Any:
        return (self._keep(nbytes, "pinned"),)

    def _cuMemFreeHost(self, address: int) -> None:
        del self._memory[address]
        self.live["pinned"] -= 1

    def _cuMemsetD8Async(self, address: int, value: int, nbytes: int, stream: int) -> None:
        ctypes.memset(address, value, nbytes)

    def _copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        assert self._capture is None, "a copy inside a graph"
        self.log.append("copy")
        ctypes.memmove(target, source, nbytes)

    _cuMemcpyHtoDAsync = _cuMemcpyDtoHAsync = _cuMemcpyDtoDAsync = _copy

    def _cuStreamCreate(self, flags: str) -> Any:
        return (self._handle("stream"),)

    def _cuStreamDestroy(self, stream: int) -> None:
        self.live["stream"] -= 1

    def _cuStreamSynchronize(self, stream: int) -> None:
        self.log.append("synchronize")

    def _cuEventCreate(self, flags: str) -> Any:
        return (self._handle("event"),)

    def _cuEventDestroy(self, event: int) -> None:
        self.live["event"] -= 1

    def _cuEventRecord(self, event: int, stream: int) -> None:
        self.log.append(f"record {event}")

    def _cuEventSynchronize(self, event: int) -> None:
        self.log.append(f"wait {event}")

    def _cuStreamBeginCapture(self, stream: int, mode: str) -> None:
        self._capture = []

    def _cuStreamEndCapture(self, stream: int) -> Any:
        graph = self._handle("graph")
        self._graphs[graph], self._capture = self._capture or [], None
        return (graph,)

    def _cuGraphInstantiate(self, graph: int, flags: int) -> Any:
        executable = self._handle("executable")
        self._graphs[executable] = self._graphs[graph]
        return (executable,)

    def _cuGraphDestroy(self, graph: int) -> None:
        self.live["graph"] -= 1

    def _cuGraphExecDestroy(self, executable: int) -> None:
        self.live["executable"] -= 1

    def _cuGraphUpload(self, executable: int, stream: int) -> None:
        pass

    def _cuGraphLaunch(self, executable: int, stream: int) -> None:
        self.log.append("graph")
        for work in self._graphs[executable]:
            work()

    def _cuModuleUnload(self, module: int) -> None:
        pass

    # -- kernels ------------------------------------------------------------------------------

    def do(self, work: Callable[[], None]) -> None:
        """Run a piece of work now, or keep it in the graph that is being captured."""
        assert hasattr(self._current, "context"), "a launch in a thread without a context"
        if self._capture is not None:
            self._capture.append(work)
        else:
            work()

    def _launch(self, config: Any, function: int, pointers: Any, extra: Any) -> int:
        """The kernels that are launched by name: casts while loading, copies and feeds."""
        name = KERNELS[function]
        count = _COUNTS.get(name, 3)
        words = [int.from_bytes(ctypes.string_at(pointers[i], 8), "little") for i in range(count)]
        if name == "copy_blocks":
            return self._copy_blocks(*config.contents.grid[:2], *words)
        if name == "fetch_inputs":
            return self._fetch_inputs(config.contents.grid[0], *words)
        if name == "copy_words":
            assert config.contents.grid[0] == -(-words[2] // 128)
            self.log.append("words")
            ctypes.memmove(words[1], words[0], 4 * words[2])
            return 0
        if name == "copy_slot":
            return self._copy_slot(config.contents.grid[0], *words)
        if name.startswith("cast"):
            kind: Any = ctypes.c_uint32 if "f32" in name else ctypes.c_uint16
            bits = np.ctypeslib.as_array((kind * words[2]).from_address(words[0]))
            values = bits.view(np.float32 if "f32" in name else np.float16).astype(np.float32)
            rounded = encode(values, "bf16")
            ctypes.memmove(words[1], rounded.ctypes.data, rounded.nbytes)
            return 0
        self._feed_tokens(*words)
        return 0

    def _feed_tokens(self, place: int, tokens: int, count: int) -> None:
        self.log.append("feed")
        ids = np.ctypeslib.as_array((ctypes.c_int32 * count).from_address(place))
        rows = np.flatnonzero(ids <= -2)
        most = int((-2 - ids[rows]).max(initial=0)) + 1
        chosen = np.ctypeslib.as_array((ctypes.c_int32 * most).from_address(tokens))
        ids[rows] = chosen[-2 - ids[rows]]

    def _fetch_inputs(
        self, num_blocks: int, source: int, target: int, table: int, chosen: int, *sizes: int
    ) -> int:
        count, rows, columns = sizes
        self.log.append("fetch")
        pieces = np.ctypeslib.as_array((ctypes.c_int32 * (3 * count)).from_address(table))
        shapes = pieces.reshape(-1, 3).tolist()
        ids, last = shapes[0], min(rows + 1, shapes[-1][1]) * columns
        assert num_blocks == (count - 1) * -(-(rows + 1) // 128) + -(-last // 128)
        for at, entries, pitch in shapes:
            for row in range(min(rows + 1, entries)):
                place = 4 * (at + row * pitch)
                ctypes.memmove(target + place, source + place, 4 * min(columns, pitch))
        if (np.ctypeslib.as_array((ctypes.c_int32 * rows).from_address(target)) <= -2).any():
            self._feed_tokens(target + 4 * ids[0], chosen, min(rows + 1, ids[1]))
        return 0

    def _copy_blocks(
        self, count: int, num_pools: int, pools: int, table: int, pool_bytes: int, size: int
    ) -> int:
        self.log.append("copy_blocks")
        pairs = np.ctypeslib.as_array((ctypes.c_int32 * (2 * count)).from_address(table))
        for source, target in pairs.reshape(-1, 2).tolist():
            for pool in range(pools, pools + num_pools * pool_bytes, pool_bytes):
                ctypes.memmove(pool + target * size, pool + source * size, size)
        return 0

    def _copy_slot(self, num_pools: int, table: int, source: int, target: int) -> int:
        self.log.append("copy_slot")
        pools = np.ctypeslib.as_array((ctypes.c_int64 * (2 * num_pools)).from_address(table))
        for address, size in pools.reshape(-1, 2).tolist():
            if source >> 31:  # −1
                ctypes.memset(address + target * size, 0, size)
            else:
                ctypes.memmove(address + target * size, address + source * size, size)
        return 0


class HostKernels:
    """In place of the table of compiled kernels."""

    on_compile: Any = None
    own: tuple[str, ...] = ()

    def __init__(self, *ignored: object) -> None:
        self.asked: list[str] = []

    def load(self, names: list[str]) -> None:
        self.asked += names

    def __getitem__(self, name: str) -> Any:
        count = _COUNTS.get(name, 3)
        info = SimpleNamespace(
            arguments=_ARGUMENTS[:count], threads=128, dynamic_shared_bytes=0, cluster=1, name=name
        )
        return SimpleNamespace(info=info, module=1, function=KERNELS.index(name))

    def forget(self, names: object) -> None:
        pass

    def close(self) -> None:
        pass


def host_ops(gpu: HostGpu) -> dict[str, Callable[..., Any]]:
    """Every op as its definition, called at each replay on what then lies in memory."""

    def bound(name: str) -> Callable[..., Any]:
        definition = OPS[name]
        signature = inspect.signature(definition)

        def op(queue: Queue, *args: Any, **kwargs: Any) -> None:
            given = signature.bind(*args, **kwargs).arguments

            def work() -> None:
                _run(name, definition, given)

            queue.call(lambda stream: gpu.do(work), given)

        return op

    return {name: bound(name) for name in OPS}


def host_sample(gpu: HostGpu) -> Callable[..., None]:
    """Sampling as its definition."""

    def sample(queue: Queue, *args: DeviceArray, out: DeviceArray) -> None:
        def work() -> None:
            gpu.log.append("sample")
            choose_tokens(*(on_host(array) for array in args), chosen=on_host(out))

        queue.call(lambda stream: gpu.do(work), (args, out))

    return sample


def host_score(gpu: HostGpu) -> Callable[..., None]:
    """Scores as their definition."""

    def score(queue: Queue, *args: DeviceArray, out: DeviceArray) -> None:
        def work() -> None:
            gpu.log.append("score")
            score_tokens(*(on_host(array) for array in args), scores=on_host(out))

        queue.call(lambda stream: gpu.do(work), (args, out))

    return score


def _run(name: str, definition: Callable[..., Any], given: dict[str, Any]) -> None:
    if name == "attention_step":  # what was stored is rounded before it is read
        for part in ("prepare_heads", "attention_prefill"):
            parameters = inspect.signature(OPS[part]).parameters
            _run(part, OPS[part], {key: given[key] for key in parameters if key in given})
        return
    if name == "attention_step_gated":  # what was attended is rounded before it is gated
        parameters = inspect.signature(OPS["attention_step"]).parameters
        _run("attention_step", OPS["attention_step"], {key: given[key] for key in parameters})
        gate, out = given["gate"], given["out"]
        flat = out.reshape(gate.shape)
        _run("sigmoid_gate", OPS["sigmoid_gate"], {"x": flat, "gate": gate, "out": flat})
        return
    if name == "moe_block":
        _run_block(given)
        return
    if name in PRODUCTS:  # the norm is rounded before it is read
        given = dict(given)
        x, norm, eps, normed = (given.pop(key) for key in ("x", "norm", "eps", "normed"))
        _run("rmsnorm", OPS["rmsnorm"], {"x": x, "weight": norm, "eps": eps, "out": normed})
        _run(PRODUCTS[name], OPS[PRODUCTS[name]], {"x": normed, **given})
        return
    held = {key: _Held(key, value) for key, value in given.items()}
    values = {key: item.value for key, item in held.items()}
    if name == "embedding":
        ids = values["ids"]
        values["ids"] = np.maximum(ids, 0)
        definition(**values)
        values["out"][ids < 0] = 0
    else:
        if {"states", "tails"} & set(values):  # sequences of nobody come last
            real = int((values["slots"] >= 0).sum())
            values["slots"] = values["slots"][:real]
            values["cu_rows"] = values["cu_rows"][: real + 1]
        elif "slots" in values and not name.startswith("moe_"):  # padding rows come last
            real = int((values["slots"] >= 0).sum())
            for key in ("q", "k", "v", "slots", "positions", "out"):
                if key in values:
                    values[key] = values[key][:real]
        with np.errstate(all="ignore"):  # padding rows hold anything
            definition(**values)
    for item in held.values():
        item.write()


def _run_block(given: dict[str, Any]) -> None:
    """What was normalised is rounded before experts read it."""
    for part, changed in (("moe_router", {}), ("moe_experts", {"x": given["normed"]})):
        parameters = inspect.signature(OPS[part]).parameters
        found = {key: given[key] for key in parameters if key in given}
        _run(part, OPS[part], found | changed)


class _Held:
    """An argument in host form, and how it goes back."""

    def __init__(self, name: str, value: Any) -> None:
        self.array = value if isinstance(value, DeviceArray) else None
        self.turned = name == "k_pool"
        self.value: Any = value
        if isinstance(value, DeviceMatrix):
            self.value = _matrix(value)
        elif self.array is not None:
            self.stored = on_host(self.array)
            self.before = self._decoded().copy()
            self.value = self.before.copy()
            if self.turned:  # the definition has the tokens innermost
                self.full, self.value = self.value, self.value.swapaxes(2, 3)

    def _decoded(self) -> Array:
        assert self.array is not None
        return decode(self.stored, "bf16") if self.array.dtype == "bfloat16" else self.stored

    def write(self) -> None:
        if self.array is None:
            return
        now = self.full if self.turned else self.value
        changed = now.view(np.uint32) != self.before[: len(now)].view(np.uint32)
        if not changed.any():
            return
        target = self.stored[: len(now)]
        if self.array.dtype == "bfloat16":
            target[changed] = encode(now[changed], "bf16")
        else:
            target[changed] = now[changed]


def on_host(array: DeviceArray) -> Array:
    """A view of a device array's memory; bfloat16 as uint16."""
    kind: Any = np.dtype("u2" if array.dtype == "bfloat16" else array.dtype)
    if not array.size:
        return np.zeros(array.shape, kind)
    extent = sum((n - 1) * s for n, s in zip(array.shape, array.strides, strict=True))
    raw = np.ctypeslib.as_array(
        (ctypes.c_uint8 * (extent + kind.itemsize)).from_address(array.address)
    )
    first = raw[: kind.itemsize].view(kind)
    return np.lib.stride_tricks.as_strided(first, array.shape, array.strides)


def _matrix(matrix: DeviceMatrix) -> HostMatrix:
    data = on_host(matrix.data)
    if matrix.is_quantized:
        values = unit_weights(data, matrix.format, matrix.rows, matrix.cols)
        return HostMatrix("f32", matrix.rows, matrix.cols, values)
    data = np.ascontiguousarray(data).view(np.uint16)
    return HostMatrix("bf16", matrix.rows, matrix.cols, data)


def exact_product(x: Array, weight: HostMatrix) -> Array:
    """x · weightᵀ summed in float64: a row's bits do not depend on the rows beside it."""
    return (x.astype(np.float64) @ dequantize(weight).T.astype(np.float64)).astype(np.float32)
