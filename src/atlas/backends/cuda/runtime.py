"""Runs networks on a GPU: lists recorded once for each bucketed shape, decode lists as graphs."""

from __future__ import annotations

import inspect
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from atlas_kernels.recurrence_shapes import CHUNK
from numpy.typing import NDArray

from atlas.backends.backend import Shapes
from atlas.backends.cpu.compiler import BodyCompiler
from atlas.backends.cuda.array import DeviceArray
from atlas.backends.cuda.block_copies import BlockCopies
from atlas.backends.cuda.buckets import PROMPT_SIZES, bucket
from atlas.backends.cuda.buffers import buffer_bytes, read_array, take_rows
from atlas.backends.cuda.device import CudaDevice
from atlas.backends.cuda.fetch import InputFetch
from atlas.backends.cuda.graph import CapturedGraph
from atlas.backends.cuda.inputs import InputLayout, InputRegion, fed, is_translation
from atlas.backends.cuda.launch import KernelLaunch, Queue, Recording
from atlas.backends.cuda.loading import Loader
from atlas.backends.cuda.memory import Arena, Workspace
from atlas.backends.cuda.pools import CudaKvPools
from atlas.backends.cuda.products import open_products
from atlas.backends.cuda.readback import ReadBacks, StepReadBack
from atlas.backends.cuda.recurrent_pools import CudaRecurrentPools
from atlas.backends.cuda.sampling import Sampling
from atlas.backends.cuda.small_copies import SmallCopies
from atlas.backends.cuda.teardown import OwnStream, RecordedStep, Teardown
from atlas.errors import AtlasError
from atlas.layers.step import StepBuffers
from atlas.model.records import PADDED_BATCH_SIZES
from atlas.ops.blocks import HostMatrix
from atlas.ops.select import bind, implementations, in_parts, takes_queue

if TYPE_CHECKING:
    from atlas._native.cuda_launch import CudaLaunchList
    from atlas.cache.recurrent import SlotCounts
    from atlas.config import ModelConfig
    from atlas.model.circuit import ForwardKind
    from atlas.model.step_result import StepResult
    from atlas.sampling_table import Draw, SamplingTable

Ints = NDArray[np.int32]
SCRATCH_BYTES = 128 << 20
ZEROED_BYTES = 1 << 20
_RECORDED = 128  # shapes kept
_FEED_ROWS = 128  # that a thread block of the feed kernel takes


