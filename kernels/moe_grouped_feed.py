"""What feeds the grouped products of Hopper: which tiles a thread block takes, stage by stage.

Tiles are numbered over the entries of ``moe_sort``'s table that have rows, all columns of one
before the next: those of an expert run at about the same time, so that its weights come from DRAM
once. A thread block takes every so many of them. It tells its consumers of a tile by a *note* of
16 bytes beside the tile's first stage: first row, rows, first column; −1 rows are the end.
"""

from __future__ import annotations

from typing import Any

from atlas_kernels._cuda import device, i32, i64
from atlas_kernels.moe_plan import ROW_BOX, WgmmaTile
from atlas_kernels.ptx_async import (
    async_fence,
    barrier_arrive,
    barrier_expect,
    barrier_wait,
    copy16,
    copy_commit,
    copy_wait,
    tile_load,
)
from atlas_kernels.ptx_math import first_bit, popcount, quotient
from atlas_kernels.ptx_memory import (
    load_b32,
    load_b32x4,
    load_shared_b64,
    store_shared_b32x4,
    store_shared_b64,
)
from atlas_kernels.ptx_warp import (
    ballot,
    block_x,
    lane_id,
    num_blocks_x,
    shuffle_b32,
    sync_named,
    sync_warp,
    thread_x,
)

_PRODUCERS = 3  # the named barrier of the warps that gather


@device
def _entries(tiles, chunk, num_tiles):
    """Entry ``32 · chunk + lane`` of the table, and which of the warp's have rows."""
    at = i32(chunk * 32 + lane_id())
    expert, first, count = i32(0), i32(0), i32(0)
    if at < num_tiles:
        expert, first, count, _ = load_b32x4(tiles + i64(at) * 16)
    filled = ballot(i32(count > 0))
    return expert, first, count, filled


def produce_tiles(tile: WgmmaTile, *, gathered: bool) -> Any:
    """By four warps, of which one alone does without ``gathered``: all stages of all tiles.

    Weight row: ``expert · expert_rows + column``, and ``half_rows`` further for the second half.
    ``source`` is x, or the tensor map of the activations.
    """
    stages, stage_bytes, barriers_at = tile.stages, tile.stage_bytes, tile.barriers_at
    weights_bytes, notes_at, rows_at = tile.weights_bytes, tile.notes_at, tile.rows_at
    half_bytes, box_bytes, lag = tile.weights_bytes // 2, ROW_BOX * 128, tile.lag
    load = tile_load(2)
    copied, all_copied = copy_wait(lag), copy_wait(0)

    @device
    def find_rows(rows, order, first, count, slots, source, stride, thread):
        """Where the tile's rows begin, into shared memory."""
        sync_named(_PRODUCERS, 128)  # the tile before is asked for
        for i in range(thread, count, 128):
            pair = load_b32(order + i64(first + i) * 4)
            store_shared_b64(rows + i * 8, source + i64(quotient(pair, slots)) * stride)
        sync_warp()  # together again
        sync_named(_PRODUCERS, 128)

    @device
    def copy_rows(target, rows, step, count, thread):
        piece = thread & 7
        along = i64(step) * 128 + piece * 16
        for i in range(thread >> 3, count, 16):
            place = i32(target + i * 128 + ((piece ^ i) & 7) * 16)
            copy16(place, load_shared_b64(rows + i * 8) + along)
        copy_commit()

    @device
    def produce(
        base, w, w_shared, source, order, tiles, num_tiles, experts, slots, steps, columns,
        column_step, expert_rows, half_rows, stride,
    ):  # fmt: skip
        lane, thread = lane_id(), i32(thread_x() & 127)
        lanes_before = i32((i64(1) << lane) - 1)
        rows, barriers = i32(base + rows_at), i32(base + barriers_at)
        chunk, passed = i32(0), i32(0)
        expert, first, count, filled = _entries(tiles, chunk, num_tiles)
        stage, parity, late, turn = i32(0), i32(1), i32(0), i32(0)
        item = i32(block_x())
        while True:
            entry = quotient(item, columns)
            while True:
                if passed + popcount(filled) > entry or (chunk + 1) * 32 >= num_tiles:
                    break
                passed, chunk = i32(passed + popcount(filled)), i32(chunk + 1)
                expert, first, count, filled = _entries(tiles, chunk, num_tiles)
            if passed + popcount(filled) <= entry:
                break
            is_it = count > 0 and popcount(i32(filled & lanes_before)) == entry - passed
            owner = first_bit(ballot(i32(1) if is_it else i32(0)))
            its_expert, at_row = shuffle_b32(expert, owner), shuffle_b32(first, owner)
            its_rows = shuffle_b32(count, owner)
            column = i32((item - entry * columns) * column_step)
            is_shared = its_expert == experts
            matrix = w_shared if is_shared else w
            weight_row = column if is_shared else i32(its_expert * expert_rows + column)
            boxes = i32((its_rows + (ROW_BOX - 1)) // ROW_BOX)
            if gathered:
                find_rows(rows, order, at_row, its_rows, slots, source, stride, thread)
            for step in range(steps):
                at, full = i32(base + stage * stage_bytes), i32(barriers + 8 * stage)
                barrier_wait(full + 8 * stages, parity)
                if thread == 0:
                    if step == 0:
                        note = (at_row, its_rows, column, i32(0))
                        store_shared_b32x4(base + notes_at + 16 * stage, note)
                    asked = i32(weights_bytes if gathered else weights_bytes + boxes * box_bytes)
                    barrier_expect(full, asked)
                    load(at, matrix, full, step * 64, weight_row)
                    load(at + half_bytes, matrix, full, step * 64, weight_row + half_rows)
                    if not gathered:
                        for b in range(boxes):
                            target = at + weights_bytes + b * box_bytes
                            load(target, source, full, step * 64, at_row + b * ROW_BOX)
                if gathered:
                    copy_rows(i32(at + weights_bytes), rows, step, its_rows, thread)
                    if turn >= lag:  # what was copied that long ago is there
                        copied()
                        async_fence()
                        sync_warp()
                        if lane == 0:
                            barrier_arrive(barriers + 8 * late)
                        late = i32(late + 1) if late + 1 < stages else i32(0)
                    turn = i32(turn + 1)
                sync_warp()  # no lane may fall two phases behind
                stage = i32(stage + 1)
                if stage == stages:
                    stage, parity = i32(0), i32(parity ^ 1)
            item = i32(item + num_blocks_x())
        barrier_wait(barriers + 8 * (stages + stage), parity)
        if thread == 0:
            store_shared_b32x4(base + notes_at + 16 * stage, (i32(0), i32(-1), i32(0), i32(0)))
            barrier_arrive(barriers + 8 * stage)
        if gathered:
            all_copied()
            async_fence()
            sync_warp()
            for _ in range(min(turn, i32(lag)) + 1):  # and the note of the end
                if lane == 0:
                    barrier_arrive(barriers + 8 * late)
                late = i32(late + 1) if late + 1 < stages else i32(0)

    return produce
