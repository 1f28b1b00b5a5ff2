"""Arrays in device memory and kernels run on them, by the PTX machine or by a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.kernels.ptx_machine import Memory, launch

Array = np.ndarray[Any, Any]
TYPES = ("bf16", "f32")


def encode(values: Array, type: str) -> Array:
    """Float32 as an activation type: bf16 as uint16, rounded to nearest even."""
    values = np.ascontiguousarray(values, np.float32)
    if type == "bf16":
        bits = values.view(np.uint32)
        return ((bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return values.astype({"f16": np.float16, "f32": np.float32}[type])


def decode(values: Array, type: str) -> Array:
    """The reverse of ``encode``, exactly."""
    if type == "bf16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def rounded(values: Array, type: str) -> Array:
    """Float32 values that the type represents."""
    return decode(encode(values, type), type)


@dataclass
class Buffer:
    """An array in device memory; rows may be a wider stride apart."""

    address: int
    stored: Array
    shape: tuple[int, ...]
    type: str

    @property
    def stride(self) -> int:
        return self.stored.strides[0]


@dataclass
class Bench:
    """Arrays put into a memory, and kernels run on them: ``run(name, grid, args)``."""

    memory: Any
    run: Callable[[str, tuple[int, int], list[Any]], None]

    def put(self, values: Array, type: str, pad: int = 0) -> Buffer:
        """Copy in, rows padded by ``pad`` elements of NaN bits."""
        shape = values.shape
        flat = encode(values.reshape(shape[0], -1), type)
        wide = np.full((shape[0], flat.shape[1] + pad), -1, f"i{flat.itemsize}").view(flat.dtype)
        wide[:, : flat.shape[1]] = flat
        return Buffer(self.memory.put(wide), wide, shape, type)

    def empty(self, shape: tuple[int, ...], type: str, pad: int = 0) -> Buffer:
        """Room for an array, filled with NaN."""
        return self.put(np.full(shape, np.nan, np.float32), type, pad)

    def put_ints(self, values: Any) -> int:
        """Address of an int32 array."""
        return self.memory.put(np.asarray(values, np.int32))

    def put_early(self, values: Any) -> int:
        """Address of an int32 array that kernels may read before they wait."""
        return self.early(self.put_ints(values))

    def early(self, address: int) -> int:
        """Let an array be read before the wait: what is older than the step, or constant."""
        getattr(self.memory, "constants", set()).add(address)
        return address

    def get(self, buffer: Buffer) -> Array:
        """The array now, as float32."""
        columns = int(np.prod(buffer.shape[1:]))
        now = self.memory.get(buffer.address, buffer.stored)[:, :columns]
        return decode(now, buffer.type).reshape(buffer.shape)


def machine_bench(ptx_of: Callable[[str], str], order: int = 0) -> Bench:
    """A bench on the PTX machine; ``order`` of the warps as in ``ptx_machine.launch``."""
    from atlas_kernels.registry import load_table

    memory, table = Memory(), load_table()

    def run(name: str, grid: tuple[int, int], args: list[Any]) -> None:
        shared = table[name].shared_bytes
        launch(ptx_of(name), grid, table[name].threads, args, memory, order, shared)

    return Bench(memory, run)


def gpu_bench(gpu: Any) -> Bench:
    """A bench on a ``Gpu``."""
    from atlas_kernels import build

    folder = os.environ.get("ATLAS_CUDA_KERNELS")
    ahead = build.read_folder(folder) if folder else {}

    def run(name: str, grid: tuple[int, int], args: list[Any]) -> None:
        if name not in gpu.kernels:
            gpu.add(ahead[name] if name in ahead else build.load(name, gpu.arch))
        gpu.run(name, grid, args)

    return Bench(gpu, run)


def close(got: Array, want: Array, type: str, tolerance: float) -> None:
    """Equal within ``tolerance`` of the greatest element; in bf16 also within half a unit."""
    bound = tolerance * np.abs(want).max() + (np.abs(want) * 2.0**-8 if type == "bf16" else 0)
    assert (np.abs(got - want) <= bound).all(), np.abs(got - want).max()