class CudaRuntime:
    """A GPU's side of one model.

    Parameters
    ----------
    device : CudaDevice
        Is closed with the runtime.
    weight_bytes : int
        Of the arena that holds all weights.

    Attributes
    ----------
    functions : dict
        Every op's implementation by name; recorded lists call these.
    kind : {"graphed", "eager"}
        How steps that only decode run.
    """

    name = "cuda"
    samples = True
    gains_by_feed = True
    tail_least = 256
    """Prompt tokens that a sweep over the weights computes in the time that it takes anyway: for
    fewer, a snapshot of recurrent states is not worth the second sweep that it costs."""
    recurrence_chunk = CHUNK
    has_two_phases = False  # a prompt's recurrence goes on from piece to piece, with the same bits
    kinds: tuple[ForwardKind, ...] = ("graphed", "eager")
    batch_sizes = PADDED_BATCH_SIZES
    prompt_sizes = PROMPT_SIZES
    promises = (
        "eager and graphed steps have the same bits",
        "a norm that a product's kernel does itself, for one row, has the bits of its own kernel",
        "cached blocks that prompt tokens made serve prompts bitwise; those that generated tokens "
        "made (reuse_generated) change bits",
    )

    def __init__(self, device: CudaDevice, weight_bytes: int, scratch_bytes: int) -> None:
        self.device = device
        self.kind: ForwardKind = "graphed"
        self._teardown = Teardown(device)
        self._recorded: OrderedDict[tuple[object, object], RecordedStep]
        self._recorded = self._teardown.recorded
        self._regions: list[InputRegion] = []
        self._turn = 0
        self._feeds: dict[int, CudaLaunchList] = {}  # by number of rows
        self._fetch: InputFetch | None = None
        self._copies = SmallCopies(device)
        # Kernels that no list holds.
        self._by_name = {"feed_tokens", BlockCopies.kernel, InputFetch.kernel, SmallCopies.kernel}
        # An engine that is dropped gives its memory back too; at exit the process does.
        weakref.finalize(self, self._teardown.close).atexit = False
        try:
            self._weights = self._own(Arena(device, weight_bytes, "the weights"))
            self.workspace = self._own(Workspace(device, scratch_bytes, ZEROED_BYTES))
            self._loader = self._own(Loader(device, self._weights))
            self._readbacks: ReadBacks
            self._capture_stream = self._own(OwnStream(device)).handle
            self.functions = implementations("cuda")
            self._builtin = dict(self.functions)
            self.replaced: dict[str, Callable[..., Any]] = {}
            device.products = open_products(device)
        except BaseException:
            self.close()
            raise

    def _own(self, part: Any) -> Any:
        self._teardown.parts.append(part)
        return part

    @property
    def fingerprint(self) -> str:
        """What a result's bits depend on besides the model."""
        from atlas_kernels.cache import source_hash

        return f"cuda-{self.device.arch}-{source_hash()[:12]}-bf16"

    @property
    def words(self) -> str:
        """The device, for people."""
        return f"{self.device.name}, {self.fingerprint}"

    @property
    def host_compiler(self) -> BodyCompiler:
        """Compiles the bodies that run on the host whatever the backend (sampling)."""
        return BodyCompiler(self.device.kernels.on_compile)

    def fault(self) -> AtlasError | None:
        """What broke the device for good."""
        return self.device.driver.failure

    # -- loading ------------------------------------------------------------------------------

    def pools(self, config: ModelConfig, num_blocks: int, kv_dtype: str) -> CudaKvPools:
        """The KV pools, zeroed."""
        pools: CudaKvPools = self._own(CudaKvPools(self.device, config, num_blocks))
        return pools

    def recurrent_pools(self, config: ModelConfig, counts: SlotCounts) -> CudaRecurrentPools | None:
        """The pools of recurrent state, zeroed; None without recurrent layers."""
        if not config.recurrent_layers:
            return None
        pools: CudaRecurrentPools = self._own(CudaRecurrentPools(self.device, config, counts))
        self._by_name.add(pools.kernel)
        return pools

    def buffers(self, shapes: Shapes) -> Any:
        """A step's buffers, zeroed, with two pinned regions for its integers."""
        arrays, _ = self._allocate(shapes)
        return StepBuffers(**arrays)

    def _allocate(self, shapes: Shapes) -> tuple[dict[str, Any], Arena]:
        """The buffers by name, and the arena that holds them."""
        device = self.device
        layout = InputLayout(shapes)
        arena = self._own(Arena(device, buffer_bytes(shapes), "buffers"))
        self._mirror = arena.take((layout.nbytes,), "uint8", zero=True)
        self._input_layout = layout
        arrays: dict[str, Any] = dict(layout.device_views(self._mirror))
        for name, shape in shapes.items():
            if name not in layout.shapes:
                arrays[name] = take_rows(arena, name, shape)
        max_logits = shapes["logits"][0]
        self._chosen = arena.take((max_logits,), "int32", zero=True)
        self._regions = [self._own(InputRegion(device, layout)) for _ in range(2)]
        copies = self._copies
        self._readbacks = self._own(ReadBacks(device, copies, arrays["logits"], self._chosen))
        if not is_translation(shapes):
            self._fetch = InputFetch(device, arena, layout, self._mirror, self._chosen)
        self._limits = shapes["token_ids"][0], shapes["block_tables"][0], max_logits
        self._sampling = self._own(
            Sampling(device, copies, arena, shapes["block_tables"][0], arrays, self._chosen)
        )
        self.ops = bind(self.functions, Queue(device, self.workspace))
        return arrays, arena

    def pack(self, matrices: Sequence[HostMatrix], groups: int = 1) -> Any:
        """Stack matrices of one format on the device."""
        return self._loader.pack(matrices, groups)

    def place(self, values: Any) -> DeviceArray:
        """A float32 array on the device."""
        placed: DeviceArray = self._loader.place(values)
        return placed

    def prepare(self, network: Any, buffers: Any, shapes: Sequence[Any]) -> None:
        """Record steps of these shapes, which loads their kernels, and capture their graphs."""
        self._loader.close()
        self.device.enter()
        padded = dict.fromkeys(self.padded(shape) for shape in shapes)
        recordings = {
            shape: self._record(network, buffers, shape)
            for shape in padded
            if (network, shape) not in self._recorded
        }
        names = {
            launch.kernel
            for recording in recordings.values()
            for launch in recording.launches
            if isinstance(launch, KernelLaunch)
        }
        self.device.kernels.load(sorted(names | self._by_name | set(self._sampling.kernels)))
        for shape, recording in recordings.items():
            self._keep(network, shape, recording)
        self.device.synchronize()

    # -- steps --------------------------------------------------------------------------------

    def padded(self, shape: Any) -> Any:
        """The shape under which a step of this one runs."""
        return bucket(shape, *self._limits)

    def logits_written(self, shape: Any) -> int:
        """Rows of the arena that a step of this shape writes."""
        written: int = self.padded(shape).logits
        return written

    def inputs(self, buffers: Any) -> Any:
        """Where the next step's integers are written: pinned memory that no copy reads now."""
        self.device.enter()
        self._turn = (self._turn + 1) % len(self._regions)
        region = self._regions[self._turn]
        self.device.wait(region.event)
        region.num_fed = 0
        self._sampling.fill(self._turn, ())
        return region.arrays

    def feed(self, inputs: Any, rows: Ints, sources: Ints, before: StepResult) -> None:
        """Let ``rows`` take the tokens that the step before chose for its logits rows.

        They are on the device when the step begins; the host does not wait for them.
        """
        region = self._regions[self._turn]
        inputs.token_ids[rows] = fed(sources)
        region.num_fed = int(rows[-1]) + 1

    def draw(self, draws: Sequence[Draw]) -> None:
        """Choose these tokens of the next step by their requests' parameters."""
        self._sampling.fill(self._turn, draws)

    def run(self, network: Any, buffers: Any, shape: Any) -> None:
        """Put one sweep of ``network`` on the stream; does not wait."""
        device, region, padded = self.device, self._regions[self._turn], self.padded(shape)
        step = self._step(network, buffers, padded)
        nbytes = self._pad(region, shape, padded)
        if step.graph is None or self._fetch is None or not self._fetch.run(region, padded):
            device.copy_in(self._mirror.address, region.pinned.address, nbytes)
            if region.num_fed:
                device.run(self._feeding(buffers, region.num_fed))
        table = self._sampling.copy_in(self._turn)
        if step.graph is not None:
            step.graph.launch()
        else:
            device.run(step.launches)
        self._choose(buffers, shape, table)
        # Not where the region has been read, as the step would then begin after the record.
        device.record(region.event)

    def _pad(self, region: InputRegion, shape: Any, padded: Any) -> int:
        """Fill what the padded shape has more; the bytes of integers that are copied."""
        region.pad(shape, padded)
        return self._input_layout.used_bytes(padded.seqs)

    def _choose(self, buffers: Any, shape: Any, table: SamplingTable) -> None:
        """Draw behind a sweep's greedy choice, and start to copy out what was chosen."""
        self._sampling.run(table, self.workspace)
        if shape.logits:
            self._readbacks.begin(shape.first_logits, shape.logits)

    def _feeding(self, buffers: StepBuffers, rows: int) -> CudaLaunchList:
        """The launch that puts tokens of the step before into the first ``rows`` rows."""
        if rows not in self._feeds:
            recording = Recording()
            args: tuple[Any, ...] = (buffers.token_ids, self._chosen, rows)
            queue = Queue(self.device, self.workspace, recording)
            queue.launch("feed_tokens", (-(-rows // _FEED_ROWS), 1), args)
            self._feeds[rows] = recording.compile(self.device)
        return self._feeds[rows]

    def launch(self, kernel: str, grid: tuple[int, int], args: tuple[Any, ...]) -> None:
        """Launch one kernel now, on the stream."""
        Queue(self.device, self.workspace).launch(kernel, grid, args)

    def _step(self, network: Any, buffers: Any, padded: Any) -> RecordedStep:
        """The launches of a padded shape, recorded at its first use."""
        step = self._recorded.get((network, padded))
        if step is None:
            return self._keep(network, padded, self._record(network, buffers, padded))
        self._recorded.move_to_end((network, padded))
        return step

    def _record(self, network: Any, buffers: Any, padded: Any) -> Recording:
        recording = Recording()
        ops = bind(self.functions, Queue(self.device, self.workspace, recording))
        views = buffers.view(padded)
        network.forward(ops, views)
        if padded.logits:
            last = padded.first_logits + padded.logits
            ops.argmax(views.logits, out=self._chosen[padded.first_logits : last])
        return recording

    def _is_decode(self, padded: Any) -> bool:
        """Whether a shape is worth a graph."""
        decodes: bool = padded.rows == padded.step_rows
        return decodes

    def _keep(self, network: Any, padded: Any, recording: Recording) -> RecordedStep:
        step = RecordedStep(recording.compile(self.device))
        if self.kind == "graphed" and self._is_decode(padded):
            step.graph = CapturedGraph(self.device, step.launches, self._capture_stream)
        self._recorded[network, padded] = step
        if len(self._recorded) > _RECORDED:
            _, oldest = self._recorded.popitem(last=False)
            oldest.close()
        return step

    # -- results ------------------------------------------------------------------------------

    def result(
        self, buffers: Any, count: int, *, wants_tokens: bool, host_rows: Sequence[int]
    ) -> StepReadBack:
        """What the step that was launched last will have chosen; does not wait."""
        found = self._readbacks.result(count, host_rows)
        found.scores = self._sampling.scores(self._turn)
        return found

    def greedy(self, buffers: Any, first: int, count: int) -> Ints:
        """Greedy id of arena rows from ``first`` on; −1 marks a row that is not finite."""
        self.device.enter()
        return self._readbacks.tokens(first, count)

    def to_host(self, array: DeviceArray) -> NDArray[Any]:
        """A copy in host memory, once the work before it is done; bfloat16 as float32."""
        self.device.enter()
        return read_array(self.device, array)

    @property
    def stream_handle(self) -> int:
        """The ``CUstream`` on which steps run."""
        return self.device.stream

    def synchronize(self) -> None:
        """Wait for all work."""
        self.device.enter()
        self.device.synchronize()

    def read_bytes(
        self, array: DeviceArray, starts: Sequence[int], count: int
    ) -> Iterator[NDArray[Any]]:
        """``count`` bytes of a weight array from each of ``starts`` on."""
        self.device.enter()
        for start in starts:
            piece = np.empty(count, np.uint8)
            self.device.copy_out(piece.ctypes.data, array.address + start, count)
            self.device.synchronize()
            yield piece

    # -- circuit and end ----------------------------------------------------------------------

    def select(self, kind: ForwardKind, replaced: Mapping[str, Callable[..., Any]]) -> None:
        """Run decode steps in this way, and these functions in place of ops, from now on."""
        self.kind = kind
        self.replaced = dict(replaced)
        self.functions.clear()
        self.functions |= self._builtin
        for name, function in replaced.items():
            self.functions[name] = function if takes_queue(function) else _called(function)
        self.functions |= in_parts(self.functions, replaced)
        self.ops = bind(self.functions, Queue(self.device, self.workspace))
        self.forget_recorded()

    def forget_recorded(self) -> None:
        """Drop every recorded list and graph (ops were replaced), and the user's own kernels."""
        self.device.enter()
        self.device.synchronize()
        while self._recorded:
            _, step = self._recorded.popitem()
            step.close()
        self.device.kernels.forget(self.device.kernels.own)

    def close(self) -> None:
        """Graphs, buffers, pools, weights, kernels, stream, in this order; idempotent."""
        self._teardown.close()


def _called(function: Callable[..., Any]) -> Callable[..., Any]:
    """A user's replacement of an op that is called at every replay."""
    wants_stream = "stream" in inspect.signature(function).parameters

    def op(queue: Queue, *args: Any, **kwargs: Any) -> None:
        def call(stream: int) -> None:
            function(*args, **kwargs, **({"stream": stream} if wants_stream else {}))

        queue.call(call)

    return op
