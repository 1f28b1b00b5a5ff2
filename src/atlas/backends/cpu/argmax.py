"""Greedy choice: launch."""

from __future__ import annotations

from atlas.backends.cpu.device import Array, Queue, address
from atlas.ops.check import match_dims


def argmax(queue: Queue, logits: Array, *, out: Array) -> None:
    sizes = match_dims("L C", logits, dtype="float32")
    match_dims(f"{sizes['L']}", out, dtype="int32")
    args = (address(logits), logits.strides[0], sizes["L"], sizes["C"], address(out))
    queue.launch("argmax.argmax", args, (logits, out))
