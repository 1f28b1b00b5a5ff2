"""Candidates of beam search: launch."""

from __future__ import annotations

import numpy as np

from atlas.backends.cpu.device import Args, Array, Queue, address
from atlas.ops.check import match_dims
from atlas.ops.elementary import LANES


def top_candidates(
    queue: Queue,
    logits: Array,
    banned: Array,
    cu_banned: Array,
    *,
    ids: Array,
    values: Array,
    totals: Array,
) -> None:
    sizes = match_dims("L C", logits, "L k", values, "L", totals, dtype="float32")
    rows, k = sizes["L"], sizes["k"]
    match_dims("NB", banned, f"{rows + 1}", cu_banned, f"{rows} {k}", ids, dtype="int32")
    lanes = np.empty((rows, LANES), np.float32)  # lives as long as the launch
    args: Args = (address(logits), logits.strides[0], rows, sizes["C"], k)
    args += (address(banned), address(cu_banned), address(ids), ids.strides[0])
    args += (address(values), values.strides[0], address(totals), address(lanes))
    keep = (logits, banned, cu_banned, ids, values, totals, lanes)
    queue.launch("beam.top_candidates", args, keep)
