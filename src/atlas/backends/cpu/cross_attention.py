"""Attention over a source's blocks: launches.

The bodies are those of paged attention; each row's position is its source's last.
"""

from __future__ import annotations

import numpy as np

from atlas.backends.cpu.attention import attention_prefill
from atlas.backends.cpu.device import Args, Array, Queue, address
from atlas.ops.check import match_dims


def cross_attention(
    queue: Queue,
    q: Array,
    k_pool: Array,
    v_pool: Array,
    source_tables: Array,
    cu_rows: Array,
    max_rows: int,
    source_lens: Array,
    scale: float,
    *,
    out: Array,
) -> None:
    sizes = match_dims("G M", source_tables, "G", source_lens, dtype="int32")
    match_dims(f"{sizes['G'] + 1}", cu_rows, dtype="int32")
    last = np.empty(len(q), np.int32)  # lives as long as the launch list
    args: Args = (address(cu_rows), address(source_lens), sizes["G"], address(last))
    queue.launch("cross_attention.last_positions", args, (cu_rows, source_lens, last))
    attention_prefill(
        queue, q, k_pool, v_pool, source_tables, cu_rows, last, scale, None, None, out=out
    )
