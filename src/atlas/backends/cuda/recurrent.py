"""What the recurrent ops share: rows of sequences, and the plan of a prompt's chunks.

A prompt's chunks lie at multiples of ``CHUNK`` positions, so a prompt cut there has the bits of one
that is not. Rows before the first whole chunk and behind the last run one after another, by the
kernels of step rows. Which rows those are is found on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

from atlas_kernels.recurrence_shapes import CHUNK

from atlas.backends.cuda.array import DeviceArray
from atlas.backends.cuda.check import match, require_contiguous_rows
from atlas.backends.cuda.launch import Argument, Queue
from atlas.errors import ShapeError

_ALIGNMENT = 256
_LARGE_SHARED, _MIDDLE_SHARED = (9, 10), ((8, 0), (8, 7))  # 227 and 163 KB a thread block


def check_sequences(
    slots: DeviceArray, cu_rows: DeviceArray, positions: DeviceArray, num_rows: int
) -> int:
    """int32 [N], [N + 1] and [T]; the number of sequences."""
    match("int32", "N", slots, f"{len(slots) + 1}", cu_rows, f"{num_rows}", positions)
    return len(slots)


def check_pool(name: str, pool: DeviceArray) -> None:
    """States and tails lie without gaps."""
    if not pool.is_contiguous:
        raise ShapeError(f"{name} {pool} must be contiguous")


def check_rows(**arrays: DeviceArray) -> None:
    """Rows may be strided; what is within one may not."""
    require_contiguous_rows(**arrays)


def ranges(cu_rows: DeviceArray) -> tuple[int, int]:
    """Addresses of the begins and the ends of all of a call's rows."""
    return cu_rows.address, cu_rows.address + 4


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """Chunks of some prompts, planned on the device; addresses in scratch.

    Attributes
    ----------
    most : int
        Chunks that there may be.
    before, after : (begins, ends)
        Rows of every sequence before its chunks, and behind them.
    cu_chunks, chunk_rows : int
    num_chunks : int
        Address of the number of chunks.
    work : tuple of int
        Addresses of what the kernels keep of every chunk.
    """

    most: int
    before: tuple[int, int]
    after: tuple[int, int]
    cu_chunks: int
    chunk_rows: int
    num_chunks: int
    work: tuple[int, ...]


def plan_chunks(
    queue: Queue,
    slots: DeviceArray,
    cu_rows: DeviceArray,
    positions: DeviceArray,
    chunk_bytes: tuple[int, ...],
) -> ChunkPlan:
    """Launch the planning; ``chunk_bytes`` are what a chunk keeps, part by part."""
    seqs, most = len(slots), len(positions) // CHUNK
    line, room = 4 * seqs, _room(seqs, most, chunk_bytes)
    at = queue.scratch(sum(room))
    places = [at + sum(room[:i]) for i in range(len(room))]
    rows, cu_chunks, chunk_rows, *work = places
    args: tuple[Argument, ...] = (cu_rows, positions, rows, cu_chunks, chunk_rows, seqs)
    queue.launch("recurrent_plan", (1, 1), args)
    return ChunkPlan(
        most,
        (rows, rows + line),
        (rows + 2 * line, rows + 3 * line),
        cu_chunks,
        chunk_rows,
        cu_chunks + line,
        tuple(work),
    )


def _room(seqs: int, chunks: int, chunk_bytes: tuple[int, ...]) -> list[int]:
    """Bytes of each part of a plan: rows, first chunks, rows of chunks, what chunks keep."""
    sizes = (16 * seqs, 4 * seqs + 4, 4 * chunks, *(chunks * size for size in chunk_bytes))
    return [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]


def plan_bytes(rows: int, seqs: int, chunk_bytes: tuple[int, ...]) -> int:
    """Scratch that ``plan_chunks`` takes for so many rows of so many sequences at most."""
    return sum(_room(seqs, rows // CHUNK, chunk_bytes))


def sweep_form(queue: Queue, heads: int, dim: int) -> tuple[str, int]:
    """Variant of a sweep from chunk to chunk, and the columns of a state that its blocks take.

    All variants have the same bits: stages follow the device's shared memory, and columns are
    narrow where a layer has few heads to fill it.
    """
    capability = queue.device.capability
    if capability[0] in _LARGE_SHARED:
        wide = heads * dim // 32 >= queue.device.num_sms * 3 // 4
        return ("c32", 32) if wide else ("c16", 16)
    return ("c16_s2" if capability in _MIDDLE_SHARED else "c16_s1"), 16
