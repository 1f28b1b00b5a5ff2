"""Greedy choice: launches."""

from __future__ import annotations

from atlas.backends.cuda.array import DeviceArray
from atlas.backends.cuda.check import match
from atlas.backends.cuda.launch import Queue

_PART_LEN = 4096
"""Logits that a thread block looks at: 16 for each of its threads."""


def argmax(queue: Queue, logits: DeviceArray, *, out: DeviceArray) -> None:
    sizes = match("float32", "L C", logits)
    match("int32", f"{sizes['L']}", out)
    parts = -(-sizes["C"] // _PART_LEN)
    keys = queue.scratch(8 * parts * sizes["L"])
    args = (logits, keys, sizes["C"], _PART_LEN, logits.strides[0])
    queue.launch("argmax_partial", (parts, sizes["L"]), args)
    queue.launch("argmax_final", (sizes["L"], 1), (keys, out, parts))
