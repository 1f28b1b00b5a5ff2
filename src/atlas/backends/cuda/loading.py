"""Weights from mapped files to device memory, through a ring of pinned buffers.

Threads copy pieces of the file into pinned buffers of their own (that reads the file, and Python's
lock is not held), and put each on one of two streams. Float formats other than bfloat16 are cast by
a kernel behind the copy; quantised weights are put into the kernels' order by the thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from atlas.backends.cuda.array import DeviceArray
from atlas.backends.cuda.launch import KernelLaunch, Recording
from atlas.backends.cuda.memory import Arena, PinnedMemory
from atlas.backends.cuda.pack import (
    DeviceMatrix,
    MatrixLayout,
    host_rows,
    host_units,
    layout,
    row_runs,
)
from atlas.ops.blocks import HostMatrix

if TYPE_CHECKING:
    from atlas.backends.cuda.device import CudaDevice

PIECE_BYTES = 4 << 20
_THREADS = 8
_BUFFERS = 2  # a thread fills one while the other is copied
_CAST = {"f32": "cast_f32_bf16", "f16": "cast_f16_bf16"}
_CAST_ELEMENTS = 2048  # that a thread block of the cast kernels takes


@dataclass(eq=False)
class _Slot:
    """A pinned buffer, memory on the device for what is cast, and when both are free again."""

    pinned: PinnedMemory
    raw: DeviceArray
    event: Any


class Loader:
    """Fills an arena with weights.

    Parameters
    ----------
    device : CudaDevice
    arena : Arena
        Where matrices and vectors go.
    threads : int
        That read the file.
    """

    def __init__(self, device: CudaDevice, arena: Arena, threads: int = _THREADS) -> None:
        self._device = device
        self._arena = arena
        self._threads = threads
        self._streams: list[int] = []
        self._own = threading.local()
        self._lock = threading.Lock()
        self._slots: list[_Slot] = []
        self._num_workers = 0
        self._raw: Arena | None = None
        self._pool: ThreadPoolExecutor | None = None

    @staticmethod
    def device_bytes(threads: int = _THREADS) -> int:
        """Device memory that loading takes besides the weights, until it is closed."""
        return threads * _BUFFERS * PIECE_BYTES

    def pack(self, matrices: Sequence[HostMatrix], groups: int = 1) -> DeviceMatrix:
        """Stack matrices of one format and width on the device.

        Returns when the host memory has been read; copies to the device may still be under way.
        """
        packed = layout(matrices, groups)
        data = self._arena.take(packed.shape, "uint8")
        if packed.is_quantized:
            pending = self._units(matrices, packed, data.address)
        else:
            pending = self._rows(matrices, packed, data.address)
        for done in pending:
            done.result()
        return DeviceMatrix(packed, data)

    def _units(
        self, matrices: Sequence[HostMatrix], packed: MatrixLayout, address: int
    ) -> list[Future[None]]:
        """Move quantised matrices, some units at a time."""
        count, unit_bytes = packed.shape
        most = max(1, PIECE_BYTES // unit_bytes)
        return [
            self._submit(
                self._move_units, matrices, first, min(count, first + most), packed,
                address + first * unit_bytes,
            )
            for first in range(0, count, most)
        ]  # fmt: skip

    def _rows(
        self, matrices: Sequence[HostMatrix], packed: MatrixLayout, address: int
    ) -> list[Future[None]]:
        """Move matrices that are bf16 on the device, some rows at a time."""
        kernel = _CAST.get(matrices[0].format)
        if kernel is not None:
            self._device.kernels.load([kernel])
        row_bytes, pending = packed.shape[1], []
        for run in row_runs([part.rows for part in matrices], packed.groups):
            part = matrices[run.part]
            most = max(1, PIECE_BYTES // max(row_bytes, part.data.strides[0]))
            for first in range(0, run.count, most):
                rows = (run.first + first, run.first + min(run.count, first + most))
                target = address + (run.target + first) * row_bytes
                pending.append(self._submit(self._move_rows, part, *rows, target))
        return pending

    def place(self, values: NDArray[np.float32]) -> DeviceArray:
        """A float32 array on the device."""
        values = np.ascontiguousarray(values, np.float32)
        placed = self._arena.take(values.shape, "float32")
        if values.nbytes:
            self._device.enter()
            self._device.copy_in(placed.address, values.ctypes.data, values.nbytes)
            self._device.synchronize()  # the array may go when the caller returns
        return placed

    def close(self) -> None:
        """Wait for every copy and free the ring; idempotent."""
        pool, self._pool = self._pool, None
        if pool is None:
            return
        pool.shutdown(wait=True, cancel_futures=True)
        device = self._device
        if device.driver.failure is None:
            device.enter()
            for stream in self._streams:
                device.synchronize(stream)
        for slot in self._slots:
            device.destroy_event(slot.event)
            slot.pinned.close()
        for stream in self._streams:
            device.destroy_stream(stream)
        self._slots.clear()
        self._streams.clear()
        if self._raw is not None:
            self._raw.close()

    def _submit(self, move: Callable[..., None], *args: Any) -> Future[None]:
        if self._pool is None:
            self._device.enter()
            self._streams += [self._device.create_stream() for _ in range(2)]
            self._raw = Arena(self._device, self.device_bytes(self._threads), "loading")
            self._pool = ThreadPoolExecutor(
                self._threads, thread_name_prefix="atlas-load", initializer=self._start_worker
            )
        return self._pool.submit(move, *args)

    def _start_worker(self) -> None:
        self._device.enter()
        with self._lock:
            assert self._raw is not None
            self._own.stream = self._streams[self._num_workers % len(self._streams)]
            self._num_workers += 1
            self._own.slots = [
                _Slot(
                    PinnedMemory(self._device, PIECE_BYTES),
                    self._raw.take((PIECE_BYTES,), "uint8"),
                    self._device.create_event(),
                )
                for _ in range(_BUFFERS)
            ]
            self._slots += self._own.slots
        self._own.turn = 0

    def _move_units(
        self,
        matrices: Sequence[HostMatrix],
        first: int,
        stop: int,
        packed: MatrixLayout,
        target: int,
    ) -> None:
        self._move(host_units(matrices, first, stop, packed), target)

    def _move_rows(self, part: HostMatrix, first: int, stop: int, target: int) -> None:
        kernel = _CAST.get(part.format)
        if kernel is None:
            self._move(host_rows(part, first, stop), target)
        else:
            rows = part.data[first:stop].view(np.uint8).reshape(stop - first, -1)
            self._move(rows, target, kernel, part.data.itemsize)

    def _move(
        self, rows: NDArray[np.uint8], target: int, kernel: str | None = None, item_bytes: int = 1
    ) -> None:
        """One piece: pinned buffer → device, and cast there if need be."""
        device, stream = self._device, self._own.stream
        for piece, offset in _pieces(rows):
            slot: _Slot = self._own.slots[self._own.turn]
            self._own.turn = (self._own.turn + 1) % _BUFFERS
            device.wait(slot.event)
            np.copyto(slot.pinned.array[: piece.size].reshape(piece.shape), piece)
            if kernel is None:
                device.copy_in(target + offset, slot.pinned.address, piece.size, stream)
            else:
                device.copy_in(slot.raw.address, slot.pinned.address, piece.size, stream)
                count = piece.size // item_bytes
                place = target + 2 * (offset // item_bytes)
                launch = KernelLaunch(
                    kernel, (-(-count // _CAST_ELEMENTS), 1), (slot.raw, place, count)
                )
                device.run(Recording([launch]).compile(device), stream)
            device.record(slot.event, stream)


def _pieces(rows: NDArray[np.uint8]) -> list[tuple[NDArray[np.uint8], int]]:
    """Rows in pieces of a buffer's size, each with the byte at which it begins.

    One row of more bytes than a buffer is cut at multiples of 16 elements.
    """
    if rows.size <= PIECE_BYTES:
        return [(rows, 0)]
    flat = np.ascontiguousarray(rows).reshape(-1)
    return [(flat[at : at + PIECE_BYTES], at) for at in range(0, flat.size, PIECE_BYTES)]
