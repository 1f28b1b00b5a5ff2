"""A GPU as loading a model sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from atlas.backends.backend import Shapes
from atlas.backends.cuda import gated_delta, mamba2
from atlas.backends.cuda.block_copies import COPY_BYTES
from atlas.backends.cuda.buffers import buffer_bytes
from atlas.backends.cuda.device import CudaDevice
from atlas.backends.cuda.loading import Loader
from atlas.backends.cuda.memory import aligned
from atlas.backends.cuda.offers import joins_shared_expert, require_support
from atlas.backends.cuda.pack import MatrixLayout, layout
from atlas.backends.cuda.pools import pool_bytes
from atlas.backends.cuda.recurrent import plan_bytes
from atlas.backends.cuda.recurrent_pools import recurrent_pool_bytes
from atlas.backends.cuda.runtime import SCRATCH_BYTES, ZEROED_BYTES, CudaRuntime
from atlas.backends.cuda.translation import TranslatorRuntime

if TYPE_CHECKING:
    from atlas.cache.recurrent import SlotCounts
    from atlas.config import ModelConfig

RESERVE_BYTES = 512 << 20
"""Left free beside the plan: kernels' code, graphs, tensor maps, what libraries take."""
_ALIGNMENT_SLACK = 64 << 10  # of arrays that begin at multiples of 256


@dataclass(frozen=True, slots=True)
class _Stored:
    """A matrix of a file, as layouts see it."""

    format: str
    rows: int
    cols: int


class CudaBackend:
    """Weights as the file has them or in bfloat16, activations and KV in bfloat16, arenas.

    Parameters
    ----------
    stream : object, optional
        Of another library, to run on.
    """

    name = "cuda"
    step_rows = 2048  # enough to keep the tensor cores busy
    piece_rows = 2048
    kv_dtypes: tuple[str, ...] = ("bfloat16",)
    dtypes: tuple[str, ...] = ("auto",)

    def __init__(self, stream: object = None) -> None:
        self._stream = stream
        self._device: CudaDevice | None = None

    def require_support(self, config: ModelConfig) -> None:
        require_support(config)

    def matrix_format(self, format: str, cols: int, groups: int) -> str:
        return layout([_Stored(format, groups, cols)], groups).format

    def matrix_bytes(self, format: str, rows: int, cols: int) -> int:
        return aligned(MatrixLayout(format, format, rows, cols).nbytes)

    def vector_bytes(self, length: int) -> int:
        return aligned(4 * length)

    def table_bytes(self, length: int) -> int:
        return aligned(4 * length)

    def auto_kv_dtype(self, *, widened: bool, quantized: bool) -> str:
        return "bfloat16"

    def kv_block_bytes(self, config: ModelConfig, kv_dtype: str) -> int:
        return pool_bytes(config, 1)

    def recurrent_bytes(self, config: ModelConfig, counts: SlotCounts) -> int:
        return recurrent_pool_bytes(config, counts)

    def joins_shared_expert(self, config: ModelConfig, formats: Mapping[str, str]) -> bool:
        return joins_shared_expert(config, formats)

    def buffer_bytes(self, config: ModelConfig, shapes: Shapes) -> int:
        workspace = aligned(_scratch_bytes(config, shapes)) + aligned(ZEROED_BYTES) + COPY_BYTES
        return buffer_bytes(shapes) + workspace + Loader.device_bytes() + _ALIGNMENT_SLACK

    def free_memory(self) -> int:
        free, _ = self._opened().memory_info()
        return max(0, free - RESERVE_BYTES)

    def open(
        self, config: ModelConfig, plan: Any, on_compile: Callable[[str], None] | None
    ) -> CudaRuntime:
        device = self._opened()
        self._device = None  # the runtime closes it
        device.kernels.on_compile = on_compile
        kind = TranslatorRuntime if plan.max_source_len else CudaRuntime
        return kind(device, plan.memory.weights, _scratch_bytes(config, plan.buffer_shapes))

    def close(self) -> None:
        """Give the device back where no runtime has taken it over; idempotent."""
        device, self._device = self._device, None
        if device is not None:
            device.close()

    def _opened(self) -> CudaDevice:
        if self._device is None:
            self._device = CudaDevice(stream=self._stream)
        return self._device


def _scratch_bytes(config: ModelConfig, shapes: Shapes) -> int:
    """Scratch of a step; the chunks of a recurrent layer's prompts may need more than the rest."""
    needed, delta, mamba = [SCRATCH_BYTES], config.gated_delta, config.mamba2
    if delta is not None or mamba is not None:
        (rows,), (seqs,) = shapes["token_ids"], shapes["state_slots"]
        if delta is not None:
            heads = (delta.num_key_heads, delta.num_value_heads, delta.key_dim)
            needed.append(plan_bytes(rows, seqs, gated_delta.chunk_parts(*heads)))
        if mamba is not None:
            sizes = (mamba.num_heads, mamba.num_groups, mamba.head_dim, mamba.state_size)
            needed.append(plan_bytes(rows, seqs, mamba2.chunk_parts(*sizes)))
    return max(needed)
