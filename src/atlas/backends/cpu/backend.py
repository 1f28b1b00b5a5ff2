"""The CPU as loading a model sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import TYPE_CHECKING, Any

from atlas.backends.backend import Shapes
from atlas.backends.cpu.pack import LANES, packed_format, tile_bytes
from atlas.backends.cpu.runtime import CpuRuntime
from atlas.backends.cpu.target import simd_level
from atlas.cache.kv import kv_block_bytes
from atlas.cache.recurrent import recurrent_bytes
from atlas.model import memory

if TYPE_CHECKING:
    from atlas.cache.recurrent import SlotCounts
    from atlas.config import ModelConfig


class CpuBackend:
    """Weights in tiles of 16 rows, activations in float32, memory that the system lends lazily."""

    name = "cpu"
    step_rows = 1
    piece_rows = 128  # more are no faster, and fewer pages of the buffers are touched
    kv_dtypes: tuple[str, ...] = ("float32", "float16")
    dtypes: tuple[str, ...] = ("auto", "float32")

    def __init__(self, threads: int) -> None:
        self.threads = threads

    def require_support(self, config: ModelConfig) -> None:
        """Every model runs here."""

    def matrix_format(self, format: str, cols: int, groups: int) -> str:
        return packed_format(format)

    def matrix_bytes(self, format: str, rows: int, cols: int) -> int:
        return -(-rows // LANES) * tile_bytes(format, cols)

    def vector_bytes(self, length: int) -> int:
        return 4 * length

    def table_bytes(self, length: int) -> int:
        return 0

    def auto_kv_dtype(self, *, widened: bool, quantized: bool) -> str:
        half = quantized and not widened and simd_level() != "plain"
        return "float16" if half else "float32"

    def kv_block_bytes(self, config: ModelConfig, kv_dtype: str) -> int:
        return kv_block_bytes(config, kv_dtype)

    def recurrent_bytes(self, config: ModelConfig, counts: SlotCounts) -> int:
        return recurrent_bytes(config, counts)

    def joins_shared_expert(self, config: ModelConfig, formats: Mapping[str, str]) -> bool:
        return False

    def buffer_bytes(self, config: ModelConfig, shapes: Shapes) -> int:
        return sum(4 * prod(shape) for shape in shapes.values())

    def free_memory(self) -> int:
        return memory.available_memory()

    def open(
        self, config: ModelConfig, plan: Any, on_compile: Callable[[str], None] | None
    ) -> CpuRuntime:
        return CpuRuntime(self.threads, on_compile)

    def close(self) -> None:
        """Nothing is taken before ``open``."""
