"""Runs networks on the CPU: records a step's launches once for each shape and replays them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from atlas._native.pool import LaunchList
from atlas.backends.cpu.device import CpuDevice, Queue
from atlas.backends.cpu.pack import PackedMatrix, pack
from atlas.backends.cpu.target import cpu_target
from atlas.layers.network import Network, Replay
from atlas.layers.step import StepBuffers, StepShape
from atlas.ops.blocks import HostMatrix
from atlas.ops.select import bind, implementations

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
    """

    name = "cpu"
    recurrence_chunk = 1

    def __init__(self, threads: int, on_compile: Callable[[str], None] | None = None) -> None:
        self.device = CpuDevice(threads, on_compile)
        self.functions = implementations("cpu")
        self.ops = bind(self.functions, Queue(self.device))
        self._recorded: OrderedDict[tuple[Sweep, StepShape], LaunchList] = OrderedDict()

    @property
    def fingerprint(self) -> str:
        """What a result's bits depend on besides the model: the instruction set."""
        return f"cpu-{cpu_target().level}"

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

    def forget_recorded(self) -> None:
        """Drop every recorded list (ops were replaced)."""
        self._recorded.clear()

    def close(self) -> None:
        """End the threads; idempotent."""
        self.device.close()
        self._recorded.clear()
