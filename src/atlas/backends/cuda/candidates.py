"""Candidates of beam search on their way to the host: bans in, ids and log-probabilities out."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from atlas.backends.cuda.array import DeviceArray
from atlas.backends.cuda.launch import Queue, Recording
from atlas.backends.cuda.memory import Arena, PinnedMemory, Workspace, aligned
from atlas.cache.kv import BLOCK_SIZE

if TYPE_CHECKING:
    from atlas._native.cuda_launch import CudaLaunchList
    from atlas.backends.cuda.device import CudaDevice

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
MAX_CANDIDATES = 256
"""Of one row: (1 + end tokens) · beams at most."""
KERNELS = ("argmax_partial", "argmax_final", "beam_lanes", "beam_part", "beam_merge")
_RECORDED = 128  # launch lists kept, one for each number of rows and of candidates


def candidates_bytes(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Device memory of a ``Candidates`` for buffers of these shapes."""
    asked, found = _sizes(shapes)
    return aligned(4 * asked) + aligned(4 * found)


def _sizes(shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
    """Most integers that go in (ends of each row's bans, bans), and most numbers that come out."""
    rows, (_, blocks) = shapes["logits"][0], shapes["block_tables"]
    return rows + 1 + rows * blocks * BLOCK_SIZE, rows * (2 * MAX_CANDIDATES + 1)


class Candidates:
    """The op ``top_candidates`` over the front of the logits arena, called by the host.

    Parameters
    ----------
    device : CudaDevice
    arena : Arena
        Gives ``candidates_bytes``.
    workspace : Workspace
    shapes : mapping
        Of the buffers.
    logits : float32 [R, C]
        The arena of logits.
    functions : dict
        Every op's implementation by name, as it stands when a list is recorded.
    """

    def __init__(
        self,
        device: CudaDevice,
        arena: Arena,
        workspace: Workspace,
        shapes: Mapping[str, tuple[int, ...]],
        logits: DeviceArray,
        functions: Mapping[str, Callable[..., Any]],
    ) -> None:
        self._device, self._workspace = device, workspace
        self._logits, self._functions = logits, functions
        asked, found = _sizes(shapes)
        self._asked = arena.take((asked,), "int32", zero=True)
        self._found = arena.take((found,), "int32", zero=True)
        self._pinned_in = PinnedMemory(device, 4 * asked)
        self._pinned_out = PinnedMemory(device, 4 * found)
        self._event = device.create_event()
        self._recorded: OrderedDict[tuple[int, int], CudaLaunchList] = OrderedDict()

    def find(self, rows: int, k: int, banned: Ints, cu_banned: Ints) -> tuple[Ints, Floats, Floats]:
        """The op's ids, values and totals of rows 0 … rows − 1, copies; waits."""
        assert 1 <= k <= MAX_CANDIDATES, k
        device, num_asked, num_found = self._device, rows + 1 + len(banned), rows * (2 * k + 1)
        launches = self._launches(rows, k)
        asked = self._pinned_in.array.view(np.int32)
        asked[: rows + 1], asked[rows + 1 : num_asked] = cu_banned, banned
        device.copy_in(self._asked.address, self._pinned_in.address, 4 * num_asked)
        device.run(launches)
        device.copy_out(self._pinned_out.address, self._found.address, 4 * num_found)
        device.record(self._event)
        device.wait(self._event)
        found = self._pinned_out.array[: 4 * num_found].copy().view(np.int32)
        size, floats = rows * k, found.view(np.float32)
        ids, values = found[:size].reshape(rows, k), floats[size : 2 * size].reshape(rows, k)
        return ids, values, floats[2 * size :]

    def _launches(self, rows: int, k: int) -> CudaLaunchList:
        key = rows, k
        if key not in self._recorded:
            recording = Recording()
            places, at = [], 0
            for shape, dtype in (
                ((rows, k), "int32"),
                ((rows, k), "float32"),
                ((rows,), "float32"),
            ):
                address = self._found.address + 4 * at
                places.append(DeviceArray(address, shape, dtype, owner=self._found))
                at += prod(shape)
            ids, values, totals = places
            self._functions["top_candidates"](
                Queue(self._device, self._workspace, recording),
                self._logits[:rows],
                self._asked[rows + 1 :],
                self._asked[: rows + 1],
                ids=ids,
                values=values,
                totals=totals,
            )
            self._recorded[key] = recording.compile(self._device)
            if len(self._recorded) > _RECORDED:
                self._recorded.popitem(last=False)
        return self._recorded[key]

    def forget_recorded(self) -> None:
        """Drop the launch lists (ops were replaced)."""
        self._recorded.clear()

    def close(self) -> None:
        """Free the pinned memory; idempotent."""
        if self._pinned_in.address:
            self._recorded.clear()
            self._device.destroy_event(self._event)
            self._pinned_in.close()
            self._pinned_out.close()
