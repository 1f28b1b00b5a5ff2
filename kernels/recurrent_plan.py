"""Which rows of a prompt are whole chunks, and which come one after another before and after them.

Chunks lie at multiples of ``CHUNK`` positions. A sequence whose first row is off a multiple begins
with single rows up to the next one; what is left after its last whole chunk are single rows again.
Found on the device, so that what a step launches depends on its shape alone.
"""

from __future__ import annotations

from atlas_kernels._cuda import i32, i64
from atlas_kernels.ptx_async import launch_dependents, wait_prerequisites
from atlas_kernels.ptx_memory import load_b32, store_b32
from atlas_kernels.ptx_warp import shuffle_b32, thread_x
from atlas_kernels.recurrence_shapes import CHUNK
from atlas_kernels.registry import kernel


@kernel("recurrent_plan", args="ptr ptr ptr ptr ptr i32", threads=32)
def recurrent_plan(cu_rows, positions, ranges, cu_chunks, chunk_rows, num_seqs):
    """Grid (1); sequence n has the rows ``cu_rows[n]`` … ``cu_rows[n + 1]`` − 1.

    Written: ``ranges`` int32 [4, N], begins and ends of the rows before the chunks, then of those
    after them; ``cu_chunks`` int32 [N + 1]; ``chunk_rows`` int32 [⌊T / 64⌋ at most], the first row
    of each chunk.
    """
    launch_dependents()
    wait_prerequisites()
    lane, before = thread_x(), i32(0)
    line = i64(num_seqs) * 4
    if lane == 0:
        store_b32(cu_chunks, 0)
    for base in range(0, num_seqs, 32):
        sequence = i32(base + lane)
        begin, end, count = i32(0), i32(0), i32(0)
        first = i32(0)
        if sequence < num_seqs:
            begin, end = load_b32(cu_rows + sequence * 4), load_b32(cu_rows + sequence * 4 + 4)
            if end > begin:
                offset = load_b32(positions + i64(begin) * 4) & (CHUNK - 1)
                first = i32(min(begin + (CHUNK - offset if offset > 0 else 0), end))
                count = i32((end - first) // CHUNK)
            else:
                first = begin
            at = ranges + i64(sequence) * 4
            store_b32(at, begin)
            store_b32(at + line, first)
            store_b32(at + 2 * line, i32(first + count * CHUNK))
            store_b32(at + 3 * line, end)
        total = i32(count)
        step = i32(1)
        while step < 32:
            other = shuffle_b32(total, max(lane - step, 0))
            total = i32(total + other if lane >= step else total)
            step = i32(step * 2)
        if sequence < num_seqs:
            store_b32(cu_chunks + sequence * 4 + 4, i32(before + total))
            place = i32(before + total - count)
            for i in range(count):
                store_b32(chunk_rows + i64(place + i) * 4, i32(first + i * CHUNK))
        before = i32(before + shuffle_b32(total, 31))
