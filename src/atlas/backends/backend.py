"""What loading a model asks of a backend, and choosing one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from atlas.errors import InvalidArgumentError

if TYPE_CHECKING:
    from atlas.cache.recurrent import SlotCounts
    from atlas.config import ModelConfig
    from atlas.layers.network import Network
    from atlas.layers.step import StepBuffers, StepShape

DeviceName = Literal["cpu", "cuda"]
Shapes = Mapping[str, tuple[int, ...]]


class Backend(Protocol):
    """Formats, sizes and memory of a backend, before anything is allocated.

    Attributes
    ----------
    name : str
        "cpu" or "cuda".
    step_rows : int
        Rows that a step has room for whatever the options ask.
    piece_rows : int
        Rows that a prefill driven by hand runs at a time.
    kv_dtypes : tuple of str
        Types that the KV cache may have.
    dtypes : tuple of str
        Of LoadOptions' ``dtype``, what is offered.
    """

    name: str
    step_rows: int
    piece_rows: int
    kv_dtypes: tuple[str, ...]
    dtypes: tuple[str, ...]

    def require_support(self, config: ModelConfig) -> None:
        """Raise CapabilityError where no kernel takes the model's shapes; which, in words."""
        ...

    def matrix_format(self, format: str, cols: int, groups: int) -> str:
        """What a stacked matrix of a file's format is kept as."""
        ...

    def matrix_bytes(self, format: str, rows: int, cols: int) -> int:
        """Bytes of a matrix kept in ``format``."""
        ...

    def vector_bytes(self, length: int) -> int:
        """Bytes of a norm's or a bias' float32 vector."""
        ...

    def table_bytes(self, length: int) -> int:
        """Bytes of a table computed at load (RoPE), where the plan counts them as weights."""
        ...

    def auto_kv_dtype(self, *, widened: bool, quantized: bool) -> str:
        """The KV cache's type where the options leave it open."""
        ...

    def kv_block_bytes(self, config: ModelConfig, kv_dtype: str) -> int:
        """Bytes of one block over all layers."""
        ...

    def recurrent_bytes(self, config: ModelConfig, counts: SlotCounts) -> int:
        """Bytes of the pools of recurrent state."""
        ...

    def joins_shared_expert(self, config: ModelConfig, formats: Mapping[str, str]) -> bool:
        """Whether a shared expert runs as one of a row's choices; ``formats`` are in memory."""
        ...

    def buffer_bytes(self, config: ModelConfig, shapes: Shapes) -> int:
        """Bytes of a step's buffers and of whatever else a model takes."""
        ...

    def free_memory(self) -> int:
        """Bytes that can be allocated now."""
        ...

    def open(
        self, config: ModelConfig, plan: Any, on_compile: Callable[[str], None] | None
    ) -> Runtime:
        """Take the device (threads, or a GPU's context) for one model.

        Parameters
        ----------
        config : ModelConfig
        plan : LoadPlan
        on_compile : callable, optional
            Called with the name of a kernel about to be compiled.
        """
        ...

    def close(self) -> None:
        """Let go of the device where ``open`` was not reached; idempotent."""
        ...


class Runtime(Protocol):
    """A backend's side of one model: places weights, then runs steps."""

    @property
    def fingerprint(self) -> str:
        """What a result's bits depend on besides the model."""
        ...

    def pools(self, config: ModelConfig, num_blocks: int, kv_dtype: str) -> Any:
        """The KV pools, zeroed; what ``cache.kv.KvPools`` offers."""
        ...

    def recurrent_pools(self, config: ModelConfig, counts: SlotCounts) -> Any:
        """The pools of recurrent state, zeroed: what ``cache.recurrent.RecurrentPools`` offers.

        None without recurrent layers.
        """
        ...

    def buffers(self, shapes: Shapes) -> Any:
        """A step's buffers, zeroed: ``StepBuffers``, or ``TranslationBuffers`` by their shapes."""
        ...

    def pack(self, matrices: Sequence[Any], groups: int = 1) -> Any:
        """Stack matrices of one format and keep them as the kernels want them."""
        ...

    def place(self, values: Any) -> Any:
        """A float32 array where the kernels read it."""
        ...

    def prepare(self, network: Network, buffers: StepBuffers, shapes: Sequence[StepShape]) -> None:
        """Load, or compile, what steps of these shapes run, so that no request waits for it."""
        ...

    def run(self, network: Network, buffers: StepBuffers, shape: StepShape) -> None:
        """One sweep of ``network`` over the front of ``buffers``."""
        ...

    def read_bytes(self, array: Any, starts: Sequence[int], count: int) -> Iterable[Any]:
        """``count`` bytes of a weight array from each of ``starts`` on."""
        ...

    def close(self) -> None:
        """End everything; idempotent."""
        ...


def choose_device(
    device: str, *, dtype: str = "auto", kv_dtype: str = "auto"
) -> tuple[DeviceName, str]:
    """The device that a name means, and why.

    ``auto`` is ``$ATLAS_DEVICE`` if that is set; else a GPU where one can be used and offers what
    is asked, else the CPU. A broken CUDA installation is a reason, not an error; it never touches
    the CPU.
    """
    if device == "auto" and (named := os.environ.get("ATLAS_DEVICE")):
        if named not in ("cpu", "cuda"):
            raise InvalidArgumentError(f"ATLAS_DEVICE is {named!r}; allowed: cpu, cuda")
        return cast(DeviceName, named), "ATLAS_DEVICE"
    if device == "cpu":
        return "cpu", "asked for"
    if device == "cuda":
        return "cuda", "asked for"
    if device != "auto":
        raise InvalidArgumentError(f"device is {device!r}; allowed: 'auto', 'cpu', 'cuda'")
    if dtype != "auto" or kv_dtype in ("float32", "float16"):
        return "cpu", f"dtype {dtype!r} with kv_dtype {kv_dtype!r} is offered there"
    from atlas.backends.cuda.probe import find_gpu

    found = find_gpu()
    return ("cuda", found.words) if found.usable else ("cpu", found.words)


def backend_named(device: str, *, threads: int = 1, stream: object = None) -> Backend:
    """The backend for a device.

    Raises
    ------
    InvalidArgumentError
        The name is unknown, or a stream is given for the CPU.
    """
    if device == "cpu":
        if stream is not None:
            raise InvalidArgumentError(f"stream is {stream!r}; allowed on the CPU: None")
        from atlas.backends.cpu.backend import CpuBackend

        return CpuBackend(threads)
    if device == "cuda":
        from atlas.backends.cuda.backend import CudaBackend

        return CudaBackend(stream=stream)
    raise InvalidArgumentError(f"device is {device!r}; allowed: 'cpu', 'cuda'")
