"""Candidates of beam search: launches."""

from __future__ import annotations

from atlas.backends.cuda.array import DeviceArray
from atlas.backends.cuda.check import Args, match
from atlas.backends.cuda.launch import Queue
from atlas.backends.cuda.memory import aligned

_PART_LEN = 4096
_LANES, _LANE_BLOCKS = 256, 8


def top_candidates(
    queue: Queue,
    logits: DeviceArray,
    banned: DeviceArray,
    cu_banned: DeviceArray,
    *,
    ids: DeviceArray,
    values: DeviceArray,
    totals: DeviceArray,
) -> None:
    sizes = match("float32", "L C", logits, "L k", values, "L", totals)
    rows, size, k = sizes["L"], sizes["C"], sizes["k"]
    match("int32", "NB", banned, f"{rows + 1}", cu_banned, f"{rows} {k}", ids)
    parts = -(-size // _PART_LEN)
    lanes_at = aligned(8 * rows * parts)
    found_at = lanes_at + aligned(4 * rows * _LANES)
    keys = queue.scratch(found_at + 8 * rows * parts * k)
    lanes, found, stride = keys + lanes_at, keys + found_at, logits.strides[0]
    queue.launch("argmax_partial", (parts, rows), (logits, keys, size, _PART_LEN, stride))
    queue.launch("beam_lanes", (_LANE_BLOCKS, rows), (logits, keys, lanes, size, parts, stride))
    args: Args = (logits, keys, banned, cu_banned, found, size, k, stride)
    queue.launch("beam_part", (parts, rows), args)
    args = (keys, lanes, found, ids, values, totals, parts, k)
    queue.launch("beam_merge", (rows, 2), args)
