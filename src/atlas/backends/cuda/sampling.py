"""Sampling on the device: launches, and the tables that they read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from atlas._native.cuda_launch import CudaLaunchList
from atlas.backends.cuda.array import DeviceArray
from atlas.backends.cuda.check import match
from atlas.backends.cuda.launch import Queue, Recording
from atlas.backends.cuda.memory import Arena, PinnedMemory, aligned
from atlas.sampling_table import EDIT, MAX_EDITS, ROW, Draw, SamplingTable

if TYPE_CHECKING:
    from atlas.backends.cuda.device import CudaDevice

KERNELS = tuple(
    f"sampling_{name}" for name in ("edit", "extent", "count", "lanes", "gather", "choose")
)

LONG_LIST_BYTES = 64 << 20
"""Room for rows with very many candidates; more of them than it holds take turns."""


def sample(
    queue: Queue,
    logits: DeviceArray,
    token_ids: DeviceArray,
    rows: DeviceArray,
    edits: DeviceArray,
    *,
    out: DeviceArray,
) -> None:
    """out[row] = the token that a row of the table asks for; other tokens stay.

    Parameters
    ----------
    logits : float32 [L, C]
        Edited in the meantime, and put back.
    token_ids : int32 [T]
        Input ids of the step: the last token of a sequence where the host has not seen it.
    rows : int32 [S, 20], edits : int32 [E, 4]
        ``atlas.sampling_table``.
    out : int32 [L]
        Greedy ids, −1 in a row that is not finite.
    """
    from atlas_kernels.sampling_rows import (
        BINS,
        COUNT_LEN,
        EXTENT_LEN,
        LANE_BLOCKS,
        LANES,
        MAX_VOCABULARY,
        ROW_WORDS,
        SHORT_LEN,
    )

    sizes = match("float32", "L C", logits)
    match("int32", f"{sizes['L']}", out)
    count, vocab = match("int32", f"S {ROW_WORDS}", rows)["S"], sizes["C"]
    num_edits = match("int32", "E 4", edits)["E"]
    assert vocab <= MAX_VOCABULARY, vocab
    parts, stride = -(-vocab // EXTENT_LEN), logits.strides[0]
    long_lists = max(1, min(count, LONG_LIST_BYTES // (8 * vocab)))
    areas = {
        "keys": 8 * count * parts,
        "lows": 4 * count * parts,
        "counts": 4 * count * BINS,
        "taken": 4 * count,
        "lanes": 4 * count * LANES,
        "lists": 8 * count * SHORT_LEN,
        "long_lists": 8 * long_lists * vocab,
        "saved": 4 * (num_edits + count),
        "extra": 4 * count,
        "left": 4 * count,
    }
    at = queue.scratch(sum(aligned(num_bytes) for num_bytes in areas.values()))
    places = {}
    for name, num_bytes in areas.items():
        places[name], at = at, at + aligned(num_bytes)
    keys, lows, counts, taken, lanes, lists, longer, saved, extra, left = places.values()
    extent = (keys, lows)
    args: tuple[int | DeviceArray, ...]
    args = (rows, edits, token_ids, logits, saved, extra, counts, taken, lanes, stride)
    queue.launch("sampling_edit", (count, 1), args)
    args = (rows, logits, *extent, vocab, stride)
    queue.launch("sampling_extent", (parts, count), args)
    args = (rows, logits, *extent, counts, vocab, parts, stride)
    queue.launch("sampling_count", (-(-vocab // COUNT_LEN), count), args)
    args = (rows, edits, logits, *extent, lanes, vocab, parts, stride)
    queue.launch("sampling_lanes", (LANE_BLOCKS, count), args)
    args = (rows, logits, *extent, counts, taken, lists, vocab, parts, stride)
    queue.launch("sampling_gather", (parts, count), args)
    for grid, room in ((count, 0), (long_lists, longer)):
        args = (rows, edits, logits, *extent, counts, taken, lanes, lists, room, saved, extra, left)
        queue.launch("sampling_choose", (grid, 1), (*args, out, count, vocab, parts, stride))


def table_bytes(max_draws: int) -> int:
    """Device memory of a ``Sampling``."""
    return aligned(max_draws * ROW.itemsize) + aligned(max_draws * MAX_EDITS * EDIT.itemsize)


class Sampling:
    """Two tables in pinned memory for two steps under way, one on the device, and the launches.

    Parameters
    ----------
    device : CudaDevice
    arena : Arena
        Gives ``table_bytes``.
    max_draws : int
        In a step.
    buffers : mapping
        "logits" and "token_ids" of the step.
    chosen : int32 [L]
        Greedy ids, and then the tokens.
    """

    kernels = KERNELS

    def __init__(
        self,
        device: CudaDevice,
        arena: Arena,
        max_draws: int,
        buffers: Mapping[str, DeviceArray],
        chosen: DeviceArray,
    ) -> None:
        self._device, self._max_draws = device, max_draws
        self._buffers, self._chosen = buffers, chosen
        self._rows = arena.take((max_draws, ROW.itemsize // 4), "int32", zero=True)
        self._edits = arena.take((max_draws * MAX_EDITS, EDIT.itemsize // 4), "int32")
        self._pinned: list[PinnedMemory] = []
        self._tables: list[SamplingTable] = []
        self._launches: dict[int, CudaLaunchList] = {}
        for _ in range(2):
            rows, edits = (
                PinnedMemory(device, array.nbytes) for array in (self._rows, self._edits)
            )
            self._pinned += [rows, edits]
            self._tables.append(
                SamplingTable(rows.array.view(np.int32), edits.array.view(np.int32))
            )

    def fill(self, turn: int, draws: Sequence[Draw]) -> None:
        """Write the draws of the step whose inputs are region ``turn``'s."""
        self._tables[turn].fill(draws)

    def copy_in(self, turn: int) -> int:
        """Copy a step's table to the device; rows to launch for, 0 where it has none."""
        table = self._tables[turn]
        count = table.num_rows
        if not count:
            return 0
        padded = min(1 << (count - 1).bit_length(), self._max_draws)
        table.pad(padded)
        rows, edits = self._pinned[2 * turn : 2 * turn + 2]
        self._device.copy_in(self._rows.address, rows.address, padded * ROW.itemsize)
        if table.num_edits:
            self._device.copy_in(
                self._edits.address, edits.address, table.num_edits * EDIT.itemsize
            )
        table.fill(())
        return padded

    def launches(self, count: int, queue: Queue) -> CudaLaunchList:
        """What chooses the tokens of ``count`` rows of the table, once the step has run."""
        if count not in self._launches:
            recording = Recording()
            sample(
                Queue(queue.device, queue.workspace, recording),
                self._buffers["logits"],
                self._buffers["token_ids"],
                self._rows[:count],
                self._edits,
                out=self._chosen,
            )
            self._launches[count] = recording.compile(self._device)
        return self._launches[count]

    def close(self) -> None:
        """Free the tables; idempotent."""
        self._launches.clear()
        while self._pinned:
            self._pinned.pop().close()
