"""Sampling on the device: launches, and the tables that they read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from atlas._native.cuda_launch import CudaLaunchList
from atlas.backends.cuda.array import DeviceArray
from atlas.backends.cuda.check import match
from atlas.backends.cuda.launch import Queue, Recording
from atlas.backends.cuda.memory import Arena, PinnedMemory, Workspace, aligned
from atlas.sampling_table import (
    EDIT,
    MAX_EDITS,
    ROW,
    SCORE_WORDS,
    Draw,
    SamplingTable,
    Scores,
)

if TYPE_CHECKING:
    from atlas.backends.cuda.device import CudaDevice
    from atlas.backends.cuda.small_copies import SmallCopies

_RING = 3  # steps whose scores may be under way: two, and the one that is being read
KERNELS = tuple(
    f"sampling_{name}" for name in ("edit", "extent", "count", "lanes", "gather", "choose", "score")
)

ROW_WORDS = ROW.itemsize // 4
WORK_BYTES = 120 << 20
"""Work areas; what is left of them is room for rows with very many candidates, which take turns."""


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
    num_logits, vocab = match("float32", "L C", logits).values()
    match("int32", f"{num_logits}", out)
    count = match("int32", f"S {ROW_WORDS}", rows)["S"]
    num_edits = match("int32", "E 4", edits)["E"]
    sizes = _work_areas(count, vocab) | {"saved": 4 * (num_edits + count), "left_over": 4 * count}
    room = WORK_BYTES - sum(map(aligned, sizes.values()))
    long_lists = max(1, min(count, room // (16 * vocab)))
    at = _places(queue, sizes | {"long_lists": 16 * long_lists * vocab})
    edited = (rows, edits, token_ids, logits, at["saved"])
    extents, stride = _weigh(queue, at, rows, edits, logits, edited, count)
    for grid, room in ((count, 0), (long_lists, at["long_lists"])):
        args: tuple[int | DeviceArray, ...]
        args = (rows, edits, logits, at["keys"], at["lows"], at["taken"], at["lanes"])
        args = (*args, at["lists"], room, at["saved"], at["extra"], at["left_over"], out)
        queue.launch("sampling_choose", (grid, 1), (*args, count, vocab, extents, stride))


def score(
    queue: Queue,
    logits: DeviceArray,
    rows: DeviceArray,
    chosen: DeviceArray,
    *,
    out: DeviceArray,
) -> None:
    """out[row] = the log-probability of the row's chosen token, and the best ids with theirs.

    Parameters
    ----------
    logits : float32 [L, C]
    rows : int32 [S, 20]
        ``atlas.sampling_table``, of the kind SCORE.
    chosen : int32 [L]
    out : int32 [S, 42]
    """
    count = match("int32", f"S {ROW_WORDS}", rows)["S"]
    vocab = match("float32", "L C", logits)["C"]
    match("int32", f"{count} {SCORE_WORDS}", out)
    at = _places(queue, _work_areas(count, vocab) | {"saved": 4 * count})
    edited = (rows, rows, chosen, logits, at["saved"])  # the rows have no edits
    extents, stride = _weigh(queue, at, rows, rows, logits, edited, count)
    args = (rows, logits, at["keys"], at["lows"], at["taken"], at["lanes"], at["lists"])
    queue.launch("sampling_score", (count, 1), (*args, chosen, out, vocab, extents, stride))


def _work_areas(count: int, vocab: int) -> dict[str, int]:
    """Bytes of what every kernel of ``count`` rows needs."""
    from atlas_kernels import sampling_rows

    assert vocab <= sampling_rows.MAX_VOCABULARY, vocab
    extents = sampling_rows.num_parts(vocab, sampling_rows.EXTENT_LEN)
    parts = sampling_rows.num_parts(vocab, sampling_rows.PART_LEN)
    return {
        "keys": 8 * count * extents,
        "lows": 4 * count * extents,
        "counts": sampling_rows.PART_COUNT_BYTES * count * parts,
        "taken": 8 * count,
        "lanes": 4 * count * sampling_rows.LANES,
        "lists": 16 * count * sampling_rows.SHORT_LEN,
        "extra": 4 * count,
    }


def _places(queue: Queue, sizes: Mapping[str, int]) -> dict[str, int]:
    """Addresses of work areas of these sizes."""
    at = queue.scratch(sum(map(aligned, sizes.values())))
    places = {}
    for name, num_bytes in sizes.items():
        places[name], at = at, at + aligned(num_bytes)
    return places


def _weigh(
    queue: Queue,
    at: Mapping[str, int],
    rows: DeviceArray,
    edits: DeviceArray,
    logits: DeviceArray,
    edited: tuple[int | DeviceArray, ...],
    count: int,
) -> tuple[int, int]:
    """What comes before a choice: edits, extents, bins, lane sums, candidates."""
    from atlas_kernels.sampling_rows import EXTENT_LEN, LANE_BLOCKS, PART_LEN, num_parts

    vocab, stride = logits.shape[1], logits.strides[0]
    extents, parts = num_parts(vocab, EXTENT_LEN), num_parts(vocab, PART_LEN)
    keys, lows, counts, taken, lanes = (
        at[name] for name in ("keys", "lows", "counts", "taken", "lanes")
    )
    queue.launch("sampling_edit", (count, 1), (*edited, at["extra"], stride))
    args: tuple[int | DeviceArray, ...] = (rows, logits, keys, lows, vocab, stride)
    queue.launch("sampling_extent", (extents, count), args)
    args = (rows, logits, keys, lows, counts, vocab, extents, stride)
    queue.launch("sampling_count", (parts, count), args)
    args = (rows, edits, logits, keys, lows, lanes, vocab, extents, stride)
    queue.launch("sampling_lanes", (LANE_BLOCKS, count), args)
    args = (rows, logits, keys, lows, counts, taken, at["lists"], vocab, extents, stride)
    queue.launch("sampling_gather", (parts, count), args)
    return extents, stride


def table_bytes(max_draws: int) -> int:
    """Device memory of a ``Sampling``."""
    rows, scores = max_draws * ROW.itemsize, max_draws * 4 * SCORE_WORDS
    return 2 * aligned(rows) + aligned(scores) + aligned(max_draws * MAX_EDITS * EDIT.itemsize)


class Sampling:
    """Two tables in pinned memory for two steps under way, one on the device, and the launches.

    Parameters
    ----------
    device : CudaDevice
    copies : SmallCopies
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
        copies: SmallCopies,
        arena: Arena,
        max_draws: int,
        buffers: Mapping[str, DeviceArray],
        chosen: DeviceArray,
    ) -> None:
        self._device, self._copies, self._max_draws = device, copies, max_draws
        self._buffers, self._chosen = buffers, chosen
        self._rows = arena.take((max_draws, ROW_WORDS), "int32", zero=True)
        self._score_rows = arena.take((max_draws, ROW_WORDS), "int32", zero=True)
        self._edits = arena.take((max_draws * MAX_EDITS, EDIT.itemsize // 4), "int32")
        self._scores = arena.take((max_draws, SCORE_WORDS), "int32", zero=True)
        self._pinned: list[PinnedMemory] = []
        self._tables = [self._table() for _ in range(2)]
        self._results = [self._pin(self._scores) for _ in range(_RING)]
        self._turn = 0
        self._launches: dict[tuple[int, int], CudaLaunchList] = {}

    def _pin(self, array: DeviceArray) -> PinnedMemory:
        self._pinned.append(PinnedMemory(self._device, array.nbytes))
        return self._pinned[-1]

    def _table(self) -> tuple[SamplingTable, list[PinnedMemory]]:
        pinned = [self._pin(array) for array in (self._rows, self._edits, self._score_rows)]
        return SamplingTable(*(memory.array.view(np.int32) for memory in pinned)), pinned

    def fill(self, turn: int, draws: Sequence[Draw]) -> None:
        """Write the draws of the step whose inputs are region ``turn``'s."""
        self._tables[turn][0].fill(draws)

    def copy_in(self, turn: int) -> SamplingTable:
        """Copy a step's table to the device."""
        table, (rows, edits, scores) = self._tables[turn]
        if table.num_rows:
            copy = self._copies.copy_in
            table.pad(self._padded(table.num_rows), self._padded(table.num_scores))
            copy(self._rows.address, rows.address, self._padded(table.num_rows) * ROW.itemsize)
            if table.num_edits:
                copy(self._edits.address, edits.address, table.num_edits * EDIT.itemsize)
            if table.num_scores:
                num_bytes = self._padded(table.num_scores) * ROW.itemsize
                copy(self._score_rows.address, scores.address, num_bytes)
        return table

    def _padded(self, count: int) -> int:
        return min(1 << (count - 1).bit_length(), self._max_draws) if count else 0

    def run(self, table: SamplingTable, workspace: Workspace) -> None:
        """Choose the tokens of a table that was copied in, once the step has run; score them."""
        if not table.num_rows:
            return
        count, num_scores = self._padded(table.num_rows), self._padded(table.num_scores)
        self._device.run(self._recorded(count, num_scores, workspace))
        if num_scores:
            self._turn = (self._turn + 1) % _RING
            target, scores = self._results[self._turn], self._scores[: table.num_scores]
            self._copies.copy_out(target.address, scores.address, scores.nbytes)

    def _recorded(self, count: int, num_scores: int, workspace: Workspace) -> CudaLaunchList:
        key = count, num_scores
        if key not in self._launches:
            recording = Recording()
            queue = Queue(self._device, workspace, recording)
            logits, ids, chosen = self._buffers["logits"], self._buffers["token_ids"], self._chosen
            sample(queue, logits, ids, self._rows[:count], self._edits, out=chosen)
            if num_scores:
                scores = self._scores[:num_scores]
                score(queue, logits, self._score_rows[:num_scores], chosen, out=scores)
            self._launches[key] = recording.compile(self._device)
        return self._launches[key]

    def scores(self, turn: int) -> Scores | None:
        """What ``run`` scored last, to be read once the step is done; None without scores."""
        table = self._tables[turn][0]
        if not table.num_scores:
            return None
        return Scores(self._results[self._turn].array.view(np.int32), table.score_places)

    def close(self) -> None:
        """Free the tables; idempotent."""
        self._launches.clear()
        self._tables.clear()
        self._results.clear()
        while self._pinned:
            self._pinned.pop().close()
