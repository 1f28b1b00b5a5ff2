"""Runs networks on the CPU: records a step's launches once for each shape and replays them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atlas._native.pool import LaunchList
from atlas.backends.backend import Shapes
from atlas.backends.cpu.compiler import BodyCompiler
from atlas.backends.cpu.device import CpuDevice, Queue
from atlas.backends.cpu.pack import PackedMatrix, pack
from atlas.backends.cpu.target import cpu_target
from atlas.cache.kv import KvPools, allocate_pools
from atlas.cache.recurrent import RecurrentPools, SlotCounts, allocate_recurrent
from atlas.config import ModelConfig
from atlas.layers.network import Network, Replay
from atlas.layers.step import Array, StepBuffers, StepShape, allocate
from atlas.layers.translation_step import TranslationBuffers, allocate_translation
from atlas.model.step_result import FinishedStep, StepResult
from atlas.ops.blocks import HostMatrix
from atlas.ops.select import bind, implementations, in_parts, takes_queue, with_queue

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Sweep = Network | Replay

_RECORDED = 64  # shapes kept; a list is about 60 KB for 30 layers


class CpuRuntime:
    """The backend's side of a model.

    Attributes
    ----------
    functions : dict
        Every op's implementation by name; recorded lists call these.
    ops : namespace
        The vocabulary bound to a queue that runs at once.
    recurrence_chunk : int
        Positions at whose multiples a prompt with recurrent layers may be split; 1: anywhere.
    has_two_phases : bool
        Whether a prompt can run layer by layer, each recurrence over all of it at once.
    """

    name = "cpu"
    kind = "eager"
    kinds = ("eager",)
    batch_sizes: tuple[int, ...] = ()  # no shape serves others: what is common is recorded
    prompt_sizes: tuple[int, ...] = ()
    promises = (
        "results do not depend on the number of threads",
        "a warm prefix cache gives a cold one's bits",
    )
    samples = False  # tokens other than the greedy ones are the samplers' choice
    tail_least = 0  # a prompt's time is its tokens' products
    gains_by_feed = False  # a step runs in the thread that plans the next one
    recurrence_chunk = 1
    has_two_phases = True

    def __init__(self, threads: int, on_compile: Callable[[str], None] | None = None) -> None:
        self.device = CpuDevice(threads, on_compile)
        self.functions = implementations("cpu")
        self._builtin = dict(self.functions)
        self.replaced: dict[str, Callable[..., Any]] = {}
        self.ops = bind(self.functions, Queue(self.device))
        self._recorded: OrderedDict[tuple[Sweep, StepShape], LaunchList] = OrderedDict()

    @property
    def fingerprint(self) -> str:
        """What a result's bits depend on besides the model: the instruction set."""
        return f"cpu-{cpu_target().level}"

    @property
    def words(self) -> str:
        """The device, for people."""
        return f"{self.fingerprint}, {self.device.threads} threads"

    @property
    def host_compiler(self) -> BodyCompiler:
        """Compiles the bodies that run on the host whatever the backend (sampling)."""
        return self.device.compiler

    def pools(self, config: ModelConfig, num_blocks: int, kv_dtype: str) -> KvPools:
        """The KV pools, zeroed."""
        return allocate_pools(config, num_blocks, kv_dtype)

    def recurrent_pools(self, config: ModelConfig, counts: SlotCounts) -> RecurrentPools | None:
        """The pools of recurrent state, zeroed; None without recurrent layers."""
        return allocate_recurrent(config, counts)

    def buffers(self, shapes: Shapes) -> Any:
        """A step's buffers, zeroed; those of an encoder-decoder where the shapes are its own."""
        return allocate_translation(shapes) if "source_tables" in shapes else allocate(shapes)

    def place(self, values: Array) -> Array:
        """The values themselves: bodies read them where they are."""
        return values

    def pack(self, matrices: Sequence[HostMatrix], groups: int = 1) -> PackedMatrix:
        """Repack weights for the bodies."""
        return pack(matrices, groups)

    def prepare(self, network: Network, buffers: StepBuffers, shapes: Sequence[StepShape]) -> None:
        """Load, or compile, the bodies that steps of these shapes and greedy choice run.

        Done when a model is loaded, so that compiling shows in its progress and no request waits.
        """
        for shape in shapes:
            self._list(network, buffers, shape)
        self.device.compiler.address("argmax.argmax")

    def run(self, network: Sweep, buffers: StepBuffers, shape: StepShape) -> None:
        """One sweep of ``network`` over the front of ``buffers``."""
        if any(not takes_queue(function) for function in self.replaced.values()):
            # A function of the user's is called between the bodies: nothing can be recorded.
            network.forward(bind(self.functions, Queue(self.device)), buffers.view(shape))
            return
        self.device.pool.run(self._list(network, buffers, shape))

    def _list(self, network: Sweep, buffers: StepBuffers, shape: StepShape) -> LaunchList:
        """The launches of a step of this shape, recorded at its first use."""
        key = network, shape
        launches = self._recorded.get(key)
        if launches is None:
            launches = LaunchList()
            network.forward(bind(self.functions, Queue(self.device, launches)), buffers.view(shape))
            self._recorded[key] = launches
            if len(self._recorded) > _RECORDED:
                self._recorded.popitem(last=False)
        else:
            self._recorded.move_to_end(key)
        return launches

    def fault(self) -> None:
        """Nothing breaks a CPU for good."""
        return

    def inputs(self, buffers: StepBuffers) -> StepBuffers:
        """Where a step's integers are written: the buffers themselves."""
        return buffers

    def logits_written(self, shape: StepShape) -> int:
        """Rows of the arena that a step of this shape writes."""
        return shape.logits

    def feed(self, inputs: StepBuffers, rows: Ints, sources: Ints, before: StepResult) -> None:
        """Let ``rows`` take the tokens that the step before chose for its logits rows."""
        inputs.token_ids[rows] = before.tokens()[sources]

    def result(
        self, buffers: StepBuffers, count: int, *, wants_tokens: bool, host_rows: Sequence[int]
    ) -> StepResult:
        """What the step that ran has chosen."""
        tokens = self.greedy(buffers, 0, count) if wants_tokens and count else None
        return FinishedStep(tokens, buffers.logits[:count], host_rows)

    def greedy(self, buffers: StepBuffers, first: int, count: int) -> Ints:
        """Greedy id of arena rows from ``first`` on; −1 marks a row that is not finite."""
        out = np.empty(count, np.int32)
        self.ops.argmax(buffers.logits[first : first + count], out=out)
        return out

    def top_candidates(
        self, buffers: TranslationBuffers, rows: int, k: int, banned: Ints, cu_banned: Ints
    ) -> tuple[Ints, Floats, Floats]:
        """The op's ids, values and totals of arena rows 0 … rows − 1."""
        ids, values = np.empty((rows, k), np.int32), np.empty((rows, k), np.float32)
        totals = np.empty(rows, np.float32)
        self.ops.top_candidates(
            buffers.logits[:rows], banned, cu_banned, ids=ids, values=values, totals=totals
        )
        return ids, values, totals

    def to_host(self, array: Array) -> Array:
        """The array itself, which is in host memory."""
        return array

    stream_handle = 0

    def synchronize(self) -> None:
        """Nothing runs once a call has returned."""

    def read_bytes(self, array: Array, starts: Sequence[int], count: int) -> Iterator[Array]:
        """``count`` bytes of a weight array from each of ``starts`` on."""
        data = array.reshape(-1).view(np.uint8)
        return (data[start : start + count] for start in starts)

    def select(self, kind: str, replaced: Mapping[str, Callable[..., Any]]) -> None:
        """Run these functions in place of ops from the next step on."""
        self.replaced = dict(replaced)
        self.functions.clear()
        self.functions |= self._builtin
        for name, function in replaced.items():
            self.functions[name] = with_queue(function)
        self.functions |= in_parts(self.functions, replaced)
        self.ops = bind(self.functions, Queue(self.device))
        self.forget_recorded()

    def forget_recorded(self) -> None:
        """Drop every recorded list (ops were replaced)."""
        self._recorded.clear()

    def close(self) -> None:
        """End the threads; idempotent."""
        self.device.close()
        self._recorded.clear()
